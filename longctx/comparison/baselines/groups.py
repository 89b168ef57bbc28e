"""Helpers of the baselines: powers of two, and assignment of documents to neighboring groups of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from longctx.planning.assignment import Assignment, Integers, largest_shards
from longctx.planning.cost.model import score
from longctx.planning.cost.rounds import choose_rounds
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.plan import PlanError


@dataclass(slots=True)
class RankGroup:
    """Neighboring ranks; each document of a group is split over all its ranks."""

    degree: int
    documents: list[int] = field(default_factory=list)


def powers_of_two(ranks: int) -> list[int]:
    """Returns 1, 2, 4, … up to `ranks`."""
    return [1 << i for i in range(ranks.bit_length())]


def stand_in_rows(rows: Sequence[Sequence[RankGroup]], lengths: Integers) -> Assignment:
    """Assigns groups to ranks: every row is a micro-batch, whose groups take consecutive ranks from rank 0."""
    micro_batch, first_rank, degree = (np.full(len(lengths), -1, dtype=np.int64) for _ in range(3))
    for row, groups in enumerate(rows):
        first = 0
        for group in groups:
            micro_batch[group.documents], first_rank[group.documents], degree[group.documents] = row, first, group.degree
            first += group.degree
    if (micro_batch < 0).any():
        raise PlanError(f"document {int(micro_batch.argmin())} was left out")
    return Assignment(micro_batch, first_rank, degree, np.zeros(len(lengths), dtype=bool))


def fastest(profile: HardwareProfile, lengths: Integers, plans: Sequence[Assignment], ranks: int) -> Assignment:
    """Returns the assignment with the smallest predicted makespan, the first of equals."""
    return min(
        plans, key=lambda plan: choose_rounds(profile, lengths, plan, score(profile, lengths, plan, ranks))[1].makespan_ns
    )


def shards_by_degree(system: str, lengths: Integers, degrees: list[int], tokens_per_rank: int) -> Integers:
    """Returns the tokens of each document on the fullest rank at each degree, [documents, degrees].

    Raises PlanError, naming the system, if the largest degree does not hold a document.
    """
    shards = largest_shards(*np.broadcast_arrays(lengths[:, None], np.array(degrees)))
    unfit = np.flatnonzero(shards[:, -1] > tokens_per_rank)
    if len(unfit):
        raise PlanError(
            f"{system} cannot hold document {unfit[0]} of {lengths[unfit[0]]} tokens: its largest degree here is "
            f"{degrees[-1]}, which holds {degrees[-1] * tokens_per_rank} at {tokens_per_rank} tokens per rank"
        )
    return shards

"""Fixed static: the plans of trainers without dynamic degrees, checked and scored as all others.

One degree for all steps, the smallest power of two that holds the longest document of the data set
and divides the ranks, or all ranks. Groups of ranks hold packs, filled next-fit in the order of the
documents; the last packs are split until every group has one in every micro-batch. This is
`dp_balanced`, the baseline of Megatron-LM's benchmark of dynamic context parallelism, in our own
code. `make_plan(mode="static")` is much stronger: it tries every degree and balances packs.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from longctx.planning.assignment import Assignment, Integers, largest_shards
from longctx.planning.check import check_lengths, check_plan, check_settings
from longctx.planning.cost.bounds import plan_cost
from longctx.planning.cost.model import score
from longctx.planning.cost.rounds import choose_rounds
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.layout import longest_document
from longctx.planning.plan import Plan, PlanError

Place = Callable[[HardwareProfile, Integers, int, int], Assignment]
"""(profile, lengths, ranks, tokens_per_rank) → assignment. Raises PlanError if the documents cannot
be held."""


def fixed_degree(longest: int, ranks: int, tokens_per_rank: int) -> int:
    """Returns the degree for a data set whose longest document has `longest` tokens. Raises
    PlanError if no degree holds it."""
    degrees = [degree for degree in powers_of_two(ranks) if ranks % degree == 0]
    for degree in (*degrees, ranks):
        if _holds(degree, longest, tokens_per_rank):
            return degree
    raise PlanError(
        f"fixed static cannot hold a document of {longest:,} tokens: all {ranks:,} ranks hold "
        f"{longest_document(ranks, tokens_per_rank):,} at {tokens_per_rank:,} tokens per rank"
    )


def best_single_degree(
    steps: Sequence[Sequence[int]],
    longest: int,
    ranks: int,
    tokens_per_rank: int,
    profile: HardwareProfile,
) -> int:
    """Returns the degree with which fixed static takes least time for all steps: the one of
    `fixed_degree`, or that doubled.

    Raises PlanError if no degree holds the longest document of the data set.
    """
    degrees = [fixed_degree(longest, ranks, tokens_per_rank)]
    while ranks % (2 * degrees[-1]) == 0:
        degrees.append(2 * degrees[-1])
    request: dict[str, Any] = {
        "ranks": ranks,
        "tokens_per_rank": tokens_per_rank,
        "profile": profile,
    }

    def seconds(degree: int) -> float:
        return sum(
            plan_fixed_static(lengths, **request, degree=degree).makespan_s for lengths in steps
        )

    return min(degrees, key=seconds)


def check_fixed_degree(degree: int, longest: int, ranks: int, tokens_per_rank: int) -> None:
    """Raises PlanError unless `degree` divides the ranks and holds a document of `longest`
    tokens."""
    if ranks % degree:
        raise PlanError(
            f"static:{degree} on {ranks:,} ranks: the degree must divide the number of ranks"
        )
    if _holds(degree, longest, tokens_per_rank):
        return
    divisors = (d for d in range(1, ranks + 1) if ranks % d == 0)
    enough = next((d for d in divisors if _holds(d, longest, tokens_per_rank)), None)
    raise PlanError(
        f"static:{degree} does not hold the longest document of {longest:,} tokens: {degree} "
        f"ranks with {tokens_per_rank:,} tokens each hold "
        f"{longest_document(degree, tokens_per_rank):,}; "
        + (f"use degree {enough} or more" if enough else f"no degree on {ranks:,} ranks holds it")
    )


def plan_fixed_static(
    lengths: Sequence[int],
    *,
    ranks: int,
    tokens_per_rank: int,
    profile: HardwareProfile,
    degree: int,
) -> Plan:
    """Plans the documents, in the order in which they were drawn, at the fixed degree of their data
    set.

    Raises PlanError for invalid input, or if the degree does not divide the ranks or does not hold
    every document.
    """
    check_settings(
        ranks, tokens_per_rank, mode="static", degree=degree, bins=None, max_remote_tokens=None
    )
    check_fixed_degree(
        degree, max(check_lengths(lengths, ranks, tokens_per_rank, profile)), ranks, tokens_per_rank
    )
    place = partial(place_fixed_static, degree=degree)
    request: dict[str, Any] = {
        "ranks": ranks,
        "tokens_per_rank": tokens_per_rank,
        "profile": profile,
    }
    return plan_placed(f"static:{degree}", place, lengths, **request, mode="static")


def plan_placed(
    name: str,
    place: Place,
    lengths: Sequence[int],
    *,
    ranks: int,
    tokens_per_rank: int,
    profile: HardwareProfile,
    mode: str = "auto",
) -> Plan:
    """Plans the documents as `place` assigns them, then scores and checks the plan; only placing
    counts as planning time.

    Raises PlanError for invalid input, or if `place` cannot hold them.
    """
    check_settings(
        ranks, tokens_per_rank, mode="auto", degree=None, bins=None, max_remote_tokens=None
    )
    sizes = check_lengths(lengths, ranks, tokens_per_rank, profile)
    began = time.perf_counter()
    assignment = place(profile, sizes, ranks, tokens_per_rank)
    planning_ms = (time.perf_counter() - began) * 1e3
    rounds, timed = choose_rounds(
        profile, sizes, assignment, score(profile, sizes, assignment, ranks)
    )
    plan = Plan(
        mode=mode,
        winner=name,
        ranks=ranks,
        tokens_per_rank=tokens_per_rank,
        lengths=tuple(sizes.tolist()),
        micro_batches=assignment.placements(rounds),
        profile=profile,
        cost=plan_cost(timed, profile, sizes, tokens_per_rank),
        planning_ms=planning_ms,
    )
    check_plan(plan)
    return plan


def place_fixed_static(
    profile: HardwareProfile, lengths: Integers, ranks: int, tokens_per_rank: int, degree: int
) -> Assignment:
    """Assigns every document. `degree` must pass `check_fixed_degree` for the longest document;
    `profile` is not used."""
    groups = ranks // degree
    packs = _next_fit(
        largest_shards(lengths, np.full_like(lengths, degree)).tolist(), tokens_per_rank
    )
    _split_last(packs, groups)
    rows = [
        [RankGroup(degree, pack) for pack in packs[i : i + groups]]
        for i in range(0, len(packs), groups)
    ]
    return stand_in_rows(rows, lengths)


@dataclass(slots=True)
class RankGroup:
    """Neighboring ranks; each document of a group is split over all its ranks."""

    degree: int
    documents: list[int] = field(default_factory=list)


def powers_of_two(ranks: int) -> list[int]:
    return [1 << i for i in range(ranks.bit_length())]


def stand_in_rows(rows: Sequence[Sequence[RankGroup]], lengths: Integers) -> Assignment:
    """Assigns groups to ranks: every row is a micro-batch, whose groups take consecutive ranks from
    rank 0."""
    micro_batch, first_rank, degree = (np.full(len(lengths), -1, dtype=np.int64) for _ in range(3))
    for row, groups in enumerate(rows):
        first = 0
        for group in groups:
            micro_batch[group.documents], first_rank[group.documents], degree[group.documents] = (
                row,
                first,
                group.degree,
            )
            first += group.degree
    if (micro_batch < 0).any():
        raise PlanError(f"document {int(micro_batch.argmin())} was left out")
    return Assignment(micro_batch, first_rank, degree, np.zeros(len(lengths), dtype=bool))


def _holds(degree: int, length: int, tokens_per_rank: int) -> bool:
    return int(largest_shards(np.array([length]), np.array([degree]))[0]) <= tokens_per_rank


def _next_fit(tokens: list[int], capacity: int) -> list[list[int]]:
    """Packs documents in their order; `tokens` are the tokens of each on the fullest rank of its
    group."""
    packs: list[list[int]] = []
    free = -1
    for document, count in enumerate(tokens):
        if count > free:
            packs.append([])
            free = capacity
        packs[-1].append(document)
        free -= count
    return packs


def _split_last(packs: list[list[int]], multiple: int) -> None:
    """Splits packs until their number is a multiple of `multiple`, if possible, starting with the
    last document."""
    at = len(packs) - 1
    while len(packs) % multiple and at >= 0:
        if len(packs[at]) > 1:
            packs.append([packs[at].pop()])
        else:
            at -= 1

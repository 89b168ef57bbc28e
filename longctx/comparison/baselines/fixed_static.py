"""Fixed static: one degree for all steps, documents packed next-fit as they come: what trainers without dynamic degrees run.

The degree is that of the data set's longest document: the smallest power of two that holds it and divides the ranks, or all
ranks where none does. A group of `degree` ranks holds a pack; the open pack is closed when the next document does not fit, and
nobody sorts. The last packs are then split, document by document from the end, until every group has one in every micro-batch.
This is how `dp_balanced` packs, the baseline of the dynamic context parallelism benchmark in Megatron-LM; written anew.
"""

import numpy as np

from longctx.comparison.baselines.groups import Group, powers_of_two, stand_in_rows
from longctx.planning.assignment import Assignment, Integers, largest_shards
from longctx.planning.cost.hardware_profile import HardwareProfile
from longctx.planning.layout import longest_document
from longctx.planning.plan import PlanError


def fixed_degree(longest: int, ranks: int, tokens_per_rank: int) -> int:
    """The degree that a data set with such a longest document gets. Raises PlanError if all ranks do not hold it."""
    degrees = [degree for degree in powers_of_two(ranks) if ranks % degree == 0]
    for degree in (*degrees, ranks):
        if _holds(degree, longest, tokens_per_rank):
            return degree
    raise PlanError(
        f"fixed static cannot hold a document of {longest:,} tokens: all {ranks:,} ranks hold "
        f"{longest_document(ranks, tokens_per_rank):,} at {tokens_per_rank:,} tokens a rank"
    )


def check_fixed_degree(degree: int, longest: int, ranks: int, tokens_per_rank: int) -> None:
    """Raises PlanError unless `degree` divides the ranks and holds a document of `longest` tokens."""
    if ranks % degree:
        raise PlanError(f"static:{degree} on {ranks:,} ranks: a fixed degree must divide the ranks")
    if _holds(degree, longest, tokens_per_rank):
        return
    divisors = (d for d in range(1, ranks + 1) if ranks % d == 0)
    enough = next((d for d in divisors if _holds(d, longest, tokens_per_rank)), None)
    raise PlanError(
        f"static:{degree} does not hold the longest document of {longest:,} tokens: {degree} ranks of {tokens_per_rank:,} hold "
        f"{longest_document(degree, tokens_per_rank):,}; "
        + (f"the smallest degree of {ranks:,} ranks that does is {enough}" if enough else f"no degree of {ranks:,} ranks does")
    )


def place_fixed_static(
    profile: HardwareProfile, lengths: Integers, ranks: int, tokens_per_rank: int, degree: int
) -> Assignment:
    """Where every document stands. `degree` must pass `check_fixed_degree` for the longest; the profile is not used."""
    groups = ranks // degree
    packs = _next_fit(largest_shards(lengths, np.full_like(lengths, degree)).tolist(), tokens_per_rank)
    _split_last(packs, groups)
    rows = [[Group(degree, documents=pack) for pack in packs[i : i + groups]] for i in range(0, len(packs), groups)]
    return stand_in_rows(rows, lengths)


def _holds(degree: int, length: int, tokens_per_rank: int) -> bool:
    return int(largest_shards(np.array([length]), np.array([degree]))[0]) <= tokens_per_rank


def _next_fit(tokens: list[int], capacity: int) -> list[list[int]]:
    """Packs documents in their order; `tokens` are those of each on the fullest rank of its group."""
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
    """Makes the number of packs a multiple, if there are documents enough: the last pack gives its last ones away first."""
    at = len(packs) - 1
    while len(packs) % multiple and at >= 0:
        if len(packs[at]) > 1:
            packs.append([packs[at].pop()])
        else:
            at -= 1

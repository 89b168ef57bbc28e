"""Fixed static: one degree for all steps, documents packed next-fit in their order, as in trainers without dynamic degrees.

The degree is the smallest power of two that holds the longest document of the data set and divides the ranks, or all ranks if
there is none. A group of `degree` ranks holds a pack; a pack is closed when the next document does not fit, without sorting.
The last packs are then split, document by document from the end, until every group has a pack in every micro-batch. This is the
packing of `dp_balanced`, the baseline of Megatron-LM's dynamic context parallelism benchmark; our own code.
"""

import numpy as np

from longctx.comparison.baselines.groups import RankGroup, powers_of_two, stand_in_rows
from longctx.planning.assignment import Assignment, Integers, largest_shards
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.layout import longest_document
from longctx.planning.plan import PlanError


def fixed_degree(longest: int, ranks: int, tokens_per_rank: int) -> int:
    """Returns the degree for a data set whose longest document has `longest` tokens. Raises PlanError if no degree holds it."""
    degrees = [degree for degree in powers_of_two(ranks) if ranks % degree == 0]
    for degree in (*degrees, ranks):
        if _holds(degree, longest, tokens_per_rank):
            return degree
    raise PlanError(
        f"fixed static cannot hold a document of {longest:,} tokens: all {ranks:,} ranks hold "
        f"{longest_document(ranks, tokens_per_rank):,} at {tokens_per_rank:,} tokens per rank"
    )


def check_fixed_degree(degree: int, longest: int, ranks: int, tokens_per_rank: int) -> None:
    """Raises PlanError unless `degree` divides the ranks and holds a document of `longest` tokens."""
    if ranks % degree:
        raise PlanError(f"static:{degree} on {ranks:,} ranks: the degree must divide the number of ranks")
    if _holds(degree, longest, tokens_per_rank):
        return
    divisors = (d for d in range(1, ranks + 1) if ranks % d == 0)
    enough = next((d for d in divisors if _holds(d, longest, tokens_per_rank)), None)
    raise PlanError(
        f"static:{degree} does not hold the longest document of {longest:,} tokens: {degree} ranks with {tokens_per_rank:,} "
        f"tokens each hold {longest_document(degree, tokens_per_rank):,}; "
        + (f"use degree {enough} or more" if enough else f"no degree on {ranks:,} ranks holds it")
    )


def place_fixed_static(
    profile: HardwareProfile, lengths: Integers, ranks: int, tokens_per_rank: int, degree: int
) -> Assignment:
    """Assigns every document. `degree` must pass `check_fixed_degree` for the longest document; `profile` is not used."""
    groups = ranks // degree
    packs = _next_fit(largest_shards(lengths, np.full_like(lengths, degree)).tolist(), tokens_per_rank)
    _split_last(packs, groups)
    rows = [[RankGroup(degree, pack) for pack in packs[i : i + groups]] for i in range(0, len(packs), groups)]
    return stand_in_rows(rows, lengths)


def _holds(degree: int, length: int, tokens_per_rank: int) -> bool:
    return int(largest_shards(np.array([length]), np.array([degree]))[0]) <= tokens_per_rank


def _next_fit(tokens: list[int], capacity: int) -> list[list[int]]:
    """Packs documents in their order; `tokens` are the tokens of each on the fullest rank of its group."""
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
    """Splits packs until their number is a multiple of `multiple`, if possible, starting with the last document."""
    at = len(packs) - 1
    while len(packs) % multiple and at >= 0:
        if len(packs[at]) > 1:
            packs.append([packs[at].pop()])
        else:
            at -= 1

"""Bins: plans by a table that maps length bins to degrees, given by the user or derived from the
hardware profile.

In the derived table, the bin of degree d ends at the longest document whose ranks take no longer
than one rank takes for a document of `tokens_per_rank` tokens. Degrees are powers of two, and N.
"""

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from longctx.planning.assignment import Assignment, Integers, largest_shards, least_degrees
from longctx.planning.cost.model import alone_ns
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.plan import PlanError
from longctx.planning.planners.packing import even_out, fill, place_rings
from longctx.planning.planners.planning_input import Candidate, PlanningInput

ROUNDS = 64
"""Maximum rounds of local search in mode bins."""


def plan_bins(given: PlanningInput) -> Candidate:
    """Plans by the given or derived table. Raises PlanError if a document does not fit the
    table."""
    return given.candidate("bins", pack_bins(given, bin_degrees(given)))


def bin_degrees(given: PlanningInput) -> Integers:
    """Returns the degree of every document by the given or derived table; see `degrees_by_bins` and
    `derived_degrees`."""
    if given.bins is None:
        return derived_degrees(given.profile, given.lengths, given.ranks, given.tokens_per_rank)
    return degrees_by_bins(given.bins, given.lengths, given.ranks, given.tokens_per_rank)


def pack_bins(given: PlanningInput, degrees: Integers) -> Assignment:
    """Packs documents at these degrees, as mode auto does, into the fewest micro-batches that
    work."""
    chosen = given.with_degrees(degrees)
    micro_batches = given.fewest_micro_batches
    while True:
        rings = place_rings(given, chosen, micro_batches)
        assignment = fill(rings) if rings else None
        if rings and assignment:
            return even_out(rings, assignment, ROUNDS)
        micro_batches += max(1, micro_batches // 8)


@lru_cache(maxsize=64)
def derived_bins(profile: HardwareProfile, ranks: int, tokens_per_rank: int) -> dict[int, int]:
    """Returns the table {longest document of the bin: degree}, ascending; the last bin ends at what
    the whole domain holds."""
    one = np.ones(1, dtype=np.int64)
    limit = int(alone_ns(profile, one * tokens_per_rank, one)[0])
    powers = [1 << i for i in range(ranks.bit_length()) if 1 << i < ranks]
    degrees = np.array([*powers, ranks], dtype=np.int64)
    # Bounds of the longest document of each bin.
    low = np.zeros_like(degrees)
    high = degrees * tokens_per_rank
    while (low < high).any():
        middle = (low + high + 1) // 2
        in_time = alone_ns(profile, np.maximum(1, middle), degrees) <= limit
        fits = largest_shards(middle, degrees) <= tokens_per_rank
        fits &= in_time | (degrees == ranks)
        low = np.where(fits, middle, low)
        high = np.where(fits, high, middle - 1)
    bins: dict[int, int] = {}
    for longest, degree in zip(low.tolist(), degrees.tolist(), strict=True):
        if longest > max(bins, default=0):
            bins[longest] = degree
    return bins


def derived_degrees(
    profile: HardwareProfile, lengths: Integers, ranks: int, tokens_per_rank: int
) -> Integers:
    """Returns the degree of every document by the derived table. Every document must fit at some
    degree.

    With a small odd budget some lengths fit only at odd degrees: such a document takes its smallest
    fitting degree.
    """
    bounds, table = _as_arrays(derived_bins(profile, ranks, tokens_per_rank))
    degrees = table[np.minimum(np.searchsorted(bounds, lengths), len(table) - 1)]
    fits = largest_shards(lengths, degrees) <= tokens_per_rank
    return np.where(fits, degrees, least_degrees(lengths, ranks, tokens_per_rank))


def _as_arrays(bins: Mapping[int, int]) -> tuple[Integers, Integers]:
    """Returns the longest document and the degree of every bin."""
    return np.array(list(bins), dtype=np.int64), np.array(list(bins.values()), dtype=np.int64)


def table_problem(bins: Mapping[int, int]) -> tuple[str, str] | None:
    """Returns the rule that a table {longest document of the bin: degree} breaks and the fix, or
    None."""
    lengths, degrees = list(bins), list(bins.values())
    if not bins:
        return "the table must not be empty", "write {8192: 1, 32768: 4}, or omit it"
    if not all(type(number) is int and number >= 1 for number in lengths + degrees):
        return (
            "lengths and degrees must be whole numbers of at least 1",
            "write {8192: 1, 32768: 4}, for example",
        )
    if lengths != sorted(lengths):
        return "lengths must be ascending", "sort the rows by length"
    if degrees != sorted(degrees):
        return "degrees must not decrease with length", "raise the later degrees"
    return None


def degrees_by_bins(
    bins: Mapping[int, int], lengths: Integers, ranks: int, tokens_per_rank: int
) -> Integers:
    """Returns the degree of every document: the degree of the first bin whose limit is at least its
    length.

    Raises PlanError for a malformed table, a document longer than the last bin, or a degree too
    small for the token budget.
    """
    problem = table_problem(bins)
    if problem is not None:
        rule, fix = problem
        raise PlanError(f"bins are {dict(bins)}: {rule}; {fix}")
    bounds, table = _as_arrays(bins)
    if table[-1] > ranks:
        raise PlanError(
            f"bin {bounds[-1]} has degree {table[-1]}: must be in 1..{ranks}, the size of the "
            "domain"
        )
    index = np.searchsorted(bounds, lengths)
    beyond = np.flatnonzero(index == len(bounds))
    if len(beyond):
        document = int(beyond[0])
        raise PlanError(
            f"document {document} has {lengths[document]} tokens, but the bins end at "
            f"{bounds[-1]}: add a bin, or use mode auto"
        )
    degrees: Integers = table[index]
    shards = largest_shards(lengths, degrees)
    over = np.flatnonzero(shards > tokens_per_rank)
    if len(over):
        document = int(over[0])
        raise PlanError(
            f"document {document} has {lengths[document]} tokens, but degree {degrees[document]} "
            f"of its bin holds at most {int(degrees[document]) * tokens_per_rank}: raise the "
            f"bin's degree to {least_degrees(lengths[[document]], ranks, tokens_per_rank)[0]}, or "
            f"tokens_per_rank to {shards[document]}"
        )
    return degrees

"""Static plans: the same degree for every document, the usual baseline.

The domain is cut into ⌊N / degree⌋ groups of neighbouring ranks; remaining ranks stay empty.
Best-fit decreasing packs documents under the token budget and sets the number of micro-batches; a
second packing gives each document, longest first, to the emptiest group. Groups run in descending
order of work, so that similar work shares a micro-batch. The packing with the lower cost wins.
"""

import bisect
import math

import numpy as np

from longctx.planning.assignment import NEVER, Assignment, Integers, largest_shards, least_degrees
from longctx.planning.cost.model import (
    alone_ns,
    attention_ns,
    beyond_ns,
    fixed_ns,
    gather_ns,
    keys_of,
    linear_ns,
    mate_ns,
    nanoseconds,
)
from longctx.planning.plan import PlanError
from longctx.planning.planners.list_scheduling import emptiest_first
from longctx.planning.planners.planning_input import Candidate, PlanningInput, fastest


def plan_static(given: PlanningInput) -> Candidate:
    """Plans with the given or the best degree. Raises PlanError if no degree fits every
    document."""
    degrees = range(1, given.ranks + 1)
    if given.degree is not None:
        degrees = range(given.degree, given.degree + 1)
    best = best_static(given, degrees)
    if best is None:
        raise PlanError(_no_degree(given))
    return best


def best_static(given: PlanningInput, degrees: range, below: int = NEVER) -> Candidate | None:
    """Returns the best static plan, or None. Skips degrees with a lower bound no better than
    `below` or the best plan so far.

    Attention is never faster on smaller chunks, so if the work of one degree on all ranks is too
    much, so is that of higher degrees.
    """
    longest = int(given.lengths.max())
    bounds = []
    for degree in degrees:
        if degree * given.tokens_per_rank < longest:
            continue
        on_all_ranks, on_groups = degree_bounds_ns(given, degree)
        if on_all_ranks >= below:
            break
        bounds.append((on_groups, degree))
    best: Candidate | None = None
    for bound, degree in sorted(bounds):
        limit = best.makespan_ns if best else below
        if bound >= limit:
            break
        candidate = pack_static(given, degree, below=limit)
        if candidate is not None:
            best = fastest(best, candidate)
    return best


def _no_degree(given: PlanningInput) -> str:
    ranks, tokens_per_rank = given.ranks, given.tokens_per_rank
    if given.degree is None:
        return (
            f"no single degree from 1 to {ranks} fits every document with {tokens_per_rank} "
            "tokens per rank: use mode auto"
        )
    shards = largest_shards(given.lengths, np.full_like(given.lengths, given.degree))
    document = int(shards.argmax())
    least = int(least_degrees(given.lengths[[document]], ranks, tokens_per_rank)[0])
    return (
        f"document {document} has {given.lengths[document]} tokens, but {given.degree} ranks of "
        f"{tokens_per_rank} tokens hold at most {given.degree * tokens_per_rank}: use degree "
        f"{least}, tokens_per_rank {shards[document]}, or mode auto"
    )


def pack_static(given: PlanningInput, degree: int, below: int = NEVER) -> Candidate | None:
    """Returns the better packing at one degree, or None if a document does not fit, or no packing
    can be below `below`."""
    lengths, tokens_per_rank = given.lengths, given.tokens_per_rank
    degrees = np.full_like(lengths, degree)
    weights = largest_shards(lengths, degrees)
    if int(weights.max()) > tokens_per_rank:
        return None
    groups = given.ranks // degree
    packed = best_fit(weights, tokens_per_rank)
    packings = [packed]
    micro_batches = -(-(int(packed.max()) + 1) // groups)
    spread = _emptiest_first(weights, tokens_per_rank, micro_batches * groups)
    if spread is not None:
        packings.append(spread)
    images = given.encoding.ring_ns(np.arange(len(lengths)), degrees)
    least = _least_ns(given, degrees) + images
    work = alone_ns(given.profile, lengths, degrees, overrides=given.overrides, encoding=images)
    best: Candidate | None = None
    for packing in packings:
        if _busiest_groups_ns(given, packing, work=work, least=least, groups=groups) >= below:
            continue
        plan = _run_longest_first(packing, work, groups, degree)
        candidate = given.candidate_below(below, f"static:{degree}", plan)
        if candidate is not None:
            best = fastest(best, candidate)
    return best


def _least_ns(given: PlanningInput, degrees: Integers) -> Integers:
    """Returns the least time of each document on every rank of its group, without images."""
    lengths, overrides = given.lengths, given.overrides
    attention = attention_ns(given.profile, lengths, degrees, overrides.pairs)
    linear = linear_ns(given.profile, 2 * (lengths // (2 * degrees)))
    rounding = 2  # both were rounded up
    result: Integers = attention + linear + beyond_ns(given.profile, overrides, degrees) - rounding
    return result


def _busiest_groups_ns(
    given: PlanningInput, group: Integers, *, work: Integers, least: Integers, groups: int
) -> int:
    """Returns a lower bound on the makespan of a packing, in a fraction of the time of its
    score."""
    by_work = np.argsort(-np.bincount(group, work), kind="stable")
    busy = np.bincount(group, least)[by_work]
    first_of_micro_batch = np.arange(0, len(busy), groups)
    slowest = np.maximum.reduceat(busy, first_of_micro_batch)
    return fixed_ns(given.profile, len(first_of_micro_batch)) + int(slowest.sum())


# A plan of one degree d on N ranks, whose documents have s tokens each, takes at least
#
#     fixed + (linear + attention + max(0, exchange − hidden)) · d / N
#     linear = Σ linear_ns(s / d)    attention = Σ attention_ns(s, d)    exchange = Σ across nodes
#     hidden = overlap · attention + min(overlap · query_share · linear, 2/3 · exchange)
#
# All sums are over documents, per rank of a ring. Tokens of a rank are at least ⌊s / d⌋, and a ring
# sends least over the network if it has as many ranks in each node as fit. The clamps below undo
# what the cost model rounds up, so that a bound is never above a makespan.


def degree_bounds_ns(given: PlanningInput, degree: int) -> tuple[int, int]:
    """Returns two lower bounds for static plans of one degree: work evenly spread, as much exchange
    hidden as possible.

    The first spreads work over all ranks and also holds for higher degrees, as attention and
    exchange never shrink as the degree rises. The second spreads work over the groups of this
    degree, whose ranks all count as the one with most images.
    """
    lengths = given.lengths
    degrees = np.full_like(lengths, degree)
    groups = given.ranks // degree
    work = _ring_work_ns(given, degrees)
    images = int(given.encoding.ring_ns(np.arange(len(lengths)), degrees).sum())

    def bound(ranks_used: int, work: int) -> int:
        micro_batches = -(-int(lengths.sum()) // (ranks_used * given.tokens_per_rank))
        return given.with_bubble_ns(fixed_ns(given.profile, micro_batches) + work, micro_batches)

    on_all_ranks = (work * degree + given.encoding.whole_ns) // given.ranks
    return bound(given.ranks, on_all_ranks), bound(groups * degree, (work + images) // groups)


def _ring_work_ns(given: PlanningInput, degrees: Integers) -> int:
    """Returns the least time of a rank of each ring, summed over documents that all have the same
    degree: the three lines above without `fixed` and d / N."""
    profile, lengths, overrides = given.profile, given.lengths, given.overrides
    documents, degree = len(lengths), int(degrees[0])
    of_tokens = linear_ns(profile, lengths // degrees) + beyond_ns(profile, overrides, degrees)
    linear = int(of_tokens.sum())
    attention = int(attention_ns(profile, lengths, degrees, overrides.pairs).sum())

    most_in_node = np.minimum(degrees, profile.ranks_per_node)
    mates = mate_ns(profile, keys_of(lengths, overrides), degrees)
    _, across = gather_ns(profile, degrees, inside=most_in_node, mates=mates)
    exchange = int(across.sum()) - degree * documents  # the time of every peer was rounded up

    by_attention = math.ceil(profile.overlap * attention)
    by_queries = math.ceil(profile.overlap * profile.query_share * linear)
    hidden = by_attention + min(by_queries, -(-2 * max(0, exchange) // 3))
    rounding = 4 * documents  # shares were rounded up
    splits = documents * nanoseconds(profile.split_document_s) if degree > 1 else 0
    return max(0, linear + attention + max(0, exchange - hidden) + splits - rounding)


def best_fit(weights: Integers, capacity: int) -> Integers:
    """Packs by best-fit decreasing, each document into the fullest group with room. Returns the
    group of every document."""
    documents = len(weights)
    group = [0] * documents
    values = weights.tolist()
    # Tokens free · documents + group, ascending: whole numbers compare faster than pairs.
    room: list[int] = []
    groups = 0
    for document in np.argsort(-weights, kind="stable").tolist():
        value = values[document]
        at = bisect.bisect_left(room, value * documents)
        if at < len(room):
            free, chosen = divmod(room.pop(at), documents)
        else:
            free, chosen = capacity, groups
            groups += 1
        bisect.insort(room, (free - value) * documents + chosen)
        group[document] = chosen
    return np.array(group, dtype=np.int64)


def _emptiest_first(weights: Integers, capacity: int, groups: int) -> Integers | None:
    """Packs documents, longest first, into the group with the fewest tokens; returns None if one
    does not fit."""
    order = np.argsort(-weights, kind="stable")
    tokens = np.zeros(groups, dtype=np.int64)
    group = np.zeros_like(weights)
    packs = emptiest_first(tokens, tokens + capacity, weights[order], weights[order])
    if packs is None:
        return None
    group[order] = packs
    return group


def _run_longest_first(group: Integers, work: Integers, groups: int, degree: int) -> Assignment:
    """Places packed groups on the domain in descending order of work, so that similar groups share
    a micro-batch."""
    total = np.bincount(group, work)
    turn = np.empty(len(total), dtype=np.int64)
    turn[np.argsort(-total, kind="stable")] = np.arange(len(total))
    slot = turn[group]
    return Assignment.alternating(
        slot // groups, slot % groups * degree, np.full_like(group, degree)
    )

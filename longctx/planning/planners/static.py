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
from longctx.planning.cost.bounds import bubble_bound_ns
from longctx.planning.cost.model import (
    alone_ns,
    attention_ns,
    beyond_ns,
    fixed_ns,
    gather_ns,
    keys_of,
    linear_ns,
    mate_ns,
)
from longctx.planning.plan import PlanError
from longctx.planning.planners.packing import emptiest_first
from longctx.planning.planners.step import Candidate, Step, fastest


def plan_static(step: Step) -> Candidate:
    """Plans with the given or the best degree. Raises PlanError if no degree fits every
    document."""
    degree = step.degree
    best = best_static(
        step, range(1, step.places + 1) if degree is None else range(degree, degree + 1)
    )
    if best is None:
        raise PlanError(_no_degree(step))
    return best


def best_static(step: Step, degrees: range, below: int = NEVER) -> Candidate | None:
    """Returns the best static plan, or None. Skips degrees with a lower bound no better than
    `below` or the best plan so far.

    Attention is never faster on smaller chunks, so if the work of one degree on all ranks is too
    much, so is that of higher degrees.
    """
    bounds = []
    for degree in degrees:
        if degree * step.tokens_per_rank < int(step.lengths.max()):
            continue
        on_all_ranks, on_groups = degree_bounds_ns(step, degree)
        if on_all_ranks >= below:
            break
        bounds.append((on_groups, degree))
    best: Candidate | None = None
    for bound, degree in sorted(bounds):
        limit = best.makespan_ns if best else below
        if bound >= limit:
            break
        if (candidate := pack_static(step, degree, below=limit)) is not None:
            best = fastest(best, candidate)
    return best


def _no_degree(step: Step) -> str:
    lengths, ranks, tokens_per_rank, degree = (
        step.lengths,
        step.places,
        step.tokens_per_rank,
        step.degree,
    )
    if degree is None:
        return (
            f"no single degree from 1 to {ranks} fits every document with {tokens_per_rank} "
            "tokens per rank: use mode auto"
        )
    shards = largest_shards(lengths, np.full_like(lengths, degree))
    document = int(shards.argmax())
    least = int(least_degrees(lengths[[document]], ranks, tokens_per_rank)[0])
    return (
        f"document {document} has {lengths[document]} tokens, but {degree} ranks of "
        f"{tokens_per_rank} tokens hold at most "
        f"{degree * tokens_per_rank}: use degree {least}, tokens_per_rank {shards[document]}, or "
        "mode auto"
    )


def pack_static(step: Step, degree: int, below: int = NEVER) -> Candidate | None:
    """Returns the better packing at one degree, or None if a document does not fit, or no packing
    can be below `below`."""
    profile, lengths, ranks, tokens_per_rank = (
        step.profile,
        step.lengths,
        step.places,
        step.tokens_per_rank,
    )
    weights = largest_shards(lengths, np.full_like(lengths, degree))
    if int(weights.max()) > tokens_per_rank:
        return None
    groups = ranks // degree
    packed = best_fit(weights, tokens_per_rank)
    micro_batches = -(-(int(packed.max()) + 1) // groups)
    images = step.encoding.ring_ns(np.arange(len(lengths)), np.full_like(lengths, degree))
    work = alone_ns(
        profile, lengths, np.full_like(lengths, degree), amounts=step.amounts, encoding=images
    )
    candidates = [packed]
    if (spread := _emptiest_first(weights, tokens_per_rank, micro_batches * groups)) is not None:
        candidates.append(spread)
    plans = [_run_longest_first(packing, work, groups, degree) for packing in candidates]
    scored = [step.candidate_below(below, f"static:{degree}", plan) for plan in plans]
    return fastest(*scored) if any(scored) else None


def degree_bounds_ns(step: Step, degree: int) -> tuple[int, int]:
    """Returns two lower bounds for static plans of one degree: work evenly spread, as much exchange
    hidden as possible.

    The first spreads work over all ranks and also holds for higher degrees, as attention and
    exchange never shrink as the degree rises. The second spreads work over the groups of this
    degree, whose ranks all count as the one with most images.
    """
    profile, lengths, ranks, tokens_per_rank = (
        step.profile,
        step.lengths,
        step.places,
        step.tokens_per_rank,
    )
    degrees, groups = np.full_like(lengths, degree), ranks // degree
    rounding = 4 * len(lengths)  # shares were rounded up, which must not raise a lower bound
    linear = int(
        (linear_ns(profile, lengths // degree) + beyond_ns(profile, step.amounts, degrees)).sum()
    )
    attention = int(attention_ns(profile, lengths, degrees, step.amounts.pairs).sum())
    in_its_node = np.minimum(degrees, profile.ranks_per_node)  # at most
    _, across = gather_ns(
        profile, degrees, in_its_node, *mate_ns(profile, keys_of(lengths, step.amounts), degrees)
    )
    exchange = int(across.sum()) - degree * len(lengths)  # the time of every peer was rounded up
    queries = min(
        math.ceil(profile.overlap * profile.query_share * linear), -(-2 * max(0, exchange) // 3)
    )
    exposed = max(0, exchange - math.ceil(profile.overlap * attention) - queries)
    work = max(0, linear + attention + exposed - rounding)
    images = int(step.encoding.ring_ns(np.arange(len(lengths)), degrees).sum())

    def bound(ranks_used: int, work: int) -> int:
        micro_batches = -(-int(lengths.sum()) // (ranks_used * tokens_per_rank))
        without_bubble = fixed_ns(profile, micro_batches) + work
        return without_bubble + bubble_bound_ns(
            profile, step.pipeline, without_bubble, micro_batches, len(lengths)
        )

    on_all_ranks = (work * degree + step.encoding.whole_ns) // ranks
    return bound(ranks, on_all_ranks), bound(groups * degree, (work + images) // groups)


def best_fit(weights: Integers, capacity: int) -> Integers:
    """Packs by best-fit decreasing, each document into the fullest group with room. Returns the
    group of every document."""
    group, values, documents = [0] * len(weights), weights.tolist(), len(weights)
    # Tokens free · documents + group, ascending: whole numbers compare faster than pairs.
    room: list[int] = []
    groups = 0
    for document in np.argsort(-weights, kind="stable").tolist():
        value = values[document]
        at = bisect.bisect_left(room, value * documents)
        if at < len(room):
            free, chosen = divmod(room.pop(at), documents)
        else:
            free, chosen, groups = capacity, groups, groups + 1
        bisect.insort(room, (free - value) * documents + chosen)
        group[document] = chosen
    return np.array(group, dtype=np.int64)


def _emptiest_first(weights: Integers, capacity: int, groups: int) -> Integers | None:
    """Packs documents, longest first, into the group with the fewest tokens; returns None if one
    does not fit."""
    order = np.argsort(-weights, kind="stable")
    tokens, group = np.zeros(groups, dtype=np.int64), np.zeros_like(weights)
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

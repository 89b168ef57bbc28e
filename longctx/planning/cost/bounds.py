"""Lower bounds on step time under the cost model; functions that end in `_bound_ns` return
nanoseconds.

The step bound spreads all work evenly at its best efficiency and treats the network as free. The
tight bound is closer if only a few documents are long; it is the larger of two. First: in a step of
M nanoseconds beyond its fixed costs every document has a degree at which it takes at most M alone,
and the mean work per rank, which never falls as degrees rise, is at most M. Second: the micro-batch
of the longest document is limited to the token budget, so that other ranks may run out of tokens
before it ends. The distance of both from the step bound is the part of a plan's gap that no plan
can avoid.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longctx.planning.assignment import NEVER, Integers, largest_shards
from longctx.planning.cost.model import (
    NANOSECONDS,
    StepTimes,
    attention_ns,
    exposed_ns,
    fixed_ns,
    gather_ns,
    latency_ns,
    linear_ns,
    mate_ns,
    nanoseconds,
    node_parts,
    received_ns,
    split_ns,
    state_ns,
    whole_ring_attention_ns,
)
from longctx.planning.cost.slow_ranks import even_ns
from longctx.planning.cost.unhidden import unhidden_exchange_ns
from longctx.planning.cost.work_overrides import NO_OVERRIDES, WorkOverrides
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.pipeline import NO_PIPELINE, Pipeline
from longctx.planning.plan import Plan, PlanCost

ROUNDING = 2
"""Error in nanoseconds of choosing a whole number of micro-batches K."""
MOST = 512
"""Number of distinct longest lengths whose degrees are searched; shorter documents count at their
best efficiency."""


def plan_cost(
    timed: StepTimes,
    profile: HardwareProfile,
    lengths: Integers,
    tokens_per_rank: int,
    pipeline: Pipeline = NO_PIPELINE,
    overrides: WorkOverrides = NO_OVERRIDES,
    encoding_ns: int = 0,
) -> PlanCost:
    """Returns the modelled cost of a scored assignment together with the lower bound.

    `overrides`, here and below: see `WorkOverrides`; `encoding_ns`: nanoseconds of all images.
    """
    bound_ns = step_bound_ns(
        profile,
        lengths,
        ranks=timed.time.shape[1],
        tokens_per_rank=tokens_per_rank,
        pipeline=pipeline,
        overrides=overrides,
        encoding_ns=encoding_ns,
    )
    return PlanCost(
        makespan_s=timed.makespan_ns / NANOSECONDS,
        lower_bound_s=bound_ns / NANOSECONDS,
        exposed_share=timed.exposed_share,
        idle_share=timed.idle_share,
        bubble_share=timed.bubble_ns / max(1, timed.makespan_ns),
    )


def step_bound_ns(
    profile: HardwareProfile,
    lengths: Integers,
    ranks: int,
    tokens_per_rank: int,
    pipeline: Pipeline = NO_PIPELINE,
    overrides: WorkOverrides = NO_OVERRIDES,
    encoding_ns: int = 0,
) -> int:
    """Returns a lower bound on step time in nanoseconds: all work at its best efficiency, evenly
    spread, on a network that is free but for what no rounds hide.

    A document of s tokens takes at least ⌈s / tokens_per_rank⌉ ranks, and attention on smaller
    chunks is never faster. In a pipeline with K micro-batches the longest takes at least 1/K of all
    work, and K is at most the number of documents.
    """
    bound = even_work_bound_ns(
        profile,
        lengths,
        degrees=-(-lengths // tokens_per_rank),
        ranks=ranks,
        tokens_per_rank=tokens_per_rank,
        overrides=overrides,
        encoding_ns=encoding_ns,
    )
    unhidden_ns = unhidden_exchange_ns(
        profile, lengths, ranks=ranks, tokens_per_rank=tokens_per_rank, overrides=overrides
    )
    bound += even_ns(profile, 0, unhidden_ns, ranks=ranks)
    launches = fewest_micro_batches(lengths, ranks, tokens_per_rank)
    return bound + bubble_bound_ns(profile, pipeline, bound, launches=launches, most=len(lengths))


def fewest_micro_batches(lengths: Integers, ranks: int, tokens_per_rank: int) -> int:
    """Returns the minimum number of micro-batches: all tokens divided by the budgets of all
    ranks."""
    return -(-int(lengths.sum()) // (ranks * tokens_per_rank))


def bubble_bound_ns(
    profile: HardwareProfile, pipeline: Pipeline, bound: int, *, launches: int, most: int
) -> int:
    """Returns the least that a pipeline adds to a lower bound on step time, which has the launches
    of so many micro-batches.

    A plan has at most `most` micro-batches; of K, the longest takes at least 1/K of the work.
    """
    if pipeline.ranks == 1:
        return 0
    launch = nanoseconds(profile.launch_s)
    work = max(0, bound - fixed_ns(profile, launches))

    def added(micro_batches: int) -> int:
        launched = (micro_batches - launches) * launch
        return launched + pipeline.bubble_ns(launch + work // micro_batches)

    # Launch time rises and the bubble shrinks with K: the best K is where the two slopes cancel, or
    # the largest K.
    best = most
    if launch:
        best = math.isqrt(max(0, pipeline.bubble_ns(work) // launch))
    least = min(added(min(max(k, launches), most)) for k in (best, best + 1))
    return max(0, least - ROUNDING)


def even_work_bound_ns(
    profile: HardwareProfile,
    lengths: Integers,
    degrees: Integers,
    ranks: int,
    tokens_per_rank: int,
    overrides: WorkOverrides = NO_OVERRIDES,
    encoding_ns: int = 0,
) -> int:
    """Returns a lower bound for plans whose documents have at least these degrees: work evenly
    spread, exchange free, though each split has its price."""
    attention = whole_ring_attention_ns(profile, lengths, degrees, overrides.pairs)
    tokens = lengths if overrides.products is None else lengths + overrides.products
    linear = profile.linear_s_per_token * NANOSECONDS * tokens
    splits = int(degrees[degrees > 1].sum()) * nanoseconds(profile.split_document_s)
    work = _floor_sum(attention) + _floor_sum(linear) + encoding_ns
    fixed = fixed_ns(profile, fewest_micro_batches(lengths, ranks, tokens_per_rank))
    return fixed + even_ns(profile, work, splits, ranks=ranks)


def _floor_sum(nanoseconds: NDArray[np.floating[Any]]) -> int:
    """Returns the sum of numbers that are each rounded down."""
    return int(np.floor(nanoseconds).astype(np.int64).sum())


def tight_step_bound_ns(
    profile: HardwareProfile, lengths: Integers, ranks: int, tokens_per_rank: int
) -> int:
    """Returns the tight lower bound on step time, ≥ `step_bound_ns`. Every document must fit at
    some degree."""
    beside = beside_longest_bound_ns(profile, lengths, ranks, tokens_per_rank)
    least = -(-lengths // tokens_per_rank)
    fixed = fixed_ns(profile, fewest_micro_batches(lengths, ranks, tokens_per_rank))
    longest, which = np.unique(lengths, return_inverse=True)
    longest = longest[-MOST:]
    all_degrees = np.arange(1, ranks + 1)
    table = document_bound_ns(profile, longest[:, None], all_degrees[None, :], tokens_per_rank)
    looked_at = lengths >= longest[0]
    row = which[looked_at] - (int(which.max()) + 1 - len(longest))

    def even_work_ns(degrees: Integers) -> int:
        bound = even_work_bound_ns(
            profile, lengths, degrees, ranks=ranks, tokens_per_rank=tokens_per_rank
        )
        return bound - fixed

    def holds(limit: int) -> bool:
        degrees = least.copy()
        fast_enough = 1 + (table <= limit).argmax(axis=1)[row]
        degrees[looked_at] = np.maximum(least[looked_at], fast_enough)
        return even_work_ns(degrees) <= limit

    low = int(table.min(axis=1).max())
    high = max(low, even_work_ns(np.full_like(lengths, ranks)))
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    loose = step_bound_ns(profile, lengths, ranks=ranks, tokens_per_rank=tokens_per_rank)
    return max(loose, fixed + max(low, beside))


def beside_longest_bound_ns(
    profile: HardwareProfile, lengths: Integers, ranks: int, tokens_per_rank: int
) -> int:
    """Returns a lower bound on step time beyond its fixed costs, from the micro-batch of the
    longest document.

    At degree d it takes a time t. Its ranks can do other work for the rest of t, and the other
    ranks for all of t, both with at most as many tokens as the budget leaves, at best those with
    the most work per token. The work that is left takes its share of all ranks. A longer
    micro-batch is no better: it saves no more time than it takes.
    """
    longest = int(lengths.argmax())
    others = np.delete(lengths, longest)
    work, tokens_upto = _most_work(profile, others, tokens_per_rank)
    degrees = np.arange(1, ranks + 1)
    length = np.full_like(degrees, lengths[longest])
    time = document_bound_ns(profile, length, degrees, tokens_per_rank)
    fits = time < NEVER
    degrees, length, time = degrees[fits], length[fits], time[fits]
    attention = whole_ring_attention_ns(profile, length, degrees)
    linear = profile.linear_s_per_token * NANOSECONDS * length
    own_ns = (attention + linear).astype(np.int64)

    def possible(nanoseconds: Integers, tokens: Integers) -> Integers:
        """Returns the most work of other documents with so many tokens in all and so much time,
        summed over ranks."""
        most = work[np.minimum(np.searchsorted(tokens_upto, tokens) + 1, len(work) - 1)]
        result: Integers = np.minimum(nanoseconds, most)
        return result

    idle_ns = np.maximum(0, degrees * time - own_ns)
    free_tokens = np.maximum(0, degrees * tokens_per_rank - length)
    in_ring = possible(idle_ns, free_tokens)
    other_ranks = ranks - degrees
    beside = possible(other_ranks * time, other_ranks * tokens_per_rank)
    left = np.maximum(0, int(work[-1]) - in_ring - beside)
    return int((time + left // ranks).min())


def _most_work(
    profile: HardwareProfile, lengths: Integers, tokens_per_rank: int
) -> tuple[Integers, Integers]:
    """Returns the work in nanoseconds, and the tokens, of the 0, 1, 2, … documents with the most
    work per token."""
    least = np.maximum(1, -(-lengths // tokens_per_rank))
    attention = np.floor(whole_ring_attention_ns(profile, lengths, least)).astype(np.int64)
    work = attention + np.floor(profile.linear_s_per_token * NANOSECONDS * lengths).astype(np.int64)
    order = np.argsort(-(work / lengths), kind="stable")
    return np.append(0, np.cumsum(work[order])), np.append(0, np.cumsum(lengths[order]))


def tight_bound_s(plan: Plan) -> float:
    """Returns the tight lower bound in seconds for the plan's documents, ranks, budget, profile and
    pipeline.

    With trees, sources or images it is the lower bound, which alone knows their work.
    """
    if plan.trees or plan.sources or plan.images:
        return plan.lower_bound_s
    lengths = np.array(plan.lengths, dtype=np.int64)
    tight_ns = tight_step_bound_ns(plan.profile, lengths, plan.ranks, plan.tokens_per_rank)
    # Only lower_bound_s counts the pipeline bubble.
    return max(tight_ns / NANOSECONDS, plan.lower_bound_s)


def unavoidable_gap(tight_s: float, lower_s: float) -> float:
    """Returns the relative distance of the tight bound from the lower bound: the gap that no plan
    can avoid (0.02 is 2 %)."""
    return tight_s / lower_s - 1 if lower_s > 0 else 0.0


def document_bound_ns(
    profile: HardwareProfile, lengths: Integers, degrees: Integers, tokens_per_rank: int
) -> Integers:
    """Returns a lower bound on the busiest rank's time for each document, on any ranks; NEVER where
    it does not fit."""
    attention = attention_ns(profile, lengths, degrees)
    shard = largest_shards(lengths, degrees)
    smallest = 2 * (lengths // (2 * degrees))
    least_linear = linear_ns(profile, smallest)

    mates = intra, inter = mate_ns(profile, lengths, degrees)
    fewest, _ = node_parts(degrees, profile.ranks_per_node, None)
    # Best split over both networks.
    both = np.floor((degrees - 1) * (intra * (inter / (intra + inter)))).astype(np.int64)
    _, across = gather_ns(profile, degrees, inside=fewest, mates=mates)
    latency, waited = latency_ns(profile)
    exchange = latency + np.maximum(across, both)

    near, far = state_ns(profile)
    states = (degrees - 1) * (near * far // max(1, near + far))  # on every rank, at best
    most_states = np.maximum((degrees - fewest) * far, states)
    waits = waited + received_ns(profile, lengths, degrees)
    waits += nanoseconds(profile.split_document_s)

    # The fullest rank computes longest; the rank with the fewest mates in its node waits longest.
    beside_linear = states + waits + split_ns(profile, shard)
    fullest = linear_ns(profile, shard) + np.where(degrees > 1, beside_linear, 0)
    exposed = exposed_ns(profile, attention, least_linear, exchange)
    exposed += most_states + waits + split_ns(profile, smallest)
    waiting = least_linear + np.where(degrees > 1, exposed, 0)
    rounding = 6 + 4 * degrees  # the time of every peer was rounded up
    time = attention + np.maximum(fullest, waiting) - rounding
    result: Integers = np.where(shard <= tokens_per_rank, np.maximum(0, time), NEVER)
    return result

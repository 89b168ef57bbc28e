"""Tight bound: a time that no plan can beat under the cost model, closer than `lower_bound_ns` where few documents are long.

A document's busiest rank takes no less than it would alone, whatever else it holds: overlap is at most 1, so attention of
others hides no more exchange than it costs. In a step with M nanoseconds beside its fixed costs every document therefore has a
degree at which it alone takes at most M, and work over all ranks, which never falls with the degree, is at most M a rank. The
bound is the least M for which both can be. It says how much of a plan's gap to the lower bound no plan could avoid.
"""

import numpy as np

from longctx.planning.assignment import NEVER, Integers, largest_shards
from longctx.planning.cost import (
    NANOSECONDS,
    attention_ns,
    bound_ns,
    gather_ns,
    hidden_ns,
    linear_ns,
    mate_ns,
    nanoseconds,
    node_parts,
)
from longctx.planning.plan import Plan
from longctx.planning.profile import HardwareProfile

MOST = 512
"""Distinct longest lengths whose degrees are looked at; the others are taken at their best efficiency."""


def tight_bound_ns(profile: HardwareProfile, lengths: Integers, ranks: int, tokens_per_rank: int) -> int:
    """Time of a step that no plan can beat; never less than `lower_bound_ns`. Every document must fit at some degree."""
    least = -(-lengths // tokens_per_rank)
    launches = -(-int(lengths.sum()) // (ranks * tokens_per_rank))
    fixed = nanoseconds(profile.step_s) + launches * nanoseconds(profile.launch_s)
    longest, which = np.unique(lengths, return_inverse=True)
    longest = longest[-MOST:]
    table = least_time_ns(profile, longest[:, None], np.arange(1, ranks + 1)[None, :], tokens_per_rank)
    looked_at = lengths >= longest[0]
    row = which[looked_at] - (int(which.max()) + 1 - len(longest))

    def holds(limit: int) -> bool:
        degrees = least.copy()
        degrees[looked_at] = np.maximum(least[looked_at], 1 + (table <= limit).argmax(axis=1)[row])
        return bound_ns(profile, lengths, degrees, ranks, tokens_per_rank) <= fixed + limit

    low = int(table.min(axis=1).max())
    high = max(low, bound_ns(profile, lengths, np.full_like(lengths, ranks), ranks, tokens_per_rank) - fixed)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return fixed + low


def tight_bound_s(plan: Plan) -> float:
    """Seconds that no plan of the same documents, ranks, budget, profile and pipeline can beat."""
    lengths = np.array(plan.lengths, dtype=np.int64)
    tight = tight_bound_ns(plan.profile, lengths, plan.ranks, plan.tokens_per_rank) / NANOSECONDS
    return max(tight, plan.lower_bound_s)  # which also counts the bubble of a pipeline


def unavoidable_gap(tight_s: float, lower_s: float) -> float:
    """How far the tight bound is above the lower bound: the part of a gap that no plan can avoid. 0.02 means 2 %."""
    return tight_s / lower_s - 1 if lower_s > 0 else 0.0


def least_time_ns(profile: HardwareProfile, lengths: Integers, degrees: Integers, tokens_per_rank: int) -> Integers:
    """The busiest rank of a document takes no less, wherever its ring stands; a very long time where it does not fit."""
    attention = attention_ns(profile, lengths, degrees)
    intra, inter = mate_ns(profile, lengths, degrees)
    fewest, _ = node_parts(degrees, profile.ranks_per_node, None)
    both = np.floor((degrees - 1) * (intra * (inter / (intra + inter)))).astype(np.int64)  # its mates shared out at best
    _, across = gather_ns(profile, degrees, fewest, intra, inter)
    exchange = nanoseconds(profile.latency_s) + np.maximum(across, both)
    exposed = np.where(degrees > 1, np.maximum(0, exchange - hidden_ns(profile, attention)), 0)
    shard, smallest = largest_shards(lengths, degrees), 2 * (lengths // (2 * degrees))  # that of the rank that waits longest
    rounding = 4 + 2 * degrees  # every mate was rounded up
    time = attention + np.maximum(linear_ns(profile, shard), linear_ns(profile, smallest) + exposed) - rounding
    result: Integers = np.where(shard <= tokens_per_rank, np.maximum(0, time), NEVER)
    return result

"""Ulysses: how many neighbouring ranks should swap heads for tokens in a micro-batch (see `longctx.attention.ulysses`).

A ring of d ranks becomes u rings of d/u on u times longer chunks, so it moves fewer keys; queries, outputs and their gradients
move too, among the u neighbours, and nothing hides that. Which u is best is a question of bytes: many kv heads, wide rings and
rings across nodes speak for it, one kv head for many query heads against it.
"""

from dataclasses import replace

import numpy as np

from longctx.planning.assignment import Assignment, Integers, spread
from longctx.planning.cost.hardware_profile import HardwareProfile
from longctx.planning.cost.model import NANOSECONDS, attention_ns, exchange_ns, hidden_ns, linear_ns
from longctx.planning.plan import Plan

PASSES = 3
"""What the profile's kv_bytes_per_token counts: K and V fetched forward, fetched again and returned in backward."""


def swaps_heads(length: int, first_rank: int, degree: int, ulysses_degree: int) -> bool:
    """Whether a document's ring consists of whole groups of `ulysses_degree` ranks, each with a token in both of its chunks."""
    whole = first_rank % ulysses_degree == 0 and degree % ulysses_degree == 0
    return ulysses_degree > 1 and whole and length >= 2 * degree


def choose_ulysses_degree(plan: Plan, micro_batch: int, query_heads: int, kv_heads: int) -> int:
    """The number of ranks that should exchange heads in a micro-batch, by the cost model; 1 for plain rings.

    It divides `kv_heads` and the ranks of a node; heads are those of one rank under tensor parallelism. Ties go to the smaller.
    """
    choices = [u for u in range(1, kv_heads + 1) if kv_heads % u == 0 and plan.profile.ranks_per_node % u == 0]
    choices = [u for u in choices if u == 1 or plan.ranks % u == 0]
    return min(choices, key=lambda u: (micro_batch_ns(plan, micro_batch, u, query_heads, kv_heads), u))


def micro_batch_ns(plan: Plan, micro_batch: int, ulysses_degree: int, query_heads: int, kv_heads: int) -> int:
    """Modelled time of a micro-batch's slowest rank if groups of `ulysses_degree` exchange heads; shards are taken as even."""
    placements, profile, ranks = plan.micro_batches[micro_batch], plan.profile, plan.ranks
    lengths = np.array([plan.lengths[p.document] for p in placements], dtype=np.int64)
    first, degree = (np.array([getattr(p, name) for p in placements], dtype=np.int64) for name in ("first_rank", "degree"))
    pairs = zip(lengths.tolist(), first.tolist(), degree.tolist(), strict=True)
    swapped = np.array([swaps_heads(length, start, width, ulysses_degree) for length, start, width in pairs], dtype=bool)
    u = np.where(swapped, ulysses_degree, 1)
    attention = _on_ranks(-(-attention_ns(profile, lengths, degree // u) // u), first, degree, ranks)
    tokens = _on_ranks(-(-lengths // degree), first, degree, ranks)
    exchange = _ring_ns(profile, lengths[~swapped], first[~swapped], degree[~swapped], ranks)
    if swapped.any():
        group = replace(
            profile,
            ranks_per_node=profile.ranks_per_node // ulysses_degree,
            kv_bytes_per_token=profile.kv_bytes_per_token / ulysses_degree,
        )
        wide = (lengths[swapped], first[swapped] // ulysses_degree, degree[swapped] // ulysses_degree, ranks // ulysses_degree)
        exchange = exchange + np.repeat(_ring_ns(group, *wide), ulysses_degree)
    moved = _on_ranks(np.where(swapped, -(-lengths // degree), 0), first, degree, ranks)
    per_token = profile.kv_bytes_per_token / PASSES * 2 * (1 + query_heads / kv_heads)  # q, k, v, out and their gradients
    share = (ulysses_degree - 1) / ulysses_degree
    swaps = np.ceil(moved * (per_token * share * NANOSECONDS / profile.intra_node_bytes_per_s)).astype(np.int64)
    time = linear_ns(profile, tokens) + attention + np.maximum(0, exchange - hidden_ns(profile, attention)) + swaps
    return int(time.max())


def _on_ranks(values: Integers, first: Integers, degree: Integers, ranks: int) -> Integers:
    """Sums a value of every document over the ranks of its ring."""
    result: Integers = spread(values, np.zeros_like(first), first, first + degree, (1, ranks))[0]
    return result


def _ring_ns(profile: HardwareProfile, lengths: Integers, first: Integers, degree: Integers, ranks: int) -> Integers:
    """Exchange of plain rings on every rank."""
    rings = Assignment(np.zeros_like(first), first, degree, np.zeros(len(first), dtype=bool))
    result: Integers = exchange_ns(profile, lengths, rings, (1, ranks))[0]
    return result

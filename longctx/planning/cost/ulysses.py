"""Ulysses: the choice of the Ulysses degree u of a micro-batch (see `longctx.attention.ulysses`).

A ring of d ranks becomes u rings of d/u ranks on chunks u times as long, so fewer keys move. In exchange, queries, outputs and
their gradients move among u neighbouring ranks, and nothing hides these messages. Many kv heads, wide rings and rings across
nodes favour a large u; many query heads per kv head favour a small one.
"""

from dataclasses import replace

import numpy as np

from longctx.planning.assignment import Assignment, Integers, spread
from longctx.planning.cost.amounts import Amounts
from longctx.planning.cost.model import NANOSECONDS, attention_ns, exchange_ns, exposed_ns, linear_ns, states_ns
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.plan import Plan

PASSES = 3
"""Passes counted in the profile's kv_bytes_per_token: K and V fetched in forward, fetched again and returned in backward."""


def swaps_heads(length: int, first_rank: int, degree: int, ulysses_degree: int) -> bool:
    """Returns whether a ring consists of whole groups of `ulysses_degree` ranks, with tokens in both chunks of each rank."""
    whole = first_rank % ulysses_degree == 0 and degree % ulysses_degree == 0
    return ulysses_degree > 1 and whole and length >= 2 * degree


def ulysses_degrees(query_heads: int, kv_heads: int) -> list[int]:
    """Returns the Ulysses degrees that share heads out evenly: divisors of `kv_heads`, and multiples that divide `query_heads`.

    With a multiple, ranks that use the same KV head have copies of it.
    """
    dividing = [u for u in range(1, query_heads + 1) if query_heads % u == 0]
    return [u for u in dividing if kv_heads % u == 0 or u % kv_heads == 0]


def choose_ulysses_degree(plan: Plan, micro_batch: int, query_heads: int, kv_heads: int) -> int:
    """Returns the Ulysses degree with the lowest modelled time of a micro-batch; 1 means plain rings.

    The degree is one of `ulysses_degrees` that divides the ranks per node; head counts are per tensor-parallel rank. Ties go to
    the smaller one.
    """
    choices = [u for u in ulysses_degrees(query_heads, kv_heads) if plan.profile.ranks_per_node % u == 0]
    choices = [u for u in choices if u == 1 or plan.ranks % u == 0]
    return min(choices, key=lambda u: (micro_batch_ns(plan, micro_batch, u, query_heads, kv_heads), u))


def micro_batch_ns(plan: Plan, micro_batch: int, ulysses_degree: int, query_heads: int, kv_heads: int) -> int:
    """Returns the modelled time of a micro-batch's slowest rank at a Ulysses degree u that divides the ranks.

    The time of a rank is linear + attention + exposed exchange + swaps + states of linear attention, which swap nothing. A
    document of length s on d ranks that swap heads costs each rank attention(s, d/u) / u, the exchange of a ring of d/u ranks
    with 1/u of the heads (one KV head at least), and the swaps of s/d tokens.
    Documents that do not swap heads cost the same as with u = 1. On ranks that swap heads, queries are computed before anything
    is sent, and hide nothing.
    """
    placements, profile, ranks = plan.micro_batches[micro_batch], plan.profile, plan.ranks
    rows = [(plan.lengths[p.document], p.first_rank, p.degree) for p in placements]
    pairs = Amounts.of(np.array(plan.lengths), plan.trees)[[p.document for p in placements]].pairs
    swapped = np.array([swaps_heads(*row, ulysses_degree) for row in rows], dtype=bool)
    lengths, first, degree = documents = np.array(rows, dtype=np.int64).T
    u, shards = np.where(swapped, ulysses_degree, 1), -(-lengths // degree)
    attention = _on_ranks(-(-attention_ns(profile, lengths, degree // u, pairs) // u), first, degree, ranks)
    linear = linear_ns(profile, _on_ranks(shards, first, degree, ranks))
    exchange = _ring_ns(profile, documents[:, ~swapped], ranks)
    if swapped.any():
        exchange = exchange + _ring_ns(profile, documents[:, swapped], ranks, ulysses_degree, kv_heads)
    swapped_tokens = _on_ranks(np.where(swapped, shards, 0), first, degree, ranks)
    swaps = _swaps_ns(profile, swapped_tokens, ulysses_degree, query_heads, kv_heads)
    hiding = np.where(swapped_tokens > 0, 0, linear)
    rings = Assignment(np.zeros_like(first), first, degree, np.array([p.reversed for p in placements]))
    states = states_ns(profile, lengths, rings, (1, ranks))[0]
    return int((linear + attention + exposed_ns(profile, attention, hiding, exchange) + swaps + states).max())


def _swaps_ns(profile: HardwareProfile, tokens: Integers, u: int, query_heads: int, kv_heads: int) -> Integers:
    """Returns the time in which a rank with `tokens` swaps all but its own 1/u of q, k, v, out and their gradients."""
    per_token = profile.kv_bytes_per_token / PASSES * 2 * (max(u, kv_heads) + query_heads) / kv_heads
    moved = per_token * ((u - 1) / u)
    result: Integers = np.ceil(tokens * (moved * NANOSECONDS / profile.intra_node_bytes_per_s)).astype(np.int64)
    return result


def _on_ranks(values: Integers, first: Integers, degree: Integers, ranks: int) -> Integers:
    """Adds the value of every document to each rank of its ring; returns an array [ranks]."""
    result: Integers = spread(values, np.zeros_like(first), first, first + degree, (1, ranks))[0]
    return result


def _ring_ns(profile: HardwareProfile, documents: Integers, ranks: int, u: int = 1, kv_heads: int = 1) -> Integers:
    """Returns the exchange time per rank for rings of groups of u ranks, each with 1/u of the KV heads, or a copy of one.

    The rows of `documents` [3, documents] are lengths, first ranks and degrees.
    """
    lengths, first, degree = documents
    width = min(u, kv_heads)
    group = replace(profile, ranks_per_node=profile.ranks_per_node // u, kv_bytes_per_token=profile.kv_bytes_per_token / width)
    rings = Assignment(np.zeros_like(first), first // u, degree // u, np.zeros(len(first), dtype=bool))
    return np.repeat(exchange_ns(group, lengths, rings, (1, ranks // u))[0], u)

"""The choice of the Ulysses degree: never slower by the cost model, and consistent with the bytes moved."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.planning.cost.ulysses import choose_ulysses_degree, micro_batch_ns, swaps_heads, ulysses_degrees
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.plan import Plan
from longctx.planning.planners.planner import make_plan
from tests.marks import examples

H100 = HardwareProfile.load("h100-nvlink-ib")


def plan_of(length: int, ranks: int, profile: HardwareProfile = H100) -> Plan:
    return make_plan([length], ranks=ranks, tokens_per_rank=16384, profile=profile, mode="static", degree=ranks)


def test_wide_rings_across_nodes_exchange_heads() -> None:
    """One document over 4 nodes, nothing hidden: keys of 24 ranks cross the network without Ulysses, of 3 with it."""
    plan = plan_of(32 * 4096, 32, replace(H100, overlap=0.0, exchange_levels=1))
    assert choose_ulysses_degree(plan, 0, 32, 8) == 8
    assert micro_batch_ns(plan, 0, 8, 32, 8) < micro_batch_ns(plan, 0, 1, 32, 8)
    assert choose_ulysses_degree(plan, 0, 32, 1) == 1, "copies of one KV head cost more than they save here"
    alone = make_plan([4000] * 8, ranks=8, tokens_per_rank=16384, profile=H100, mode="static", degree=1)
    assert choose_ulysses_degree(alone, 0, 32, 8) == 1
    assert swaps_heads(100, 4, 8, 4) and not swaps_heads(100, 4, 8, 1)
    assert not swaps_heads(100, 2, 8, 4) and not swaps_heads(100, 4, 6, 4)
    assert not swaps_heads(15, 4, 8, 4), "a rank would have no tokens of it"


def test_exposed_time_is_what_the_bytes_take() -> None:
    """Without overlap, efficiency or latency, on one node: u=1 moves d-1 shards of K and V; u=4 moves fewer, plus q and out."""
    flat = replace(H100, overlap=0.0, latency_s=0.0, attention_efficiency=((1, 1.0),), ranks_per_node=8)
    plan = plan_of(8 * 1024, 8, flat)
    shard_s = 1024 * flat.kv_bytes_per_token / flat.intra_node_bytes_per_s
    ring = micro_batch_ns(plan, 0, 1, 8, 4) - micro_batch_ns(plan, 0, 4, 8, 4)
    swaps = 3 / 4 * 2 / 3 * (1 + 8 / 4)  # three of four ranks' worth, both ways, of (q, out) and (k, v)
    assert ring / 1e9 == pytest.approx(shard_s * (7 - 1 - swaps), rel=1e-4)


def test_queries_hide_messages_only_on_ranks_that_do_not_swap_heads() -> None:
    """Heads are swapped once the queries are there: nothing of them is left to hide K and V."""
    ready = replace(H100, overlap=1.0, attention_s_per_token2=1e-18, latency_s=1.0, query_share=0.0)
    for profile in (ready, replace(ready, query_share=1.0)):
        swapping, plain = plan_of(8 * 4096, 8, profile), plan_of(7 * 4096, 7, profile)
        exposed = [micro_batch_ns(plan, 0, 4, 32, 8) / 1e9 - 4096 * 8.9e-5 for plan in (swapping, plain)]
        assert exposed[0] > 1
        assert (exposed[1] > 1) == (profile == ready)


@given(
    lengths=st.lists(st.integers(1, 200_000), min_size=1, max_size=20),
    ranks=st.sampled_from([6, 8, 16, 32]),
    heads=st.sampled_from([(32, 8), (8, 8), (6, 2), (4, 1)]),
)
@settings(max_examples=examples(40), deadline=None)
def test_the_choice_is_never_slower(lengths: list[int], ranks: int, heads: tuple[int, int]) -> None:
    plan = make_plan(lengths, ranks=ranks, tokens_per_rank=65536, profile=H100)
    for micro_batch in range(len(plan.micro_batches)):
        u = choose_ulysses_degree(plan, micro_batch, *heads)
        assert u in ulysses_degrees(*heads)
        assert micro_batch_ns(plan, micro_batch, u, *heads) <= micro_batch_ns(plan, micro_batch, 1, *heads)

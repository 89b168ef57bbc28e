"""Traffic of a block, and fixed costs of sharded weights, counted by hand."""

from dataclasses import replace
from typing import Any

import pytest

from longctx.model.presets import PRESETS
from longctx.planning.cost.fixed import UPDATE_BYTES, ShardedStates, with_fixed_costs
from longctx.planning.cost.scaling import query_share, scale
from longctx.planning.cost.spec import Matrix, ModelSpec
from longctx.planning.cost.traffic import Traffic
from longctx.planning.cost.work import RankWork, work_of
from longctx.planning.hardware_profile import NO_LIMIT, HardwareProfile

TINY = replace(PRESETS["tiny"].spec, vocab_size=1000)
LAYER = TINY.layers[0]
ONE = replace(TINY, layers=(LAYER,))
HIDDEN, INNER = LAYER.hidden_size, LAYER.intermediate_size
QUERIES = LAYER.num_attention_heads * LAYER.head_dim
KEYS = LAYER.num_key_value_heads * LAYER.head_dim
SIDES = 2 * (HIDDEN + QUERIES) + 2 * (HIDDEN + KEYS) + 3 * (HIDDEN + INNER)
"""Inputs and outputs of all products of a token: Q and the output, K and V, and three of the
MLP."""
H100 = HardwareProfile.load("h100-nvlink-ib")


def traffic(spec: ModelSpec = ONE, **settings: Any) -> Traffic:
    return work_of(spec, "bfloat16", **settings).traffic


def test_operands_are_moved_once_forward_and_twice_backward() -> None:
    assert traffic().products == 2 * 3 * SIDES
    everything = LAYER.matrix_parameters
    again = (everything - HIDDEN * INNER) / everything  # all but the last product
    assert traffic(recompute="full").products == pytest.approx(2 * (3 + again) * SIDES)
    assert traffic(recompute="norms").products == traffic().products
    assert work_of(ONE, "float32").traffic.products == 2 * traffic().products


def test_frozen_weights_have_no_gradient_and_adapters_move_rows() -> None:
    first = Matrix(8, HIDDEN, role="lora_a")
    second = Matrix(INNER, 8, role="adapter")
    adapted = replace(ONE, layers=(replace(LAYER, matrices=(*LAYER.matrices, first, second)),))
    assert traffic(adapted).products == 2 * 2 * SIDES
    assert traffic(adapted).adapters == 2 * (10 * INNER + 6 * HIDDEN)
    assert traffic(adapted, recompute="full").adapters == 2 * (16 * INNER + 7 * HIDDEN)
    assert traffic().adapters == 0


def test_products_in_float8_cast_inputs_and_gradients_of_outputs() -> None:
    """Forward an input is read twice and written as a byte, which the product then reads instead of
    two; backward that is done anew, for gradients of outputs too, which two products read, and both
    are copied to the other layout."""
    inputs = 3 * HIDDEN + QUERIES + 2 * HIDDEN + INNER
    outputs = SIDES - inputs
    casts = 4 * inputs + 6 * inputs + 5 * outputs
    assert traffic(float8=True).products == traffic().products + casts
    everything = LAYER.matrix_parameters
    again = (everything - HIDDEN * INNER) / everything
    repeated = traffic(float8=True, recompute="full").products - traffic(recompute="full").products
    assert repeated == pytest.approx(casts + again * 4 * inputs)
    shared = traffic(float8=True, tensor=2).products - traffic(tensor=2).products
    assert shared == pytest.approx(casts / 2)


def test_elementwise_work_is_repeated_and_more_where_nothing_is_compiled() -> None:
    fused = 8 * HIDDEN + 2 * (QUERIES + KEYS) + 3 * INNER
    assert traffic().elementwise == 2 * 3 * fused
    assert traffic(recompute="norms").elementwise == 2 * 4 * fused
    eager = 10 * HIDDEN + 9 * (QUERIES + KEYS) + 5 * INNER
    assert traffic(compiled=False).elementwise == 2 * 3 * eager


def test_experts_move_the_rows_of_the_tokens_that_they_get() -> None:
    experts = tuple(
        replace(matrix, count=8, used=2, role="expert") for matrix in LAYER.matrices[4:]
    )
    sparse = replace(LAYER, matrices=(*LAYER.matrices[:4], *experts), intermediate_size=2 * INNER)
    moved = traffic(replace(ONE, layers=(sparse,)))
    assert moved.products == 2 * 3 * (SIDES + 3 * (HIDDEN + INNER))
    assert moved.elementwise - traffic().elementwise == 2 * 3 * (3 * INNER + 4 * 2 * HIDDEN)
    own = tuple(replace(matrix, role="own") for matrix in experts)
    stacked = replace(sparse, matrices=(*LAYER.matrices[:4], *own))
    assert traffic(replace(ONE, layers=(stacked,))) == moved, "as transformers' experts are"


def test_tensor_parallel_ranks_share_all_but_the_residual_stream() -> None:
    alone = traffic()
    shared = traffic(tensor=2)
    products = 7 * HIDDEN + (SIDES - 7 * HIDDEN) / 2
    assert shared.products == 2 * 3 * products
    assert (shared.elementwise, shared.head) == (alone.elementwise / 2, alone.head / 2)
    assert alone.head == 2 * 7 * 1000


def test_narrow_matrices_reach_less_of_the_peak() -> None:
    """Half the width has a quarter of the operations and half of the traffic."""
    profile = replace(H100, memory_bytes_per_s=1e12)
    known = RankWork(2, 1.0, 1000.0, 1.0, 1, exchanges=1.0, traffic=Traffic(products=1e7))
    narrow = replace(known, computed=250.0, traffic=Traffic(products=5e6))
    found = scale(profile, known, narrow).linear_s_per_token
    products = (H100.linear_s_per_token - 1e-5) / 4
    assert found == pytest.approx(products + 5e-6)
    unlimited = replace(H100, memory_bytes_per_s=NO_LIMIT)
    by_parameters = scale(unlimited, known, narrow).linear_s_per_token
    assert by_parameters == pytest.approx(H100.linear_s_per_token / 4)
    asked = replace(known, queries=100.0)
    assert query_share(profile, asked) == pytest.approx(0.1 * (1 - 1e-5 / H100.linear_s_per_token))


WORK = RankWork(10, 1e9, 1e9, 1.0, 1)
STATES = ShardedStates(8, 2, 2, reduces_each=True, trained=1e9, waits=False)


def costs(states: ShardedStates = STATES, tokens: int = 1, work: RankWork = WORK) -> list[float]:
    """Returns what sharded states add to launch and step."""
    profile = replace(H100, launch_s=0.0, step_s=0.0, linear_s_per_token=1e-5)
    found = with_fixed_costs(profile, work, states, tokens)
    return [found.launch_s, found.step_s]


def test_gathers_and_reductions_that_products_do_not_hide_are_launch_and_step() -> None:
    gather = 2 * 1e9 * 7 / 8 / H100.intra_node_bytes_per_s
    reduction = 2 * gather
    update = UPDATE_BYTES * 1e9 / 8 / H100.memory_bytes_per_s
    assert costs(tokens=0) == pytest.approx([gather / 10 + 2 * gather + reduction, update])
    tokens = 1000
    hidden = tokens * 1e-5
    left = 2 * gather + reduction - hidden
    assert costs(tokens=tokens) == pytest.approx([gather / 10 + left, update])
    assert costs(tokens=10**6) == pytest.approx([gather / 10, update])
    waiting = replace(STATES, waits=True)
    assert costs(waiting, tokens=10**6) == costs(tokens=0)
    once = replace(STATES, reduces_each=False)
    assert costs(once, tokens=0)[1] == pytest.approx(update + reduction)
    whole = replace(STATES, shards=1)
    assert costs(whole, tokens=0) == pytest.approx([0.0, 8 * update])
    frozen = replace(STATES, trained=0.0)
    assert costs(frozen, tokens=0) == pytest.approx([gather / 10 + 2 * gather, 0.0])


def test_experts_that_are_split_over_ranks_are_gathered_from_those_with_the_same() -> None:
    split = replace(WORK, expert_weights=8e8, expert_ranks=8)
    gather = 2 * 2e8 * 7 / 8 / H100.intra_node_bytes_per_s
    kept = replace(STATES, trained=0.0)
    assert costs(kept, tokens=0, work=split)[0] == pytest.approx(gather * 2.1)
    half = replace(split, expert_ranks=4)
    more = 2 * 8e8 * 1 / 2 / H100.intra_node_bytes_per_s
    assert costs(kept, tokens=0, work=half)[0] == pytest.approx((gather + more) * 2.1)


def test_a_gather_over_nodes_is_as_fast_as_all_their_links() -> None:
    many = replace(STATES, shards=64, trained=0.0)
    slow = replace(H100, launch_s=0.0, inter_node_bytes_per_s=1e9)
    gather = 2 * 1e9 * 63 / 64 / 8e9
    assert with_fixed_costs(slow, WORK, many, 0).launch_s == pytest.approx(2.1 * gather)
    fast = replace(slow, inter_node_bytes_per_s=1e12)
    gather = 2 * 1e9 * 63 / 64 / H100.intra_node_bytes_per_s
    assert with_fixed_costs(fast, WORK, many, 0).launch_s == pytest.approx(2.1 * gather)

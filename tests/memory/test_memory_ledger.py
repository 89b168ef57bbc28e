"""What the memory of a rank is counted from: what modes keep, gradients and weights of pipelines
and single micro-batches, buffers beside the allocator."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from longctx.config import Config, load
from longctx.memory.kernels import COLLECTIVES, CONTEXT, NODE, PEER, outside_allocator
from longctx.memory.loads import Load, _nodes
from longctx.memory.model import RankMemory
from longctx.model.presets import PRESETS
from longctx.parallel.recompute import RECOMPUTE_MODES
from longctx.planning.cost.spec import ModelSpec, Scan

SPEC = PRESETS["llama-3.2-1b"].model_copy(update={"vocab_size": 1000}).spec
LOAD = Load(tokens=1024, remote=512, sent=0, held=0, fullest=0, micro_batches=2)
PIPELINE = ("parallel.pipeline_parallel_size=2", "train.dtype=bfloat16")


def memory(*settings: str, spec: ModelSpec = SPEC, rank: int = 0, **of_load: Any) -> RankMemory:
    config = load(None, ["model.preset=llama-3.2-1b", *settings])
    return RankMemory(spec, config, 8, replace(LOAD, **of_load), True, rank)


@pytest.mark.parametrize(
    ("name", "modes"),
    [
        ("Q", {"none", "norms", "mlp"}),
        ("K and V", {"none", "norms", "mlp"}),
        ("output of attention", {"none", "norms", "mlp", "selective"}),
        ("log-sum-exp", {"none", "norms", "mlp", "selective"}),
        ("output of the output matrix", {"norms", "mlp"}),
        ("outputs of the first matrices", {"none", "norms"}),
        ("activations, and their products with a gate", {"none"}),
        ("output of the last matrix", {"norms"}),
    ],
)
def test_modes_of_recomputation_keep_what_they_say(name: str, modes: set[str]) -> None:
    block = memory().block
    (entry,) = [each for each in block.entries if each.name == name]
    assert entry.size > 0 and set(entry.kept_by) == modes <= set(RECOMPUTE_MODES)


def test_gradients_of_a_pipeline_are_whole_until_its_last_backward() -> None:
    """Also with a single micro-batch, which alone reduces them at once elsewhere."""
    for rank in (0, 1):
        one, two = (memory(*PIPELINE, rank=rank, micro_batches=count) for count in (1, 2))
        assert one.unreduced == two.unreduced == 4 * one.weights.trained
        assert not one.reduced_at_once and one.earlier_gradients == one.unreduced
    alone, several = memory(micro_batches=1), memory(micro_batches=2)
    assert alone.unreduced == 0 and several.unreduced == 4 * several.weights.trained


def test_weights_stay_gathered_only_for_further_micro_batches() -> None:
    for reshard, count, stays in (("step", 2, True), ("step", 1, False), ("block", 2, False)):
        last = memory(f"parallel.reshard_after={reshard}", micro_batches=count)._end_of_backward()
        assert bool(last.gathered_weights) == stays


def test_keys_are_kept_by_layers_that_attend() -> None:
    layers = [
        replace(layer, scan=Scan(8), attends=False) if number % 4 else layer
        for number, layer in enumerate(SPEC.layers)
    ]
    hybrid = replace(SPEC, layers=tuple(layers))
    attending = sum(layer.attends for layer in hybrid.layers)
    found = memory("context.keep_kv=true", "train.recompute=none", spec=hybrid)
    assert 0 < attending < len(layers)
    assert found.kept_kv == attending * found.block.sent_row * LOAD.remote


@pytest.mark.parametrize(
    ("settings", "ranks", "peers"),
    [
        ([], 1, 0),
        ([], 4, 3),
        ([], 64, NODE - 1),
        (["parallel.tensor_parallel_size=2"], 64, NODE // 2 - 1),
        (["context.mode=static", "context.degree=1"], 64, 0),
    ],
)
def test_buffers_beside_the_allocator(settings: list[str], ranks: int, peers: int) -> None:
    config: Config = load(None, settings)
    expected = CONTEXT + (COLLECTIVES if ranks > 1 else 0) + PEER * peers
    assert outside_allocator(config, ranks) == expected


@pytest.mark.parametrize(
    ("members", "per_node", "nodes"),
    [
        (range(4), None, ()),
        (range(4), 4, ()),
        (range(2, 7), 4, (2, 3)),
        (range(0, 16, 4), 4, ()),
        (range(3, 9), 4, (1, 4, 1)),
    ],
)
def test_rows_travel_by_nodes_if_some_have_several_members(
    members: range, per_node: int | None, nodes: tuple[int, ...]
) -> None:
    assert _nodes(np.array(members), per_node) == nodes

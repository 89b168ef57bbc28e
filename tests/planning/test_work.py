"""Work of a rank: what tensor parallelism shares, what recomputation repeats, where stages are
cut."""

from dataclasses import replace
from typing import Any

import pytest

from longctx.model.presets import PRESETS
from longctx.planning.cost.spec import Latent, LayerSpec, Matrix, ModelSpec, PassFlops, Scan
from longctx.planning.cost.work import (
    FLOAT32,
    REPEATED_ATTENTION,
    layers_of_ranks,
    split_layers,
    work_of,
)
from longctx.planning.pipeline import Pipeline

TINY = replace(PRESETS["tiny"].spec, vocab_size=1000)
SCAN = Scan(96, PassFlops(600.0, 1200.0), PassFlops(60.0, 180.0), delta_rule=True)


def mixed() -> ModelSpec:
    """A block of softmax attention that sends latents, and one of linear attention with experts."""
    first, second = TINY.layers[0], TINY.layers[1]
    experts = Matrix(first.hidden_size, 24, count=8, used=2, role="expert")
    latent = replace(first, latent=Latent(values=40, parameters=1200))
    linear = replace(second, attends=False, scan=SCAN, matrices=(*second.matrices, experts))
    return replace(TINY, layers=(latent, linear))


def test_tensor_parallel_ranks_share_the_work() -> None:
    spec = mixed()
    alone, shared = work_of(spec, "bfloat16"), work_of(spec, "bfloat16", tensor=2)
    halves = ("weights", "computed", "attention", "queries", "expert_weights", "split", "received")
    for name in halves:
        assert getattr(alone, name) > 0, name
        assert getattr(shared, name) == pytest.approx(getattr(alone, name) / 2), name
    # Latents are sent whole; states and the order of messages do not depend on the split.
    for name in ("layers", "kv_bytes", "state_bytes", "exchanges"):
        assert getattr(shared, name) == getattr(alone, name), name
    assert (shared.tensor, shared.expert_ranks, alone.tensor_bytes) == (2, 2, 0)


def test_recomputed_parameters_count_a_third_more() -> None:
    hidden, inner = TINY.layers[0].hidden_size, TINY.layers[0].intermediate_size
    in_blocks = sum(layer.matrix_parameters for layer in TINY.layers)
    last = len(TINY.layers) * hidden * inner
    plain = work_of(TINY, "float32")
    assert plain.computed == in_blocks + TINY.vocabulary_parameters
    rest = in_blocks - last
    repeated = {"norms": 0, "mlp": 2 * last, "selective": rest, "full": rest}
    for mode, parameters in repeated.items():
        again = work_of(TINY, "float32", recompute=mode)
        assert again.computed - plain.computed == pytest.approx(parameters / 3), mode
    full = work_of(TINY, "float32", recompute="full")
    assert full.attention == plain.attention * REPEATED_ATTENTION
    assert full.kv_bytes * 3 == plain.kv_bytes * 4
    assert work_of(TINY, "float32", keep_kv=True).kv_bytes * 3 == plain.kv_bytes * 2


def test_scans_count_by_their_dtype() -> None:
    """In parameters of 6 operations, forward and backward; recomputation repeats the forward."""
    spec = replace(mixed(), layers=(mixed().layers[1],))
    without = replace(spec, layers=(replace(spec.layers[0], scan=None),))

    def scanned(**settings: Any) -> tuple[float, float]:
        work = work_of(spec, "bfloat16", **settings)
        plain = work_of(without, "bfloat16", **settings)
        return work.computed - plain.computed, work.split

    slower = FLOAT32["bfloat16"]
    assert scanned() == pytest.approx((slower * 1800 / 6, slower * 240 / 6))
    assert scanned(fused=True) == pytest.approx((1800 / 6, 240 / 6))
    assert scanned(fused=True, recompute="selective") == pytest.approx((2400 / 6, 300 / 6))


def test_stages_are_even_at_the_mean_number_of_keys() -> None:
    """Which is half of the tokens of a rank: with a third of them, these stages are cut elsewhere."""
    layer = TINY.layers[0]
    small = replace(layer, matrices=(Matrix(8, 8),), window=None)

    def blocks(windows: list[int | None]) -> tuple[LayerSpec, ...]:
        return tuple(replace(small, window=window) for window in windows)

    spec = replace(TINY, layers=blocks([None, 100, 100, 100, None, 100]))
    pipeline = Pipeline(2)
    cut = {
        keys: [tuple(stage) for stage in split_layers(spec, 2, keys=keys)] for keys in (200, 300)
    }
    assert cut[200] != cut[300]
    assert list(layers_of_ranks(spec, pipeline, 600)) == cut[300]
    assert list(layers_of_ranks(spec, pipeline, 601)) == cut[300]

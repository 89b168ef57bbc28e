"""The work of linear attention: that which torch counts in the layers, in estimates, plans and the
utilisation."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextConfig,
    Qwen3NextGatedDeltaNet,
)

from longctx import make_plan
from longctx.attention import keeping
from longctx.attention.linear import fused
from longctx.attention.linear.recurrence import Recurrence
from longctx.config import load
from longctx.hf import linear_costs
from longctx.hf.linear import ARGUMENT, LayerRecurrence, linear_layers, replace_functions
from longctx.hf.linear_costs import TOKENS, _solve_flops
from longctx.hf.spec import spec_of
from longctx.parallel.recompute import _contexts_of, _recomputed
from longctx.planning.cost.scaling import scale
from longctx.planning.cost.spec import NO_FLOPS, ModelSpec
from longctx.planning.cost.work import FLOAT32, work_of
from longctx.planning.hardware_profile import NO_LIMIT, HardwareProfile
from longctx.planning.layout import Layout, Placement
from longctx.training import run_profile as run_profile_module
from longctx.training.metrics import model_flops
from tests.family_cases import build
from tests.pretrained_cases import SETTINGS

KINDS = ("qwen3_next", "kimi_linear", "falcon_h1")
CHUNK, LANE = 64, 16
SOLVING = {torch.ops.aten.linalg_solve_triangular: _solve_flops}


def without_products(spec: ModelSpec) -> ModelSpec:
    """Returns the sizes of a model whose scans take no time."""
    scans = [
        None if each.scan is None else replace(each.scan, flops=NO_FLOPS, split_flops=NO_FLOPS)
        for each in spec.layers
    ]
    return replace(
        spec,
        layers=tuple(
            replace(each, scan=scan) for each, scan in zip(spec.layers, scans, strict=True)
        ),
    )


def spec_and_layer(kind: str) -> tuple[ModelSpec, int, Any]:
    model = build(kind, "eager")
    layer, _ = next(iter(linear_layers(model).items()))
    spec = spec_of(model, model.get_decoder().layers)
    return spec, next(i for i, each in enumerate(spec.layers) if each.scan), layer


def test_what_a_layer_keeps_has_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views of weights would count, and less for each of more tokens; of real sizes."""
    config = Qwen3NextConfig()
    with torch.device("meta"):
        layer = Qwen3NextGatedDeltaNet(config, 0)
    replace_functions(sys.modules[type(layer).__module__])
    few, _ = linear_costs._memory(layer, config.hidden_size)
    monkeypatch.setattr(linear_costs, "TOKENS", 16 * TOKENS)
    many, _ = linear_costs._memory(layer, config.hidden_size)
    assert few == pytest.approx(many, rel=1e-3)


def heads_of(layer: Any) -> tuple[int, int, int]:
    """Returns heads, k_dim and v_dim."""
    if hasattr(layer, "ssm_state_size"):
        return layer.num_heads, layer.ssm_state_size, layer.head_dim
    if hasattr(layer, "forget_gate"):
        return layer.num_heads, layer.head_dim, layer.head_dim
    return layer.num_v_heads, layer.head_k_dim, layer.head_v_dim


def by_hand(layer: Any) -> tuple[float, float, float]:
    """Returns the operations per token of a scan of 16 lanes: forward, and how many more in later
    segments, both passes."""
    heads, k, v = heads_of(layer)
    if hasattr(layer, "ssm_state_size"):
        scores, added, out = 2 * CHUNK * k, 2 * k * v, 2 * (k + CHUNK) * v
        reached = 2 * k * v
        return heads * (scores + added + out), heads * reached, heads * 2 * reached
    # Keys against keys and queries; by channel, blocks of 1, 2, .. 32 tokens only against the block
    # before.
    between = 2 * 2 * (CHUNK if not hasattr(layer, "forget_gate") else (CHUNK - 1) / 2) * k
    solved, through, out = CHUNK * (k + v), 4 * k * v, 2 * (k + CHUNK) * v
    carried = (LANE - 1) / LANE  # of the lanes, which are combined, and their maps again
    combined = carried * 4 * k * (k + v) + 2 * k * k * v * (LANE - 1) / TOKENS
    return heads * (between + solved + through + out + combined), 0.0, 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_scan_takes_the_operations_that_follow_from_its_sizes(kind: str) -> None:
    spec, number, layer = spec_and_layer(kind)
    forward, more, more_backward = by_hand(layer)
    found = spec.layers[number]
    assert found.scan.flops.forward == pytest.approx(forward, rel=1e-9)
    assert 1.5 * forward < found.scan.flops.backward < 2.5 * forward
    if more:
        assert found.scan.split_flops == pytest.approx((more, more_backward), rel=0.01)
    else:
        assert 0.2 * forward < found.scan.split_flops.forward < forward


def scanned(counter: FlopCounterMode) -> int:
    """Returns the operations of products of batches and of triangular systems."""
    return sum(
        count
        for name, count in counter.get_flop_counts()["Global"].items()
        if "bmm" in str(name) or "solve" in str(name)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_torch_counts_as_many_operations_in_the_layer(kind: str) -> None:
    """In forward and backward, with gradients of all weights. Elementwise operations are left out,
    and convolutions, which torch counts without regard to groups in backward; their weights count
    as matrices."""
    spec, number, layer = spec_and_layer(kind)
    tokens = TOKENS // 2
    replace_functions(sys.modules[type(layer).__module__])
    layer, x = (
        layer.to("meta"),
        torch.empty(1, tokens, spec.hidden_size, requires_grad=True, device="meta"),
    )
    given = {
        ARGUMENT: LayerRecurrence(Recurrence(Layout.of([Placement(0, 0, 1)], [tokens], 0, 0)), None)
    }
    with FlopCounterMode(display=False, custom_mapping=SOLVING) as counter:
        layer.forward(x, **given).sum().backward()
    weights = sum(each.numel() for each in layer.parameters() if each.dim() == 2)
    counts = counter.get_flop_counts()["Global"]
    found = sum(count for name, count in counts.items() if "convolution" not in str(name))
    assert found == pytest.approx(
        tokens * (6 * weights + sum(spec.layers[number].scan.flops)), rel=0.03
    )
    assert sum(spec.layers[number].scan.flops) > 0.1 * 6 * weights


def test_recomputation_repeats_the_forward_where_estimates_say_so() -> None:
    """Modes selective and full do. The others keep its products, and repeat triangular systems
    alone."""
    backward, forward = {}, 0
    for mode in ("none", "norms", "mlp", "selective", "full"):
        _, _, layer = spec_and_layer("qwen3_next")
        layer = layer.to("meta")
        replace_functions(sys.modules[type(layer).__module__])
        run = layer.forward
        if mode != "none":
            run = _recomputed(layer.forward, _contexts_of(layer, mode, keeping.ON_DEVICE))
        x = torch.empty(1, CHUNK, layer.hidden_size, requires_grad=True, device="meta")
        given = {
            ARGUMENT: LayerRecurrence(
                Recurrence(Layout.of([Placement(0, 0, 1)], [CHUNK], 0, 0)), None
            )
        }
        with FlopCounterMode(display=False, custom_mapping=SOLVING) as first:
            out = run(x, **given)
        with FlopCounterMode(display=False, custom_mapping=SOLVING) as second:
            out.backward(torch.empty_like(out))
        forward, backward[mode] = scanned(first), scanned(second)
    heads, k, v = heads_of(layer)
    assert backward["norms"] == backward["mlp"] == backward["none"] + heads * CHUNK**2 * (k + v)
    assert backward["selective"] == backward["full"] == backward["none"] + forward


def test_estimates_and_the_utilisation_count_the_scans() -> None:
    spec, number, _ = spec_and_layer("qwen3_next")
    plain = without_products(spec)
    scan, split = spec.layers[number].scan.flops, spec.layers[number].scan.split_flops
    assert len([each for each in spec.layers if each.scan is None]) == 1
    assert model_flops(spec, [300, 20]) - model_flops(plain, [300, 20]) == round(320 * sum(scan))
    for recompute, again in (("none", 0), ("norms", 0), ("selective", 1), ("full", 1)):
        for dtype, slower in FLOAT32.items():
            works = [work_of(each, dtype, recompute=recompute) for each in (spec, plain)]
            assert 6 * (works[0].computed - works[1].computed) == pytest.approx(
                slower * (sum(scan) + again * scan.forward)
            )
            assert 6 * works[0].split == pytest.approx(
                slower * (sum(split) + again * split.forward)
            )
    fast, slow = (
        work_of(spec, dtype, fused=dtype == "bfloat16") for dtype in ("bfloat16", "float32")
    )
    # Kernels scan in the dtype of the matrices.
    assert (fast.computed, fast.split) == (slow.computed, slow.split)
    mamba, _, _ = spec_and_layer("mamba2")
    assert work_of(mamba, "bfloat16", fused=True) == work_of(mamba, "bfloat16")
    # Two exchanges in each of two passes instead of three.
    assert work_of(spec, "float32").exchanges == 1 + 4 / 3
    assert work_of(spec, "float32", recompute="full").exchanges == 1 + 6 / 4


def test_scans_slow_down_plans_and_more_so_split_documents() -> None:
    shipped = HardwareProfile.load("h100-nvlink-ib")
    profile = replace(shipped, memory_bytes_per_s=NO_LIMIT)
    spec, _, _ = spec_and_layer("qwen3_next")
    plain = without_products(spec)
    with_scans, without = (
        scale(profile, work_of(plain, "float32"), work_of(each, "float32"))
        for each in (spec, plain)
    )
    work = work_of(spec, "float32")
    more = work.computed / work_of(plain, "float32").computed
    assert more > 1
    assert with_scans.linear_s_per_token / profile.linear_s_per_token == pytest.approx(more)
    assert with_scans.split_s_per_token / with_scans.linear_s_per_token == pytest.approx(
        work.split / work.computed
    )
    request: dict[str, Any] = {"ranks": 4, "tokens_per_rank": 4000}
    plans = [make_plan([8000, 300], profile=each, **request) for each in (with_scans, without)]
    assert (
        plans[0].makespan_s > plans[1].makespan_s
        and plans[0].lower_bound_s > plans[1].lower_bound_s
    )


def test_a_run_on_gpus_counts_scans_by_the_kernels_that_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build("qwen3_next", "eager").save_pretrained(tmp_path)
    config = load(
        None,
        [
            *SETTINGS,
            f"model.from_pretrained={tmp_path}",
            "train.dtype=bfloat16",
            "context.profile=h100-nvlink-ib",
        ],
        world_size=2,
    )
    monkeypatch.setattr(run_profile_module, "choose_device", lambda *_: torch.device("cuda"))
    found = []
    for kernels in (None, ()):
        monkeypatch.setattr(fused, "kernels", lambda kernels=kernels: kernels)
        found.append(run_profile_module.run_profile(config, 2).profile)
    assert found[0].split_s_per_token == pytest.approx(
        FLOAT32["bfloat16"] * found[1].split_s_per_token
    )
    assert found[0].linear_s_per_token > found[1].linear_s_per_token

"""Liger's kernels, interpreted, against our own operations: the same outputs and gradients for any number of tokens."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from longctx.attention import RingAttention
from longctx.config import ConfigError, load
from longctx.model.decoder import Decoder
from longctx.model.presets import PRESETS
from longctx.parallel.recompute import apply_recompute
from longctx.planning.cost.spec import RECOMPUTE_MODES
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.layout import Layout
from longctx.planning.planners.planner import make_plan
from tests.training_cases import make_store, train
from tests.workers import Workers

needs_liger = pytest.mark.skipif(sys.platform != "linux", reason="the extra installs liger-kernel on Linux only")
SIZES = {"vocab_size": 50, "hidden_size": 36, "intermediate_size": 75, "head_dim": 12, "num_attention_heads": 4}
GEMMA = {"norm_offset": True, "qk_norm": True, "output_norms": True, "hidden_act": "gelu"}


class Scalar(float):
    """A float with the method of Triton's scalars that Liger's norm calls; Triton's interpreter passes plain floats."""

    def to(self, dtype: object) -> "Scalar":
        return self


def make_interpretable() -> None:
    """Replaces what Triton's interpreter does not have: functions of CUDA's libdevice, and methods of scalars."""
    names = ("rms_norm", "swiglu", "geglu")
    norms, swiglu, geglu = (importlib.import_module(f"liger_kernel.ops.{name}") for name in names)
    if hasattr(norms, "interpretable"):
        return
    norms.interpretable = True
    norms.rsqrt = lambda x: 1 / triton.language.sqrt(x)
    geglu.tanh = lambda x: 2 / (1 + triton.language.exp(-2 * x)) - 1
    for module in (norms, swiglu, geglu):
        for name, kernel in list(vars(module).items()):
            if name.endswith("_kernel"):
                setattr(module, name, Kernel(kernel))


class Kernel:
    """A kernel that gets its floats as scalars."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*given: Any, **named: Any) -> None:
            self.kernel[grid](*(Scalar(each) if isinstance(each, float) else each for each in given), **named)

        return launch


def train_fused(store: Path, folder: Path, settings: list[str]) -> list[float]:
    make_interpretable()
    return [metrics.loss for metrics in train(store, folder, settings, 2)]


def run(fused: bool, options: dict[str, object], tokens: int, mode: str = "none") -> list[torch.Tensor]:
    """Returns the hidden states and the gradients of a step."""
    model = Decoder(PRESETS["tiny"].model_copy(update={**SIZES, "num_hidden_layers": 2, "num_key_value_heads": 2, **options}))
    model.initialize(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.linspace(-0.3, 0.3, len(parameter)))
    if fused:
        from longctx.model.fused import check_device, fuse

        make_interpretable()
        check_device(torch.device("cpu"))
        fuse(model)
    apply_recompute(model, mode)
    plan = make_plan([max(tokens, 1)], ranks=1, tokens_per_rank=64, profile=HardwareProfile.load("cpu-2core"))
    attention = RingAttention(plan.layout(0, 0) if tokens else Layout(0, 0, ()))
    hidden = model(torch.arange(tokens) % 50, torch.arange(tokens), attention, lambda hidden, _: hidden)
    hidden.sin().sum().backward()
    return [hidden.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@needs_liger
@pytest.mark.parametrize("options", [{}, GEMMA], ids=["llama", "gemma"])
@pytest.mark.parametrize("tokens", [19, 1, 0])
def test_fused_operations_are_the_same(options: dict[str, object], tokens: int) -> None:
    fused, plain = run(True, options, tokens), run(False, options, tokens)
    rounding = 1e-6 * max(tensor.norm() for tensor in plain)  # with one token, queries and keys have no gradient but this
    for a, b in zip(fused, plain, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm() + rounding


@needs_liger
def test_recomputed_blocks_have_the_same_gradients() -> None:
    """Although the backward of the gated product overwrites its inputs, which recomputation may have kept."""
    kept = run(True, GEMMA, 7)
    for mode in RECOMPUTE_MODES[1:]:
        for a, b in zip(run(True, GEMMA, 7, mode), kept, strict=True):
            assert torch.equal(a, b), mode


@needs_liger
def test_a_run_with_fused_operations(workers: Workers, tmp_path: Path) -> None:
    store = make_store(tmp_path, (20, 40))
    settings = ["data.max_length=45", "batch.global_tokens=80", "batch.tokens_per_rank=24"]
    plain, fused = (
        workers.run(train_fused, 2, store, tmp_path / each, [*settings, f"train.fused={each}"])[0] for each in ("false", "true")
    )
    assert fused == pytest.approx(plain, rel=1e-5)


@needs_liger
def test_what_is_fused() -> None:
    def fuses(device: str, *settings: str) -> bool:
        return load(None, list(settings), world_size=2).fuses(device)

    assert not fuses("cuda"), "compiled instead"
    assert fuses("cuda", "train.compile=false") and fuses("cuda", "train.mlp_tile_tokens=64")
    assert not fuses("cpu", "train.compile=false")
    assert not fuses("cuda", "parallel.tensor_parallel_size=2")
    assert not load(None, ["train.fused=true"]).compiles("cuda")


def test_a_missing_liger_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "liger_kernel" else found(name))
    with pytest.raises(ConfigError, match=r"pip install '\.\[gpu\]'"):
        load(None, ["train.fused=true"])

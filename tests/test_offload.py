"""Keeping block inputs in host memory does not change results; the optimizer in host memory uses its cores."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from longctx.attention import RingAttention
from longctx.config import load
from longctx.model.decoder import Decoder
from longctx.model.presets import PRESETS
from longctx.parallel.offload import Offload
from longctx.parallel.recompute import apply_recompute
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.planners.planner import make_plan
from longctx.training import build

TOKENS = 96
SHAPE = PRESETS["tiny"].model_copy(update={"vocab_size": 50, "num_hidden_layers": 3})


def gradients(mode: str, device: str, offload: Offload | None) -> dict[str, torch.Tensor]:
    model = Decoder(SHAPE)
    model.initialize(0)
    model.to(device)
    apply_recompute(model, mode, offload=offload)
    plan = make_plan([TOKENS], ranks=1, tokens_per_rank=TOKENS, profile=HardwareProfile.load("cpu-2core"))
    tokens = torch.arange(TOKENS, device=device) % 50
    positions = torch.arange(TOKENS, device=device)
    attention = RingAttention(plan.layout(0, 0), device=device, kernel="reference")
    model(tokens, positions, attention).square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_gradients_are_those_without(mode: str, device: str) -> None:
    offload = Offload()
    plain, offloaded = gradients(mode, device, None), gradients(mode, device, offload)
    assert offload.moved_bytes == SHAPE.num_hidden_layers * TOKENS * SHAPE.hidden_size * 4, "every block's input, and no more"
    assert plain.keys() == offloaded.keys()
    assert all(torch.equal(plain[name], offloaded[name]) for name in plain)


@pytest.mark.parametrize(("offload", "free", "expected"), [(True, 5, [5]), (True, None, []), (False, 5, [])])
def test_an_offloaded_optimizer_uses_the_cores(
    monkeypatch: pytest.MonkeyPatch, offload: bool, free: int | None, expected: list[int]
) -> None:
    """torchrun leaves every process one thread, which would take seconds for a step of billions of weights."""
    used: list[int] = []

    def stop(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("that is enough")

    monkeypatch.setattr(build, "host_threads", lambda: free)
    monkeypatch.setattr(build, "shard", stop)
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    config = load(None, ["model.preset=tiny", "model.vocab_size=100", f"train.offload_optimizer={offload}"])
    one = SimpleNamespace(size=lambda: 1)
    mesh = SimpleNamespace(device=torch.device("cuda"), pipeline_rank=0, tensor=one, weights=one, copies=one, experts=None)
    with pytest.raises(RuntimeError, match="that is enough"):
        build.build_model(config.model_source(), config, cast(Any, mesh))
    assert used == expected

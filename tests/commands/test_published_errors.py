"""Estimates and dry runs for GPUs state how far predictions of published runs of their kind were
off."""

from dataclasses import replace
from typing import Any

import pytest

from longctx.cli import main
from longctx.model.presets import PRESETS
from longctx.planning.cost.published_errors import MEMORY, TIME, Errors, kind_of, said
from longctx.planning.cost.spec import Matrix

EIGHT_B = ["--model.preset=llama-3.1-8b", "--model.vocab_size=128256"]


def test_a_kind_is_float8_then_adapters_then_experts() -> None:
    dense = PRESETS["tiny"].spec
    experts = PRESETS["qwen3-30b-a3b"].spec
    adapter = Matrix(8, 8, role="adapter")
    layers = (replace(layer, matrices=(*layer.matrices, adapter)) for layer in experts.layers)
    adapted = replace(experts, layers=tuple(layers))
    assert kind_of(dense, float8=False) == "of all weights"
    assert kind_of(experts, float8=False) == "with experts"
    assert kind_of(adapted, float8=False) == "with adapters"
    assert kind_of(adapted, float8=True) == "in float8"
    kinds = {"of all weights", "with experts", "with adapters", "in float8"}
    assert set(TIME) == set(MEMORY) == kinds


def test_errors_are_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TIME, "with experts", Errors(9, more=-0.04, half=0.2, most=0.5))
    assert said("time", "with experts") == (
        "time of 9 published runs with experts: 4% less than predicted in the median, within 20% "
        "in half, 50% in nine of ten"
    )


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_an_estimate_and_a_dry_run_state_them_for_gpus(
    capsys: pytest.CaptureFixture[str], device: str
) -> None:
    def printed(*arguments: Any) -> str:
        assert main([*arguments, *EIGHT_B, f"--train.device={device}"]) == 0
        return capsys.readouterr().out

    of_memory = said("memory", "of all weights")
    estimated = printed("estimate", "--gpus=8")
    assert (f"\n{of_memory}\n" in estimated) == (device == "cuda")
    planned = printed("train", "--dry-run", "--gpus=8", "--mix=wlb_128k", "--train.steps=1")
    of_time = said("time", "of all weights")
    stated = f"errors     {of_time}\n           {of_memory}\n"
    assert (stated in planned) == (device == "cuda")

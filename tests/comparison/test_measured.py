"""The measured comparison: modes in turn on the same documents, with equal losses, on two workers
and from the command line."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from longctx import cli
from longctx.comparison.measured import (
    MeasuredComparison,
    MeasuredMode,
    MeasuredStep,
    mode_configs,
    train_in_turn,
)
from longctx.config import ConfigError, load
from longctx.data.store.store import Store
from longctx.errors import UserError
from longctx.parallel.mesh import make_groups
from longctx.training import runner as module
from longctx.training.build import build_model
from tests.training_cases import SMALL
from tests.workers import Workers

MODES = ("auto", "static", "static:2", "bins")


def measure_here(
    store: Path, modes: tuple[str, ...], steps: int, warmup: int, other_seed_of: str | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Returns this rank's measurements; `other_seed_of` gives one mode other initial weights, to
    simulate a fault."""
    config = load(
        None,
        [*SMALL, f"data.store={store}", "batch.tokens_per_rank=750"],
        world_size=dist.get_world_size(),
    )
    lines: list[str] = []

    def with_fault(shape: Any, config: Any, mesh: Any) -> Any:
        name, degree = config.context.mode, config.context.degree
        seed = 1 if other_seed_of == (f"{name}:{degree}" if degree else name) else 0
        return build_model(
            shape,
            config.model_copy(update={"train": config.train.model_copy(update={"seed": seed})}),
            mesh,
        )

    mesh = make_groups(torch.device("cpu"), timeout_s=30.0)
    with mock.patch.object(module, "build_model", with_fault):
        result = train_in_turn(
            config,
            mesh,
            Store.open(store),
            modes=modes,
            steps=steps,
            warmup=warmup,
            tell=lines.append,
        )
    return result.to_json(), lines


@pytest.mark.slow
def test_modes_train_the_same_documents_to_equal_losses(store: Path, workers: Workers) -> None:
    ranks = workers.run(measure_here, 2, store, MODES, 3, 1)
    (found, lines), (other, _) = ranks
    assert [mode["mode"] for mode in found["modes"]] == list(MODES)
    assert found["losses_equal"] and 0 < found["loss_difference"] <= 1e-5
    for mode in found["modes"]:
        assert [step["step"] for step in mode["steps"]] == [2, 3, 4], "the warm-up step is left out"
    for steps in zip(*(mode["steps"] for mode in found["modes"]), strict=True):
        assert len({(step["documents"], step["tokens"]) for step in steps}) == 1, (
            "all modes see the same documents"
        )
        assert [step["loss"] for step in steps] == pytest.approx(
            [steps[0]["loss"]] * len(MODES), rel=1e-5
        )
        assert [step["grad_norm"] for step in steps] == pytest.approx(
            [steps[0]["grad_norm"]] * len(MODES), rel=1e-3
        )
    assert found["modes"][0]["steps"][0]["loss"] > found["modes"][0]["steps"][-1]["loss"], (
        "these are real steps"
    )
    every = {step["degrees"].keys() == {"2"} for step in found["modes"][2]["steps"]}
    assert every == {True}, "static:2 splits every document over both ranks"
    seconds = [
        [step["seconds"] for mode in rank["modes"] for step in mode["steps"]]
        for rank in (found, other)
    ]
    assert seconds[0] == seconds[1], "the slowest rank's time, the same on all ranks"
    assert len(lines) == 4 and "step 4/4" in lines[-1] and "static:2" in lines[-1]


@pytest.mark.parametrize("mode", ["auto", "static:2"])
def test_other_weights_in_one_mode_are_found(store: Path, workers: Workers, mode: str) -> None:
    """Whether its loss is higher than that of the other mode, or lower."""
    found, _ = workers.run(measure_here, 2, store, ("auto", "static:2"), 1, 0, mode)[0]
    assert not found["losses_equal"]
    assert found["loss_difference"] > 1e-5


def step_of(seconds: float, predicted_s: float) -> MeasuredStep:
    return {
        "step": 1,
        "loss": 2.0,
        "seconds": seconds,
        "predicted_s": predicted_s,
        "data_wait_s": 0.0,
    }


def test_figures_match_their_definitions() -> None:
    auto = MeasuredMode("auto", (step_of(1.0, 0.9), step_of(2.0, 2.2), step_of(4.0, 4.4)))
    two = MeasuredMode("static:2", (step_of(2.0, 2.0), step_of(3.0, 3.0), step_of(4.0, 4.0)))
    four = MeasuredMode(
        "static:4", tuple({**step, "seconds": 2 * step["seconds"]} for step in two.steps)
    )
    comparison = MeasuredComparison((auto, four, two), 4, 100, 0, 1e-6, 1e-5, ended_early=False)
    assert comparison.baseline is two, "the single degree that took least time"
    oracle = replace(auto, mode="static")
    assert replace(comparison, modes=(auto, oracle, two)).baseline is two, (
        "one degree for all steps, not one for each"
    )
    assert replace(comparison, modes=(auto, oracle)).baseline is oracle
    assert auto.median_s == 2.0
    assert auto.times_as_fast_as(two) == 1.5, "the median of 2/1, 3/2 and 4/4"
    assert auto.prediction_error == pytest.approx(7.5 / 7 - 1)
    json = comparison.to_json()
    assert json["baseline"] == "static:2"
    assert [mode["speedup"] for mode in json["modes"]] == [1.5, 0.5, 1.0]
    assert not replace(comparison, loss_difference=2e-5).losses_equal


def test_documents_are_cut_alike_for_all_modes(store: Path) -> None:
    settings = [
        "batch.tokens_per_rank=500",
        f"data.store={store}",
        "context.mode=bins",
        "context.bins={400: 1, 1200: 4}",
    ]
    configs = mode_configs(load(None, settings, world_size=4), ("auto", "bins", "static:2"), 4, 500)
    assert {config.data.max_length for config in configs} == {1000}, "what degree 2 holds"
    assert [config.context.mode for config in configs] == ["auto", "bins", "static"]
    assert [config.context.degree for config in configs] == [None, None, 2]
    assert {config.train.steps for config in configs} == {500}
    with pytest.raises(ConfigError, match=r"(?s)mode static:2 .*data\.max_length"):
        mode_configs(
            load(None, [*settings, "data.max_length=1100"], world_size=4),
            ("auto", "static:2"),
            4,
            10,
        )
    with pytest.raises(ConfigError, match=r"(?s)mode static:8 .*context\.degree"):
        mode_configs(load(None, settings, world_size=4), ("auto", "static:8"), 4, 10)


@pytest.mark.parametrize(
    ("modes", "steps", "warmup", "message"),
    [
        (("auto", "dynamic"), 3, 0, "unknown mode 'dynamic'.*static:DEGREE"),
        (("auto", "static:0"), 3, 0, "unknown mode 'static:0'"),
        (("auto",), 3, 0, "at least two"),
        (("auto", "auto"), 3, 0, "at least two different modes"),
        (("auto", "static"), 0, 0, "steps is 0"),
        (("auto", "static"), 1, -1, "warmup is -1"),
    ],
)
def test_requests_that_cannot_be_measured(
    modes: tuple[str, ...], steps: int, warmup: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        train_in_turn(load(None, []), None, None, modes=modes, steps=steps, warmup=warmup)


def test_options_that_the_command_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["measure", "nowhere.yaml", "--out", "no/folder/here.json"]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_the_command_on_one_process(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "run.yaml"
    settings.write_text("train: {device: cpu}\n")
    overrides = [
        f"--{setting}"
        for setting in (*SMALL, f"data.store={store}", f"train.run_dir={tmp_path / 'run'}")
    ]
    options = [
        "--modes",
        "auto,static:1",
        "--steps",
        "1",
        "--warmup",
        "0",
        "--out",
        str(tmp_path / "measured.json"),
    ]
    assert cli.main(["measure", str(settings), *options, *overrides]) == 0
    text = capsys.readouterr().out
    assert "losses equal" in text and "static:1" in text
    assert (tmp_path / "measured.json").is_file() and not (tmp_path / "run").exists(), (
        "nothing but --out is written"
    )

"""Steps whose numbers the host reads when the next one is queued: the same run as with a host that
waits, and steps that are not finite change nothing."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from longctx.config import load
from longctx.parallel.sharding import local_part
from longctx.report import waiting
from longctx.training.health import NonFiniteLoss
from longctx.training.optimizer import leaves_out
from longctx.training.runner import ModelRunner
from longctx.training.trainer import Trainer
from tests.training_cases import optimizer_of_gpus, start, steps_in
from tests.workers import Workers

LOGGED = ("step", "loss", "grad_norm", "lr", "skipped", "tokens", "validation_loss")


def values_of(trainer: Trainer) -> list[torch.Tensor]:
    """Copies of weights, buffers and state of the optimizer on this rank."""
    states = [state.values() for state in trainer.optimizer.state.values()]
    held = [*trainer.model.parameters(), *trainer.model.buffers()]
    for state in states:
        held.extend(state)
    return [local_part(value).detach().clone() for value in held]


def spoiled(batch_steps: list[int]) -> Any:
    """A forward and backward that ends with NaN on rank 1 in these steps."""
    original = ModelRunner.forward_backward

    def spoil(self: ModelRunner, batch: Any) -> torch.Tensor:
        losses = original(self, batch)
        if batch.step in batch_steps and dist.get_rank() == dist.get_world_size() - 1:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    local_part(parameter.grad).fill_(float("nan"))
        return losses

    return spoil


def a_run(
    store: Path, run: Path, settings: list[str], ahead: bool, steps: list[int], resume: bool = False
) -> tuple[list[Any], list[torch.Tensor], str]:
    """Lines of the log, values at the end, and the error of a run with these spoiled steps."""
    with optimizer_of_gpus():
        trainer = start(store, run, settings, resume=resume)
    assert trainer.ahead
    error = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "forward_backward", spoiled(steps))
        if not ahead:
            trainer.ahead = False
        try:
            trainer.train()
        except NonFiniteLoss as refused:
            error = str(refused)
    lines = [[line[name] for name in LOGGED] for line in steps_in(run)]
    return lines, values_of(trainer), error


def two_runs(store: Path, run: Path, settings: list[str], steps: list[int]) -> tuple[Any, str]:
    """Compares a run that goes ahead with one that waits. Returns the log and the error."""
    lines, values, error = a_run(store, run / "ahead", settings, True, steps)
    wanted, others, same_error = a_run(store, run / "waits", settings, False, steps)
    assert lines == wanted and error == same_error
    if not error:
        assert all(torch.equal(a, b) for a, b in zip(values, others, strict=True))
    assert all(bool(value.isfinite().all()) for value in values)
    return lines, error


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, ["optimizer.weight_decay=0.1", "eval.every=3", "data.held_out=0.1"]),
        pytest.param(
            2, ["optimizer.name=muon", "optimizer.weight_decay=0.1"], marks=pytest.mark.slow
        ),
        pytest.param(
            2,
            ["model.preset=tiny-moe", "model.overrides.moe_intermediate_size=16"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2,
            ["parallel.pipeline_parallel_size=2", "model.overrides.num_hidden_layers=4"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_ahead_is_the_run_that_waits(
    workers: Workers, store: Path, tmp_path: Path, ranks: int, settings: list[str]
) -> None:
    """Weights, moments, biases and log, with a first step and two later ones left out."""
    given = [*settings, "train.steps=7", "checkpoint.every=5", "train.on_nonfinite=skip"]
    lines, error = workers.run(two_runs, ranks, store, tmp_path, given, [1, 3, 6])[0]
    assert not error
    assert [line[0] for line in lines] == [1, 2, 3, 4, 5, 6, 7], "the last one, too"
    assert [line[LOGGED.index("skipped")] for line in lines] == [
        step in (1, 3, 6) for step in range(1, 8)
    ]


@pytest.mark.parametrize(
    ("policy", "steps", "logged"),
    [
        pytest.param("stop", [3], 2, marks=pytest.mark.slow),
        pytest.param("skip", [2, 3, 4, 5, 6], 4, marks=pytest.mark.slow),
    ],
)
def test_a_run_ahead_stops_where_one_that_waits_does(
    workers: Workers, store: Path, tmp_path: Path, policy: str, steps: list[int], logged: int
) -> None:
    given = ["train.steps=7", "checkpoint.every=null", f"train.on_nonfinite={policy}"]
    lines, error = workers.run(two_runs, 2, store, tmp_path, given, steps)[0]
    assert len(lines) == logged and f"step {logged + 1}: loss is" in error


def resumed(store: Path, run: Path) -> None:
    """A run ahead that goes on from its checkpoint is the run that was not interrupted."""
    settings = ["checkpoint.every=2", "optimizer.schedule=constant"]
    _, whole, _ = a_run(store, run / "whole", [*settings, "train.steps=5"], True, [])
    first = run / "parts"
    a_run(store, first, [*settings, "train.steps=3"], True, [])
    newest = max((first / "checkpoints").glob("step-*"))
    assert json.loads((newest / "state.json").read_text())["step"] == 3
    dist.barrier()
    lines, parts, _ = a_run(store, first, [*settings, "train.steps=5"], True, [], resume=True)
    assert [line[0] for line in lines] == [1, 2, 3, 4, 5]
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


@pytest.mark.slow
def test_a_run_ahead_resumes(workers: Workers, store: Path, tmp_path: Path) -> None:
    workers.run(resumed, 2, store, tmp_path)


@pytest.mark.parametrize(
    ("settings", "ahead", "device", "said"),
    [
        (["optimizer.name=adamw-8bit"], False, "cuda", "optimizer.name adamw-8bit"),
        (["train.offload_optimizer=true"], False, "cuda", "train.offload_optimizer"),
        ([], False, "cpu", ""),
        ([], True, "cuda", ""),
    ],
)
def test_a_run_that_waits_says_why(
    settings: list[str], ahead: bool, device: str, said: str
) -> None:
    mesh = SimpleNamespace(device=torch.device(device))
    trainer: Any = SimpleNamespace(ahead=ahead, mesh=mesh)
    line = waiting(load(None, [*settings, "train.device=cuda"]), trainer)
    assert line.endswith(said) and bool(line) == bool(said)


def test_what_leaves_out_updates() -> None:
    """Not AdamW that is not fused, nor one of parameters in host memory beside a GPU."""
    weight = torch.nn.Parameter(torch.zeros(2))
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    fused = torch.optim.AdamW([weight], fused=True)
    assert leaves_out(fused, cpu) and not leaves_out(fused, cuda)
    assert not leaves_out(torch.optim.AdamW([weight]), cpu)
    assert not leaves_out(torch.optim.SGD([weight]), cpu)

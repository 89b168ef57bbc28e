"""Pipelines give the losses of one process, whatever the schedule, the domain and the number of micro-batches."""

import shutil
from pathlib import Path

import pytest

from longctx.training.metrics import StepMetrics
from tests.training_cases import make_store, train, train_and_save
from tests.workers import Workers

LAYERS = "model.num_hidden_layers=4"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def alone(workers: Workers, store: Path, tmp_path_factory: pytest.TempPathFactory) -> list[StepMetrics]:
    """Ten steps of one process."""
    return workers.run(train, 1, store, tmp_path_factory.mktemp("alone"), [LAYERS])[0]


def pipeline(ranks: int, schedule: str, chunks: int = 1) -> list[str]:
    sizes = [f"parallel.pipeline_parallel_size={ranks}", f"parallel.pipeline_chunks={chunks}"]
    return [LAYERS, *sizes, f"parallel.pipeline_schedule={schedule}"]


HALF, STATIC = "batch.tokens_per_rank=750", ["context.mode=static", "context.degree=2"]
ZERO_BUBBLE = [*pipeline(2, "zero-bubble"), "parallel.reshard_after=step"]
SPLITS = {
    "1f1b": (2, pipeline(2, "1f1b")),
    "gpipe, 3 stages": (3, pipeline(3, "gpipe")),
    "interleaved, recompute full": (2, [*pipeline(2, "interleaved", 2), "train.recompute=full"]),
    "zero-bubble": (2, ZERO_BUBBLE),
    "1f1b, domain of 2, recompute selective": (4, [*pipeline(2, "1f1b"), HALF, "train.recompute=selective"]),
    "gpipe, domain of 2, static": (4, [*pipeline(2, "gpipe"), HALF, *STATIC]),
    "interleaved, domain of 2": (4, [*pipeline(2, "interleaved", 2), HALF, "parallel.reshard_after=micro_batch"]),
    "interleaved, domain of 2, static, replicated": (
        4,
        [*pipeline(2, "interleaved", 2), HALF, *STATIC, "parallel.shard_ranks=1"],
    ),
    "zero-bubble, domain of 2": (4, [*ZERO_BUBBLE, HALF]),
    "zero-bubble, domain of 2, static": (4, [*ZERO_BUBBLE, HALF, *STATIC]),
    "tp2": (4, [*pipeline(2, "1f1b"), "parallel.tensor_parallel_size=2"]),
    "tp2 int": (4, [*pipeline(2, "interleaved", 2), "parallel.tensor_parallel_size=2"]),
    "tp2 zb": (4, [*pipeline(2, "zero-bubble", 2), "parallel.tensor_parallel_size=2", "parallel.reshard_after=step"]),
}


@pytest.mark.parametrize("name", SPLITS)
def test_pipelines(workers: Workers, store: Path, alone: list[StepMetrics], tmp_path: Path, name: str) -> None:
    ranks, settings = SPLITS[name]
    split = workers.run(train, ranks, store, tmp_path, settings)[0]
    assert [metrics.tokens for metrics in split] == [metrics.tokens for metrics in alone]
    assert [metrics.target_tokens for metrics in split] == [metrics.target_tokens for metrics in alone]
    assert [metrics.loss for metrics in split] == pytest.approx([metrics.loss for metrics in alone], rel=1e-5)
    assert [metrics.grad_norm for metrics in split] == pytest.approx([metrics.grad_norm for metrics in alone], rel=1e-4)


def test_resume_under_another_layout(workers: Workers, store: Path, tmp_path: Path) -> None:
    """A checkpoint of one process goes on in a pipeline, one of a pipeline in another and in one process."""
    layouts = {
        "one process": (1, [LAYERS]),
        "pipeline": (4, [*pipeline(2, "1f1b"), HALF]),
        "interleaved": (2, pipeline(2, "interleaved", 2)),
    }
    whole = workers.run(train, 1, store, tmp_path / "whole", [LAYERS], 8)[0]
    for written, others in (("one process", ["pipeline"]), ("pipeline", ["one process", "interleaved"])):
        ranks, settings = layouts[written]
        run = tmp_path / written
        workers.run(train_and_save, ranks, store, run, [*settings, "train.steps=10", "checkpoint.every=6"])
        shutil.rmtree(run / "checkpoints" / "step-000010")
        for name in others:
            ranks, settings = layouts[name]
            resumed = workers.run(train, ranks, store, run, settings, 2, True)[0]
            assert [(m.step, m.tokens, m.target_tokens) for m in resumed] == [
                (m.step, m.tokens, m.target_tokens) for m in whole[6:]
            ]
            assert [m.loss for m in resumed] == pytest.approx([m.loss for m in whole[6:]], rel=1e-5)

"""Pipelines give the losses of one process, whatever the schedule, the domain and the number of micro-batches."""

from pathlib import Path

import pytest

from longctx.training.metrics import StepMetrics
from tests.training_cases import make_store, train
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


SPLITS = {
    "1f1b": (2, pipeline(2, "1f1b")),
    "1f1b, domain of 2": (4, [*pipeline(2, "1f1b"), "batch.tokens_per_rank=750"]),
}


@pytest.mark.parametrize("name", SPLITS)
def test_pipelines(workers: Workers, store: Path, alone: list[StepMetrics], tmp_path: Path, name: str) -> None:
    ranks, settings = SPLITS[name]
    split = workers.run(train, ranks, store, tmp_path, settings)[0]
    assert [metrics.tokens for metrics in split] == [metrics.tokens for metrics in alone]
    assert [metrics.target_tokens for metrics in split] == [metrics.target_tokens for metrics in alone]
    assert [metrics.loss for metrics in split] == pytest.approx([metrics.loss for metrics in alone], rel=1e-5)
    assert [metrics.grad_norm for metrics in split] == pytest.approx([metrics.grad_norm for metrics in alone], rel=1e-4)

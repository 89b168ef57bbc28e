"""An objective gives the loss and the gradients of one process, however a step is split, also with weights of any value."""

from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from longctx.training.metrics import StepMetrics
from longctx.training.objectives.loss import cross_entropy_sum, log_probabilities, rows_with_labels
from tests.marks import slow_unless
from tests.objective_cases import OBJECTIVES, train
from tests.workers import Workers

STEPS = 2
SPLITS = {
    "three ranks": (3, ["batch.tokens_per_rank=500"]),
    "two tensor ranks": (4, ["parallel.tensor_parallel_size=2", "batch.tokens_per_rank=750"]),
    "a pipeline": (4, ["parallel.pipeline_parallel_size=2", "batch.tokens_per_rank=750"]),
}


@pytest.fixture(scope="module")
def alone(workers: Workers, store: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[StepMetrics]]:
    run = tmp_path_factory.mktemp("alone")
    return {name: workers.run(train, 1, store, run, ["batch.tokens_per_rank=1500"], name, STEPS)[0] for name in OBJECTIVES}


@pytest.mark.parametrize(
    ("name", "split"),
    slow_unless(lambda name, split: name == "by place" or split == "three ranks", product(OBJECTIVES, SPLITS)),
)
def test_the_split_does_not_change_the_result(
    workers: Workers, store: Path, alone: dict[str, list[StepMetrics]], tmp_path: Path, name: str, split: str
) -> None:
    ranks, given_settings = SPLITS[split]
    found = workers.run(train, ranks, store, tmp_path, given_settings, name, STEPS)[0]
    assert [m.loss for m in found] == pytest.approx([m.loss for m in alone[name]], rel=1e-5)
    assert [m.grad_norm for m in found] == pytest.approx([m.grad_norm for m in alone[name]], rel=1e-4)
    assert any(int(degree) > 1 for m in found for degree in m.degrees)


def test_objectives_differ(alone: dict[str, list[StepMetrics]]) -> None:
    losses = [steps[0].loss for steps in alone.values()]
    assert abs(losses[0] - losses[1]) > 0.1


@given(
    st.integers(0, 40),
    st.integers(1, 50),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.booleans(),
    st.integers(0, 100),
)
@settings(deadline=None)
def test_chunked_cross_entropy(tokens: int, chunk: int, ignored: float, weighted: bool, seed: int) -> None:
    """With any rows that include those with labels, and a matrix or a function as head."""
    torch.manual_seed(seed)
    hidden = torch.randn(tokens, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 11, (tokens,)).where(torch.rand(tokens) >= ignored, -100)
    weights = torch.randn(tokens, dtype=torch.float64).where(torch.rand(tokens) > 0.2, 0) if weighted else None

    def head_of(some: torch.Tensor) -> torch.Tensor:
        return some @ weight.T

    logits = head_of(hidden)
    nll = F.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
    wanted = (nll * (1 if weights is None else weights)).sum() / 3.7
    gradients = torch.autograd.grad(wanted, (hidden, weight))
    given = None if weights is None else weights.where(labels >= 0, float("nan"))
    for head in (weight, head_of):
        for rows in (None, rows_with_labels(labels), (labels != -100).nonzero()[:, 0]):
            loss = cross_entropy_sum(hidden, head, labels, 3.7, chunk, given, rows=rows)
            torch.testing.assert_close(loss, wanted)
            for found, gradient in zip(torch.autograd.grad(loss, (hidden, weight)), gradients, strict=True):
                torch.testing.assert_close(found, gradient)
    torch.testing.assert_close(log_probabilities(hidden, weight, labels, chunk), -nll.detach())

"""Pooled documents, and the example's heads on them, equal one process with whole documents,
forward and backward."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.data_cases import random_plan
from tests.marks import slow_unless
from tests.project.test_examples import load
from tests.workers import Workers

LENGTHS = (37, 1, 150, 8, 2, 64)
WIDTH = 5


def states() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(length, WIDTH, dtype=torch.float64, generator=generator, requires_grad=True)
        for length in LENGTHS
    ]


def loss_of(pooled: torch.Tensor, first: int, step: int) -> torch.Tensor:
    """Returns the loss of every `step`th document from `first`, which depends on all documents."""
    return ((pooled @ pooled.T)[first::step].tanh() * torch.arange(len(LENGTHS))).sum()


def pooled_on_a_rank(how: str, seed: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns what this rank pools, and the gradients of all documents summed over ranks."""
    rank, ranks, documents = dist.get_rank(), dist.get_world_size(), states()
    plan = random_plan(LENGTHS, ranks, seed)
    pooled = torch.zeros(len(LENGTHS), WIDTH, dtype=torch.float64)
    for index in range(len(plan.micro_batches)):
        layout = plan.layout(index, rank)
        spans = [
            span
            for shard in layout.shards
            for span in ((shard.document, *shard.head), (shard.document, *shard.tail))
        ]
        padding = torch.full((2, WIDTH), torch.nan, dtype=torch.float64)
        hidden = torch.cat(
            [*(documents[document][start:stop] for document, start, stop in spans), padding]
        )
        pooled = pooled + load("encoder_heads").pool_documents(
            hidden, layout, len(LENGTHS), how=how
        )
    loss_of(pooled, rank, ranks).backward()
    gradients = [
        torch.zeros_like(document) if document.grad is None else document.grad
        for document in documents
    ]
    for gradient in gradients:
        dist.all_reduce(gradient)
    return pooled.detach(), gradients


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("how", ["mean", "first"])
def test_pooled_documents_are_those_of_one_process(workers: Workers, how: str, ranks: int) -> None:
    documents = states()
    expected = torch.stack(
        [document.mean(0) if how == "mean" else document[0] for document in documents]
    )
    loss_of(expected, 0, 1).backward()
    for seed in range(2):
        for pooled, gradients in workers.run(pooled_on_a_rank, ranks, how, seed):
            torch.testing.assert_close(pooled, expected.detach())
            for gradient, document in zip(gradients, documents, strict=True):
                torch.testing.assert_close(gradient, document.grad)


def heads_on_a_rank() -> list[tuple[float, list[torch.Tensor], dict[int, int]]]:
    """Returns loss, gradients and degrees of the example's first two steps, with an update between
    them."""
    example = load("encoder_heads")
    model = example.build_model()
    example.prepare(model.encoder, causal=False)
    return [
        (*_updated(model, *example.forward_backward(model, *example.read_halves(step))),)
        for step in range(2)
    ]


def _updated(
    model: torch.nn.Module, loss: float, plan: Any
) -> tuple[float, list[torch.Tensor], dict[int, int]]:
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()
    return loss, gradients, {} if plan is None else plan.degrees


@pytest.mark.parametrize("ranks", slow_unless(lambda ranks: ranks == 2, (2, 3)))
def test_heads_of_the_example_equal_one_process(workers: Workers, ranks: int) -> None:
    example = load("encoder_heads")
    model = example.build_model()
    results: Any = workers.run(heads_on_a_rank, ranks)
    for step in range(2):
        documents, labels = example.read_halves(step)
        hidden = [
            model.encoder(input_ids=document[None]).last_hidden_state[0] for document in documents
        ]
        first, mean = (
            torch.stack([state[0] for state in hidden]),
            torch.stack([state.mean(0) for state in hidden]),
        )
        loss = model.loss(first, mean, labels, torch.arange(len(documents)))
        loss.backward()
        value, gradients, _ = _updated(model, loss.item(), None)
        assert max(float(gradient.abs().max()) for gradient in gradients) > 0.01
        for steps in results:
            found, found_gradients, degrees = steps[step]
            assert max(degrees) > 1 and min(degrees) == 1
            assert found == pytest.approx(value, rel=1e-5)
            for ours, theirs in zip(found_gradients, gradients, strict=True):
                assert float((ours - theirs).norm()) < 1e-4 * max(float(theirs.norm()), 1e-3)


def test_the_loss_must_count_each_document_once() -> None:
    """The example's shares of the loss add up to the whole."""
    model = load("encoder_heads").build_model()
    first, mean = torch.randn(2, 6, 64)
    labels, everything = torch.tensor([0, 1, 2, 0, 1, 2]), torch.arange(6)
    parts = [model.loss(first, mean, labels, everything[rank::4]) for rank in range(4)]
    torch.testing.assert_close(
        torch.stack(parts).sum(), model.loss(first, mean, labels, everything)
    )
    assert F.cross_entropy(torch.zeros(0, 3), labels[:0], reduction="sum") == 0

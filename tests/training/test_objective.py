"""The chunked loss is cross-entropy, with weights of any value, and its gradients are those of
plain torch."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from longctx.model.balance import RouterWatch
from longctx.planning.layout import Placement
from longctx.training.objectives.balance import STATISTICS, Balance
from longctx.training.objectives.loss import cross_entropy_sum, log_probabilities, rows_with_labels
from tests.data_cases import placed_plan


@given(
    st.integers(0, 40),
    st.integers(1, 50),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.booleans(),
    st.integers(0, 100),
)
@settings(deadline=None)
def test_chunked_cross_entropy(
    tokens: int, chunk: int, ignored: float, weighted: bool, seed: int
) -> None:
    """With any rows that include those with labels, and a matrix or a function as head."""
    torch.manual_seed(seed)
    hidden = torch.randn(tokens, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 11, (tokens,)).where(torch.rand(tokens) >= ignored, -100)
    weights = (
        torch.randn(tokens, dtype=torch.float64).where(torch.rand(tokens) > 0.2, 0)
        if weighted
        else None
    )

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
            for found, gradient in zip(
                torch.autograd.grad(loss, (hidden, weight)), gradients, strict=True
            ):
                torch.testing.assert_close(found, gradient)
    torch.testing.assert_close(log_probabilities(hidden, weight, labels, chunk), -nll.detach())


@pytest.mark.parametrize(("tensor", "split"), [(1, [1]), (2, [0, 1, 2])])
def test_tensor_ranks_split_every_document(tensor: int, split: list[int]) -> None:
    """Those that several ranks have parts of come first, the same on all: their counts are summed.
    Rank 1 has none of document 0."""
    router: Any = SimpleNamespace(document_loss=0.1, z_loss=0.0)
    placed = [[Placement(0, 0, 1), Placement(1, 0, 2), Placement(2, 1, 1)]]
    plan = placed_plan([5, 8, 3], 2, placed)
    lengths = [[5, 8, 3][document] for document in split]
    for rank in range(2):
        parts = []
        for local in range(tensor):
            axis = SimpleNamespace(size=lambda: tensor, get_local_rank=lambda local=local: local)
            mesh: Any = SimpleNamespace(tensor=axis, device=torch.device("cpu"))
            documents = Balance([router], 0.0, mesh).documents(plan, plan.layout(0, rank), 10)
            assert documents is not None and documents.split == len(split)
            assert documents.lengths[: len(split)].tolist() == lengths
            parts.append(torch.cat([documents.lengths, torch.zeros(1)])[documents.rows])
        held = [5.0] * 5 + [8.0] * 4 if rank == 0 else [8.0] * 4 + [3.0] * 3
        assert torch.cat(parts).tolist() == held + [0.0] * (10 - len(held))


def test_experts_are_counted_over_all_ranks_with_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over tensor ranks too, which have other tokens."""
    monkeypatch.setattr(
        dist, "all_reduce", lambda total, group: total.mul_({"tokens": 10, "domain": 100}[group])
    )
    router = RouterWatch(2, 1, "softmax")
    router.counts, router.losses = torch.tensor([1, 3]), torch.tensor([0.5, 0.25]).double()
    domain = SimpleNamespace(get_group=lambda: "domain")
    mesh: Any = SimpleNamespace(tokens="tokens", domain=domain, device=torch.device("cpu"))
    balance = Balance([router], 0.0, mesh)
    ended = dict(zip(STATISTICS, balance.end_step().tolist(), strict=True))
    assert balance.counts is not None and balance.counts.tolist() == [[10, 30]]
    assert (ended["document_loss"], ended["z_loss"]) == (5.0, 2.5)
    assert (ended["expert_imbalance"], router.counts) == (1.5, None)


def test_gradients_of_the_head_are_scaled_in_place() -> None:
    """A copy of that of the weight would take gigabytes for a large vocabulary."""
    hidden, weight = (torch.randn(rows, 6, requires_grad=True) for rows in (9, 11))
    loss = cross_entropy_sum(hidden, weight, torch.randint(0, 11, (9,)), 3.0, 4)
    assert loss.grad_fn is not None
    saved = [each.data_ptr() for each in loss.grad_fn.saved_tensors]  # type: ignore[attr-defined]  # of our function
    values = [each.clone() for each in loss.grad_fn.saved_tensors]  # type: ignore[attr-defined]
    found = torch.autograd.grad(loss * 0.3, (hidden, weight))
    assert [each.data_ptr() for each in found] == saved
    assert all(
        torch.equal(each, value * torch.tensor(0.3))
        for each, value in zip(found, values, strict=True)
    )


def test_a_second_backward_through_the_loss_is_refused() -> None:
    """It would scale gradients twice."""
    hidden = torch.randn(9, 6, requires_grad=True)
    loss = cross_entropy_sum(hidden, torch.randn(11, 6), torch.randint(0, 11, (9,)))
    torch.autograd.grad(loss, hidden, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, hidden)

"""The chunked loss is cross-entropy, with weights of any value, and its gradients are those of
plain torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from longctx.training.objectives.loss import cross_entropy_sum, log_probabilities, rows_with_labels


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

"""The chunked loss is cross-entropy, with weights of any value, and its gradients are those of plain torch."""

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

"""The loss whose elementwise part is compiled equals the plain one, and is compiled once for all
numbers of tokens."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from longctx.training.objectives import loss
from longctx.training.objectives.loss import cross_entropy_sum

SIZES = (37, 12, 1, 0, 130, 5)
"""Tokens of the cases; with chunks of 16, also chunks of 5, 10 and 2 rows."""


def inputs(tokens: int, dtype: torch.dtype, weighted: bool) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, 24, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(51, 24, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(51, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < 0.3] = -100
    return hidden, weight, labels, torch.rand(tokens, generator=generator) if weighted else None


def losses(case: tuple[Any, ...], divisor: float, compiled: bool) -> list[torch.Tensor]:
    hidden, weight, labels, weights = case
    rows = labels.ne(-100).nonzero()[:, 0] if len(labels) % 2 else None
    given = {"chunk_tokens": 16, "weights": weights, "rows": rows, "compiled": compiled}
    found = cross_entropy_sum(hidden, weight, labels, divisor, **given)
    return [found, *torch.autograd.grad(found, (hidden, weight))]


def compare(dtype: torch.dtype, weighted: bool) -> None:
    for number, tokens in enumerate(SIZES):
        case = inputs(tokens, dtype, weighted)
        plain, compiled = (losses(case, 31.0 + number, each) for each in (False, True))
        for a, b in zip(plain, compiled, strict=True):
            close = (
                {"rtol": 1e-5, "atol": 1e-7}
                if dtype == torch.float32
                else {"rtol": 0.02, "atol": 1e-4}
            )
            torch.testing.assert_close(a, b, **close)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Counts the programs, which a simpler compiler than inductor runs."""
    torch._dynamo.reset()
    counting, made = CompileCounterWithBackend("aot_eager"), {}

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return made.setdefault(function, torch.compile(function, backend=counting))

    monkeypatch.setattr(loss, "_compiled", compiled)
    return counting


@pytest.mark.parametrize(("dtype", "weighted"), [(torch.float32, True), (torch.bfloat16, False)])
def test_compiled_and_plain_loss_are_equal(
    counter: CompileCounterWithBackend, dtype: torch.dtype, weighted: bool
) -> None:
    compare(dtype, weighted)
    assert len(counter.graphs) == 2, (
        "log-sum-exp and gradient, for any number of rows and any divisor"
    )


@pytest.mark.slow
def test_inductor_computes_the_same() -> None:
    torch._dynamo.reset()
    loss._compiled.cache_clear()
    compare(torch.bfloat16, True)

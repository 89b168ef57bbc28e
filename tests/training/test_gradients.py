"""The gradient norm is exact for any number of elements per rank."""

import math

import pytest
import torch
from torch import nn

from longctx.training.optimizer import clip_gradients, norm_of, sum_of_squares


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_of_many_numbers(dtype: torch.dtype) -> None:
    """A float32 sum of squares of this many elements is off by 3e-4 on a CPU."""
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (8_000_000, 3)]
    for parameter in parameters:
        parameter.grad = torch.randn(
            parameter.shape, generator=torch.Generator().manual_seed(0)
        ).to(dtype)
    exact = math.sqrt(
        sum(float(parameter.grad.double().square().sum()) for parameter in parameters)
    )
    norm = norm_of(
        torch.tensor([sum_of_squares(p.grad for p in parameters), 0.0], dtype=torch.float64)
    )
    assert norm == pytest.approx(exact, rel=1e-9)
    clip_gradients(parameters, 1.0, norm)
    assert float(parameters[0].grad.double().norm()) == pytest.approx(
        1.0, rel=1e-2 if dtype == torch.bfloat16 else 1e-4
    )

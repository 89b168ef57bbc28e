"""The gradient norm is exact for any number of elements per rank."""

import math
import random

import pytest
import torch
from torch import nn

from longctx.training.optimizer import clip_gradients, norm_of, sum_of_squares, sum_rounded_once


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
    norm = norm_of(sum_of_squares(p.grad for p in parameters).view(1))
    assert norm.item() == pytest.approx(exact, rel=1e-9)
    clip_gradients(parameters, 1.0, norm)
    assert float(parameters[0].grad.double().norm()) == pytest.approx(
        1.0, rel=1e-2 if dtype == torch.bfloat16 else 1e-4
    )


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 129, 1024])
def test_sums_on_the_device_are_rounded_once(count: int) -> None:
    """As math.fsum: neither numbers of all sizes nor halves of the last bit change a bit."""
    draw = random.Random(count)
    for _ in range(50):
        values = [draw.random() * 2.0 ** draw.randint(-60, 60) for _ in range(count)]
        close = [1.0, *(draw.choice([2.0**-53, 2.0**-54, 2.0**-90]) for _ in range(count - 1))]
        for given in (values, close):
            found = sum_rounded_once(torch.tensor(given, dtype=torch.float64))
            assert found.item() == math.fsum(given)
            assert norm_of(torch.tensor(given, dtype=torch.float64)).item() == math.sqrt(
                math.fsum(given)
            )


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_sums_with_numbers_that_are_not_finite(value: float) -> None:
    found = sum_rounded_once(torch.tensor([1.0, value, 2.0], dtype=torch.float64)).item()
    assert str(found) == str(value)


@pytest.mark.parametrize(("greatest", "times"), [(0.3, 0.3), (7.0, 1.0), (None, 1.0)])
def test_clipping_is_a_product_with_one_number(greatest: float | None, times: float) -> None:
    """Bit by bit; gradients that are short enough stay as they are."""
    parameter = nn.Parameter(torch.zeros(1000))
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    gradient[0] = -0.0
    parameter.grad = gradient.clone()
    norm = gradient.double().norm() / 10
    clip_gradients([parameter], greatest, norm=norm)
    wanted = gradient if times == 1.0 else gradient * (times / norm.item())
    assert torch.equal(parameter.grad.view(torch.int32), wanted.view(torch.int32))

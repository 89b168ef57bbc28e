"""The scan of affine maps equals a loop over maps, forward and gradients, in a number of steps that
grows with a logarithm."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.linear import Counting
from longctx.attention.linear.affine import Lanes, Maps, scan
from longctx.attention.linear.scan import _without_autocast
from tests.marks import examples

K_DIM, V_DIM, ROWS, HEADS = 3, 2, 4, 2


def draw_maps(
    maps: int, segments: int, *, factors: bool, channels: bool, wide: bool, seed: int
) -> list[torch.Tensor | None]:
    """Returns the five tensors of maps, and initial states, which have more columns than the maps
    if `wide`."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    move = draw(maps, HEADS, K_DIM if channels else 1, 1)
    initial = draw(segments, HEADS, K_DIM, V_DIM + (K_DIM if wide else 0))
    if not factors:
        return [move, draw(maps, HEADS, K_DIM, V_DIM), None, None, None, initial]
    return [
        move,
        None,
        draw(maps, HEADS, ROWS, K_DIM),
        draw(maps, HEADS, ROWS, K_DIM),
        draw(maps, HEADS, ROWS, V_DIM),
        initial,
    ]


def one_by_one(counts: list[int], tensors: list[Any]) -> list[torch.Tensor]:
    move, added, left, right, values, initial = tensors
    before, news, ends, start = [], [], [], 0
    for state, count in zip(initial, counts, strict=True):
        for i in range(start, start + count):
            before.append(state)
            empty = state.shape[-1] - V_DIM
            after = move[i] * state
            if left is None:
                after = after + torch.nn.functional.pad(added[i], (empty, 0))
            else:
                news.append(torch.nn.functional.pad(values[i], (empty, 0)) + right[i] @ state)
                after = after + left[i].mT @ news[-1]
            state = after
        ends.append(state)
        start += count
    return [torch.stack(x) for x in (before, news, ends) if x]


@settings(max_examples=examples(60), deadline=None)
@given(
    counts=st.lists(st.integers(1, 23), min_size=1, max_size=4),
    size=st.integers(2, 5),
    factors=st.booleans(),
    channels=st.booleans(),
    wide=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_lanes_equal_a_loop(
    counts: list[int], size: int, factors: bool, channels: bool, wide: bool, seed: int
) -> None:
    tensors = draw_maps(
        sum(counts), len(counts), factors=factors, channels=channels, wide=wide, seed=seed
    )
    *maps, initial = tensors
    assert initial is not None
    found = [x for x in scan(Maps(*maps), initial, Lanes.of(counts, "cpu", size)) if x is not None]  # type: ignore[arg-type]
    expected = one_by_one(counts, tensors)
    wanted = [x for x in tensors if x is not None]
    torch.manual_seed(seed)
    douts = [torch.randn_like(x) for x in expected]
    for one, other in zip(
        [*found, *torch.autograd.grad(found, wanted, douts)],
        [*expected, *torch.autograd.grad(expected, wanted, douts)],
        strict=True,
    ):
        assert (one - other).norm() <= 1e-10 * other.norm()


def test_autocast_does_not_reach_the_scan() -> None:
    a = torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
        with _without_autocast("cpu"):
            assert (a @ a).dtype == torch.float32
        with _without_autocast("meta"):
            pass


@pytest.mark.parametrize("factors", [True, False])
def test_steps_grow_with_the_logarithm_of_the_maps(factors: bool) -> None:
    calls = {}
    for count in (16, 256, 4096):
        tensors = draw_maps(count, 1, factors=factors, channels=False, wide=False, seed=0)
        lanes = Lanes.of([count], "cpu")
        with Counting() as counting:
            before, _, ends = scan(Maps(*tensors[:5]), tensors[5], lanes)  # type: ignore[arg-type]
            (before.sum() + ends.sum()).backward()
        calls[count] = counting.calls
    assert calls[4096] - calls[256] <= 1.1 * (calls[256] - calls[16]) < 1.1 * 16 * calls[16]
    assert calls[4096] < 4096 / 2

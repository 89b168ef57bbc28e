"""The kernel of selected keys equals dense attention whose other keys are hidden."""

from collections.abc import Iterator

import pytest
import torch

from longctx.attention.kernels import Options, reference
from longctx.attention.kernels import selected as selected_kernel
from longctx.attention.kernels.selected import SelectedKernel
from longctx.attention.segments import Segment


def selections(queries: int, keys: int, most: int) -> Iterator[torch.Tensor]:
    """Yields the positions that random queries select: with their own, and of later keys only, so
    that queries see none."""
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(queries, keys, generator=generator).argsort(1)
    own = torch.arange(queries).unsqueeze(1)
    yield torch.cat([order[:, :most], own, torch.full_like(own, -1)], dim=1).int()
    yield torch.full((queries, 1), keys - 1).int()


@pytest.mark.parametrize("block_bytes", [256 << 20, 8 * 300 * 2 * 40, 1])
def test_the_kernel_equals_dense_attention_with_hidden_keys(
    monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(selected_kernel, "BLOCK_BYTES", block_bytes)
    torch.manual_seed(0)
    keys = 300
    q = torch.randn(keys, 4, 6, dtype=torch.float64, requires_grad=True)
    k = torch.randn(keys, 2, 6, dtype=torch.float64, requires_grad=True)
    v = torch.randn(keys, 2, 5, dtype=torch.float64, requires_grad=True)
    dout = torch.randn(keys, 4, 5, dtype=torch.float64)
    order = torch.randperm(keys)
    segments = [Segment(0, keys, 0, keys)]
    for selected in selections(keys, keys, most=7):
        chosen = torch.zeros(keys, keys + 1, dtype=torch.bool)
        chosen.scatter_(1, selected.long().clamp(min=-1) % (keys + 1), True)
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * 0.3
        scores = scores.masked_fill(~chosen[:, :keys][:, order], float("-inf"))
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(2, 1))
        wanted = torch.autograd.grad(out, (q, k, v), dout)
        kernel = SelectedKernel(
            selected, order, longest=keys, has_selection=lambda _: True, dense=lambda: reference
        )
        options = Options(0.3)
        with torch.no_grad():
            found, lse = kernel.forward(q, k, v, segments, options)
            gradients = kernel.backward(dout, q, k, v, found, lse, segments, options)
        assert torch.allclose(found, out, atol=1e-12)
        assert torch.allclose(lse, scores.logsumexp(-1).T, atol=1e-12)
        for mine, theirs in zip(gradients, wanted, strict=True):
            assert torch.allclose(mine, theirs, atol=1e-12)


def test_queries_that_see_no_key_of_a_call_can_be_merged() -> None:
    q, k = torch.randn(3, 1, 4), torch.randn(2, 1, 4)
    kernel = SelectedKernel(
        torch.tensor([[0], [1], [5]], dtype=torch.int32),
        torch.tensor([0, 1]),
        longest=6,
        has_selection=lambda _: True,
        dense=lambda: reference,
    )
    segments = [Segment(0, 3, 0, 2)]
    out, lse = kernel.forward(q, k, k, segments, Options(1.0))
    assert torch.equal(out[2], torch.zeros(1, 4))
    assert lse[2].item() == torch.finfo(torch.float32).min / 2
    gradients = kernel.backward(out, q, k, k, out, torch.zeros(3, 1), segments, Options(1.0))
    assert torch.equal(gradients[0][2], torch.zeros(1, 4))


def test_a_soft_cap_is_refused() -> None:
    q = torch.randn(2, 1, 4)
    kernel = SelectedKernel(
        torch.zeros(2, 1, dtype=torch.int32),
        torch.arange(2),
        longest=2,
        has_selection=lambda _: True,
        dense=lambda: reference,
    )
    with pytest.raises(ValueError, match="softcap is 2"):
        kernel.forward(q, q, q, [Segment(0, 2, 0, 2)], Options(1.0, softcap=2.0))

"""Compares the reference kernel with autograd, and the CPU kernel with the reference kernel, for
any band."""

from typing import get_args

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from longctx.attention.kernels import KERNELS, Options, cpu
from longctx.attention.segments import Segment, visible
from longctx.config.settings import ContextSection


def bands() -> st.SearchStrategy[tuple[int | None, int | None]]:
    return st.tuples(
        st.one_of(st.none(), st.integers(-6, 0)), st.one_of(st.none(), st.integers(0, 6))
    )


def test_queries_that_see_no_key_have_gradients_of_zero() -> None:
    x = torch.randn(4, 2, 3, dtype=torch.float64)
    segments, kernel = [Segment(0, 4, 0, 4, hi=-2)], KERNELS["reference"]
    out, lse = kernel.forward(x, x, x, segments, Options(0.7))
    gradients = kernel.backward(x, x, x, x, out, lse, segments, Options(0.7))
    for each in (out, *gradients):
        assert each.isfinite().all() and each.any()
    assert not out[:2].any() and not gradients[0][:2].any() and lse[:2].isneginf().all()


@given(
    band=bands(),
    queries=st.integers(1, 9),
    keys=st.integers(1, 9),
    softcap=st.sampled_from([0.0, 0.5, 20.0]),
    seed=st.integers(0, 1000),
)
@settings(deadline=None)
def test_reference_kernel_bands_and_gradients(
    band: tuple[int | None, int | None], queries: int, keys: int, softcap: float, seed: int
) -> None:
    """The reference kernel's backward equals autograd, for any band and unequal head sizes of k and
    v."""
    torch.manual_seed(seed)
    q = torch.randn(queries + 2, 4, 3, dtype=torch.float64, requires_grad=True)
    k = torch.randn(keys + 1, 2, 3, dtype=torch.float64, requires_grad=True)
    v = torch.randn(keys + 1, 2, 5, dtype=torch.float64, requires_grad=True)
    segment = Segment(1, 1 + queries, 1, 1 + keys, *band)
    kernel = KERNELS["reference"]
    out, lse = kernel.forward(q.detach(), k.detach(), v.detach(), [segment], Options(0.7, softcap))

    scores = (
        torch.einsum("qhd,khd->hqk", q[1 : 1 + queries], k[1:].repeat_interleave(2, dim=1)) * 0.7
    )
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    offset = torch.arange(keys)[None] - torch.arange(queries)[:, None]
    hidden = (offset < (band[0] if band[0] is not None else -99)) | (
        offset > (band[1] if band[1] is not None else 99)
    )
    probabilities = scores.masked_fill(hidden, float("-inf")).softmax(-1).nan_to_num(0.0)
    wanted = torch.einsum("hqk,khd->qhd", probabilities, v[1:].repeat_interleave(2, dim=1))
    torch.testing.assert_close(out[1 : 1 + queries], wanted)
    assert not out[0].any() and not out[-1].any() and lse[0].isneginf().all()

    seen = ~hidden.all(1)  # queries that see no key have no gradient to compare
    dout = (
        torch.randn_like(out)
        * torch.cat([torch.zeros(1), seen.double(), torch.zeros(1)])[:, None, None]
    )
    safe = scores.masked_fill(hidden, -1e30).softmax(-1)
    surrogate = torch.einsum("hqk,khd->qhd", safe, v[1:].repeat_interleave(2, dim=1))
    autograd = torch.autograd.grad(surrogate, (q, k, v), dout[1 : 1 + queries])
    ours = kernel.backward(
        dout, q.detach(), k.detach(), v.detach(), out, lse, [segment], Options(0.7, softcap)
    )
    for a, b in zip(ours, autograd, strict=True):
        torch.testing.assert_close(a, b)


def test_cpu_kernel_skips_empty_segments() -> None:
    q = torch.randn(4, 2, 8)
    kernel = KERNELS["cpu"]
    out, lse = kernel.forward(q, q, q, [Segment(0, 4, 2, 2), Segment(1, 1, 0, 4)], Options(1.0))
    assert not out.any() and lse.isneginf().all()
    assert not any(
        part.any()
        for part in kernel.backward(q, q, q, q, out, lse, [Segment(0, 4, 2, 2)], Options(1.0))
    )


@given(
    band=bands(),
    queries=st.integers(1, 30),
    keys=st.integers(1, 30),
    block=st.sampled_from([1, 4, 7]),
    seed=st.integers(0, 1000),
)
@settings(deadline=None)
def test_cpu_kernel_bands(
    band: tuple[int | None, int | None], queries: int, keys: int, block: int, seed: int
) -> None:
    """Blocks of queries with masks equal the reference, also if the final log-sum-exp is larger
    than that of this call."""
    segments = [
        Segment(1, 1 + queries, 2, 2 + keys, *band),
        Segment(1 + queries, 4 + queries, 2 + keys, 5 + keys, hi=0),
    ]
    assume(visible(segments[0], torch.device("cpu")).any(dim=1).all())
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(queries + 5, 4, 8, generator=generator)
    k, v = (torch.randn(keys + 6, 2, 8, generator=generator) for _ in range(2))
    dout = torch.randn(q.shape, generator=generator)
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "BLOCK", block)
        for name in ("cpu", "reference"):
            out, lse = KERNELS[name].forward(q, k, v, segments, Options(0.4))
            results.append(
                (
                    out,
                    lse,
                    *KERNELS[name].backward(
                        dout, q, k, v, out * 0.6, lse + 0.5, segments, Options(0.4)
                    ),
                )
            )
    for ours, wanted in zip(*results, strict=True):
        torch.testing.assert_close(ours, wanted, atol=2e-6, rtol=2e-5)


ranges = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda pair: (min(pair), max(pair)))


@given(
    segment=st.builds(
        Segment, *[st.integers(0, 5), st.integers(6, 12)] * 2, *[st.none() | st.integers(-9, 9)] * 2
    ),
    queries=ranges,
    keys=ranges,
)
def test_cutting_a_segment_keeps_what_is_seen_and_no_more(
    segment: Segment, queries: tuple[int, int], keys: tuple[int, int]
) -> None:
    part = segment.cut(queries, keys)
    seen = torch.zeros(12, 12, dtype=torch.bool)
    wanted = torch.zeros(12, 12, dtype=torch.bool)
    whole = torch.zeros(12, 12, dtype=torch.bool)
    whole[segment.q_start : segment.q_stop, segment.k_start : segment.k_stop] = visible(
        segment, torch.device("cpu")
    )
    rows, columns = slice(*queries), slice(*keys)
    wanted[rows, columns] = whole[rows, columns]
    if part.empty:
        assert not wanted.any()
        return
    inside = visible(part, torch.device("cpu"))
    seen[part.q_start : part.q_stop, part.k_start : part.k_stop] = inside
    assert torch.equal(seen, wanted)
    assert inside.any(0).all() and inside.any(1).all()
    assert inside.all() == part.dense


def test_the_setting_offers_every_kernel() -> None:
    assert get_args(ContextSection.model_fields["kernel"].annotation) == ("auto", *KERNELS)


@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
@pytest.mark.parametrize(
    "band", [(None, 0), (None, None), (-2, 0)], ids=["causal", "dense", "window"]
)
@pytest.mark.parametrize("where", ["q", "k", "v", "all of k"])
def test_nan_stays_nan(name: str, band: tuple[int | None, int | None], where: str) -> None:
    """Rows that see NaN are NaN, forward and backward, and not zeros as if they saw nothing."""
    torch.manual_seed(0)
    tensors = {each: torch.randn(6, 2, 16) for each in "qkv"}
    place = slice(None) if where == "all of k" else 3
    tensors[where[-1]][place, 0, 2] = torch.nan
    q, k, v = tensors.values()
    segment, options = Segment(0, 6, 0, 6, *band), Options(0.5)
    kernel = KERNELS[name]
    out, lse = kernel.forward(q, k, v, [segment], options)
    seen = visible(segment, q.device)
    if where == "q":
        sick = torch.arange(6) == 3
    elif where == "all of k":
        sick = torch.ones(6, dtype=torch.bool)
    else:
        sick = seen[:, 3]
    assert out[sick, 0].isnan().any(-1).all()
    assert where == "v" or lse[sick, 0].isnan().all()
    assert out[:, 1].isfinite().all(), "another head is not concerned"
    gradients = kernel.backward(torch.ones_like(out), q, k, v, out, lse, [segment], options)
    assert any(gradient[:, 0].isnan().any() for gradient in gradients)
    assert all(gradient[:, 1].isfinite().all() for gradient in gradients)

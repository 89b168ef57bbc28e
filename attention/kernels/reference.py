"""Reference kernel: dense float64 scores per segment, to check other kernels. Any mask, head size
and device; slow."""

import torch
from torch import Tensor

from longctx.attention.kernels.contract import BackwardSizes, Gradients, KernelRequest, Options
from longctx.attention.segments import Segment, Segments, visible

SCORES = 6
"""Matrices of scores in float64 that backward has at once, with a soft cap."""


def refusal(request: KernelRequest) -> str | None:
    """Implements `contract`; never refuses."""
    return None


def workspace(sizes: BackwardSizes) -> int:
    """Implements `contract`: q, dout, dq, out and k, v, dk, dv per query head, and dense scores of
    the longest document."""
    matrices = 4 * (sizes.queries + sizes.keys) * sizes.request.head_dim
    return 8 * sizes.heads * (matrices + SCORES * sizes.queries * min(sizes.keys, sizes.longest))


def forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, options: Options
) -> tuple[Tensor, Tensor]:
    """Implements `contract`."""
    heads = q.shape[1]
    q64, k64, v64 = q.double(), _expand(k, heads), _expand(v, heads)
    out = q64.new_zeros(q.shape[0], heads, v.shape[2])
    lse = q64.new_full((q.shape[0], heads), float("-inf"))
    for segment in segments:
        rows, keys = segment.queries, segment.keys
        scores, _ = _scores(q64, k64, segment, options)
        total = scores.logsumexp(dim=-1)
        probabilities = (scores - _finite(total).unsqueeze(-1)).exp_()
        out[rows] = torch.einsum("hqk,khd->qhd", probabilities, v64[keys])
        lse[rows] = total.T
    dtype = torch.promote_types(q.dtype, torch.float32)
    return out.to(dtype), lse.to(dtype)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Segments,
    options: Options,
) -> Gradients:
    """Implements `contract`."""
    heads = q.shape[1]
    q64, k64, v64 = q.double(), _expand(k, heads), _expand(v, heads)
    dout64 = dout.double()
    delta = (dout64 * out.double()).sum(-1)
    dq, dk, dv = torch.zeros_like(q64), torch.zeros_like(k64), torch.zeros_like(v64)
    for segment in segments:
        rows, keys = segment.queries, segment.keys
        scores, slope = _scores(q64, k64, segment, options)
        total = lse[rows].double().T
        probabilities = (scores - _finite(total).unsqueeze(-1)).exp_()
        dv[keys] += torch.einsum("hqk,qhd->khd", probabilities, dout64[rows])
        dprobabilities = torch.einsum("qhd,khd->hqk", dout64[rows], v64[keys])
        dscores = probabilities * (dprobabilities - delta[rows].T.unsqueeze(-1)) * slope
        dq[rows] += torch.einsum("hqk,khd->qhd", dscores, k64[keys])
        dk[keys] += torch.einsum("hqk,qhd->khd", dscores, q64[rows])
    return dq.to(lse.dtype), _reduce(dk, k).to(lse.dtype), _reduce(dv, v).to(lse.dtype)


def _scores(
    q: Tensor, k: Tensor, segment: Segment, options: Options
) -> tuple[Tensor, Tensor | float]:
    """Returns masked scores [heads, queries, keys] and their derivative by q·k; k is already
    expanded to all heads."""
    scale, softcap = options.scale, options.softcap
    scores = torch.einsum("qhd,khd->hqk", q[segment.queries], k[segment.keys]) * scale
    slope: Tensor | float = scale
    if softcap:
        bent = torch.tanh(scores / softcap)
        scores, slope = softcap * bent, scale * (1 - bent * bent)
    return scores.masked_fill_(~visible(segment, q.device), float("-inf")), slope


def _finite(total: Tensor) -> Tensor:
    """Returns log-sum-exps with 0 for queries that see no key, whose scores are -inf; NaN stays
    NaN."""
    return total.masked_fill(total.isneginf(), 0.0)


def _expand(x: Tensor, heads: int) -> Tensor:
    return x.double().repeat_interleave(heads // x.shape[1], dim=1)


def _reduce(gradient: Tensor, like: Tensor) -> Tensor:
    """Sums over the query heads of each kv head: [T, heads, dim] → [T, kv_heads, dim]."""
    return gradient.view(gradient.shape[0], like.shape[1], -1, gradient.shape[2]).sum(2)

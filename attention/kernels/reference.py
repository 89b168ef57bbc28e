"""Reference kernel: dense scores per segment in float64, to check others by. Any mask, head size, device; slow and large."""

import torch

from longctx.attention.segments import Segment, Segments


def visible(segment: Segment, device: torch.device) -> torch.Tensor:
    """Boolean [queries, keys]: which keys of the segment each of its queries sees."""
    queries = torch.arange(segment.q_stop - segment.q_start, device=device).unsqueeze(1)
    keys = torch.arange(segment.k_stop - segment.k_start, device=device).unsqueeze(0)
    mask = torch.ones(queries.shape[0], keys.shape[1], dtype=torch.bool, device=device)
    if segment.lo is not None:
        mask &= keys - queries >= segment.lo
    if segment.hi is not None:
        mask &= keys - queries <= segment.hi
    return mask


def _scores(q: torch.Tensor, k: torch.Tensor, segment: Segment, scale: float) -> torch.Tensor:
    """Masked scores [heads, queries, keys] in float64; k already repeated to all heads."""
    rows, keys = slice(segment.q_start, segment.q_stop), slice(segment.k_start, segment.k_stop)
    scores = torch.einsum("qhd,khd->hqk", q[rows], k[keys]) * scale
    return scores.masked_fill_(~visible(segment, q.device), float("-inf"))


def _expand(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.double().repeat_interleave(heads // x.shape[1], dim=1)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `longctx.attention.kernels`."""
    heads = q.shape[1]
    q64, k64, v64 = q.double(), _expand(k, heads), _expand(v, heads)
    out = q64.new_zeros(q.shape[0], heads, v.shape[2])
    lse = q64.new_full((q.shape[0], heads), float("-inf"))
    for segment in segments:
        rows, keys = slice(segment.q_start, segment.q_stop), slice(segment.k_start, segment.k_stop)
        scores = _scores(q64, k64, segment, scale)
        total = scores.logsumexp(dim=-1)
        probabilities = (scores - total.unsqueeze(-1)).exp_().nan_to_num_(nan=0.0)
        out[rows] = torch.einsum("hqk,khd->qhd", probabilities, v64[keys])
        lse[rows] = total.T
    return out.to(q.dtype), lse if q.dtype == torch.float64 else lse.float()


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    segments: Segments,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `longctx.attention.kernels`."""
    heads = q.shape[1]
    q64, k64, v64 = q.double(), _expand(k, heads), _expand(v, heads)
    dout64 = dout.double()
    delta = (dout64 * out.double()).sum(-1)
    dq, dk, dv = torch.zeros_like(q64), torch.zeros_like(k64), torch.zeros_like(v64)
    for segment in segments:
        rows, keys = slice(segment.q_start, segment.q_stop), slice(segment.k_start, segment.k_stop)
        probabilities = (_scores(q64, k64, segment, scale) - lse[rows].double().T.unsqueeze(-1)).exp_().nan_to_num_(nan=0.0)
        dv[keys] += torch.einsum("hqk,qhd->khd", probabilities, dout64[rows])
        dprobabilities = torch.einsum("qhd,khd->hqk", dout64[rows], v64[keys])
        dscores = probabilities * (dprobabilities - delta[rows].T.unsqueeze(-1)) * scale
        dq[rows] += torch.einsum("hqk,khd->qhd", dscores, k64[keys])
        dk[keys] += torch.einsum("hqk,qhd->khd", dscores, q64[rows])
    return dq.to(q.dtype), _reduce(dk, k).to(k.dtype), _reduce(dv, v).to(v.dtype)


def _reduce(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Sums the query heads that shared a kv head: [T, heads, dim] → [T, kv_heads, dim]."""
    return gradient.view(gradient.shape[0], like.shape[1], -1, gradient.shape[2]).sum(2)

"""CPU kernel: torch's fused attention for the CPU, one call per segment. It returns and accepts log-sum-exps and knows GQA.

The op's causal mask is top-left aligned and the op ends the process on empty keys, so only equal lengths are given as causal
and empty segments are dropped.
"""

import torch

from longctx.attention.segments import Segment, Segments
from longctx.errors import UserError

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `longctx.attention.kernels`."""
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = q.new_full(q.shape[:2], float("-inf"), dtype=lse_dtype)
    for segment in segments:
        rows, keys = _slices(segment)
        if rows is None:
            continue
        part, part_lse = _forward(_heads(q[rows]), _heads(k[keys]), _heads(v[keys]), 0.0, _is_causal(segment), scale=scale)
        out[rows] = part[0].transpose(0, 1)
        lse[rows] = part_lse[0].transpose(0, 1)
    return out, lse


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
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for segment in segments:
        rows, keys = _slices(segment)
        if rows is None:
            continue
        gradients = _backward(
            _heads(dout[rows]),
            _heads(q[rows]),
            _heads(k[keys]),
            _heads(v[keys]),
            _heads(out[rows]),
            lse[rows].transpose(0, 1).unsqueeze(0).contiguous(),
            0.0,
            _is_causal(segment),
            scale=scale,
        )
        for total, part, where in zip((dq, dk, dv), gradients, (rows, keys, keys), strict=True):
            total[where] += part[0].transpose(0, 1)
    return dq, dk, dv


def _slices(segment: Segment) -> tuple[slice, slice] | tuple[None, None]:
    if segment.q_start == segment.q_stop or segment.k_start == segment.k_stop:
        return None, None
    return slice(segment.q_start, segment.q_stop), slice(segment.k_start, segment.k_stop)


def _is_causal(segment: Segment) -> bool:
    if not segment.dense and not segment.causal:
        raise UserError(f"kernel cpu takes dense and plain causal segments, not the band of {segment}: use kernel=reference")
    return segment.causal and not segment.dense


def _heads(x: torch.Tensor) -> torch.Tensor:
    """[T, heads, dim] → [1, heads, T, dim], a view."""
    return x.transpose(0, 1).unsqueeze(0)

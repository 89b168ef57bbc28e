"""CPU kernel: torch's fused CPU attention, one call per segment. It returns and accepts log-sum-exp
and supports GQA.

The op's causal mask is aligned to the top left, and the op crashes on empty keys: only segments
with equal numbers of queries and keys are passed as causal, and empty segments are dropped. The op
does not support bands: a banded segment is cut into blocks of queries, each with a mask and the
keys that its queries see. Of NaN in queries and keys the op makes rows of zeros (pytorch 141128),
as if a query saw nothing: such calls are computed by the reference kernel, and stay NaN.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from longctx.attention.kernels import reference
from longctx.attention.kernels.contract import BackwardSizes, Gradients, KernelRequest, Options
from longctx.attention.segments import Segments, visible

BLOCK = 256
"""Number of queries per block of a banded segment."""

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def refusal(request: KernelRequest) -> str | None:
    """Implements `contract`."""
    if request.device != "cpu":
        return f"runs on the CPU, not on {request.device}"
    if request.head_dim != request.v_head_dim:
        return f"needs equal head sizes of k and v, not {request.head_dim} and {request.v_head_dim}"
    return "does not support a soft cap" if request.softcap else None


def workspace(sizes: BackwardSizes) -> int:
    """Implements `contract`: it runs on no GPU."""
    return 0


def forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, options: Options
) -> tuple[Tensor, Tensor]:
    """Implements `contract`."""
    if _has_nan(q) or _has_nan(k):
        exact, lse = reference.forward(q, k, v, segments, options=options)
        return exact.to(q.dtype), lse
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_full(q.shape[:2], float("-inf"), dtype=lse_dtype)
    for rows, keys, causal, mask in _blocks(segments, q):
        part, part_lse = _forward(
            _heads(q[rows]),
            _heads(k[keys]),
            _heads(v[keys]),
            dropout_p=0.0,
            is_causal=causal,
            attn_mask=mask,
            scale=options.scale,
        )
        out[rows] = part[0].transpose(0, 1)
        lse[rows] = part_lse[0].transpose(0, 1)
    return out, lse


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
    if _has_nan(lse):
        return reference.backward(
            dout, q, k, v, out=out, lse=lse, segments=segments, options=options
        )
    dq = torch.zeros_like(q)
    # Several blocks may add to a key.
    dk = torch.zeros_like(k, dtype=lse.dtype)
    dv = torch.zeros_like(v, dtype=lse.dtype)
    for rows, keys, causal, mask in _blocks(segments, q):
        part_dq, part_dk, part_dv = _backward(
            _heads(dout[rows]),
            _heads(q[rows]),
            _heads(k[keys]),
            _heads(v[keys]),
            _heads(out[rows]),
            lse[rows].transpose(0, 1).unsqueeze(0).contiguous(),
            dropout_p=0.0,
            is_causal=causal,
            attn_mask=mask,
            scale=options.scale,
        )
        dq[rows] += part_dq[0].transpose(0, 1)
        dk[keys] += part_dk[0].transpose(0, 1)
        dv[keys] += part_dv[0].transpose(0, 1)
    return dq, dk, dv


def _blocks(segments: Segments, like: Tensor) -> Iterator[tuple[slice, slice, bool, Tensor | None]]:
    """Yields queries, keys, whether the call is causal, and an additive mask or None, for every
    call of the op."""
    for segment in segments:
        if segment.empty:
            continue
        if segment.dense or segment.causal:
            yield segment.queries, segment.keys, not segment.dense, None
            continue
        for start in range(segment.q_start, segment.q_stop, BLOCK):
            block = segment.cut((start, start + BLOCK), (segment.k_start, segment.k_stop))
            mask = None
            if not block.dense:
                mask = torch.where(visible(block, like.device), 0.0, float("-inf")).to(like.dtype)
            yield block.queries, block.keys, False, mask


def _has_nan(x: Tensor) -> bool:
    """Returns whether a tensor has NaN, or infinities of both signs."""
    return bool(x.sum(dtype=torch.float32).isnan())


def _heads(x: Tensor) -> Tensor:
    """Returns a view [1, heads, T, dim] of [T, heads, dim]."""
    return x.transpose(0, 1).unsqueeze(0)

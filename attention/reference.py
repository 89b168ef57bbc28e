"""Single-process attention over packed documents: the reference for ring attention, forward and
gradients."""

from collections.abc import Sequence

import torch
from torch import Tensor

from longctx.attention.masks import CAUSAL, Mask


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    scale: float | None = None,
    *,
    mask: Mask = CAUSAL,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Computes attention within each document, dense and in the dtype of q (float64 for a
    reference).

    Args:
        q, k, v: [T, heads, dim], [T, kv_heads, dim] and [T, kv_heads, v_dim]; rows hold documents
            of `lengths` in order, then optional padding.
        lengths: tokens of each document.
        scale, mask, softcap, sink_logits: as in `ring_attention`.

    Returns [T, heads, v_dim]; padding rows are 0. Differentiable by autograd; memory is O(length²).
    """
    group = q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    outs, start = [], 0
    for document, length in enumerate(lengths):
        rows = slice(start, start + length)
        keys, values = (
            k[rows].repeat_interleave(group, dim=1),
            v[rows].repeat_interleave(group, dim=1),
        )
        scores = torch.einsum("qhd,khd->hqk", q[rows], keys) * scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        scores = scores.masked_fill(~mask.visible(document, length, q.device), float("-inf"))
        if sink_logits is not None:
            scores = torch.cat(
                [scores, sink_logits.to(scores.dtype)[:, None, None].expand(-1, length, 1)], dim=-1
            )
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1)[..., :length], values))
        start += length
    return torch.cat([*outs, q.new_zeros(q.shape[0] - start, q.shape[1], v.shape[2])])

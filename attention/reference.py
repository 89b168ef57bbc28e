"""Single-process attention over packed documents: what ring attention must equal, forward and gradients."""

from collections.abc import Sequence

import torch

from longctx.attention.segments import packed_causal


def reference_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], scale: float | None = None
) -> torch.Tensor:
    """Causal attention of each document to itself, dense and in the dtype given (float64 for a reference).

    q [T, heads, dim], k [T, kv_heads, dim], v [T, kv_heads, v_dim] with documents of `lengths` one after the other, and perhaps
    padding behind them, whose output is 0. Returns [T, heads, v_dim]. Differentiable by plain autograd, memory O(length²).
    """
    group = q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    outs = []
    for segment in packed_causal(lengths):
        rows = slice(segment.q_start, segment.q_stop)
        keys, values = k[rows].repeat_interleave(group, dim=1), v[rows].repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q[rows], keys) * scale
        future = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu_(1)
        probabilities = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        outs.append(torch.einsum("hqk,khd->qhd", probabilities, values))
    padding = q.shape[0] - sum(lengths)
    return torch.cat([*outs, q.new_zeros(padding, q.shape[1], v.shape[2])])

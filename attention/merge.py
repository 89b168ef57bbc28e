"""Merging of partial attention outputs by their log-sum-exp, in place and in float32 (FlashAttention-2, §3.1)."""

import torch

from longctx.attention.segments import Segments


def merge_(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor, segments: Segments) -> None:
    """Adds a partial result to the running one, for the queries that `segments` cover.

    out [T, heads, v_dim] and lse [T, heads] are the running result in the accumulation dtype, changed in place; part and
    part_lse have the same shapes. Every covered query must have seen a key in both, so no -inf meets another.
    """
    for segment in segments:
        rows = slice(segment.q_start, segment.q_stop)
        total = torch.logaddexp(lse[rows], part_lse[rows])
        keep, add = (lse[rows] - total).exp_(), (part_lse[rows] - total).exp_()
        out[rows].mul_(keep.unsqueeze(-1)).addcmul_(part[rows].to(out.dtype), add.unsqueeze(-1))
        lse[rows] = total

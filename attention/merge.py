"""Merging of partial attention outputs by their log-sum-exp, in place and in float32 (FlashAttention-2, §3.1).

On a GPU with Triton one launch merges all segments: it moves 10 bytes for every number of a bfloat16 part, where the plain
version moves 26 in several launches for each segment. That is why it is taken without having been timed.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

from longctx.attention.kernels.triton import device_tiles
from longctx.attention.segments import Segments

ROWS = 32
"""Rows of a head that a program of the fused version merges."""


def merge_(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor, segments: Segments) -> None:
    """Adds a partial result to the running one, for the queries that `segments` cover.

    out [T, heads, v_dim] and lse [T, heads] are the running result in the accumulation dtype, changed in place; part and
    part_lse have the same shapes. In the part every covered query has seen a key, so no -inf meets another.
    """
    fused = out.is_cuda and out.dtype == torch.float32 and _has_triton()
    (merge_fused_ if fused else merge_plain_)(out, lse, part, part_lse, segments)


def merge_plain_(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor, segments: Segments) -> None:
    """`merge_` in PyTorch's operations, for any device and dtype."""
    for segment in segments:
        rows = segment.queries
        total = torch.logaddexp(lse[rows], part_lse[rows])
        keep, add = (lse[rows] - total).exp_(), (part_lse[rows] - total).exp_()
        out[rows].mul_(keep.unsqueeze(-1)).addcmul_(part[rows].to(out.dtype), add.unsqueeze(-1))
        lse[rows] = total


def merge_fused_(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor, segments: Segments) -> None:
    """`merge_` as one launch of a Triton kernel; out and lse in float32, the last dimension of out and part contiguous."""
    tiles = device_tiles(segments, False, ROWS, ROWS, out.device)
    heads, dim = out.shape[1:]
    programs = tiles.table.shape[0] * heads
    if not programs:
        return
    part = part if part.stride(2) == 1 else part.contiguous()
    strides = (*out.stride()[:2], *lse.stride(), *part.stride()[:2], *part_lse.stride())
    block_dim = 1 << (dim - 1).bit_length()
    kernel = import_module("longctx.attention.merge_device").merge_kernel
    with torch.cuda.device_of(out):
        kernel[(programs,)](
            out, lse, part, part_lse, tiles.table, *strides, heads,
            DIM=dim, BLOCK_DIM=block_dim, BLOCK_ROWS=ROWS, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None

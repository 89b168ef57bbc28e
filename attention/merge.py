"""Merges partial attention outputs by log-sum-exp, in place and in float32 (FlashAttention-2,
§3.1).

On a GPU with Triton, one launch merges all segments and moves 10 bytes per element of a bfloat16
part; the plain version moves 26 in several launches per segment. The choice rests on these counts,
not on timings.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from longctx.attention.kernels.triton import device_tiles
from longctx.attention.segments import Segments

ROWS = 32
"""Rows that each program of the fused version merges, per head."""


def merge_(
    out: Tensor,
    lse: Tensor,
    part: Tensor,
    part_lse: Tensor,
    segments: Segments,
) -> None:
    """Merges a partial result into the running result for the queries in `segments`, in place.

    out [T, heads, v_dim] and lse [T, heads] are the running result in the accumulation dtype; part
    and part_lse have the same shapes. Every query in `segments` has seen a key in the partial
    result, so two values of -inf never meet.
    """
    fused = out.is_cuda and out.dtype == torch.float32 and _has_triton()
    merge = merge_fused_ if fused else merge_plain_
    merge(out, lse, part=part, part_lse=part_lse, segments=segments)


def merge_plain_(
    out: Tensor,
    lse: Tensor,
    part: Tensor,
    part_lse: Tensor,
    segments: Segments,
) -> None:
    """Implements `merge_` with PyTorch operations, for any device and dtype."""
    for segment in segments:
        rows = segment.queries
        total = torch.logaddexp(lse[rows], part_lse[rows])
        keep = (lse[rows] - total).exp_()
        add = (part_lse[rows] - total).exp_()
        out[rows].mul_(keep.unsqueeze(-1)).addcmul_(part[rows].to(out.dtype), add.unsqueeze(-1))
        lse[rows] = total


def merge_fused_(
    out: Tensor,
    lse: Tensor,
    part: Tensor,
    part_lse: Tensor,
    segments: Segments,
) -> None:
    """Implements `merge_` as one Triton launch; out and lse must be float32, with contiguous last
    dimension of out."""
    tiles = device_tiles(segments, by_keys=False, rows=ROWS, columns=ROWS, device=out.device)
    heads, dim = out.shape[1:]
    programs = tiles.table.shape[0] * heads
    if not programs:
        return
    part = part if part.stride(2) == 1 else part.contiguous()
    strides = (*out.stride()[:2], *lse.stride(), *part.stride()[:2], *part_lse.stride())
    block_dim = 1 << (dim - 1).bit_length()
    kernel = import_module("longctx.attention.kernels.merge_device").merge_kernel
    with torch.cuda.device_of(out):
        kernel[(programs,)](
            out, lse, part, part_lse, tiles.table, *strides, heads,
            DIM=dim, BLOCK_DIM=block_dim, BLOCK_ROWS=ROWS, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None

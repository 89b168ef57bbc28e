"""Triton kernel for merging: all segments and heads in one launch, each element read once and
written once."""

import triton
import triton.language as tl

TILE_FIELDS = tl.constexpr(8)


@triton.jit
def merge_kernel(
    out, lse, part, part_lse, tiles,
    out_row, out_head, lse_row, lse_head, part_row, part_head, part_lse_row, part_lse_head, heads,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """Merges the rows of one tile (`longctx.attention.kernels.triton_device`) of one head. Grid:
    tiles · heads."""
    head = tl.cast(tl.program_id(0) % heads, tl.int64)
    tile = tiles + tl.program_id(0) // heads * TILE_FIELDS
    first, stop = tl.load(tile), tl.load(tile + 1)
    rows = first.to(tl.int64) + tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_DIM)
    inside = rows < stop
    lse_pointers = lse + rows * lse_row + head * lse_head
    ours = tl.load(lse_pointers, mask=inside, other=0.0)
    theirs = tl.load(part_lse + rows * part_lse_row + head * part_lse_head, mask=inside, other=0.0)
    top = tl.maximum(ours, theirs)
    total = top + tl.log(tl.exp(ours - top) + tl.exp(theirs - top))
    tl.store(lse_pointers, total, mask=inside)

    keep = inside[:, None] & (dims[None, :] < DIM)
    out_pointers = out + rows[:, None] * out_row + head * out_head + dims[None, :]
    mine = tl.load(out_pointers, mask=keep, other=0.0)
    other = tl.load(
        part + rows[:, None] * part_row + head * part_head + dims[None, :], mask=keep, other=0.0
    ).to(tl.float32)
    merged = mine * tl.exp(ours - total)[:, None] + other * tl.exp(theirs - total)[:, None]
    tl.store(out_pointers, merged, mask=keep)

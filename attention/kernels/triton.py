"""Triton kernel: attention for GPUs with any head size up to 256, any band and soft caps, one
launch for all segments.

This is the host side; it imports Triton only when used. It cuts segments into tiles and copies
their table to the device, longest first, so that short and long documents of one call fill the GPU
evenly. The device code is in `longctx.attention.kernels.triton_device`. Results are bitwise
reproducible: backward computes the scores twice, for dQ and for dK and dV, which takes 7 block
products instead of 5 but needs neither atomics nor dK and dV per query head.

For tests without a GPU, `forward` and `backward` also run under Triton's interpreter (set
TRITON_INTERPRET=1 before Triton is imported). It is very slow, and computes bfloat16 in float32, as
it cannot multiply bfloat16.
"""

from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx.attention.host_to_device import copy_to
from longctx.attention.kernels.contract import BackwardSizes, Gradients, KernelRequest, Options
from longctx.attention.segments import Segment, Segments
from longctx.errors import UserError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_HEAD = 256

_LOG2_E = 1.4426950408889634
_UNLIMITED = 1 << 30


class Blocks(NamedTuple):
    """Rows and columns of the score blocks of a program, and Triton's compile options for its
    loops."""

    rows: int
    columns: int
    warps: int
    stages: int

    def sides(self, program: str) -> dict[str, int]:
        """Returns the block sizes as constants of `program`; rows are queries, but keys in dkv."""
        queries, keys = (self.columns, self.rows) if program == "dkv" else (self.rows, self.columns)
        return {"BLOCK_Q": queries, "BLOCK_K": keys}

    @property
    def options(self) -> dict[str, Any]:
        """Options of Triton's compiler."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


ROOMY = 227 << 10
"""Shared memory in bytes per program on Hopper and data-center Blackwell."""

BLOCKS = {
    ("forward", 64): Blocks(128, 64, 8, 3),
    ("forward", 128): Blocks(128, 64, 8, 3),
    ("forward", 256): Blocks(128, 32, 8, 3),
    ("dq", 64): Blocks(128, 64, 8, 3),
    ("dq", 128): Blocks(128, 64, 8, 3),
    ("dq", 256): Blocks(128, 32, 8, 2),
    ("dkv", 64): Blocks(128, 64, 8, 3),
    ("dkv", 128): Blocks(128, 32, 8, 3),
    ("dkv", 256): Blocks(32, 32, 8, 2),
}
"""Blocks for bfloat16 and float16 on GPUs with at least ROOMY shared memory, by program and head
size rounded up.

Chosen by Triton's resource usage for Hopper and Blackwell (`tests/triton_resources.py`), not by
timing: the largest blocks whose accumulators stay in registers on both, with as many stages as
shared memory holds. They are fixed because autotuning would break reproducibility.
"""

_fewer_stages: dict[tuple[Any, ...], int] = {}
"""Stages of programs that need more shared memory with another version of Triton than with the one
that chose their blocks."""

SMALL_BLOCKS = {64: Blocks(64, 32, 4, 2), 128: Blocks(64, 32, 4, 1), 256: Blocks(32, 32, 4, 1)}
"""Blocks for other GPUs, by head size, for all programs: they fit in 99 KiB."""

FLOAT32_BLOCKS = Blocks(32, 16, 4, 1)
INTERPRETED_BLOCKS = Blocks(32, 16, 1, 1)
"""Small, so that small tests cover blocks of every kind."""


def refusal(request: KernelRequest) -> str | None:
    """Implements `contract`."""
    if find_spec("triton") is None:
        return "needs Triton: pip install triton (it comes with PyTorch's builds for CUDA)"
    if request.device != "cuda":
        return f"runs on GPUs, not on {request.device}"
    if request.dtype not in DTYPES:
        return f"computes in bfloat16, float16 and float32, not in {request.dtype}"
    if max(request.head_dim, request.v_head_dim) > LARGEST_HEAD:
        return (
            f"supports head sizes up to {LARGEST_HEAD}, not {request.head_dim} and "
            f"{request.v_head_dim}"
        )
    return None


def workspace(sizes: BackwardSizes) -> int:
    """Implements `contract`: the `statistics` of backward."""
    return 2 * 4 * sizes.queries * sizes.heads


def forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, options: Options
) -> tuple[Tensor, Tensor]:
    """Implements `contract`."""
    run = _KernelLaunch(q, k, v, segments, options=options)
    q_, k_, v_ = (run.readable(x) for x in (q, k, v))
    out = q_.new_empty(q.shape[0], q.shape[1], v.shape[2])
    lse = out.new_empty(out.shape[:2], dtype=torch.float32)
    tiles = run.tiles("forward")
    if tiles.rows < q.shape[0]:
        out.zero_()
        lse.fill_(float("-inf"))
    strides = (*q_.stride()[:2], *k_.stride()[:2], *v_.stride()[:2])
    run.launch(
        "forward",
        tiles,
        q.shape[1],
        (q_, k_, v_, out, lse, tiles.table, *strides, *run.heads, *run.scores),
    )
    return out.to(q.dtype), lse


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
    run = _KernelLaunch(q, k, v, segments, options=options)
    dout_, q_, k_, v_, out_ = (run.readable(x) for x in (dout, q, k, v, out))
    dq, dk, dv = q_.new_empty(q.shape), k_.new_empty(k.shape), v_.new_empty(v.shape)
    statistics = lse.new_empty(2, q.shape[1], q.shape[0])
    queries, keys = run.tiles("dq"), run.tiles("dkv")
    if queries.rows < q.shape[0]:
        dq.zero_()
    if keys.rows < k.shape[0]:
        dk.zero_()
        dv.zero_()
    strides = tuple(stride for x in (dout_, q_, k_, v_) for stride in x.stride()[:2])
    sizes = (q.shape[0], *run.heads, options.scale, *run.scores)
    more = (*strides, *out_.stride()[:2], *lse.stride(), *sizes)
    run.launch(
        "dq",
        queries,
        q.shape[1],
        (dout_, q_, k_, v_, out_, lse, dq, statistics, queries.table, *more),
    )
    run.launch(
        "dkv",
        keys,
        k.shape[1],
        (dout_, q_, k_, v_, dk, dv, statistics, keys.table, *strides, *sizes),
    )
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class Tiles(NamedTuple):
    """The programs of a launch: their table on the device, one row per program, and the number of
    tensor rows covered."""

    table: Tensor
    rows: int


class _KernelLaunch:
    """State shared by the launches of one call."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, options: Options
    ) -> None:
        scale, softcap = options.scale, options.softcap
        if scale <= 0:
            raise UserError(
                f"scale is {scale}: kernel triton needs a positive scale; negate q instead"
            )
        self.device_code = import_module("longctx.attention.kernels.triton_device")
        self.interpreted = not isinstance(
            self.device_code.forward_kernel, self.device_code.triton.JITFunction
        )
        self.device = q.device
        self.segments = tuple(segments)
        self.heads = (q.shape[1], q.shape[1] // k.shape[1])
        self.scores = (scale / softcap, softcap * _LOG2_E) if softcap else (scale * _LOG2_E, 0.0)
        self.element_size = q.element_size()
        self.widest = max(q.shape[2], v.shape[2])
        self.constants = constants(q.shape[2], v.shape[2], q.dtype, softcap != 0)

    def readable(self, x: Tensor) -> Tensor:
        """Returns `x` if the kernels can read it directly (contiguous last dimension), else a
        copy."""
        if self.interpreted and x.dtype == torch.bfloat16:
            x = x.float()
        return x if x.stride(2) == 1 else x.contiguous()

    def blocks(self, program: str) -> Blocks:
        if self.interpreted:
            return INTERPRETED_BLOCKS
        shared_memory = torch.cuda.get_device_properties(self.device).shared_memory_per_block_optin  # type: ignore[attr-defined]  # torch's stubs lack it
        return choose_blocks(program, self.element_size, self.widest, shared_memory)

    def tiles(self, program: str) -> Tiles:
        blocks = self.blocks(program)
        return device_tiles(
            self.segments,
            by_keys=program == "dkv",
            rows=blocks.rows,
            columns=blocks.columns,
            device=self.device,
        )

    def launch(self, program: str, tiles: Tiles, heads: int, arguments: tuple[Any, ...]) -> None:
        programs = tiles.table.shape[0] * heads
        if not programs:
            return
        blocks = self.blocks(program)
        key = program, self.element_size, *self.constants.values()
        kernel = getattr(self.device_code, f"{program}_kernel")
        with torch.cuda.device_of(arguments[0]):
            while True:
                blocks = blocks._replace(stages=_fewer_stages.get(key, blocks.stages))
                try:
                    kernel[(programs,)](
                        *arguments, **self.constants, **blocks.sides(program), **blocks.options
                    )
                    return
                except self.device_code.triton.OutOfResources:
                    if blocks.stages == 1:
                        raise
                    _fewer_stages[key] = blocks.stages - 1


def choose_blocks(program: str, element_size: int, widest: int, shared_memory: int) -> Blocks:
    """Chooses blocks for head sizes up to `widest`, elements of `element_size` bytes and
    `shared_memory` bytes per program."""
    if element_size == 4:
        return FLOAT32_BLOCKS
    width = max(64, _power_of_two(widest))
    return BLOCKS[program, width] if shared_memory >= ROOMY else SMALL_BLOCKS[width]


def constants(dim: int, v_dim: int, dtype: torch.dtype, capped: bool) -> dict[str, Any]:
    """Returns the compile-time constants of every program.

    float32 products use three TensorFloat-32 products, which is almost exact; for the largest heads
    they do not fit.
    """
    precise = "ieee" if max(dim, v_dim) > 128 else "tf32x3"
    return {
        "DIM": dim,
        "V_DIM": v_dim,
        "BLOCK_DIM": _power_of_two(dim),
        "BLOCK_V_DIM": _power_of_two(v_dim),
        "CAPPED": capped,
        "PRECISION": precise if dtype == torch.float32 else "tf32",
    }


def _power_of_two(size: int) -> int:
    """Returns the smallest power of two ≥ `size` that Triton can multiply."""
    return max(16, 1 << (size - 1).bit_length())


def device_tiles(
    segments: Segments, by_keys: bool, rows: int, columns: int, device: torch.device
) -> Tiles:
    """Returns the tiles of `segments` on `device` (see `tile_table`); cached, as all layers of a
    micro-batch share them."""
    # A table is copied and read on the same stream, so no stream reads it too early.
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
    return _kept_tiles(
        tuple(segments), by_keys, rows=rows, columns=columns, device=device, stream=stream
    )


@lru_cache(maxsize=256)
def _kept_tiles(
    segments: tuple[Segment, ...],
    by_keys: bool,
    rows: int,
    columns: int,
    device: torch.device,
    stream: int | None,
) -> Tiles:
    """Builds and caches tiles per `stream`, which copies the table."""
    table, covered = tile_table(segments, by_keys, rows, columns)
    return Tiles(copy_to(table, device), covered)


def tile_table(
    segments: Segments, by_keys: bool, block_rows: int, block_columns: int
) -> tuple[Tensor, int]:
    """Cuts the queries of every segment, or with `by_keys` its keys, into blocks of rows.

    Returns the table described in `triton_device`, int32 [tiles, 8], tiles with the most work
    first, and the number of tensor rows covered. Empty segments have no tiles.
    """
    parts = []
    for segment in segments:
        q_start, q_stop, k_start, k_stop, lo, hi = segment
        if q_start == q_stop or k_start == k_stop:
            continue
        # Converts distances key - query from segment to tensor coordinates.
        near = -_UNLIMITED if lo is None else lo + k_start - q_start
        far = _UNLIMITED if hi is None else hi + k_start - q_start
        if by_keys:
            parts.append((k_start, k_stop, q_start, q_stop, -far, -near))
        else:
            parts.append((q_start, q_stop, k_start, k_stop, near, far))
    fields = torch.tensor(parts, dtype=torch.int64).view(-1, 6).clamp(-_UNLIMITED, _UNLIMITED)
    counts = (fields[:, 1] - fields[:, 0] + block_rows - 1) // block_rows
    segment_of = torch.repeat_interleave(counts)
    number = torch.arange(len(segment_of)) - (counts.cumsum(0) - counts)[segment_of]
    start, stop, begin, end, least, most = fields[segment_of].unbind(1)
    row = start + number * block_rows
    row_stop = torch.minimum(row + block_rows, stop)
    column = torch.minimum(torch.maximum(row + least, begin), end)
    column_stop = torch.maximum(torch.minimum(row_stop + most, end), column)
    # Columns that all rows see, and the whole blocks within them, counted from `column`.
    seen = torch.maximum(row_stop - 1 + least, column)
    seen_stop = torch.minimum(row + most + 1, column_stop)
    before = (seen - column + block_columns - 1) // block_columns
    whole = ((seen_stop - column) // block_columns - before).clamp(min=0)
    full = torch.where(whole > 0, column + before * block_columns, column)
    full_stop = full + whole * block_columns
    table = torch.stack(
        [row, row_stop, column, column_stop, full, full_stop, least, most], dim=1
    ).int()
    longest_first = (column_stop - column).argsort(descending=True, stable=True)
    return table[longest_first].contiguous(), int((row_stop - row).sum())

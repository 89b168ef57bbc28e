"""Compilation before the first step: some kernels compile every variant when it is first called."""

from itertools import pairwise, product

import torch
from torch import Tensor

from longctx.attention.kernels import KernelRequest, choose_kernel
from longctx.attention.kernels.contract import Computes, Options
from longctx.attention.segments import Segment

LONG = 512
"""Queries and keys of several blocks. Flash-attn 4 has other variants for calls within one block of
queries or of keys."""
BLOCK_ROWS = 128
"""Rows that a block of queries always holds, which are queries times query heads of a key head;
Blackwell takes two blocks."""
MANY = 257
"""Sequences of a call for which flash-attn 4 has other variants."""
SEVERAL = 150
"""Sequences of a call that are more than half of a GPU's multiprocessors: other variants for large
heads on Blackwell."""


def compile_variants(
    kernel: str, request: KernelRequest, heads: tuple[int, int], *, window: bool
) -> None:
    """Runs a kernel on small random tensors in every way that a layer calls it, forward and
    backward, so that it compiles now.

    Args:
        kernel: name of the kernel, or auto.
        request: what the kernel must support.
        heads: heads of the queries and of the keys; kernels depend on their ratio.
        window: whether the layer has a window, for which causal and dense segments are limited to
            the left.
    """
    run_variants(choose_kernel(kernel, request), request, heads, window=window)


def run_variants(
    kernel: Computes, request: KernelRequest, heads: tuple[int, int], *, window: bool
) -> None:
    """Runs a kernel as `compile_variants` does."""
    q_heads, kv_heads = heads
    dim, v_dim = request.head_dim, request.v_head_dim
    softcap = 30.0 if request.softcap else 0.0
    options = Options(dim**-0.5, softcap, deterministic=request.deterministic)
    ratio = q_heads // kv_heads
    short, double = max(2, BLOCK_ROWS // max(2, ratio)), max(2, 2 * BLOCK_ROWS // ratio)

    def random(rows: int, heads: int, dim: int) -> Tensor:
        return torch.randn(rows, heads, dim, device=request.device).to(request.dtype)

    counts = [1, MANY]
    if dim > BLOCK_ROWS:
        counts.append(SEVERAL)
    for q_rows, k_rows, sequences in product((short, double, LONG), (short, LONG), counts):
        # Rows that are left are a sequence too, as they are in rings.
        longest = min(q_rows, k_rows)
        more = sequences - 1
        q = random(q_rows + more, q_heads, dim)
        k = random(k_rows + more, kv_heads, dim)
        v = random(k_rows + more, kv_heads, v_dim)
        dout = random(q_rows + more, q_heads, v_dim)
        edges = [0, *range(longest, longest + sequences)]
        for lo, hi in product((None, 1 - longest // 2) if window else (None,), (0, None)):
            segments = tuple(
                Segment(start, stop, start, stop, lo=lo, hi=hi) for start, stop in pairwise(edges)
            )
            out, lse = kernel.forward(q, k, v, segments, options)
            kernel.backward(dout, q, k, v, out, lse, segments, options)

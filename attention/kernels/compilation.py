"""Compilation before the first step: some kernels compile every variant when it is first called."""

import torch

from longctx.attention.kernels import Request, choose_kernel
from longctx.attention.kernels.contract import Mode
from longctx.attention.segments import Segment

TOKENS = 512
"""Queries and keys of a call: several blocks, as calls of a single block are other variants."""


def compile_variants(kernel: str, request: Request, heads: tuple[int, int], *, window: bool) -> None:
    """Runs a kernel on small random tensors in every way that a layer calls it, forward and backward, so that it compiles now.

    Args:
        kernel: name of the kernel, or auto.
        request: what the kernel must support.
        heads: heads of the queries and of the keys; kernels depend on their ratio.
        window: whether the layer has a window, for which causal and dense segments are limited to the left.
    """
    q_heads, kv_heads = heads
    dim, v_dim = request.head_dim, request.v_head_dim
    shapes = (q_heads, dim), (kv_heads, dim), (kv_heads, v_dim), (q_heads, v_dim)
    q, k, v, dout = (torch.randn(TOKENS, *shape, device=request.device).to(request.dtype) for shape in shapes)
    bands: list[tuple[int | None, int | None]] = [(None, 0), (None, None)]
    if window:
        bands += [(-TOKENS // 2, 0), (-TOKENS // 2, None)]
    chosen, mode = choose_kernel(kernel, request), Mode(request.deterministic)
    scale, softcap = dim**-0.5, 30.0 if request.softcap else 0.0
    for lo, hi in bands:
        segments = (Segment(0, TOKENS, 0, TOKENS, lo, hi),)
        out, lse = chosen.forward(q, k, v, segments, scale, softcap, mode)
        chosen.backward(dout, q, k, v, out, lse, segments, scale, softcap, mode)

"""Compiles the kernels of the real flash-attn 4 for a GPU that is not here, in a process of its own.

    python flash_4_kernels.py FOLDER ARCH LAYER SIZES OUT     # FOLDER: where pip put flash-attn 4

LAYER is `full` or `window`, SIZES are those of heads of k and of v, as in 192,128. Writes what it counted into OUT as JSON. The environment names the
folder with compiled kernels.
"""

import json
import random
import site
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from longctx.attention.kernels import ahead, flash_4
from longctx.attention.kernels.contract import KernelRequest, Options
from longctx.attention.segments import Segment

HEADS = 32, 8
CALLS = 700
SEQUENCES = [1, 2, 3, 8, 40, 100, 200, 250, 254, 255, 256, 257, 258, 300, 600]
SHORT = [1, 2, 3, 4, 7, 16, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129]
ROWS = [*SHORT, 200, 256, 257, 511, 512, 4096]
MORE_KEYS = [16384, 131072, 524288]
WINDOWS = [1, 100, 4096]


def random_segments(draw: random.Random, window: bool) -> tuple[tuple[Segment, ...], int, int]:
    """Draws the segments of a call, and its rows of queries and of keys: one long segment and
    others of two rows, with rows that are left."""
    queries = draw.choice(ROWS)
    keys = max(queries, draw.choice(ROWS + MORE_KEYS))
    others = draw.choice(SEQUENCES) - 1
    causal = draw.random() < 0.5
    q_edges = [0, queries, *range(queries + 2, queries + 2 + 2 * others, 2)]
    k_edges = [0, keys, *range(keys + 2, keys + 2 + 2 * others, 2)]
    found = []
    for (q_start, q_stop), (k_start, k_stop) in zip(
        pairwise(q_edges), pairwise(k_edges), strict=True
    ):
        shift = (k_stop - k_start) - (q_stop - q_start)
        segment = Segment(q_start, q_stop, k_start, k_stop)
        if causal:
            segment = segment._replace(hi=shift)
        if window:
            segment = segment._replace(lo=shift - draw.choice(WINDOWS))
        found.append(segment)
    left_over = draw.choice([0, 1, 50])
    return tuple(found), q_edges[-1] + left_over, k_edges[-1] + left_over


def call(draw: random.Random, window: bool, dim: int, v_dim: int) -> None:
    """Calls both passes on fake tensors, of K and V that are strided or not."""
    segments, q_rows, k_rows = random_segments(draw, window)
    kernel = ahead.Ahead()
    options = Options(dim**-0.5)
    heads, kv_heads = HEADS
    q = torch.empty(q_rows, heads, dim, dtype=torch.bfloat16, device="cuda")
    if draw.random() < 0.5:
        both = torch.empty(k_rows, kv_heads, dim + v_dim, dtype=torch.bfloat16, device="cuda")
        k, v = both.split([dim, v_dim], dim=2)
    else:
        k = torch.empty(k_rows, kv_heads, dim, dtype=torch.bfloat16, device="cuda")
        v = torch.empty(k_rows, kv_heads, v_dim, dtype=torch.bfloat16, device="cuda")
    out, lse = kernel.forward(q, k, v, segments, options)
    kernel.backward(torch.empty_like(out), q, k, v, out, lse, segments, options)


def main(folder: str, arch: str, layer: str, sizes: str, out: str) -> None:
    site.addsitedir(folder)
    sys.path.insert(0, folder)
    ahead.choose_target(ahead.TARGETS[arch])
    window = layer == "window"
    dim, v_dim = map(int, sizes.split(","))
    request = KernelRequest("cuda", torch.bfloat16, dim, v_dim, bands=window)
    assert flash_4.refusal(request, ahead.TARGETS[arch].capability) is None
    known = ahead.kept_kernels()
    started = time.process_time()
    ahead.compile_ahead(request, HEADS, window=window)
    found = {"compiled": ahead.kept_kernels() - known, "seconds": time.process_time() - started}
    before = ahead.kept_kernels()
    draw = random.Random(arch)
    with FakeTensorMode():
        for _ in range(CALLS):
            call(draw, window, dim, v_dim)
    found["by_random_calls"] = ahead.kept_kernels() - before
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Times one rank's part of a ring (ring index degree / 2), with random tensors instead of messages
of other ranks.

`calls`: only the kernel calls. `ring`: RingAttention as in training, with merging, selecting keys
and summing gradients, less the time of the copies that replace messages, so that `ring` - `calls`
is the cost of merging, selecting and summing. `single`: one call of the same kernel on as many
whole documents with equal work: length / √degree instead of length. Forward counts 4 FLOP per
visible pair, head and element of a head, backward 2.5 times as many. Memory-bound pieces of a step
are compared with a copy.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F

from harness import median_s, repeats
from longctx.attention import RingAttention
from longctx.attention.exchange import Exchange, Pending, Rows
from longctx.attention.kernels import KernelRequest, Options, choose_kernel
from longctx.attention.operator import begin, expansion_arguments
from longctx.attention.operator import forward as ring_forward
from longctx.attention.ring_pass import NO_LAYER
from longctx.attention.segments import Segment, Segments
from longctx.model.rope import Rope, rotate
from longctx.planning.layout import Layout, Placement

# Maximum received tokens per round; rings with more get several rounds.
MOST_REMOTE_TOKENS = 1 << 18
KINDS = [
    f"{direction}_{what}"
    for direction, what in product(("forward", "backward"), ("calls", "ring", "single"))
]
COLUMNS = [
    *(
        "kernel",
        "tokens",
        "degree",
        "documents",
        "rounds",
        "calls",
        "pairs",
        "single_pairs",
        "flop_a_pair",
    ),
    *(
        *KINDS,
        *(f"{kind}_tflops" for kind in KINDS),
        *(f"{kind}_share" for kind in KINDS),
        "failed",
    ),
]
"""Seconds of one rank's attention in one layer, throughput, and throughput relative to the single
call."""


@dataclass(frozen=True)
class Sizes:
    """Sizes to measure: tokens per rank, degrees, documents per rank; heads of an 8B model unless
    it is a smoke test.

    In the order of interest, as time may not suffice for all. Checked heads are as many for each
    key head as those timed, and a multiple of 16 too: kernels that compile by such properties do it
    once.
    """

    tokens: tuple[int, ...] = (8192, 1024, 32768, 4096, 2048, 16384)
    degrees: tuple[int, ...] = (1, 4, 16, 64, 2, 8, 32)
    documents: tuple[int, ...] = (1, 8)
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    checked_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
    checked_head_dims: tuple[int, ...] = (64, 128, 256)
    checked_heads: int = 16
    checked_lengths: tuple[int, ...] = (2500, 900, 513, 130, 1)
    checked_window: int = 100
    longest_s: float = 0.3

    def request(self, device: torch.device) -> KernelRequest:
        """Returns the request for kernels that are timed."""
        return KernelRequest(device.type, self.dtype, self.head_dim, self.head_dim)


FIRST = replace(
    Sizes(),
    tokens=(8192, 32768, 131072),
    degrees=(1, 4),
    documents=(1,),
    checked_dtypes=(torch.bfloat16,),
    checked_head_dims=(128,),
)
"""What first_contact.py measures."""
SMOKE = Sizes(
    tokens=(64, 128),
    degrees=(1, 2, 4),
    documents=(1, 4),
    heads=4,
    kv_heads=2,
    head_dim=16,
    dtype=torch.float32,
    checked_dtypes=(torch.float32,),
    checked_head_dims=(16,),
    checked_heads=4,
    checked_lengths=(90, 33, 17, 5, 1),
    checked_window=12,
    longest_s=0.005,
)
# Sizes that flash attention libraries support.
GPU_SMOKE = replace(
    SMOKE,
    head_dim=64,
    dtype=torch.bfloat16,
    checked_dtypes=(torch.bfloat16,),
    checked_head_dims=(64, 128),
)


def measure_cell(cell: dict[str, Any], sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Measures a row: seconds of forward and backward, and derived values."""
    name, tokens, degree, documents = cell.values()
    length, options = tokens * degree // documents, Options(sizes.head_dim**-0.5)
    rounds = math.ceil(tokens * (degree - 1) / MOST_REMOTE_TOKENS) or 1
    placements = [Placement(document, 0, degree, rounds=rounds) for document in range(documents)]
    # The layout gets rank 0, the rank of this process, but keeps its ring index.
    layout = replace(Layout.of(placements, [length] * documents, 0, degree // 2), rank=0)
    q, k, v, dout = random(layout.tokens, sizes, device)
    for x in (q, k, v):
        x.requires_grad_()
    ring = RingAttention(layout, kernel=name, device=device)
    hops = [hop for round_ in ring.schedule.rounds for hop in round_.hops]
    most = max((max(hop.received_rows, hop.sent_rows) for hop in hops), default=0)
    pool = torch.randn(most, sizes.kv_heads * 2 * sizes.head_dim, dtype=sizes.dtype, device=device)
    buffer, copied = torch.empty_like(pool), list[int]()
    ring.exchange = from_pool(pool, copied)

    def seconds(run: Callable[[], object]) -> float:
        return median_s(run, device, sizes.longest_s)

    def without_messages(run: Callable[[], object]) -> float:
        copied.clear()
        run()
        counts = list(copied)
        both = seconds(run)
        return both - (
            seconds(lambda: [buffer[:n].copy_(pool[:n]) for n in counts]) if counts else 0.0
        )

    out, row = ring(q, k, v), dict[str, Any]()
    row["forward_ring"] = without_messages(lambda: ring(q, k, v))
    row["backward_ring"] = without_messages(
        lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    )

    kernel = choose_kernel(name, sizes.request(device))
    with torch.no_grad():
        handles = {"attention_handle": ring.handle, "layer": NO_LAYER}
        ticket = begin(k, v, None, **handles)
        final, lse, _ = ring_forward(
            q, k, v, sink_logits=None, ticket=ticket, **expansion_arguments(None), **handles
        )
        calls: list[tuple[torch.Tensor, torch.Tensor, Segments]] = [
            (k, v, call.segments) for call in ring.schedule.local
        ]
        for call in (call for round_ in ring.schedule.rounds for call in round_.calls):
            keys = pool[: sum(s.k_stop - s.k_start for s in call.segments)].unflatten(
                1, (2 * sizes.kv_heads, sizes.head_dim)
            )
            calls.append((keys[:, : sizes.kv_heads], keys[:, sizes.kv_heads :], call.segments))
        row["forward_calls"] = seconds(
            lambda: [kernel.forward(q, *part, options) for part in calls]
        )
        row["backward_calls"] = seconds(
            lambda: [
                kernel.backward(dout, q, a, b, final, lse, segments, options)
                for a, b, segments in calls
            ]
        )

        each = round(length / degree**0.5)
        single = [
            Segment(i * each, (i + 1) * each, i * each, (i + 1) * each, hi=0)
            for i in range(documents)
        ]
        q, k, v, dout = random(single[-1].q_stop, sizes, device)
        row["forward_single"] = seconds(lambda: kernel.forward(q, k, v, single, options))
        final, lse = kernel.forward(q, k, v, single, options)
        row["backward_single"] = seconds(
            lambda: kernel.backward(dout, q, k, v, final, lse, single, options)
        )
    # Of forward.
    row |= {"rounds": rounds, "calls": len(calls), "flop_a_pair": 4 * sizes.heads * sizes.head_dim}
    row["pairs"] = sum(pairs(segment) for *_, segments in calls for segment in segments)
    row["single_pairs"] = sum(map(pairs, single))
    for kind in KINDS:
        flop = row["flop_a_pair"] * row["single_pairs" if kind.endswith("single") else "pairs"]
        row[f"{kind}_tflops"] = flop * (1 if kind.startswith("forward") else 2.5) / row[kind] / 1e12
    for kind in KINDS:
        row[f"{kind}_share"] = (
            row[f"{kind}_tflops"] / row[f"{kind.partition('_')[0]}_single_tflops"]
        )
    return cell | row


def needed_s(cell: dict[str, Any], rows: Sequence[dict[str, str]], sizes: Sizes) -> float:
    """Returns the seconds that a row is expected to take, from the last of `rows`; 0 without
    any."""
    if not rows:
        return 0.0
    more = _work(cell) / _work(rows[-1])
    once = [float(rows[-1][kind]) * more for kind in KINDS]
    return sum(each * (2 + repeats(each, sizes.longest_s)) for each in once)


def _work(cell: dict[str, Any]) -> float:
    tokens, degree, documents = (int(cell[name]) for name in ("tokens", "degree", "documents"))
    return tokens**2 * degree / documents


def from_pool(pool: torch.Tensor, copied: list[int]) -> type[Exchange]:
    """Makes an exchange that receives the first rows of `pool`, and appends the number of rows to
    `copied`."""

    class Pool(Exchange):
        def start(self, outgoing: object, incoming: torch.Tensor, rows: Rows) -> Pending:
            copied.append(len(incoming))
            return Pending(self, [], incoming.copy_(pool[: len(incoming)]), [], [])

    return Pool


def random(tokens: int, sizes: Sizes, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Returns random q, k, v, dout [tokens, heads, head_dim]."""
    heads = sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads
    return tuple(
        torch.randn(tokens, count, sizes.head_dim, dtype=sizes.dtype, device=device)
        for count in heads
    )


def pairs(segment: Segment) -> int:
    """Returns the number of visible pairs of query and key, without windows; the last query sees
    all keys."""
    queries, keys = segment.q_stop - segment.q_start, segment.k_stop - segment.k_start
    # From the first query; one fewer from every other.
    hidden = 0 if segment.hi is None else keys - 1 - segment.hi
    return queries * keys - hidden * (hidden + 1) // 2


def pieces(sizes: Sizes, device: torch.device) -> dict[str, tuple[Callable[[], object], int]]:
    """Returns memory-bound pieces of a step, a copy first, with their bytes: every tensor read or
    written counts once."""
    tokens, width = max(sizes.tokens), sizes.heads * sizes.head_dim
    x, y = (
        torch.randn(tokens, sizes.heads, sizes.head_dim, dtype=sizes.dtype, device=device)
        for _ in range(2)
    )
    cos, sin = Rope(sizes.head_dim, 10000.0).tables(torch.arange(tokens, device=device))
    flat, weight = x.flatten(1), torch.ones(width, dtype=sizes.dtype, device=device)
    return {
        "copy": (lambda: y.copy_(x), 2 * x.nbytes),
        "rotary embedding": (lambda: rotate(x, cos, sin), 2 * x.nbytes + 2 * cos.nbytes),
        "RMSNorm": (lambda: F.rms_norm(flat, (width,), weight), 2 * x.nbytes),
        "SwiGLU": (lambda: F.silu(x) * y, 3 * x.nbytes),
    }

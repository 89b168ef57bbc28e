"""Attention on one GPU: is every kernel right, how fast is one rank's part of a ring, and what does it lose to one plain call.

    python bench/attention_gpu.py                # everything, in about 25 minutes at most
    python bench/attention_gpu.py --minutes 9    # what fits in so many: every kernel gets its share of them
    python bench/attention_gpu.py --quick        # fewer sizes
    python bench/attention_gpu.py --smoke        # tiny, on any machine: that the script works; its times mean nothing

First a kernel (of flash, every library that is installed) is checked on packed documents of mixed degrees, all ranks of the
ring one after the other in one process: the errors of out, dQ, dK and dV may have at most twice the norm of those that the
same kernel makes when it gets the same documents whole, and a second run must give the same bits. A kernel that fails in what
is timed is not timed; the others are. The script's status is 1 if any check failed.

Then the calls of one rank (ring index degree / 2) are timed, with random tensors for what other ranks would send: so one GPU
measures every degree. `calls` are the kernel calls alone; `ring` is RingAttention as in training, with merging, picking out
keys and summing of gradients, less the time of the copies that stand for its messages; `single` is one call of the same kernel
on as many whole documents and as much work: length / √degree instead of length. Forward counts 4 FLOP a visible pair, head and
number of a head, backward 2.5 times as many. Memory-bound pieces are compared with a copy of the same number of bytes.

Writes OUT.csv (times), OUT-checks.csv, OUT-elementwise.csv and OUT.png; prints the efficiency table for a hardware profile.
Rows are appended as they come, and one that cannot be measured says why. Several kernels are measured in a process each, so
that none takes another with it; where the GPU is lost to a process, another process goes on behind the row at fault.
Not measured here: messages, and whether they hide behind the calls.
"""

import argparse
import csv
import gc
import logging
import math
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.distributed as dist
import torch.nn.functional as F

from longctx.attention import RingAttention, reference_attention
from longctx.attention.exchange import Exchange, Pending, Rows
from longctx.attention.kernels import KERNELS, KernelError, Request, choose_kernel
from longctx.attention.kernels.flash import Flash
from longctx.attention.kernels.flash_libraries import LIBRARIES
from longctx.attention.masks import Mask
from longctx.attention.merge import merge_
from longctx.attention.operator import NO_LAYER
from longctx.attention.operator import forward as ring_forward
from longctx.attention.segments import Segment, Segments, packed_causal, visible
from longctx.model.rope import rope_tables, rotate
from longctx.planning.calibration.fit import AttentionTime, fit_attention
from longctx.planning.layout import Layout, Placement

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # after the choice of a backend that needs no screen

Tensors = tuple[torch.Tensor, ...]

MOST_REMOTE_TOKENS = 1 << 18
"""Received tokens that a stage may hold: beyond, a ring gets more stages."""


MOST_ROUNDINGS = 10
"""Error that a kernel itself may have, in units of the last digit of the largest number of a result."""


@dataclass(frozen=True)
class Sizes:
    """What is measured: tokens a rank, degrees, documents a rank; and the heads, of an 8B model unless it is a smoke test."""

    tokens: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768)
    degrees: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    documents: tuple[int, ...] = (1, 8)
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    checked_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
    checked_head_dims: tuple[int, ...] = (64, 128, 256)
    checked_lengths: tuple[int, ...] = (2500, 900, 513, 130, 1)
    checked_window: int = 100
    elementwise_tokens: int = 16384
    seconds: float = 0.3

    def request(self, device: torch.device) -> Request:
        """What is asked of kernels that are timed."""
        return Request(device.type, self.dtype, self.head_dim, self.head_dim)

    @property
    def flop_a_pair(self) -> int:
        """In forward."""
        return 4 * self.heads * self.head_dim


QUICK = Sizes(tokens=(1024, 8192), degrees=(1, 4, 16))
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
    checked_lengths=(90, 33, 17, 5, 1),
    checked_window=12,
    elementwise_tokens=256,
    seconds=0.005,
)
GPU_SMOKE = replace(
    SMOKE, head_dim=64, dtype=torch.bfloat16, checked_dtypes=(torch.bfloat16,), checked_head_dims=(64, 128)
)  # what libraries of flash attention take


TIMED_MASKS = "causal", "dense"
"""Of which the parts of a ring are; a kernel that fails at others is timed, and its failure told."""


def masks(window: int) -> dict[str, Mask]:
    return {
        "causal": Mask(),
        "dense": Mask(causal=False),
        "window": Mask(window=window),
        "window with sinks": Mask(window=window, sinks=4),
        "prefix": Mask(prefix={0: window, 2: 9}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="fewer sizes")
    size.add_argument("--smoke", action="store_true", help="tiny sizes, also on a CPU")
    parser.add_argument("--kernels", help="only these, such as triton,reference (default: all that run here)")
    parser.add_argument("--layers", type=int, default=32, help="layers of the model that the efficiency table is for")
    parser.add_argument(
        "--minutes", type=float, default=25.0, help="for all kernels together; what does not fit in is left out"
    )
    parser.add_argument("--append", action="store_true", help="add to the tables what they do not have, and report nothing")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "attention_gpu", help="without a suffix"
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not arguments.smoke:
        parser.error("there is no GPU here: --smoke tries the script on a CPU")
    smoke = GPU_SMOKE if device.type == "cuda" else SMOKE
    sizes = smoke if arguments.smoke else QUICK if arguments.quick else Sizes()
    deadline = time.monotonic() + arguments.minutes * 60
    tables = Tables(arguments.out, machine(device, arguments.out), anew=not arguments.append)
    names = kernel_names(arguments.kernels.split(",") if arguments.kernels else None)
    names = [name for name in names if runs(name, sizes, device)]
    if len(names) == 1:
        measure_kernel(names[0], sizes, device, tables, deadline)
    else:
        for number, name in enumerate(names):
            until = time.monotonic() + (deadline - time.monotonic()) / (len(names) - number)
            measure_in_processes(name, tables, until)
    if arguments.append:
        return  # whoever called reports
    report(names, sizes, device, tables, arguments.layers)
    checks = tables.checks.rows
    failed = [check for check in checks if check["right"] != "True"]
    print(f"{len(checks) - len(failed)} of {len(checks)} checks passed: {', '.join(names)}")
    if failed or not checks:
        told = ["; ".join(f"{name} {check[name]}" for name in CHECK_COLUMNS) for check in failed]
        sys.exit("\n".join(["these checks failed; a kernel with one among what is timed was not timed:", *told]))


LOST = 3
"""Exit status of a process that the GPU does not answer any more."""


def measure_in_processes(name: str, tables: "Tables", until: float) -> None:
    """Measures a kernel in a process of its own, and in a new one as often as one has lost the GPU to a row."""
    given = [argument for argument in sys.argv[1:] if argument in ("--quick", "--smoke")]
    while (left := until - time.monotonic()) > 0:
        options = ["--kernels", name, "--minutes", str(left / 60), "--out", str(tables.out), "--append", *given]
        try:
            # It ends by itself between two rows; a row that hangs is ended here.
            code = subprocess.run([sys.executable, __file__, *options], timeout=left + HANGING_S).returncode
            why = f"its process ended with status {code}"
        except subprocess.TimeoutExpired:
            code, why = 1, f"a row hung for {HANGING_S} s"
        tables.read()
        if code == LOST:
            continue
        if code:
            tables.times.append({"kernel": name, "failed": why})
        return
    print(f"{name}: no time is left")


HANGING_S = 60
"""More than any one row takes."""


def measure_kernel(name: str, sizes: Sizes, device: torch.device, tables: "Tables", deadline: float) -> None:
    """Appends checks and, if what is timed is right, times, until time is over. What tables have already is left out."""
    if not dist.is_initialized():
        store = dist.HashStore()
        dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    for case in check_cases(name, sizes, device):
        mask, dtype, head_dim = case
        if tables.checks.has(kernel=name, mask=mask, dtype=str(dtype), head_dim=head_dim) or time.monotonic() > deadline:
            continue
        with failures(tables.checks, device, kernel=name, mask=mask, dtype=str(dtype), head_dim=head_dim, right=False):
            for check in check_kernel(name, *case, sizes, device):
                tables.checks.append(asdict(check))
    same = {"kernel": name, "dtype": str(sizes.dtype), "head_dim": str(sizes.head_dim)}
    checked = [row for row in tables.checks.rows if all(row[key] == value for key, value in same.items())]
    checked = [row for row in checked if row["mask"] in TIMED_MASKS]
    if not checked or any(row["right"] != "True" for row in checked):
        tables.times.append({"kernel": name, "failed": f"not timed: {'wrong' if checked else 'not checked'}"})
        return
    for tokens, degree, documents in product(sizes.tokens, sizes.degrees, sizes.documents):
        cell = {"kernel": name, "tokens": tokens, "degree": degree, "documents": documents}
        if tables.times.has(**cell):
            continue
        if time.monotonic() > deadline:
            print(f"{name}, {tokens:,} tokens, degree {degree}, {documents} documents: no time is left")
            continue
        with failures(tables.times, device, **cell):
            row = measure_cell(name, tokens, degree, documents, sizes, device)
            tables.times.append(row.columns())
            print(row, flush=True)


@contextmanager
def failures(table: "Table", device: torch.device, **row: object) -> Iterator[None]:
    """Whatever goes wrong becomes a row that says so. Ends the process if it has lost the GPU."""
    try:
        yield
    except Exception as error:  # of libraries, compilers, drivers: the other rows go on
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        table.append({**row, "failed": why})
        print(f"{', '.join(map(str, row.values()))}: {why}", flush=True)
    else:
        return
    if device.type == "cuda":
        gc.collect()  # the traceback held tensors
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception:  # an error that stays, such as an illegal address
            sys.stdout.flush()
            os._exit(LOST)


def report(names: Sequence[str], sizes: Sizes, device: torch.device, tables: "Tables", layers: int) -> None:
    """The picture, the table for a profile, and memory-bound pieces."""
    rows = [Row.read(row) for row in tables.times.rows if not row["failed"]]
    if rows:
        plot(rows, tables.facts, tables.out.with_suffix(".png"))
    print(efficiency(rows, sizes, device, layers))
    for piece in elementwise(sizes, device, tables.pieces):
        print(f"{piece['piece']}: {piece['gb_per_s']:.0f} GB/s, {piece['share_of_copy']:.0%} of a copy")


def kernel_names(wanted: Sequence[str] | None) -> list[str]:
    """Kernels to measure; every library of flash attention becomes a kernel of its own name."""
    KERNELS.update({library.name: Flash([library]) for library in LIBRARIES})
    unknown = set(wanted or ()) - set(KERNELS)
    if unknown:
        sys.exit(f"--kernels names {', '.join(sorted(unknown))}: choose from {', '.join(KERNELS)}")
    return list(wanted or (name for name in KERNELS if name not in ("flash", "reference")))


def runs(name: str, sizes: Sizes, device: torch.device) -> bool:
    """Whether the kernel can do what is timed; says why if it cannot."""
    try:
        choose_kernel(name, sizes.request(device))
    except KernelError as error:
        print(f"not measured: {error}")
        return False
    return True


# One process plays every rank.


def layout_of(lengths: Sequence[int], placements: Sequence[Placement], rank: int, stages: int) -> Layout:
    """A rank's layout of one micro-batch, which says that it is rank 0, as this process is; its ring indices are its own."""
    return replace(Layout.of(placements, lengths, 0, rank, stages), rank=0)


def document_rows(layout: Layout, lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """For each row of a rank's buffer, its row in the documents laid one after the other."""
    spans = [(s.document, span) for s in layout.shards for span in (s.head, s.tail)]
    parts = [torch.arange(*span) + sum(lengths[:document]) for document, span in spans]
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts]).to(device)


# Checks


@dataclass(frozen=True)
class Check:
    """Distances from float64 by norm: of the ring, and of the kernel on whole documents; relative to the norm of the result."""

    kernel: str
    mask: str
    dtype: str
    head_dim: int
    tensor: str
    ring: float
    single: float
    same_bits: bool
    right: bool


Case = tuple[str, torch.dtype, int]
"""Mask, dtype and head size."""


def check_cases(name: str, sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Every mask, dtype and head size that the kernel takes; first those that are timed."""
    timed = sizes.dtype, sizes.head_dim
    kinds = sorted(product(sizes.checked_dtypes, sizes.checked_head_dims), key=lambda kind: kind != timed)
    for dtype, head_dim in kinds:
        if not KERNELS[name].refusal(Request(device.type, dtype, head_dim, head_dim, bands=True)):
            yield from ((mask, dtype, head_dim) for mask in masks(sizes.checked_window))


def check_kernel(
    name: str, mask_name: str, dtype: torch.dtype, head_dim: int, sizes: Sizes, device: torch.device
) -> Iterator[Check]:
    """Every result against float64."""
    lengths, mask = sizes.checked_lengths, masks(sizes.checked_window)[mask_name]
    rings = [Placement(0, 0, 4), Placement(1, 1, 3), Placement(2, 0, 2), Placement(3, 3, 1), Placement(4, 0, 2)]
    alone = [Placement(document, 0, 1) for document in range(len(lengths))]
    generator = torch.Generator().manual_seed(head_dim)
    shapes = [(sum(lengths), heads, head_dim) for heads in (4, 2, 2, 4)]
    inputs = tuple(torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    truth = whole(inputs, lengths, mask)
    single = play(name, inputs, lengths, alone, 1, mask)
    ring, again = (play(name, inputs, lengths, rings, 4, mask) for _ in range(2))
    for tensor, *results in zip(("out", "dq", "dk", "dv"), truth, single, ring, again, strict=True):
        exact, norm, largest = results[0], float(results[0].norm()), float(results[0].abs().max())
        single_error, ring_error = (float((x - exact).norm()) / norm for x in results[1:3])
        same = torch.equal(results[2], results[3])
        rounding = torch.finfo(dtype).eps
        right = same and ring_error <= 2 * single_error + rounding / 4
        # A fault in a few numbers hardly shows in a norm, one of the kernel itself is in both.
        right &= all(float((x - exact).abs().max()) <= MOST_ROUNDINGS * rounding * largest for x in results[1:3])
        yield Check(name, mask_name, str(dtype), head_dim, tensor, ring_error, single_error, same, right)


def whole(inputs: Tensors, lengths: Sequence[int], mask: Mask) -> Tensors:
    """out, dq, dk, dv in float64 by plain autograd."""
    q, k, v = (x.double().requires_grad_() for x in inputs[:3])
    out = reference_attention(q, k, v, lengths, mask=mask)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3].double())


def play(
    name: str, inputs: Tensors, lengths: Sequence[int], placements: Sequence[Placement], ranks: int, mask: Mask
) -> Tensors:
    """out, dq, dk, dv (float64) of ring attention in which this process is one rank after the other."""
    device = inputs[0].device
    layouts = [layout_of(lengths, placements, rank, stages=2) for rank in range(ranks)]
    rows = [document_rows(layout, lengths, device) for layout in layouts]
    rings = [RingAttention(layout, mask=mask, kernel=name, device=device, keep_kv=True) for layout in layouts]
    kv = torch.cat([x.flatten(1) for x in inputs[1:3]], dim=1)
    results = tuple(torch.zeros(x.shape, dtype=torch.float64, device=device) for x in (inputs[3], *inputs[:3]))
    remote = torch.zeros(kv.shape, dtype=torch.float64, device=device)
    for rank, ring in enumerate(rings):
        received = []
        for number, stage in enumerate(ring.schedule.stages):
            (hop,) = stage.hops
            sent = [dict(rings[peer].schedule.stages[number].hops[0].sends)[rank] for peer, _ in hop.receives]
            received.append(torch.cat([rows[rank][:0], *(rows[p][x] for (p, _), x in zip(hop.receives, sent, strict=True))]))
        ring.exchange = messages(kv, remote, received)
        q, k, v, dout = (x[rows[rank]] for x in inputs)
        for x in (q, k, v):
            x.requires_grad_()
        out = ring(q, k, v)
        gradients = torch.autograd.grad(out, (q, k, v), dout)
        for result, part in zip(results, (out.detach(), *gradients), strict=True):
            result[rows[rank]] = part.double()
    dk, dv = remote.split([inputs[1][0].numel(), inputs[2][0].numel()], dim=1)
    return *results[:2], results[2] + dk.view_as(results[2]), results[3] + dv.view_as(results[3])


def messages(kv: torch.Tensor, gradients: torch.Tensor, received: Sequence[torch.Tensor]) -> type[Exchange]:
    """An exchange of one rank: stage by stage it gets rows of `kv`, and adds the gradients it returns to `gradients`."""

    class Messages(Exchange):
        def start(self, outgoing: Sequence[tuple[int, torch.Tensor]], incoming: torch.Tensor, rows: Rows) -> Pending:
            stage, self.stage = getattr(self, "stage", 0), getattr(self, "stage", 0) + 1
            if "backward" in self.where:
                if outgoing:
                    gradients.index_add_(0, received[stage], torch.cat([part for _, part in outgoing]).double())
                incoming.zero_()
            else:
                incoming.copy_(kv[received[stage]])
            return Pending(self, [], incoming, [], [])

    return Messages


# Times


@dataclass(frozen=True)
class Row:
    """Seconds of one rank's attention in one layer, and visible pairs of query and key, of the rank and of the single call."""

    kernel: str
    tokens: int
    degree: int
    documents: int
    stages: int
    calls: int
    pairs: int
    single_pairs: int
    flop_a_pair: int
    forward_calls: float
    backward_calls: float
    forward_ring: float
    backward_ring: float
    forward_single: float
    backward_single: float

    @classmethod
    def read(cls, row: dict[str, str]) -> "Row":
        """From a row of the table."""
        return cls(**{f.name: f.type(row[f.name]) for f in fields(cls)})  # str, int and float

    def tflops(self, direction: str, what: str) -> float:
        """TFLOP/s of direction forward or backward, of calls, ring or single."""
        pairs = self.single_pairs if what == "single" else self.pairs
        flop = self.flop_a_pair * pairs * (1 if direction == "forward" else 2.5)
        seconds: float = getattr(self, f"{direction}_{what}")
        return flop / seconds / 1e12

    def share(self, direction: str, what: str) -> float:
        """Throughput over that of the single call."""
        return self.tflops(direction, what) / self.tflops(direction, "single")

    def columns(self) -> dict[str, Any]:
        rates = {f"{d}_{w}_tflops": self.tflops(d, w) for d in ("forward", "backward") for w in ("calls", "ring", "single")}
        shares = {f"{d}_{w}_share": self.share(d, w) for d in ("forward", "backward") for w in ("calls", "ring")}
        return {**{f.name: getattr(self, f.name) for f in fields(self)}, **rates, **shares}

    def __str__(self) -> str:
        return (
            f"{self.kernel}, {self.tokens:,} tokens, degree {self.degree}, {self.documents} documents: "
            + ", ".join(
                f"{d} {self.tflops(d, 'ring'):.3g} TFLOP/s ({self.share(d, 'ring'):.0%})" for d in ("forward", "backward")
            )
            + f" of single; calls alone {self.share('forward', 'calls'):.0%} and {self.share('backward', 'calls'):.0%}"
        )


def measure_cell(name: str, tokens: int, degree: int, documents: int, sizes: Sizes, device: torch.device) -> Row:
    length, scale = tokens * degree // documents, sizes.head_dim**-0.5
    stages = math.ceil(tokens * (degree - 1) / MOST_REMOTE_TOKENS) or 1
    lengths = [length] * documents
    layout = layout_of(lengths, [Placement(d, 0, degree) for d in range(documents)], degree // 2, stages)
    q, k, v, dout = random(layout.tokens, sizes, device)
    for x in (q, k, v):
        x.requires_grad_()
    ring = RingAttention(layout, kernel=name, device=device)
    hops = [hop for stage in ring.schedule.stages for hop in stage.hops]
    most = max((max(hop.received_rows, hop.sent_rows) for hop in hops), default=0)
    pool = torch.randn(most, sizes.kv_heads * 2 * sizes.head_dim, dtype=sizes.dtype, device=device)
    buffer, copied = torch.empty_like(pool), list[int]()
    ring.exchange = from_pool(pool, copied)

    def without_messages(run: Callable[[], object]) -> float:
        copied.clear()
        run()
        counts = list(copied)
        both = seconds(run, sizes, device)
        return both - (seconds(lambda: [buffer[:n].copy_(pool[:n]) for n in counts], sizes, device) if counts else 0.0)

    out = ring(q, k, v)
    forward_ring = without_messages(lambda: ring(q, k, v))
    backward_ring = without_messages(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))

    kernel = choose_kernel(name, sizes.request(device))
    with torch.no_grad():
        final, lse, _ = ring_forward(q, k, v, None, ring.number, NO_LAYER)
        calls: list[tuple[torch.Tensor, torch.Tensor, Segments]] = [(k, v, call.segments) for call in ring.schedule.local]
        for call in (call for stage in ring.schedule.stages for call in stage.calls):
            keys = pool[: sum(s.k_stop - s.k_start for s in call.segments)].unflatten(1, (2 * sizes.kv_heads, sizes.head_dim))
            calls.append((keys[:, : sizes.kv_heads], keys[:, sizes.kv_heads :], call.segments))
        forward_calls = seconds(lambda: [kernel.forward(q, *part, scale) for part in calls], sizes, device)
        backward_calls = seconds(
            lambda: [kernel.backward(dout, q, a, b, final, lse, segments, scale) for a, b, segments in calls], sizes, device
        )

        single = packed_causal([round(length / degree**0.5)] * documents)
        q, k, v, dout = random(single[-1].q_stop, sizes, device)
        forward_single = seconds(lambda: kernel.forward(q, k, v, single, scale), sizes, device)
        final, lse = kernel.forward(q, k, v, single, scale)
        backward_single = seconds(lambda: kernel.backward(dout, q, k, v, final, lse, single, scale), sizes, device)
    return Row(
        name,
        tokens,
        degree,
        documents,
        stages,
        len(calls),
        sum(pairs(segment) for *_, segments in calls for segment in segments),
        sum(map(pairs, single)),
        sizes.flop_a_pair,
        forward_calls,
        backward_calls,
        forward_ring,
        backward_ring,
        forward_single,
        backward_single,
    )


def from_pool(pool: torch.Tensor, copied: list[int]) -> type[Exchange]:
    """An exchange that copies the first rows of `pool` to whatever is to be received, and notes how many in `copied`."""

    class Pool(Exchange):
        def start(self, outgoing: object, incoming: torch.Tensor, rows: Rows) -> Pending:
            copied.append(len(incoming))
            return Pending(self, [], incoming.copy_(pool[: len(incoming)]), [], [])

    return Pool


def random(tokens: int, sizes: Sizes, device: torch.device) -> Tensors:
    """q, k, v, dout."""
    heads = sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads
    return tuple(torch.randn(tokens, count, sizes.head_dim, dtype=sizes.dtype, device=device) for count in heads)


def pairs(segment: Segment) -> int:
    """Visible pairs of a query and a key."""
    queries, keys = segment.q_stop - segment.q_start, segment.k_stop - segment.k_start
    if segment.dense:
        return queries * keys
    if segment.causal:
        return queries * (queries + 1) // 2
    return int(visible(segment, torch.device("cpu")).sum())


def seconds(run: Callable[[], object], sizes: Sizes, device: torch.device) -> float:
    """Median time of a run, over as many as fit in `sizes.seconds`, 3 at least and 50 at most, after warming up."""
    for _ in range(2):
        first = timed(run, device)
    return statistics.median(timed(run, device) for _ in range(min(50, max(3, int(sizes.seconds / first)))))


def timed(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    run()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) / 1e3


# Memory-bound pieces


def elementwise(sizes: Sizes, device: torch.device, table: "Table") -> Iterator[dict[str, Any]]:
    """Bytes a second of each piece, counting every tensor that must be read or written once, over those of a copy."""
    tokens, width = sizes.elementwise_tokens, sizes.heads * sizes.head_dim
    shape = tokens, sizes.heads, sizes.head_dim
    x, y = (torch.randn(shape, dtype=sizes.dtype, device=device) for _ in range(2))
    total, lse, part_lse = torch.randn(shape, device=device), *(torch.randn(shape[:2], device=device) for _ in range(2))
    rows = torch.arange(tokens // 2, device=device)
    cos, sin = rope_tables(torch.arange(tokens, device=device), sizes.head_dim, 10000.0)
    weight = torch.ones(width, dtype=sizes.dtype, device=device)
    flat = x.flatten(1)
    segments = packed_causal([tokens // 8] * 8)
    size = x.numel() * x.element_size()
    merged = 2 * total.numel() * 4 + size + 3 * lse.numel() * 4
    pieces: dict[str, tuple[Callable[[], object], int]] = {
        "copy": (lambda: y.copy_(x), 2 * size),
        "merging of out and log-sum-exp": (lambda: merge_(total, lse, x, part_lse, segments), merged),
        "picking of half the rows": (lambda: x.index_select(0, rows), size),
        "rotary embedding": (lambda: rotate(x, cos, sin), 2 * size + 2 * cos.numel() * 4),
        "RMSNorm": (lambda: F.rms_norm(flat, (width,), weight), 2 * size),
        "SwiGLU": (lambda: F.silu(x) * y, 3 * size),
    }
    copied = None
    for name, (run, moved) in pieces.items():
        with failures(table, device, piece=name):
            rate = moved / seconds(run, sizes, device) / 1e9
            copied = copied or rate
            row = {"piece": name, "gb_per_s": rate, "share_of_copy": rate / copied}
            table.append(row)
            yield row


# Results


def efficiency(rows: Sequence[Row], sizes: Sizes, device: torch.device, layers: int) -> str:
    """Constants for a hardware profile: forward and backward of the kernel that auto would choose, merging included."""
    chosen = choose_kernel("auto", sizes.request(device))
    name = next(name for name, kernel in KERNELS.items() if kernel is chosen)
    if isinstance(chosen, Flash):
        library = chosen.library(sizes.request(device))
        name = library if isinstance(library, str) else library.name
    times = []
    for row in rows:
        if row.kernel == name:
            length, both = row.tokens * row.degree // row.documents, row.forward_ring + row.backward_ring
            times.append(AttentionTime(length, row.degree, both * layers / row.documents))
    if not any(time.degree == 1 for time in times):
        return f"# no efficiency table: whole documents with kernel {name}, which auto chooses, were not measured"
    fit = fit_attention(times)
    table = ", ".join(f"[{length}, {share:.3f}]" for length, share in fit.efficiency)
    penalty = "" if fit.split_penalty is None else f"\nattention_split_penalty: {fit.split_penalty:.3g}"
    return (
        f"# {name}, {layers} layers of {sizes.heads} heads of {sizes.head_dim}, {sizes.dtype}; forward and backward once each\n"
        f"attention_s_per_token2: {fit.s_per_token2:.4g}\nattention_efficiency: [{table}]{penalty}"
    )


def machine(device: torch.device, out: Path) -> dict[str, str]:
    """Where and with what this was measured."""
    gpu = device.type == "cuda"
    facts = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "device": torch.cuda.get_device_name() if gpu else f"CPU, {platform.machine()}",
        "driver": driver() if gpu else "",
        "cuda": torch.version.cuda or "",
        "command": shlex.join(["python", "bench/attention_gpu.py", *(out.name if x == str(out) else x for x in sys.argv[1:])]),
    }
    for package in ("torch", "triton", "flash-attn-4", "flash-attn-3", "flash-attn"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    return facts


def driver() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown"
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0].strip()


RATES = [f"{d}_{w}_tflops" for d in ("forward", "backward") for w in ("calls", "ring", "single")]
SHARES = [f"{d}_{w}_share" for d in ("forward", "backward") for w in ("calls", "ring")]
TIME_COLUMNS = [*(f.name for f in fields(Row)), *RATES, *SHARES, "failed"]
CHECK_COLUMNS = [*(f.name for f in fields(Check)), "failed"]
PIECE_COLUMNS = ["piece", "gb_per_s", "share_of_copy", "failed"]


class Table:
    """A CSV file that grows by rows, each with the facts of this measurement; `rows` are those that it has, as text."""

    def __init__(self, path: Path, columns: Sequence[str], facts: dict[str, str], *, anew: bool) -> None:
        self.path, self.columns, self.facts = path, [*columns, *facts], facts
        self.rows: list[dict[str, str]] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        if anew or not path.exists():
            path.write_text("", encoding="utf-8")
            self._write(dict(zip(self.columns, self.columns, strict=True)))
        self.read()

    def read(self) -> None:
        with self.path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            self.rows = list(reader)
        if list(reader.fieldnames or ()) != self.columns:
            sys.exit(f"{self.path} has other columns than these rows: give another --out")

    def has(self, **values: object) -> bool:
        return any(all(row[name] == str(value) for name, value in values.items()) for row in self.rows)

    def append(self, row: dict[str, Any]) -> None:
        texts = {name: f"{value:.6g}" if isinstance(value, float) else str(value) for name, value in row.items()}
        self.rows.append({**dict.fromkeys(self.columns, ""), **texts, **self.facts})
        self._write(self.rows[-1])

    def _write(self, row: dict[str, str]) -> None:
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self.columns).writerow(row)


class Tables:
    """The three tables of a measurement, and what they say of it."""

    def __init__(self, out: Path, facts: dict[str, str], *, anew: bool) -> None:
        self.out, self.facts = out, facts
        self.times = Table(out.with_suffix(".csv"), TIME_COLUMNS, facts, anew=anew)
        self.checks = Table(out.with_name(f"{out.name}-checks.csv"), CHECK_COLUMNS, facts, anew=anew)
        self.pieces = Table(out.with_name(f"{out.name}-elementwise.csv"), PIECE_COLUMNS, facts, anew=anew)

    def read(self) -> None:
        for table in (self.times, self.checks, self.pieces):
            table.read()


def plot(rows: Sequence[Row], facts: dict[str, str], path: Path) -> None:
    """Throughput by tokens a rank: a column for each kernel, a line for each degree."""
    kernels = list(dict.fromkeys(row.kernel for row in rows))
    degrees, tokens, documents = (sorted({getattr(row, name) for row in rows}) for name in ("degree", "tokens", "documents"))
    panels = [(direction, count) for direction in ("forward", "backward") for count in documents]
    size = 2 + 3.5 * len(kernels), 1 + 2.6 * len(panels)
    figure, axes = plt.subplots(
        len(panels), len(kernels), figsize=size, sharex=True, sharey="row", squeeze=False, layout="constrained"
    )
    colours = plt.get_cmap("viridis")
    for (direction, count), line in zip(panels, axes, strict=True):
        line[0].set_ylabel(f"{direction}, TFLOP/s\n{count} document{'s' if count > 1 else ''}")
        for kernel, axis in zip(kernels, line, strict=True):
            for position, degree in enumerate(degrees):
                chosen = [row for row in rows if (row.kernel, row.degree, row.documents) == (kernel, degree, count)]
                colour = colours(0.9 * position / max(1, len(degrees) - 1))
                x = [row.tokens for row in chosen]
                axis.plot(x, [row.tflops(direction, "ring") for row in chosen], "o-", markersize=4, color=colour)
                axis.plot(x, [row.tflops(direction, "single") for row in chosen], "--", linewidth=1, color=colour)
            axis.set_xscale("log", base=2)
            axis.set_xticks(tokens, [f"{count // 1024}k" if count >= 1024 else str(count) for count in tokens])
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
    for kernel, top, bottom in zip(kernels, axes[0], axes[-1], strict=True):
        top.set_title(kernel)
        bottom.set_xlabel("tokens per rank")
    lines = axes[0, 0].get_lines()[::2]
    figure.legend(lines, [f"degree {degree}" for degree in degrees], loc="outside right upper")
    title = "One rank of a ring (solid)\nand one call on as much work (dashed)"
    figure.suptitle(f"{title}\n{facts['device']}, torch {facts['torch']}, {facts['date']}", fontsize="medium")
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()

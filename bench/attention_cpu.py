"""Ring attention on CPUs against one process: CPU time of all ranks together, and the bytes that they send.

    torchrun --nproc-per-node 4 bench/attention_cpu.py                  # one causal document of 16,384 tokens: a minute or two
    torchrun --nproc-per-node 4 bench/attention_cpu.py --tokens 4096
    torchrun --nproc-per-node 8 bench/attention_cpu.py --precision 300  # errors in bfloat16 instead, over random documents

One thread a process. CPU time (all threads, the communication's too) and not wall clock, because ranks share cores; the least
of some repetitions, ring and single in turn. Prints JSON, and writes it with --out.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from attention_checks import document_rows, in_float64
from harness import facts, options
from longctx.attention import Mask, RingAttention
from longctx.attention.exchange import Exchange, Pending
from longctx.attention.kernels import cpu
from longctx.attention.segments import packed_causal
from longctx.planning.cost.hardware_profile import HardwareProfile
from longctx.planning.layout import Layout, Placement
from longctx.planning.planner import make_plan


class Counting(Exchange):
    """Counts the bytes that this rank sends."""

    sent = 0

    def start(self, outgoing: Any, incoming: torch.Tensor, rows: Any) -> Pending:
        Counting.sent += sum(tensor.nbytes for _, tensor in outgoing)
        return super().start(outgoing, incoming, rows)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--precision", type=int, metavar="CASES")
    parser.add_argument("--kernel", default="cpu", help="of --precision")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if given.precision:
        errors = [precision(random.Random(case), given.kernel) for case in range(given.precision)]
        report = {"cases": given.precision, "kernel": given.kernel, "ring_over_single": spread(errors)}
    else:
        report = times(given)
    if dist.get_rank() == 0:
        about = facts("torch")
        load = f"load {os.getloadavg()[0]:.1f}"
        report |= {"date": about["date"], "torch": about["torch"], "machine": f"{about['machine']}, {load}"}
        print(json.dumps(report, indent=1))
        if given.out:
            given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


def times(given: argparse.Namespace) -> dict[str, Any]:
    """CPU seconds of forward and backward, of all ranks and of rank 0 alone; and the bytes sent."""
    rank, ranks, tokens = dist.get_rank(), dist.get_world_size(), given.tokens
    profile = HardwareProfile.load("cpu-2core")
    plan = make_plan([tokens], ranks=ranks, tokens_per_rank=tokens, profile=profile, mode="static", degree=ranks)
    layout = plan.layout(0, rank)
    attention = RingAttention(layout, exchange=Counting)

    def inputs(tokens: int) -> list[torch.Tensor]:
        heads = given.heads, given.kv_heads, given.kv_heads, given.heads
        return [torch.randn(tokens, count, given.head_dim) for count in heads]

    *leaves, dout = inputs(layout.tokens)
    for x in leaves:
        x.requires_grad_()
    whole, segments, scale = inputs(tokens if rank == 0 else 0), packed_causal([tokens]), given.head_dim**-0.5

    def ring() -> None:
        torch.autograd.grad(attention(*leaves), leaves, dout)

    def single() -> None:
        if rank == 0:
            q, k, v, dout = whole
            out, lse = cpu.forward(q, k, v, segments, scale)
            cpu.backward(dout, q, k, v, out, lse, segments, scale)

    ring()
    bytes_sent = torch.tensor(float(Counting.sent))
    dist.all_reduce(bytes_sent)
    together, alone = (
        min(column) for column in zip(*((summed(ring), summed(single)) for _ in range(given.repeat)), strict=True)
    )
    chunk = tokens // (2 * ranks) * 2 * given.kv_heads * given.head_dim * 4
    passes = 3 * chunk * sum((ranks - 1 - r) + 2 * r for r in range(ranks))
    return {
        "ranks": ranks,
        **{name: getattr(given, name) for name in ("tokens", "heads", "kv_heads", "head_dim")},
        "ring_cpu_s": round(together, 3),
        "single_cpu_s": round(alone, 3),
        "ratio": round(together / alone, 3),
        "bytes_sent": int(bytes_sent),
        "bytes_by_formula": passes if tokens % (2 * ranks) == 0 else None,
    }


def summed(work: Callable[[], None]) -> float:
    """CPU seconds of all ranks together."""
    dist.barrier()
    before = time.process_time()
    work()
    spent = torch.tensor(time.process_time() - before, dtype=torch.float64)
    dist.all_reduce(spent)
    return float(spent)


def precision(draw: random.Random, kernel: str) -> dict[str, float]:
    """Errors against float64 of a random micro-batch in bfloat16, over those of the same kernel on whole documents."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    longest = draw.choice([20, 150, 600])
    lengths = [draw.randint(2, longest) for _ in range(draw.randint(1, 4))]
    degrees = [draw.randint(min(ranks, 2), ranks), *(draw.randint(1, ranks) for _ in lengths[1:])]
    rings = [Placement(d, draw.randint(0, ranks - degree), degree) for d, degree in enumerate(degrees)]
    whole = [Placement(d, 0, 1) for d in range(len(lengths))]
    kv_heads, head_dim, stages = draw.randint(1, 3), draw.choice([8, 16, 32, 64, 128]), draw.randint(1, 7)
    heads, per_node = kv_heads * draw.randint(1, 3), draw.choice([None, None, 2, 3, 4])
    mask = draw.choice([Mask(), Mask(), Mask(causal=False), Mask(window=draw.randint(8, longest))])
    generator = torch.Generator().manual_seed(draw.randint(0, 2**31))
    shapes = [(sum(lengths), count, head_dim) for count in (heads, kv_heads, kv_heads, heads)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).bfloat16() for shape in shapes]

    def attend(placements: list[Placement], **options: Any) -> list[torch.Tensor]:
        layout = Layout.of(placements, lengths, 0, rank, stages)
        rows = document_rows(layout, lengths, torch.device("cpu"))
        *leaves, dout = (x[rows] for x in inputs)
        for x in leaves:
            x.requires_grad_()
        out = RingAttention(layout, mask=mask, kernel=kernel, **options)(*leaves)
        results = [torch.zeros(x.shape, dtype=torch.float64) for x in (inputs[3], *inputs[:3])]
        for result, part in zip(results, (out.detach(), *torch.autograd.grad(out, leaves, dout)), strict=True):
            result[rows] = part.double()
            dist.all_reduce(result)
        return results

    ring, single, exact = attend(rings, ranks_per_node=per_node), attend(whole), in_float64(inputs, lengths, mask)
    errors = {}
    for tensor, r, s, e in zip(("out", "dq", "dk", "dv"), ring, single, exact, strict=True):
        errors[f"norm, {tensor}"] = float((r - e).norm() / (s - e).norm())
        errors[f"largest, {tensor}"] = float((r - e).abs().max() / (s - e).abs().max())
    return errors


def spread(errors: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Median, 99th percentile and greatest of each ratio."""
    table = {}
    for name in errors[0]:
        ratios = torch.tensor([case[name] for case in errors], dtype=torch.float64)
        shares = torch.tensor([0.5, 0.99, 1.0], dtype=torch.float64)
        table[name] = dict(zip(("median", "p99", "most"), (round(x, 2) for x in ratios.quantile(shares).tolist()), strict=True))
    return table


if __name__ == "__main__":
    main()

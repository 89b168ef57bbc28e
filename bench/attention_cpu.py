"""Ring attention on CPUs against one process: CPU time of all ranks together, and the bytes that they send.

    torchrun --nproc-per-node 4 bench/attention_cpu.py                  # one causal document of 16,384 tokens: a minute or two
    torchrun --nproc-per-node 4 bench/attention_cpu.py --tokens 4096

One thread a process. CPU time (all threads, the communication's too) and not wall clock, because ranks share cores; the least
of some repetitions, ring and single in turn. Prints JSON, and writes it with --out.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from longctx.attention import RingAttention
from longctx.attention.exchange import Exchange, Pending
from longctx.attention.kernels import cpu
from longctx.attention.segments import packed_causal
from longctx.planning.planner import make_plan
from longctx.planning.profile import HardwareProfile


class Counting(Exchange):
    """Counts the bytes that this rank sends."""

    sent = 0

    def start(self, outgoing: Any, incoming: torch.Tensor, rows: Any) -> Pending:
        Counting.sent += sum(tensor.nbytes for _, tensor in outgoing)
        return super().start(outgoing, incoming, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    profile = HardwareProfile.load("cpu-2core")
    plan = make_plan([a.tokens], ranks=ranks, tokens_per_rank=a.tokens, profile=profile, mode="static", degree=ranks)
    layout = plan.layout(0, rank)
    attention = RingAttention(layout, exchange=Counting)

    def inputs(tokens: int) -> list[torch.Tensor]:
        return [torch.randn(tokens, heads, a.head_dim) for heads in (a.heads, a.kv_heads, a.kv_heads, a.heads)]

    q, k, v, dout = inputs(layout.tokens)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def ring() -> None:
        torch.autograd.grad(attention(*leaves), leaves, dout)

    whole = inputs(a.tokens) if rank == 0 else []
    segments = packed_causal([a.tokens])

    def single() -> None:
        if rank == 0:
            q, k, v, dout = whole
            out, lse = cpu.forward(q, k, v, segments, a.head_dim**-0.5)
            cpu.backward(dout, q, k, v, out, lse, segments, a.head_dim**-0.5)

    ring()
    bytes_sent = torch.tensor(float(Counting.sent))
    dist.all_reduce(bytes_sent)
    times = [(summed(ring), summed(single)) for _ in range(a.repeat)]
    if rank == 0:
        together, alone = (min(column) for column in zip(*times, strict=True))
        chunk = a.tokens // (2 * ranks) * 2 * a.kv_heads * a.head_dim * 4
        passes = 3 * chunk * sum((ranks - 1 - r) + 2 * r for r in range(ranks))
        report = {
            "ranks": ranks,
            "tokens": a.tokens,
            "heads": a.heads,
            "kv_heads": a.kv_heads,
            "head_dim": a.head_dim,
            "ring_cpu_s": round(together, 3),
            "single_cpu_s": round(alone, 3),
            "ratio": round(together / alone, 3),
            "bytes_sent": int(bytes_sent),
            "bytes_by_formula": passes if a.tokens % (2 * ranks) == 0 else None,
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "torch": torch.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        }
        print(json.dumps(report, indent=1))
        if a.out:
            a.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


def summed(work: Callable[[], None]) -> float:
    """CPU seconds of all ranks together."""
    dist.barrier()
    before = time.process_time()
    work()
    spent = torch.tensor(time.process_time() - before, dtype=torch.float64)
    dist.all_reduce(spent)
    return float(spent)


if __name__ == "__main__":
    main()

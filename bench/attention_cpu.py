"""Ring attention on CPUs compared with one process: total CPU time of all ranks, and bytes sent.

    torchrun --nproc-per-node 4 bench/attention_cpu.py                  # one causal document of 16,384 tokens: 1 to 2 minutes
    torchrun --nproc-per-node 4 bench/attention_cpu.py --tokens 4096

One thread per process. Measures CPU time (of all threads, including communication) because ranks share cores; the minimum of
several repetitions, with ring and single process in turn. Prints JSON.
"""

import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from harness import facts, options
from longctx.attention import RingAttention
from longctx.attention.exchange import Exchange, Pending
from longctx.attention.kernels import Options, cpu
from longctx.attention.segments import Segment
from longctx.planning.layout import Layout, Placement

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
REPEAT = 3


class Counting(Exchange):
    """Counts the bytes that this rank sends."""

    sent = 0

    def start(self, outgoing: Any, incoming: torch.Tensor, rows: Any) -> Pending:
        Counting.sent += sum(tensor.nbytes for _, tensor in outgoing)
        return super().start(outgoing, incoming, rows)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    tokens = parser.parse_args().tokens
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    report = measure(tokens)
    if dist.get_rank() == 0:
        print(json.dumps(report | facts("torch") | {"load": round(os.getloadavg()[0], 1)}, indent=1))
    dist.destroy_process_group()


def measure(tokens: int) -> dict[str, Any]:
    """Returns the CPU seconds of forward and backward, of all ranks and of a single process, and the bytes sent."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layout = Layout.of([Placement(0, 0, ranks)], [tokens], 0, rank)
    attention = RingAttention(layout, exchange=Counting)

    def inputs(tokens: int) -> list[torch.Tensor]:
        return [torch.randn(tokens, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]

    *leaves, dout = inputs(layout.tokens)
    for x in leaves:
        x.requires_grad_()
    whole, segments, options = (
        inputs(tokens if rank == 0 else 0),
        [Segment(0, tokens, 0, tokens, hi=0)],
        Options(HEAD_DIM**-0.5),
    )

    def ring() -> None:
        torch.autograd.grad(attention(*leaves), leaves, dout)

    def single() -> None:
        if rank == 0:
            q, k, v, dout = whole
            out, lse = cpu.forward(q, k, v, segments, options)
            cpu.backward(dout, q, k, v, out, lse, segments, options)

    ring()
    bytes_sent = torch.tensor(float(Counting.sent))
    dist.all_reduce(bytes_sent)
    together, alone = (min(column) for column in zip(*((summed(ring), summed(single)) for _ in range(REPEAT)), strict=True))
    chunk = tokens // (2 * ranks) * 2 * KV_HEADS * HEAD_DIM * 4
    passes = 3 * chunk * sum((ranks - 1 - r) + 2 * r for r in range(ranks))
    return {
        "ranks": ranks,
        "tokens": tokens,
        "heads": HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "ring_cpu_s": round(together, 3),
        "single_cpu_s": round(alone, 3),
        "ratio": round(together / alone, 3),
        "bytes_sent": int(bytes_sent),
        "bytes_by_formula": passes if tokens % (2 * ranks) == 0 else None,
    }


def summed(work: Callable[[], None]) -> float:
    """Returns the CPU seconds of `work`, summed over ranks."""
    dist.barrier()
    before = time.process_time()
    work()
    spent = torch.tensor(time.process_time() - before, dtype=torch.float64)
    dist.all_reduce(spent)
    return float(spent)


if __name__ == "__main__":
    main()

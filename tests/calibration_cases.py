"""Code that the ranks run in tests of `longctx calibrate`."""

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from longctx import calibration
from longctx.attention import RingAttention
from longctx.attention.exchange import Exchange, Pending, Rows
from longctx.config import load
from longctx.parallel.mesh import make_groups
from longctx.planning.layout import Layout, Placement

TINY = [
    "model.overrides.hidden_size=64",
    "model.overrides.intermediate_size=128",
    "model.overrides.num_hidden_layers=1",
    "model.overrides.num_attention_heads=4",
    "model.overrides.num_key_value_heads=2",
    "model.overrides.head_dim=8",
    "model.vocab_size=300",
    "batch.tokens_per_rank=1024",
]


def measure_profile(local_ranks: list[int], settings: list[str]) -> dict[str, Any]:
    """Returns the measured profile, with the source of every constant, as plain data."""
    config = load(None, [*TINY, *settings], world_size=dist.get_world_size())
    assert config.model.vocab_size is not None
    measured = calibration.measure_profile(
        config,
        make_groups(torch.device("cpu"), tensor=config.parallel.tensor_parallel_size, timeout_s=30),
        config.model.shape(config.model.vocab_size),
        base="h100-nvlink-ib",
        local_rank=local_ranks[dist.get_rank()],
    )
    return asdict(measured) | {"sources": measured.sources, "yaml": measured.to_yaml()}


def ranks_per_node(local_ranks: list[int]) -> int | str:
    try:
        return calibration.ranks_per_node(
            make_groups(torch.device("cpu")), local_ranks[dist.get_rank()]
        )
    except ValueError as error:
        return str(error)


def time_a_slow_rank(seconds: float) -> list[float]:
    """Times work that takes rank 1 a given time, and work that makes it run out of memory."""
    run = object.__new__(calibration.TimedRun)
    run.mesh = make_groups(torch.device("cpu"))

    def slow() -> None:
        time.sleep(seconds if dist.get_rank() == 1 else 0.0)

    def large() -> None:
        if dist.get_rank() == 1:
            raise torch.OutOfMemoryError("as a GPU would")

    return run.seconds(slow, large, slow)


def slow_ranks(seconds: list[float], tensor: int = 1) -> list[tuple[int, float]]:
    """Returns the slow ranks of processes whose attention takes so many seconds each."""

    class Run(calibration.TimedRun):
        def __init__(self) -> None:
            self.mesh = make_groups(torch.device("cpu"), tensor=tensor)

        def attention(self, layout: Layout) -> Callable[[], object]:
            assert [(shard.degree, shard.tokens) for shard in layout.shards] == [(1, 700)]
            return lambda: time.sleep(seconds[dist.get_rank()])

    return list(calibration._slow_ranks(Run(), 700))


def count_bytes(length: int, recompute: bool, keep_kv: bool) -> list[tuple[int, int]]:
    """Returns this rank's (sent, received) bytes per pass, for one layer and one document on all
    ranks."""
    counted: list[tuple[int, int]] = []

    class Counting(Exchange):
        def start(self, outgoing: Any, incoming: torch.Tensor, rows: Rows) -> Pending:
            counted.append((sum(tensor.nbytes for _, tensor in outgoing), incoming.nbytes))
            return super().start(outgoing, incoming, rows)

    layout = Layout.of([Placement(0, 0, dist.get_world_size())], [length], 0, dist.get_rank())
    attention = RingAttention(
        layout, group=make_groups(torch.device("cpu")).exchange, exchange=Counting, keep_kv=keep_kv
    )
    q, k, v = (torch.randn(layout.tokens, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    if recompute:
        attention(q.detach(), k.detach(), v.detach())
    attention(q, k, v).sum().backward()
    return counted

"""Code that the ranks run in tests of `longctx calibrate`."""

import re
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from longctx.attention import RingAttention
from longctx.attention.exchange import Exchange, Pending, Rows
from longctx.calibration import measure
from longctx.calibration.communication import Nodes
from longctx.calibration.profiled_run import layout_of
from longctx.calibration.stopwatch import Stopwatch
from longctx.config import load
from longctx.parallel.mesh import make_groups

TINY = [
    "model.hidden_size=64",
    "model.intermediate_size=128",
    "model.num_hidden_layers=1",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
    "model.head_dim=8",
    "model.vocab_size=300",
    "batch.tokens_per_rank=1024",
]


def measure_profile(local_ranks: list[int], settings: list[str]) -> tuple[dict[str, Any], str]:
    """Returns the measured profile and the content of its file."""
    ranks = dist.get_world_size()
    config = load(None, [*TINY, *settings], world_size=ranks)
    assert config.model.vocab_size is not None
    measured = measure.measure_profile(
        config,
        make_groups(torch.device("cpu"), tensor=config.parallel.tensor_parallel_size, timeout_s=30),
        config.model.shape(config.model.vocab_size),
        base="h100-nvlink-ib",
        local_rank=local_ranks[dist.get_rank()],
        longest_s=0.02,
    )
    return measured.to_json(), measured.to_yaml()


def nodes_of_rings(local_ranks: list[int], settings: list[str]) -> tuple[set[int | None], set[int], int, set[int]]:
    """Returns `ranks_per_node` as passed to RingAttention, the hops of its messages, the profile's exchange levels, and the
    degrees at which overlap was measured."""
    given, hops = set(), set()

    class Watched(RingAttention):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            given.add(options["ranks_per_node"])
            hops.update(len(round_.hops) for round_ in self.schedule.rounds)

    with mock.patch("longctx.attention.ulysses.RingAttention", Watched):
        content, _ = measure_profile(local_ranks, settings)
    degrees = {int(degree) for degree in re.findall(r"at degree (\d+)", content["sources"]["overlap"])}
    return given, hops, content["exchange_levels"], degrees


def find_nodes(local_ranks: list[int]) -> str:
    try:
        return str(Nodes.find(make_groups(torch.device("cpu")), local_ranks[dist.get_rank()]))
    except ValueError as error:
        return str(error)


def time_a_slow_rank(seconds: float) -> list[float]:
    """Times work that takes rank 1 a given time, and work that makes it run out of memory."""
    watch = Stopwatch(make_groups(torch.device("cpu")), longest_s=4 * seconds)

    def slow() -> None:
        time.sleep(seconds if dist.get_rank() == 1 else 0.0)

    def large() -> None:
        if dist.get_rank() == 1:
            raise torch.OutOfMemoryError("as a GPU would")

    return [timing.seconds for timing in watch(slow, large, slow)]


def count_bytes(length: int, recompute: bool, keep_kv: bool) -> list[tuple[int, int]]:
    """Returns this rank's (sent, received) bytes per pass, for one layer and one document on all ranks."""
    counted: list[tuple[int, int]] = []

    class Counting(Exchange):
        def start(self, outgoing: Any, incoming: torch.Tensor, rows: Rows) -> Pending:
            counted.append((sum(tensor.nbytes for _, tensor in outgoing), incoming.nbytes))
            return super().start(outgoing, incoming, rows)

    rank, ranks = dist.get_rank(), dist.get_world_size()
    layout = layout_of(rank, 1, length, degree=ranks, ring_index=rank)
    attention = RingAttention(layout, group=make_groups(torch.device("cpu")).exchange, exchange=Counting, keep_kv=keep_kv)
    q, k, v = (torch.randn(layout.tokens, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    if recompute:
        attention(q.detach(), k.detach(), v.detach())
    attention(q, k, v).sum().backward()
    return counted

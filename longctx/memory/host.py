"""Host memory: what GPUs keep there between forward and backward, and what is free."""

from collections.abc import Sequence
from typing import NamedTuple

from longctx.config import Config
from longctx.memory.loads import Load
from longctx.memory.model import RankMemory
from longctx.parallel.environment import processes_per_node
from longctx.parallel.host_memory import free_bytes
from longctx.planning.cost.spec import ModelSpec
from longctx.training.run_profile import own_device


class HostNeed(NamedTuple):
    """Bytes of host memory that a GPU needs for offloaded activations, and that are free for it."""

    needed: int
    free: int


def host_need(
    spec: ModelSpec, config: Config, ranks: int, candidates: Sequence[Load]
) -> HostNeed | None:
    """Returns what the fullest GPU needs; None without offloaded activations, or for GPUs that are
    not on this machine."""
    device, gpu = own_device(config)
    if not config.train.offload_activations or device.type != "cuda" or gpu is None:
        return None
    free = free_bytes()
    if free is None:
        return None
    needed = host_bytes(spec, config, ranks, candidates)
    return HostNeed(needed, free // (processes_per_node(ranks) or ranks))


def host_bytes(spec: ModelSpec, config: Config, ranks: int, candidates: Sequence[Load]) -> int:
    """Returns the bytes of host memory in which the fullest GPU keeps offloaded activations: of a
    pipeline as many micro-batches as it has ranks."""
    found = []
    for load in candidates:
        for pipeline_rank in range(config.parallel.pipeline_parallel_size):
            rank = RankMemory(
                spec, config, ranks=ranks, load=load, fused=True, pipeline_rank=pipeline_rank
            )
            found.append(rank.on_host * config.pipeline.ranks)
    return max(found)

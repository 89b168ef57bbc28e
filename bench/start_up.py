"""What the process groups of a run cost at its start: their number, seconds and memory.

    python -m bench.start_up          # a minute, on one machine

Real: so many processes make all groups over gloo, which connects every pair of ranks of every
group. Fake: one rank of so many makes them with torch's fake
group, as on GPUs, where a group connects nobody until it is used. The memory of NCCL is what others
have measured (longctx/memory/kernels.py), for 8 GPUs a node.

Rows go to OUT.csv. Not measured: NCCL, whose communicators connect in the first step.
"""

import multiprocessing
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from bench.harness import Table, command, facts, options
from longctx.parallel import mesh
from tests.whole_size import fake_ranks

NODE = 8
SPLITS: dict[str, dict[str, int]] = {
    "domain": {},
    "shards of 8": {"shard_ranks": 8},
    "tensor 2, pipeline 4": {"tensor": 2, "pipeline": 4},
    "experts over 8": {"expert": 8},
}
REAL = 2, 4, 8, 16
FAKE = 64, 512, 4096
COLUMNS = "groups", "ranks", "split", "communicators", "seconds", "megabytes"


def own_megabytes() -> float:
    """Returns the memory of this process that it shares with no other, or wrote itself."""
    text = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8")
    private = [line.split()[1] for line in text.splitlines() if line.startswith("Private_")]
    return sum(map(int, private)) / 1024


def made(split: dict[str, int]) -> dict[str, Any]:
    """Makes the groups of a run in this process. Returns how many have several ranks, and what they
    took."""
    before, began = own_megabytes(), time.monotonic()
    mesh.make_groups(torch.device("cpu"), timeout_s=300.0, **split)
    seconds = time.monotonic() - began
    everything = dist.distributed_c10d._world.pg_map
    several = [group for group in everything if dist.get_world_size(group) > 1]
    return {
        "communicators": len(several),
        "seconds": round(seconds, 2),
        "megabytes": round(own_megabytes() - before, 1),
    }


def real_rank(rank: int, ranks: int, store: str, split: dict[str, int], answers: Any) -> None:
    os.environ.update(LOCAL_WORLD_SIZE=str(min(ranks, NODE)), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=300),
    )
    dist.barrier()
    answers.put(made(split))
    dist.barrier()
    dist.destroy_process_group()


def real(ranks: int, split: dict[str, int], folder: Path) -> dict[str, Any]:
    """Returns what the slowest and the largest of so many processes needed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["longctx.parallel.mesh"])
    answers = context.Queue()
    store = str(folder / f"store-{ranks}-{time.monotonic_ns()}")
    processes = [
        context.Process(target=real_rank, args=(rank, ranks, store, split, answers))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found = [answers.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    return {name: max(each[name] for each in found) for name in found[0]}


def fake(ranks: int, split: dict[str, int]) -> dict[str, Any]:
    """Returns what one rank of so many needs."""
    os.environ.update(LOCAL_WORLD_SIZE=str(NODE), WORLD_SIZE=str(ranks))
    with mock.patch.object(mesh, "warm_up"), fake_ranks(1, ranks):
        return made(split)


def main() -> None:
    given = options(__doc__, "start-up").parse_args()
    about = facts("longctx", "torch") | {"command": command(given.out)}
    table = Table(given.out.with_suffix(".csv"), COLUMNS, about, overwrite=True)
    with tempfile.TemporaryDirectory() as folder:
        for ranks in REAL:
            found = real(ranks, {}, Path(folder))
            table.append({"groups": "gloo", "ranks": ranks, "split": "domain", **found})
            print(table.rows[-1], flush=True)
    for ranks in FAKE:
        for name, split in SPLITS.items():
            table.append({"groups": "fake", "ranks": ranks, "split": name, **fake(ranks, split)})
            print(table.rows[-1], flush=True)


if __name__ == "__main__":
    main()

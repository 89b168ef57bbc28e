"""Environment: the place of this process as its launcher set it, and its share of the machine's cores."""

import os
import time
from dataclasses import dataclass

from longctx.errors import UserError
from longctx.units import whole_number


@dataclass(frozen=True)
class Launch:
    """Place of a process as set by torchrun; without torchrun 0, 0, 1, 1."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @classmethod
    def read(cls) -> "Launch":
        """Reads the environment. Raises UserError for values that a launcher does not set."""
        defaults = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        values = {name: os.environ.get(name, default) for name, default in defaults.items()}
        for name, value in values.items():
            if whole_number(value) is None:
                raise UserError(
                    f"the environment variable {name} is {value!r}: it must be a number; unset it, or start with torchrun"
                )
        return cls(*map(int, values.values()))


def wait_for_rank_0() -> None:
    """Waits, but for rank 0, so that one rank of each node tells an error of all: its launcher then ends the others there.

    The first rank of another node waits 2 s, and all others 10 s.
    """
    if os.environ.get("RANK", "0") != "0":
        time.sleep(2.0 if os.environ.get("LOCAL_RANK", "0") == "0" else 10.0)


def processes_per_node(ranks: int) -> int | None:
    """Returns the number of processes that the launcher started on this node; None if they are not part of a run of `ranks`
    processes on several nodes, or the launcher does not say.
    """
    launch = Launch.read()
    spread = "LOCAL_WORLD_SIZE" in os.environ and launch.local_world_size < launch.world_size
    return launch.local_world_size if spread and launch.world_size == ranks else None


def share_cores(ranks: int) -> None:
    """Divides this machine's cores among `ranks` processes through OMP_NUM_THREADS, unless it is set."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))


def host_threads() -> int | None:
    """Returns the number of threads for large computations on the CPU: this process's share of the cores it may use.

    None if OMP_NUM_THREADS says otherwise. A value of 1 does not count: torchrun sets it if the user has set none.
    """
    return _own_cores() if os.environ.get("OMP_NUM_THREADS", "1") == "1" else None


def share_compilers() -> None:
    """Lets torch.compile start one worker per core of this process's share, unless TORCHINDUCTOR_COMPILE_THREADS is set.

    Torch starts up to 32 in every process: 256 on a node of eight GPUs.
    """
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        import torch._inductor.config as inductor

        inductor.compile_threads = min(32, _own_cores())


def _own_cores() -> int:
    """Returns this process's share of the cores that the processes of this node may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // Launch.read().local_world_size)

"""Environment: the place of this process as its launcher set it, and its share of the machine's
cores."""

import os
import time
from dataclasses import dataclass

from longctx.errors import UserError
from longctx.units import whole_number

TRAINER_OPTIONS = "LONGCTX_OPTIONS"
"""Variable with options of `python -m longctx.trainers`, as YAML."""


def trainer_options() -> str | None:
    """Returns the options of `python -m longctx.trainers` in the environment; None without any."""
    return os.environ.get(TRAINER_OPTIONS)


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
                    f"the environment variable {name} is {value!r}: it must be a number; unset it, "
                    "or start with torchrun"
                )
        launch = cls(*map(int, values.values()))
        launch._check()
        return launch

    def _check(self) -> None:
        """Raises UserError for places that cannot be, as when only some of the variables are
        set."""
        if self.rank >= self.world_size:
            raise UserError(
                f"the environment variable RANK is {self.rank}, but WORLD_SIZE is "
                f"{self.world_size}, so there is no such rank: set both, or start with torchrun"
            )

    @classmethod
    def to_join(cls) -> "Launch":
        """Reads the environment of a process that is about to run with the others, and not before
        others are started.

        Raises UserError for a task of a launcher that torchrun does not know: each of the tasks
        would run alone.
        """
        tasks = other_tasks()
        if tasks:
            raise UserError(tasks)
        launch = cls.read()
        if launch.world_size > 1 and "RANK" not in os.environ:
            raise UserError(
                f"the environment variable WORLD_SIZE is {launch.world_size}, but RANK is not "
                "set, so that all processes would be rank 0: set both, or start with torchrun"
            )
        return launch


OTHER_LAUNCHERS = {
    "SLURM": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    "Open MPI": ("OMPI_COMM_WORLD_SIZE",),
    "MPICH or Intel MPI": ("PMI_SIZE", "MV2_COMM_WORLD_SIZE"),
    "Flux": ("FLUX_JOB_SIZE",),
}
"""Launchers of tasks → variables with the number of the tasks, the first of which counts."""


def other_tasks() -> str:
    """Returns what is wrong if a launcher has started several tasks, and torchrun none of them;
    nothing otherwise.

    Processes are those of torchrun alone. SLURM's and MPI's numbers of tasks may be of the
    allocation, and not of this command, so that they are not taken for ranks.
    """
    if "WORLD_SIZE" in os.environ:
        return ""
    for launcher, names in OTHER_LAUNCHERS.items():
        name = next((name for name in names if name in os.environ), None)
        tasks = None if name is None else whole_number(os.environ[name])
        if tasks is not None and tasks > 1:
            return (
                f"{launcher} has {tasks} tasks ({name}), but torchrun started none of them, so "
                "each would run alone: start one task per node with torchrun in it, such as srun "
                "--ntasks-per-node 1 torchrun --nnodes N --nproc-per-node GPUS --rdzv-backend "
                "c10d --rdzv-endpoint HOST:29500 -m longctx train .. (docs/clusters.md); or set "
                "WORLD_SIZE=1 and RANK=0 for a single process"
            )
    return ""


def is_task() -> bool:
    """Returns whether this process is one of several tasks, and not the script of an allocation for
    several."""
    of_slurm = "SLURM_STEP_ID" in os.environ
    return bool(other_tasks()) and (
        of_slurm or not any(name.startswith("SLURM_") for name in os.environ)
    )


def wait_for_rank_0() -> None:
    """Waits, but for rank 0, so that one rank of each node tells an error of all: its launcher then
    ends the others there.

    The first rank of another node waits 2 s, and all others 10 s.
    """
    if os.environ.get("RANK", "0") != "0":
        time.sleep(2.0 if os.environ.get("LOCAL_RANK", "0") == "0" else 10.0)


def processes_per_node(ranks: int) -> int | None:
    """Returns the number of processes that the launcher started on this node; None if they are not
    part of a run of `ranks` processes on several nodes, or the launcher does not say.
    """
    launch = Launch.read()
    spread = "LOCAL_WORLD_SIZE" in os.environ and launch.local_world_size < launch.world_size
    if spread and launch.world_size == ranks:
        return launch.local_world_size
    return None


def share_cores(ranks: int) -> None:
    """Divides this machine's cores among `ranks` processes through OMP_NUM_THREADS, unless it is
    set."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))


def host_threads() -> int | None:
    """Returns the number of threads for large computations on the CPU: this process's share of the
    cores it may use.

    None if OMP_NUM_THREADS says otherwise. A value of 1 does not count: torchrun sets it if the
    user has set none.
    """
    if os.environ.get("OMP_NUM_THREADS", "1") == "1":
        return _own_cores()
    return None


def share_compilers() -> None:
    """Lets torch.compile start one worker per core of this process's share, unless
    TORCHINDUCTOR_COMPILE_THREADS is set.

    Torch starts up to 32 in every process: 256 on a node of eight GPUs.
    """
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        import torch._inductor.config as inductor

        inductor.compile_threads = min(32, _own_cores())


def _own_cores() -> int:
    """Returns this process's share of the cores that the processes of this node may use."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, cores // Launch.read().local_world_size)

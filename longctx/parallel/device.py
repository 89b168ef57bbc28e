"""Device: chooses and prepares the device of this process, before CUDA starts."""

import faulthandler
import os
import sys
from pathlib import Path

import torch
from torch import torch_version

from longctx.errors import UserError
from longctx.parallel.environment import Launch

ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
EXACT_PINNED = "pinned_max_round_threshold_mb"
"""Setting of torch's allocator: larger pinned buffers are not rounded up to powers of two."""


QUEUES_SETTING = "CUDA_DEVICE_MAX_CONNECTIONS"
QUEUES = 32
"""Hardware queues of a process. Over two nodes ten streams are in use: compute and the hops beside
it, two exchanges, FSDP's four, offloading and checkpoints. Of the default of 8, two streams in one
queue would wait for each other, which messages of different groups must not."""


def choose_device(setting: str, local_rank: int) -> torch.device:
    """Returns the device for `setting`: cpu, cuda, or auto (this node's GPU `local_rank` if torch
    sees GPUs, else the CPU)."""
    if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def assumed(setting: str) -> str:
    """Returns words for a run that is planned as on CPUs because this machine has no GPU; empty for
    others."""
    without = setting == "auto" and not torch.cuda.is_available()
    if without:
        return " of CPUs, as no GPU is here (--train.device cuda plans for GPUs)"
    return ""


def prepare_device(setting: str, launch: Launch) -> torch.device:
    """Returns the device of this process for `setting` (see `choose_device`), current and ready to
    allocate memory.

    Raises UserError if this node has fewer GPUs than processes.
    """
    device = choose_device(setting, launch.local_rank)
    prepare_allocator(device)
    prepare_queues(device)
    check_device(device, launch.local_world_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels are chosen by what the current device can do
    return device


def check_device(device: torch.device, local_processes: int) -> None:
    """Raises UserError if this node has fewer GPUs than processes, which need one each."""
    if device.type == "cuda" and (seen := torch.cuda.device_count()) < local_processes:
        raise UserError(
            f"this node has {local_processes} processes, which need a GPU each, but torch "
            f"{torch.__version__} sees {seen}: start fewer, or set train.device to cpu"
        )


def prepare_allocator(device: torch.device) -> None:
    """Lets torch's allocator grow its segments on a GPU, unless the user has configured it. Call it
    before CUDA starts.

    Every micro-batch has other shapes, for which segments of fixed size would be cut into pieces
    that fit no later one. Pinned host memory is not rounded up to powers of two, from the first
    version of torch on that can do without.
    """
    if not is_prepared(device):
        if torch_version.TorchVersion(torch.__version__) >= "2.13":
            exact = f",{EXACT_PINNED}:1"
        else:
            exact = ""
        # The other names are deprecated, but come first if set.
        os.environ[ALLOCATOR_SETTINGS[0]] = f"expandable_segments:True{exact}"


def prepare_queues(device: torch.device) -> None:
    """Gives every stream of a GPU a hardware queue of its own, unless the user has set their
    number. Call it before CUDA starts."""
    if device.type == "cuda":
        os.environ.setdefault(QUEUES_SETTING, str(QUEUES))


def is_prepared(device: torch.device) -> bool:
    """Returns whether a device has no allocator of torch, or one that is configured."""
    return device.type != "cuda" or any(name in os.environ for name in ALLOCATOR_SETTINGS)


def rounds_pinned() -> bool:
    """Returns whether torch rounds pinned host memory up to powers of two."""
    return not any(EXACT_PINNED in os.environ.get(name, "") for name in ALLOCATOR_SETTINGS)


def record_messages(device: torch.device, folder: Path) -> None:
    """On a GPU, makes a process that NCCL ends tell where it was; variables of torch's that the
    user has set are kept.

    NCCL raises no error for a message that never comes: after the timeout its watchdog ends the
    process. Then torch's flight recorder writes the last operations of all groups to
    `folder`/rank_N, and Python prints what every thread was doing. Call this before the processes
    join.
    """
    if device.type != "cuda":
        return
    folder.mkdir(parents=True, exist_ok=True)
    settings = (
        # operations: some steps of a small model.
        (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "20000"),
        (
            ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"),
            str(folder.absolute() / "rank_"),
        ),
        (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
    )
    for names, value in settings:  # the second name is the older one, which torch reads too
        if not any(name in os.environ for name in names):
            os.environ[names[0]] = value
    faulthandler.enable(sys.__stderr__ or sys.stderr)

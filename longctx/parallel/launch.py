"""Starts torchrun on this machine from a command: it ends as its processes do, and adds no
traceback."""

import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import is_torchelastic_launched

import longctx
from longctx.errors import UserError
from longctx.parallel.environment import Launch, is_task, other_tasks, share_cores


def launches(processes: int) -> bool:
    """Returns whether this process starts `processes` others, and is not one of them.

    Raises UserError for less than 1, and for another number than torchrun started here.
    """
    if processes < 1:
        raise UserError(f"--processes is {processes}: must be at least 1")
    if not is_torchelastic_launched():
        if processes > 1 and is_task():
            raise UserError(f"--processes is {processes}, but {other_tasks()}")
        return processes > 1
    started = Launch.read().local_world_size
    if started != processes:
        raise UserError(
            f"--processes is {processes}, but torchrun started {started} on this machine: omit "
            "--processes"
        )
    return False


def _check_imported() -> None:
    """Raises UserError if new processes would import another `longctx`: Python looks in the working
    directory first."""
    ours = Path(longctx.__file__)
    command = [
        sys.executable,
        "-c",
        "from importlib.util import find_spec; print(find_spec('longctx').origin)",
    ]
    theirs = Path(subprocess.run(command, capture_output=True, text=True).stdout.strip())
    if theirs.resolve() != ours.resolve():
        raise UserError(
            f"processes started in {Path.cwd()} would import another longctx, {theirs.parent}, "
            f"than this command, {ours.parent}: start the command in another folder, or with "
            "python -m longctx to use theirs"
        )


def launch(ranks: int, arguments: Sequence[str]) -> int:
    """Runs `python -m longctx arguments` in `ranks` processes. Returns the exit status of the first
    that fails, else 0.

    SIGINT and SIGTERM go on to the processes, which have half a minute to end; then 128 and the
    signal's number is returned.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    _check_imported()
    share_cores(ranks)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run.main(["--standalone", f"--nproc-per-node={ranks}", "-m", "longctx", *arguments])
    except ChildFailedError as error:
        return int(error.get_first_failure()[1].exitcode)
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0

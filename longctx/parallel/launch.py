"""Starts torchrun on this machine from a command: it ends as its processes do, and adds no traceback."""

import logging
from collections.abc import Sequence

from torch.distributed import is_torchelastic_launched

from longctx.errors import UserError
from longctx.parallel.mesh import Launch, share_cores


def launches(processes: int) -> bool:
    """Returns whether this process starts `processes` others, and is not one of them.

    Raises UserError for less than 1, and for another number than torchrun started here.
    """
    if processes < 1:
        raise UserError(f"--processes is {processes}: must be at least 1")
    if not is_torchelastic_launched():
        return processes > 1
    started = Launch.read().local_world_size
    if started != processes:
        raise UserError(f"--processes is {processes}, but torchrun started {started} on this machine: omit --processes")
    return False


def launch(ranks: int, module: str, arguments: Sequence[str]) -> int:
    """Runs `python -m module arguments` in `ranks` processes. Returns the exit status of the first that fails, else 0.

    SIGINT and SIGTERM go on to the processes, which have half a minute to end; then 128 and the signal's number is returned.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    share_cores(ranks)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run.main(["--standalone", f"--nproc-per-node={ranks}", "-m", module, *arguments])
    except ChildFailedError as error:
        return int(error.get_first_failure()[1].exitcode)
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0

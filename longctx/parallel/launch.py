"""Starts torchrun on this machine from a command: it ends as its processes do, and adds no traceback."""

import logging
from collections.abc import Sequence

from longctx.parallel.mesh import share_cores


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

"""A pool of processes for tests over several ranks. Workers are started once and given a fresh
process group for every call, because starting a process costs a second and making a group
milliseconds. After a failure the pool is ended and started anew.

A group that something still refers to goes on waking up a hundred times a second: so garbage is
collected after every call, and for what other caches keep workers are replaced after some calls."""

import faulthandler
import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

GROUP_TIMEOUT_S = 60.0
"""A deadlock fails a test after this long instead of hanging it."""
CALLS = 40
"""After so many the workers are replaced."""
PRELOADED = ["tests.preloaded"]
"""What the fork server imports once for all processes."""


def _serve(connection: Connection) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    torch.set_num_threads(1)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # says where it is, if it gives no answer
    while True:
        gc.freeze()  # what was imported needs no look again
        try:
            job = connection.recv()
        except EOFError:
            return
        function, arguments, rank, ranks, store, timeout_s, device = job
        try:
            if device == "cuda":
                torch.cuda.set_device(rank)
            dist.init_process_group(
                "nccl" if device == "cuda" else "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=ranks,
                timeout=timedelta(seconds=timeout_s),
            )
            answer = (True, function(*arguments))
            dist.barrier()
            time.sleep(0.01)  # as `Mesh.close`
            dist.destroy_process_group()
            # It holds meshes, and the names of groups that were destroyed.
            _clear_sharding_prop_cache()
            gc.collect()
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send(answer)


class Workers:
    """`run(function, ranks, *arguments)` calls a module-level function on every rank of a new
    group: gloo, or NCCL on GPUs."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED)
        self.workers: list[tuple[Any, Connection]] = []
        self.folder = tempfile.TemporaryDirectory(prefix="longctx-test-groups-")
        self.calls = 0

    def run(
        self,
        function: Callable[..., Any],
        ranks: int,
        *arguments: Any,
        timeout_s: float = GROUP_TIMEOUT_S,
        device: str = "cpu",
    ) -> list[Any]:
        """Results by rank. Raises AssertionError with the traceback of every rank that failed."""
        if self.calls % CALLS == 0:
            self.stop()
        while len(self.workers) < ranks:
            self._start()
        self.calls += 1
        store = Path(self.folder.name) / f"group-{self.calls}"
        for rank in range(ranks):
            self.workers[rank][1].send((function, arguments, rank, ranks, store, timeout_s, device))
        answers = [self._receive(rank, timeout_s) for rank in range(ranks)]
        failures = [
            f"--- rank {rank}\n{text}" for rank, (good, text) in enumerate(answers) if not good
        ]
        if failures:
            self.stop()
            raise AssertionError("\n".join(failures))
        return [value for _, value in answers]

    def stop(self) -> None:
        """Ends the workers; the next `run` starts new ones."""
        for process, connection in self.workers:
            connection.close()
            process.kill()
            process.join()
        self.workers = []

    def _start(self) -> None:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self.workers.append((process, ours))

    def _receive(self, rank: int, timeout_s: float) -> tuple[bool, Any]:
        connection = self.workers[rank][1]
        with suppress(EOFError, ConnectionResetError):
            if connection.poll(4 * timeout_s):
                return connection.recv()
            os.kill(self.workers[rank][0].pid, signal.SIGUSR1)
            time.sleep(1)
            return (
                False,
                f"rank {rank} gave no answer in {4 * timeout_s:.0f} s: where it is stands in the "
                "output",
            )
        process = self.workers[rank][0]
        process.join(10)
        return (
            False,
            f"the process of rank {rank} died with exit code {process.exitcode} (negative: a "
            "signal)",
        )

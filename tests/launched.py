"""Commands in processes of their own, started by a fork server that has imported torch: a new
process would need seconds.

`run("train", "run.yaml", ranks=2)` is what `torchrun --nproc-per-node 2 -m longctx train run.yaml`
does, without torchrun.
"""

import ctypes
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.distributed import TCPStore

from tests.workers import PRELOADED

LIMIT_S = 900.0
"""A group of processes that lasts longer hangs, with two cores that are busy otherwise."""
CLONE_NEWNET = 0x40000000


def free_port() -> int:
    """Returns a port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port: int = free.getsockname()[1]
    return port


def _rank(
    arguments: list[str], environment: dict[str, str], output: Path, namespace: str | None
) -> None:
    """One rank: `longctx ARGUMENTS`, or a script, with stdout and stderr in files, in a network
    namespace if one is named."""
    from longctx.cli import main

    for suffix, descriptor in ((".out", 1), (".err", 2)):
        with output.with_suffix(suffix).open("wb", buffering=0) as stream:
            os.dup2(stream.fileno(), descriptor)
    if namespace is not None:
        with Path("/run/netns", namespace).open() as file:
            assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) == 0, (
                os.strerror(ctypes.get_errno())
            )
    os.chdir(environment.pop("PWD"))
    os.environ.update(environment)
    if arguments[0].endswith(".py"):
        sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).parent)
        runpy.run_path(arguments[0], run_name="__main__")
    else:
        sys.exit(main(arguments))


@dataclass
class Group:
    """Processes of a command, by rank, with their output in files of a folder."""

    processes: list[Any]
    folder: Path
    store: Any = None  # of the processes, kept while they run
    ranks: Sequence[int] | None = None  # those of the processes; None: from 0 on

    def part(self, *ranks: int) -> "Group":
        """Returns some of the processes."""
        return Group([self.processes[rank] for rank in ranks], self.folder, self.store, ranks)

    def _read(self, suffix: str) -> list[str]:
        files = [
            self.folder / f"{rank}{suffix}" for rank in self.ranks or range(len(self.processes))
        ]
        return [
            file.read_text("utf-8", errors="replace") if file.exists() else "" for file in files
        ]

    @property
    def printed(self) -> str:
        """What all ranks wrote to stdout."""
        return "".join(self._read(".out"))

    @property
    def errors(self) -> list[str]:
        """What every rank wrote to stderr."""
        return self._read(".err")

    @property
    def said(self) -> str:
        return self.printed + "".join(self.errors)

    @property
    def codes(self) -> list[int | None]:
        return [process.exitcode for process in self.processes]

    @property
    def running(self) -> list[int]:
        return [rank for rank, process in enumerate(self.processes) if process.is_alive()]

    def send(self, number: signal.Signals, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if self.processes[rank].is_alive():
                os.kill(self.processes[rank].pid, number)

    def end(self, limit_s: float = LIMIT_S) -> bool:
        """Waits until all processes have ended; those that have not in time are killed. Returns
        whether they had to be."""
        deadline = time.monotonic() + limit_s
        while (running := self.running) and (left := deadline - time.monotonic()) > 0:
            wait([self.processes[rank].sentinel for rank in running], left)
        hung = bool(self.running)
        for process in self.processes:
            process.kill()
            process.join()
        return hung

    def until(self, condition: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
        """Waits for a condition. Returns False if a process ended before, or the time was over."""
        deadline = time.monotonic() + limit_s
        while not condition():
            if len(self.running) < len(self.processes) or time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True


def start(
    by_rank: Sequence[Sequence[str]],
    folder: Path,
    *,
    world: int | None = None,
    namespaces: Sequence[str] = (),
) -> Group:
    """Starts `longctx ARGUMENTS` on one rank for each of the given arguments, the first of `world`
    ranks (default: all).

    `folder` is made for their output. With namespaces, each rank is in one of them.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ranks, address = world or len(by_rank), "10.77.0.1" if namespaces else "127.0.0.1"
    place = {
        "MASTER_ADDR": address,
        "MASTER_PORT": free_port(),
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
    }
    place |= {"PWD": Path.cwd()} | ({"GLOO_SOCKET_IFNAME": "eth0"} if namespaces else {})
    folder.mkdir()
    group = Group([], folder)
    if not namespaces:  # as torchrun's agent: the store outlives rank 0
        group.store = TCPStore(address, 0, ranks, is_master=True, wait_for_workers=False)
        place |= {"MASTER_PORT": group.store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    for rank, arguments in enumerate(by_rank):
        environment = {
            name: str(value) for name, value in (place | {"RANK": rank, "LOCAL_RANK": rank}).items()
        }
        given = (
            [*arguments],
            environment,
            folder / str(rank),
            namespaces[rank] if namespaces else None,
        )
        process = context.Process(target=_rank, args=given, daemon=True)
        process.start()
        group.processes.append(process)
    return group


def run(*arguments: object, ranks: int = 1, status: int = 0) -> tuple[str, str]:
    """Runs `longctx ARGUMENTS` on `ranks` ranks. Returns stdout and stderr; every rank must end
    with `status`."""
    with TemporaryDirectory(prefix="longctx-test-output-") as folder:
        group = start([[str(argument) for argument in arguments]] * ranks, Path(folder) / "output")
        assert not group.end() and group.codes == [status] * ranks, f"{group.codes}\n{group.said}"
        return group.printed, "".join(group.errors)


def launch(ranks: int, arguments: Sequence[str]) -> int:
    """Takes the place of `longctx.parallel.launch.launch` where a test is of what a command starts,
    not of torchrun."""
    with TemporaryDirectory(prefix="longctx-test-output-") as folder:
        group = start([arguments] * ranks, Path(folder) / "output")
        assert not group.end(), group.said
        print(group.printed, end="")
        print(*group.errors, sep="", end="", file=sys.stderr)
        return next((code for code in group.codes if code), 0)

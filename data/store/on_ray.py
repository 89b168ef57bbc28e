"""On Ray: makes the slices of a store on the machines of a Ray cluster, which see source and store
under the same names.

Every attempt at a slice writes into a folder of its own, and moves what it has made into its place
once it is whole. So an attempt may die, or be made twice, and the store is the same.
"""

import os
import shutil
import statistics
import time
import uuid
from dataclasses import dataclass, replace
from typing import Any

from longctx.data.store.encode import Encoder
from longctx.data.store.manifest import StoreError
from longctx.data.store.shares import Preparation, finished_share, make_slice, silent
from longctx.data.store.writer import Progress
from longctx.errors import UserError, brief

RETRIES = 5
"""How often a slice is made again whose process or machine has died."""
WAIT_S = 0.5
"""Seconds between looks at the cluster."""
SLOW = 2.0
"""How many times longer than usual an attempt lasts before a second one is made beside it, if a
machine is idle."""
ATTEMPT = "attempt-"


@dataclass(frozen=True)
class _Attempt:
    slice: int
    began: float


def make_on_ray(
    work: Preparation, address: str, *, workers: int | None, progress: Progress
) -> None:
    """Makes all slices that are not finished, with `workers` tokenizer threads each (None: 1).

    Raises what an attempt raises, and StoreError for a cluster that does not answer.
    """
    ray = _connected(address)
    try:
        _Slices(ray, work, threads=workers or 1).make(progress)
    finally:
        ray.shutdown()
        for folder in work.folder.glob(f"{ATTEMPT}*"):
            shutil.rmtree(folder, ignore_errors=True)


def _connected(address: str) -> Any:
    """Returns the module `ray`, connected to a cluster."""
    try:
        import ray
    except ImportError as error:
        raise StoreError("--ray needs the package ray: pip install '.[ray]'") from error
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise StoreError(
            f"there is no Ray cluster at {address} ({brief(error)}): start one (`ray start "
            "--head`), and give its address, or auto on one of its machines"
        ) from error
    return ray


class _Slices:
    """The attempts at slices that are under way."""

    def __init__(self, ray: Any, work: Preparation, *, threads: int) -> None:
        self._ray = ray
        self._work = work
        self._threads = threads
        self._given = ray.put(work)
        options = {"num_cpus": threads, "max_retries": RETRIES}
        self._attempt = ray.remote(**options)(_make_attempt)
        self._running: dict[Any, _Attempt] = {}
        self._lasted: list[float] = []
        numbers = range(len(work.slices))
        self._waiting = [number for number in numbers if not work.is_finished(number)]

    def make(self, progress: Progress) -> None:
        """Makes them all."""
        while self._waiting or self._running:
            self._begin()
            ready, _ = self._ray.wait(list(self._running), timeout=WAIT_S)
            for reference in ready:
                self._end(reference)
            progress("tokenizing", finished_share(self._work))

    def _begin(self) -> None:
        """Begins as many attempts as the cluster has room for, at least one; second ones once no
        slice waits."""
        cores = int(self._ray.cluster_resources().get("CPU", 0))
        room = max(1, cores // self._threads)
        while self._waiting and len(self._running) < room:
            self._start(self._waiting.pop(0))
        for number in self._slow():
            if len(self._running) < room and not self._waiting:
                self._start(number)

    def _start(self, number: int) -> None:
        reference = self._attempt.remote(self._given, number, threads=self._threads)
        self._running[reference] = _Attempt(number, time.monotonic())

    def _slow(self) -> list[int]:
        """Returns the slices with a single attempt that lasts longer than usual."""
        if not self._lasted:
            return []
        usual = statistics.median(self._lasted)
        now = time.monotonic()
        numbers = [attempt.slice for attempt in self._running.values()]
        return [
            attempt.slice
            for attempt in self._running.values()
            if now - attempt.began > SLOW * usual + WAIT_S and numbers.count(attempt.slice) == 1
        ]

    def _end(self, reference: Any) -> None:
        """Takes the result of an attempt, and ends others at the same slice. Raises its error,
        unless another attempt is under way after a machine has died."""
        if reference not in self._running:  # ended as another attempt was first
            return
        attempt = self._running.pop(reference)
        others = [each for each, its in self._running.items() if its.slice == attempt.slice]
        try:
            self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise error.cause from None
            raise
        except self._ray.exceptions.RayError as error:
            if others:
                return
            raise StoreError(
                f"slice {attempt.slice + 1} of {len(self._work.slices)} could not be made "
                f"{RETRIES + 1} times ({brief(error)}): run the command again, which goes on from "
                "there; if memory was short, give fewer --workers"
            ) from error
        self._lasted.append(time.monotonic() - attempt.began)
        for other in others:
            del self._running[other]
            self._ray.cancel(other, force=True)


def _make_attempt(work: Preparation, number: int, *, threads: int) -> None:
    """Makes a slice in a folder of its own, and puts it in its place; its note, which says that it
    is finished, comes last."""
    if work.is_finished(number):
        return
    folder = work.folder / f"{ATTEMPT}{number}-{uuid.uuid4().hex}"
    folder.mkdir()
    encoder = Encoder(work.tokenizer, work.request, threads)
    make_slice(replace(work, folder=folder), encoder, number, progress=silent)
    note = work.files(number).note
    names = sorted(file.name for file in folder.iterdir() if file.name != note)
    for name in (*names, note):
        os.replace(folder / name, work.folder / name)
    folder.rmdir()

"""Shares: processes, on one machine or on many, that make the slices of a store.

Every process goes through all slices, beginning with its own share, and makes those that nobody has
made or is making. A slice is locked while it is made, and a lock is gone with its process, so that
another share makes what a dead one has left. What is written for a slice depends on the source and
the request alone.
"""

import fcntl
import json
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from longctx.checksums import sealed, unsealed
from longctx.data.records.corpus import SourceCounts
from longctx.data.records.readers import CorpusError
from longctx.data.records.slices import Slice
from longctx.data.records.tokenizer import Tokenizer
from longctx.data.store.encode import Encoder
from longctx.data.store.manifest import TOKENIZER, StoreError
from longctx.data.store.request import StoreRequest
from longctx.data.store.writer import Part, Progress, SliceFiles, finished_parts, write_parts
from longctx.remote import RemotePath

WAIT_S = 0.1
"""Seconds between looks at what processes have finished."""
_SHARE = re.compile(r"([0-9]{1,9})/([0-9]{1,9})")


@dataclass(frozen=True)
class Share:
    """Share `number` of `count`, counted from 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Share":
        """Returns the share that `3/64` names. Raises StoreError."""
        match = _SHARE.fullmatch(text)
        share = None if match is None else cls(int(match[1]), int(match[2]))
        if share is None or not 1 <= share.number <= share.count:
            raise StoreError(
                f"share is {text!r}: must be K/N, share K of N with 1 ≤ K ≤ N, such as 3/64"
            )
        return share

    def order(self, slices: int) -> list[int]:
        """Returns the numbers of all slices, those of this share first and then those of the shares
        behind it."""
        own = self.number - 1
        return sorted(range(slices), key=lambda each: ((each - own) % self.count, each))


ALL = Share(1, 1)


@dataclass(kw_only=True)
class FinishedSlice:
    """What is known of a slice that is finished: its parts, what its reader counted, and the
    digests of its files, by path."""

    parts: list[Part]
    read: SourceCounts
    digests: dict[str, str]

    def save(self, file: Path) -> None:
        unfinished = file.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(sealed(asdict(self))), "utf-8")
        unfinished.rename(file)

    @classmethod
    def load(cls, file: Path) -> "FinishedSlice":
        content: dict[str, Any] = unsealed(json.loads(file.read_text("utf-8")))
        parts = [Part(**part) for part in content["parts"]]
        read = SourceCounts(**content["read"])
        return cls(parts=parts, read=read, digests=content["digests"])


@dataclass(frozen=True)
class Preparation:
    """The store that a request asks for, made of `slices` of its source in a partial folder, where
    the tokenizer is."""

    folder: Path
    request: StoreRequest
    slices: Sequence[Slice]

    @property
    def tokenizer(self) -> Tokenizer:
        return self.request.given or Tokenizer.load(self.folder / TOKENIZER)

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of every slice."""
        return [slice_.bytes for slice_ in self.slices]

    def files(self, number: int) -> SliceFiles:
        """Returns the names of the files of a slice."""
        return SliceFiles(number, len(self.slices))

    def is_finished(self, number: int) -> bool:
        """Returns whether somebody has made a slice."""
        return (self.folder / self.files(number).note).is_file()

    def finished(self) -> list[FinishedSlice] | None:
        """Returns all slices in order; None if one is not finished."""
        numbers = range(len(self.slices))
        if not all(map(self.is_finished, numbers)):
            return None
        return [FinishedSlice.load(self.folder / self.files(number).note) for number in numbers]


def make_slices(
    work: Preparation, share: Share, *, workers: int | None, progress: Progress
) -> None:
    """Makes the slices that nobody has made or is making, in the `order` of a share, with so many
    tokenizer threads."""
    encoder = Encoder(work.tokenizer, work.request, workers)
    for number in share.order(len(work.slices)):
        if work.is_finished(number):
            continue
        with lock(work.folder / work.files(number).lock) as is_held:
            if is_held and not work.is_finished(number):
                make_slice(work, encoder, number, progress=progress)


def make_slice(work: Preparation, encoder: Encoder, number: int, *, progress: Progress) -> None:
    """Makes a slice, or what an interrupted process has left of it. Raises CorpusError if a file
    changes meanwhile."""
    corpus = work.request.corpus
    slice_ = work.slices[number]
    files = work.files(number)
    remove_unfinished(work.folder, files)
    before = _states(slice_)
    digests = corpus.digests_of(slice_)
    read = SourceCounts()
    parts = write_parts(
        work.folder, corpus, encoder, read, slice_=slice_, files=files, progress=progress
    )
    for file in slice_.files:
        if isinstance(file, RemotePath):
            file.check_unchanged()
    if _states(slice_) != before:
        names = ", ".join(str(file) for file in slice_.files[:3])
        raise CorpusError(f"{names} changed while it was read: run the command again")
    FinishedSlice(parts=parts, read=read, digests=digests).save(work.folder / files.note)


def _states(part: Slice) -> list[tuple[int, int]]:
    """Returns size and time of change of every file; those in object storage know themselves
    whether they have changed."""
    states = [file.stat() for file in part.files]
    return [(state.st_size, state.st_mtime_ns) for state in states]


def remove_unfinished(folder: Path, files: SliceFiles) -> None:
    """Removes the parts of a slice that an interrupted process has not finished."""
    kept = {part.file for part in finished_parts(folder, files.journal)}
    for file in folder.iterdir():
        if files.is_part(file.name) and file.name not in kept:
            file.unlink()


@contextmanager
def lock(file: Path, *, wait: bool = False) -> Iterator[bool]:
    """Yields whether this process holds the lock of that name until it leaves the block; no other
    one does then. It waits for another process if wanted.

    No process holds a lock in a folder that is gone, as others have put the store in place.
    """
    try:
        stream = file.open("wb")
    except FileNotFoundError:
        yield False
        return
    with stream:
        is_held = try_lock(stream.fileno(), fcntl.LOCK_EX)
        while wait and not is_held:
            time.sleep(WAIT_S)
            is_held = try_lock(stream.fileno(), fcntl.LOCK_EX)
        yield is_held


def try_lock(descriptor: int, kind: int) -> bool:
    """Returns whether a file or folder is locked now. Raises StoreError on a file system without
    locks."""
    try:
        # Released by the system when this process ends, however it ends.
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise StoreError(
            f"the file system of --out has no locks ({error}): choose an --out on another one, or "
            "mount it with flock"
        ) from error
    return True


# --- several processes of this machine


def make_in_processes(
    work: Preparation, share: Share, *, workers: int | None, progress: Progress
) -> None:
    """Makes slices as `make_slices` does, in as many processes as there are cores and slices,
    with `workers` tokenizer threads in all (None: one per core).

    Raises what the first process that fails raises.
    """
    threads = workers or os.cpu_count() or 1
    count = min(threads, len(work.slices))
    if count == 1:
        make_slices(work, share, workers=workers, progress=progress)
        return
    own = _OwnProcesses(work, share, count=count, threads=threads // count)
    try:
        while own.are_running():
            progress("tokenizing", finished_share(work))
            time.sleep(WAIT_S)
    finally:
        own.stop()
    progress("tokenizing", 1)


def finished_share(work: Preparation) -> float:
    """Returns the share of the bytes of finished slices."""
    sizes = work.sizes
    finished = sum(size for number, size in enumerate(sizes) if work.is_finished(number))
    return finished / max(1, sum(sizes))


class _OwnProcesses:
    """Processes that each make slices of a share."""

    def __init__(self, work: Preparation, share: Share, *, count: int, threads: int) -> None:
        self._running: list[subprocess.Popen[bytes]] = []
        for number in range(count):
            # Share 3/64 of a machine with 4 processes is those from 3/256 on, every 64th.
            its = Share(number * share.count + share.number, count * share.count)
            process = subprocess.Popen(
                [sys.executable, "-m", "longctx.data.store.shares"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            self._running.append(process)
            assert process.stdin is not None
            pickle.dump((work, its, threads), process.stdin)
            process.stdin.flush()  # it stays open: a process ends with the one that started it

    def are_running(self) -> bool:
        """Returns whether one is; raises the error of one that has failed."""
        for process in list(self._running):
            status = process.poll()
            if status is None:
                continue
            self._running.remove(process)
            assert process.stdout is not None
            said = process.stdout.read()
            _close(process)
            if not said:
                raise StoreError(
                    f"a process that prepared a part of the store ended with status {status}: run "
                    "the command again, which goes on from there; if memory was short (status -9), "
                    "give fewer --workers"
                )
            error = pickle.loads(said)
            if error is not None:
                raise error
        return bool(self._running)

    def stop(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()
            _close(process)


def _close(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def _end_with_parent(descriptor: int) -> None:
    """Ends this process once the one that writes to the pipe has ended."""
    os.read(descriptor, 1)
    os._exit(1)


def silent(stage: str, share: float) -> None:
    """Tells nobody of progress: the parent process sees which slices are finished."""


def _serve(given: IO[bytes], said: IO[bytes]) -> None:
    """Makes slices as the parent process asks, and tells it the error, or None."""
    work, share, threads = pickle.load(given)
    threading.Thread(target=_end_with_parent, args=(given.fileno(),), daemon=True).start()
    error: Exception | None = None
    try:
        make_slices(work, share, workers=threads, progress=silent)
    except Exception as raised:
        error = raised
    pickle.dump(error, said)
    said.flush()


if __name__ == "__main__":
    answer = sys.stdout.buffer
    sys.stdout = sys.stderr  # what a library prints is no answer
    _serve(sys.stdin.buffer, answer)

"""Cache: pieces of stores in object storage, in a folder that all processes of a machine share.

A piece is named by its checksum, and verified whenever it is read. Those that were not used for
longest are removed once all together are larger than wanted. The indices of stores are kept.
"""

import errno
import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow

from longctx.checksums import CHUNK, DIGITS, checksums_of, damage
from longctx.data.store.manifest import StoreError
from longctx.data.store.mapped import SMALL
from longctx.remote import RemotePath

FOLDER = Path("~/.cache/longctx")
MOST_GIB = 100.0
KEPT = 0.9
"""Share of the largest size to which a cache that is full is reduced."""
AT_ONCE = 8
"""Pieces that are fetched at a time."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


class Cache:
    """A folder of at most `most_gib` of pieces, beside the indices of stores.

    Attributes:
        fetched_bytes, used_bytes: pieces that this process has fetched, and that it has read.
    """

    def __init__(self, folder: Path | None = None, most_gib: float = MOST_GIB) -> None:
        self._folder = (folder or FOLDER).expanduser()
        self._most_bytes = int(most_gib * 2**30)
        self.fetched_bytes = 0
        self.used_bytes = 0

    def make(self) -> None:
        """Makes the folder. Raises StoreError."""
        with self._writing():
            for name in ("pieces", "files", "locks"):
                (self._folder / name).mkdir(parents=True, exist_ok=True)

    def piece(self, file: RemotePath, number: int, *, size: int, checksum: str) -> bytes:
        """Returns chunk `number` of a file of `size` bytes, which has this checksum. Raises
        ValueError if the storage has another one."""
        place = self._folder / "pieces" / checksum
        content = b""
        with self._held(checksum[:2]):
            with suppress(FileNotFoundError):
                content = place.read_bytes()
            if checksums_of(content) == checksum:
                os.utime(place)
            else:
                content = _fetched(file, number, size=size, checksum=checksum)
                self.fetched_bytes += len(content)
                self._put(place, content)
        self.used_bytes += len(content)
        return content

    def file(self, file: RemotePath, size: int, *, checksums: str) -> Path:
        """Returns the copy of a whole file of the index of a store, which has these checksums; a
        copy that has no more, if it is small enough to look, is fetched again."""
        name = checksums_of(checksums.encode())
        place = self._folder / "files" / f"{name}-{file.name}"
        with self._held(name[:2]):
            is_whole = place.is_file() and place.stat().st_size == size
            if is_whole and (size > SMALL or not damage(place, checksums)):
                return place
            unfinished = place.with_suffix(".unfinished")
            with self._writing(), unfinished.open("wb") as stream:
                for number in range(len(checksums) // DIGITS):
                    checksum = _checksum(checksums, number)
                    stream.write(_fetched(file, number, size=size, checksum=checksum))
            unfinished.rename(place)
        self.fetched_bytes += size
        return place

    def _put(self, place: Path, content: bytes) -> None:
        """Writes a piece, and removes those that were not used for longest, if there are too
        many."""
        unfinished = place.with_suffix(".unfinished")
        with self._writing():
            unfinished.write_bytes(content)
            unfinished.rename(place)
        with self._held("size") as stream:
            stream.seek(0)
            size = int(stream.read() or 0) + len(content)
            if size > self._most_bytes:
                size = self._reduce(place)
            stream.truncate(0)
            stream.write(str(size))

    def _reduce(self, last: Path) -> int:
        """Removes pieces, but for the `last` one. Returns the bytes that stay."""
        states = []
        for place in (self._folder / "pieces").iterdir():
            with suppress(FileNotFoundError):  # the name of one that another process is writing
                state = place.stat()
                states.append((state.st_mtime_ns, state.st_size, place))
        size = sum(its for _, its, _ in states)
        for _, its, place in sorted(states):
            if size > KEPT * self._most_bytes and place != last and not place.suffix:
                place.unlink(missing_ok=True)
                size -= its
        return size

    @contextmanager
    def _held(self, name: str) -> Iterator[Any]:
        """Yields a file, locked against other processes and threads."""
        with (self._folder / "locks" / name).open("a+") as stream:
            fcntl.flock(stream.fileno(), fcntl.LOCK_EX)
            yield stream

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise StoreError(
                f"the cache {self._folder} cannot be written ({error.strerror}): set "
                "data.cache_dir to a folder on a disk of this machine, and data.cache_gib to what "
                "it holds"
            ) from error


def _checksum(checksums: str, number: int) -> str:
    return checksums[number * DIGITS : (number + 1) * DIGITS]


def _fetched(file: RemotePath, number: int, *, size: int, checksum: str) -> bytes:
    start = number * CHUNK
    stop = min(start + CHUNK, size)
    content = file.part(start, stop)
    if checksums_of(content) != checksum:
        raise ValueError(
            f"{file.name} does not match its checksums between bytes {start:,} and {stop:,}"
        )
    return content


class CachedParts:
    """The parts of a store in object storage, read through a cache; as `LocalParts`."""

    def __init__(
        self,
        folder: RemotePath,
        sizes: Mapping[str, int],
        *,
        checksums: Mapping[str, str],
        cache: Cache,
    ) -> None:
        self.names = sorted(checksums)
        self._folder = folder
        self._sizes = sizes
        self._checksums = checksums
        self._cache = cache

    def read(self, part: int, begin: int, end: int) -> Any:
        """Returns the bytes from begin to end of a part. Raises ValueError if they are damaged."""
        first = begin // CHUNK
        pieces = [self._piece(part, number) for number in range(first, -(-end // CHUNK))]
        content = b"".join(pieces)
        return pyarrow.py_buffer(content)[begin - first * CHUNK : end - first * CHUNK]

    def fetch(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """Fetches spans (part, begin and end) that will be read, several at a time."""
        wanted: dict[tuple[int, int], None] = {}
        for part, begin, end in spans:
            for number in range(begin // CHUNK, -(-end // CHUNK)):
                wanted[part, number] = None
        with ThreadPoolExecutor(AT_ONCE) as threads:
            for fetched in [threads.submit(self._piece, *place) for place in wanted]:
                fetched.result()

    def _piece(self, part: int, number: int) -> bytes:
        name = self.names[part]
        checksum = _checksum(self._checksums[name], number)
        file = self._folder / name
        return self._cache.piece(file, number, size=self._sizes[name], checksum=checksum)

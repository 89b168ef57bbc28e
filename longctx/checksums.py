"""Checksums of the files of stores and checkpoints, so that a bit that has changed on disk is
noticed before it is used.

A file has a checksum (xxh3, 128 bits) for every CHUNK bytes, so that a part of a large file can be
verified alone. They find damage, not forgery: whoever can write a file can write its checksums too.
"""

import errno
import io
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from xxhash import xxh3_128, xxh3_128_hexdigest

CHUNK = 4 << 20
"""Bytes per checksum."""
DIGITS = 32
"""Characters of a checksum; the checksums of a file are joined in one string."""
SEAL = "checksum"
"""Key of the checksum of a JSON object, within it."""
WAITS_S = (0.5, 2.0, 6.0)
"""Seconds before a failed read is tried again."""
TRANSIENT = {
    errno.EIO,
    errno.EAGAIN,
    errno.EBUSY,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ECONNRESET,
    errno.ENOTCONN,
}
"""Errors of network file systems that may pass."""

T = TypeVar("T")


class SummedFile(io.BufferedWriter):
    """A new binary file that is written from start to end; `checksums` are of the bytes
    written so far."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._complete: list[str] = []
        self._last = xxh3_128()
        self._room = CHUNK

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        while len(rest) >= self._room:
            self._last.update(rest[: self._room])
            self._complete.append(self._last.hexdigest())
            rest = rest[self._room :]
            self._last = xxh3_128()
            self._room = CHUNK
        self._last.update(rest)
        self._room -= len(rest)
        return super().write(data)

    @property
    def checksums(self) -> str:
        return "".join(self._complete) + (self._last.hexdigest() if self._room < CHUNK else "")


def checksums(path: Path) -> str:
    """Returns the checksums of a file, 32 hexadecimal digits for each chunk of CHUNK bytes."""
    sums = []
    buffer = memoryview(bytearray(CHUNK))
    with path.open("rb") as file:
        while count := file.readinto(buffer):
            sums.append(xxh3_128_hexdigest(buffer[:count]))
    return "".join(sums)


def checksums_of(data: Any) -> str:
    """Returns the checksums of bytes in memory, which begin where a chunk begins."""
    view = memoryview(data)
    return "".join(
        xxh3_128_hexdigest(view[start : start + CHUNK]) for start in range(0, len(view), CHUNK)
    )


def damage(path: Path, expected: str) -> str:
    """Returns what is wrong with a file that had the checksums `expected`; empty if nothing is."""
    try:
        actual = persistent(lambda: checksums(path))
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    wrong = [
        at // DIGITS
        for at in range(0, max(len(actual), len(expected)), DIGITS)
        if _at(actual, at) != _at(expected, at)
    ]
    if not wrong:
        return ""
    first = wrong[0] * CHUNK
    last = (wrong[-1] + 1) * CHUNK
    return (
        f"{path.name} does not match its checksums between bytes {first:,} and "
        f"{min(last, path.stat().st_size):,}"
    )


def _at(joined: str, start: int) -> str:
    return joined[start : start + DIGITS]


def persistent(read: Callable[[], T]) -> T:
    """Returns `read()`, which is tried again after an error that may pass."""
    for wait in WAITS_S:
        try:
            return read()
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
            time.sleep(wait)
    return read()


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """Returns a JSON object with its own checksum in it."""
    plain: dict[str, Any] = json.loads(json.dumps(content))
    return {**plain, SEAL: _seal(plain)}


def unsealed(content: Any) -> dict[str, Any]:
    """Returns a JSON object without its checksum. Raises ValueError if it has none, or does not
    match it."""
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    plain = {key: value for key, value in content.items() if key != SEAL}
    if content.get(SEAL) != _seal(plain):
        raise ValueError("it does not match its checksum")
    return plain


def _seal(plain: dict[str, Any]) -> str:
    return xxh3_128_hexdigest(json.dumps(plain, sort_keys=True).encode())


def inside(folder: Path, name: str) -> Path:
    """Returns the path of a file in a folder. Raises ValueError for a name that leads out of it,
    also by a link."""
    pure = PurePosixPath(name)
    path = folder / name
    leads_out = pure.is_absolute() or ".." in pure.parts or "\0" in name
    if leads_out or not pure.parts or not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{name!r} is not a file in this folder: it leads out of it")
    return path


def plain_files(folder: Path) -> dict[str, int]:
    """Returns the bytes of every file that lies directly in a folder and is no link, by one
    listing: there may be very many."""
    with os.scandir(folder) as entries:
        return {
            entry.name: entry.stat(follow_symlinks=False).st_size
            for entry in entries
            if entry.is_file(follow_symlinks=False)
        }


def check_files(
    folder: Path,
    sizes: dict[str, int],
    checksums: dict[str, str],
    *,
    plain: Mapping[str, int] | None = None,
) -> None:
    """Raises ValueError unless all files are in the folder, with these sizes, and have checksums.
    Their content is not read. Sizes of `plain` files are known."""
    if checksums.keys() != sizes.keys():
        raise ValueError("some of its checksums are missing")
    plain = plain or {}
    for name, size in sizes.items():
        if plain.get(name) == size:
            continue
        file = inside(folder, name)
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            found = "is missing" if actual is None else f"has {actual:,} bytes"
            raise ValueError(f"{name} {found}, but should have {size:,} bytes")

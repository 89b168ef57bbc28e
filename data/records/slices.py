"""Slices: parts of a source that are read alone, in the order of the source.

A slice is a run of whole files, or what begins in a span of the bytes of a large file: lines of
JSON, or row groups of Parquet. Slices depend on the sizes of the files alone, so that what is made
of each is the same whoever makes it.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from longctx.remote import RemotePath

SLICE_BYTES = 256 << 20
"""About how many bytes a slice has, unless one file that is not cut has more."""
CUT = (".jsonl", ".ndjson", ".parquet")
"""Endings of files that may be cut where a line or a row group begins."""
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Slice:
    """A part of a source.

    Attributes:
        files: whole files, or the only one of which a span is read.
        start, stop: bytes of that file; 0 and 0: the whole files.
    """

    files: tuple[Path, ...]
    start: int = 0
    stop: int = 0

    @property
    def is_span(self) -> bool:
        return self.stop > 0

    @property
    def bytes(self) -> int:
        if self.is_span:
            return self.stop - self.start
        return sum(file.stat().st_size for file in self.files)

    def digest(self, file: Path) -> str:
        """Returns the SHA-256 (hex) of a file of the slice, or of its span; in object storage that
        of its version there, so that it is not read once more."""
        if isinstance(file, RemotePath):
            version = f"{file.state()} {self.start} {self.stop}"
            return hashlib.sha256(version.encode()).hexdigest()
        with file.open("rb") as stream:
            if not self.is_span:
                return hashlib.file_digest(stream, "sha256").hexdigest()
            digest = hashlib.sha256()
            stream.seek(self.start)
            left = self.stop - self.start
            while left > 0 and (block := stream.read(min(_BLOCK, left))):
                digest.update(block)
                left -= len(block)
            return digest.hexdigest()


def slices_of(files: Sequence[Path], *, cut: bool) -> list[Slice]:
    """Returns the slices of files that are read one after the other, at least one; large files of
    JSON Lines and Parquet are `cut`, or not."""
    slices: list[Slice] = []
    run: list[Path] = []
    size = 0
    for file in files:
        its_size = file.stat().st_size
        if cut and file.suffix.lower() in CUT and its_size >= 2 * SLICE_BYTES:
            if run:
                slices.append(Slice(tuple(run)))
            slices += _spans(file, its_size)
            run = []
            size = 0
            continue
        run.append(file)
        size += its_size
        if size >= SLICE_BYTES:
            slices.append(Slice(tuple(run)))
            run = []
            size = 0
    if run or not slices:
        slices.append(Slice(tuple(run)))
    return slices


def _spans(file: Path, size: int) -> Iterator[Slice]:
    """Yields spans of a file, the last of which is the longest."""
    count = size // SLICE_BYTES
    for number in range(count):
        start = number * SLICE_BYTES
        stop = size if number == count - 1 else start + SLICE_BYTES
        yield Slice((file,), start=start, stop=stop)


def joined_digests(digests: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Returns the digest of every file, by path, from those of all slices in order."""
    by_file: dict[str, list[str]] = {}
    for of_slice in digests:
        for file, digest in of_slice.items():
            by_file.setdefault(file, []).append(digest)
    return {file: _of_spans(its) for file, its in by_file.items()}


def _of_spans(digests: Sequence[str]) -> str:
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def lines_in(stream: BinaryIO, start: int, stop: int) -> Iterator[bytes]:
    """Yields the lines that begin at bytes start … stop - 1."""
    if start > 0:
        stream.seek(start - 1)
        stream.readline()  # the rest of a line that begins before, or its last byte
    place = stream.tell()
    while place < stop and (line := stream.readline()):
        yield line
        place += len(line)


def version_of(file: Path) -> int | str:
    """Returns what changes with the contents of a file: the time of its last change, or in object
    storage its version, as it was listed."""
    if isinstance(file, RemotePath):
        return file.state().version
    return file.stat().st_mtime_ns

"""Mapped file: one Arrow file of a store in memory, its record batches, and the verification of
those that are read."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow

from longctx.checksums import CHUNK, DIGITS, checksums_of

COLUMNS = ["name", "tokens", "length", "trained_tokens", "trained", "weight"]
"""Columns of every store."""
SMALL = 64 << 20
"""Bytes of a file that is verified whole before it is used; of a larger one only the parts that are
read."""
MOST_MAPS = 1024
"""Parts of a store that are mapped at a time: a process may have 65,530 maps."""


class MappedBytes:
    """A file that is mapped into memory, with the checksums that it should have."""

    def __init__(self, path: Path, checksums: str) -> None:
        self.path = path
        self._checksums = checksums
        self.bytes = pyarrow.memory_map(str(path)).read_buffer()
        self._verified = np.zeros(len(checksums) // DIGITS, np.bool_)

    def damage(self, start: int = 0, stop: int | None = None) -> str:
        """Verifies the chunks of a span of bytes that no earlier call has. Returns what is wrong;
        empty if nothing is."""
        stop = len(self.bytes) if stop is None else stop
        for chunk in range(start // CHUNK, min(-(-stop // CHUNK), len(self._verified))):
            if not self._verified[chunk]:
                span = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
                if (
                    checksums_of(self.bytes[span])
                    != self._checksums[chunk * DIGITS : (chunk + 1) * DIGITS]
                ):
                    return (
                        f"{self.path.name} does not match its checksums between bytes "
                        f"{span.start:,} and {span.stop:,}"
                    )
                self._verified[chunk] = True
        return ""


class MappedFile(MappedBytes):
    """An Arrow stream file, of which all record batches are open."""

    def __init__(self, path: Path, checksums: str) -> None:
        """Opens a file with these checksums. Raises ValueError if it is damaged."""
        super().__init__(path, checksums)
        if len(self.bytes) <= SMALL and (problem := self.damage()):
            raise ValueError(problem)
        try:
            self._open()
        except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
            raise ValueError(self.damage() or f"{path.name}: {error}") from error

    def _open(self) -> None:
        source = pyarrow.BufferReader(self.bytes)
        reader = pyarrow.ipc.open_stream(source)
        batches = []
        ends = [0]
        for batch in reader:
            batch.validate()
            batches.append(batch)
            ends.append(source.tell())
        ends[-1] = len(self.bytes)
        self.table = pyarrow.Table.from_batches(batches, reader.schema)
        self.columns = self.table.column_names
        if missing := set(COLUMNS) - set(self.columns):
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        spans = zip(batches, ends, ends[1:], strict=False)
        self.batches = [Batch(rows, begin, end) for rows, begin, end in spans]


class Batch(NamedTuple):
    """An Arrow record batch, which its file has in the bytes from `begin` to `end`, header
    included."""

    rows: Any
    begin: int
    end: int


class LocalParts:
    """The parts of a store in a folder of this machine, of which the last ones are mapped.

    Attributes:
        names: names of the parts, in order.
    """

    def __init__(self, folder: Path, checksums: Mapping[str, str]) -> None:
        self.names = sorted(checksums)
        self._folder = folder
        self._checksums = checksums
        self._open = OrderedDict[str, MappedBytes]()

    def read(self, part: int, begin: int, end: int) -> Any:
        """Returns the bytes from begin to end of a part. Raises ValueError if they are damaged."""
        name = self.names[part]
        if name not in self._open:
            while len(self._open) >= MOST_MAPS:
                self._open.popitem(last=False)
            self._open[name] = MappedBytes(self._folder / name, self._checksums[name])
        self._open.move_to_end(name)
        mapped = self._open[name]
        if problem := mapped.damage(begin, end):
            raise ValueError(problem)
        return mapped.bytes[begin:end]

    def fetch(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """Nothing is far away."""

    def damage(self) -> str:
        """Returns what is wrong with the first part that is damaged; empty if none is."""
        for name in self.names:
            if problem := MappedBytes(self._folder / name, self._checksums[name]).damage():
                return problem
        return ""

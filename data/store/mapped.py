"""Mapped file: one Arrow file of a store in memory, its record batches, and the verification of
those that are read."""

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


class MappedFile:
    """An Arrow stream file, mapped into memory."""

    def __init__(self, path: Path, checksums: str) -> None:
        """Opens a file with these checksums. Raises ValueError if it is damaged."""
        self.path = path
        self._checksums = checksums
        self._bytes = pyarrow.memory_map(str(path)).read_buffer()
        self._verified = np.zeros(len(checksums) // DIGITS, np.bool_)
        if len(self._bytes) <= SMALL and (problem := self.damage()):
            raise ValueError(problem)
        try:
            self._open()
        except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
            raise ValueError(self.damage() or f"{path.name}: {error}") from error

    def _open(self) -> None:
        source = pyarrow.BufferReader(self._bytes)
        reader = pyarrow.ipc.open_stream(source)
        batches = []
        ends = [0]
        for batch in reader:
            batch.validate()
            batches.append(batch)
            ends.append(source.tell())
        ends[-1] = len(self._bytes)
        self.table = pyarrow.Table.from_batches(batches, reader.schema)
        if missing := set(COLUMNS) - set(self.table.column_names):
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        self.batches = [
            Batch(rows, self, *span) for rows, *span in zip(batches, ends, ends[1:], strict=False)
        ]

    def damage(self, start: int = 0, stop: int | None = None) -> str:
        """Verifies the chunks of a span of bytes that no earlier call has. Returns what is wrong;
        empty if nothing is."""
        stop = len(self._bytes) if stop is None else stop
        for chunk in range(start // CHUNK, min(-(-stop // CHUNK), len(self._verified))):
            if not self._verified[chunk]:
                span = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
                if (
                    checksums_of(self._bytes[span])
                    != self._checksums[chunk * DIGITS : (chunk + 1) * DIGITS]
                ):
                    return (
                        f"{self.path.name} does not match its checksums between bytes "
                        f"{span.start:,} and {span.stop:,}"
                    )
                self._verified[chunk] = True
        return ""


class Batch(NamedTuple):
    """An Arrow record batch, which its file has in the bytes from `begin` to `end`, header
    included."""

    rows: Any
    file: MappedFile
    begin: int
    end: int

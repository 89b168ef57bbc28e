"""Mapped file: one Arrow file of a store in memory, its record batches, and the verification of those that are read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow

from longctx.checksums import CHUNK, DIGITS, checksums_of

COLUMNS = ["name", "tokens", "length", "trained_tokens", "trained", "weight"]
"""Columns of every store."""
SMALL = 64 << 20
"""Bytes of a file that is verified whole before it is used; of a larger one only the parts that are read."""


class MappedFile:
    """An Arrow stream file, mapped into memory."""

    def __init__(self, path: Path, checksums: str) -> None:
        """`checksums` are those of the file. Raises ValueError if it is damaged."""
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
        batches, ends = [], [0]
        for batch in reader:
            batch.validate()
            batches.append(batch)
            ends.append(source.tell())
        ends[-1] = len(self._bytes)
        self.table = pyarrow.Table.from_batches(batches, reader.schema)
        if missing := set(COLUMNS) - set(self.table.column_names):
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        self.batches = [_batch(self, batch, *span) for batch, *span in zip(batches, ends, ends[1:], strict=False)]

    def damage(self, start: int = 0, stop: int | None = None) -> str:
        """Verifies the chunks of a span of bytes that no earlier call has. Returns what is wrong; empty if nothing is."""
        stop = len(self._bytes) if stop is None else stop
        for chunk in range(start // CHUNK, min(-(-stop // CHUNK), len(self._verified))):
            if not self._verified[chunk]:
                span = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
                if checksums_of(self._bytes[span]) != self._checksums[chunk * DIGITS : (chunk + 1) * DIGITS]:
                    return f"{self.path.name} does not match its checksums between bytes {span.start:,} and {span.stop:,}"
                self._verified[chunk] = True
        return ""


@dataclass(frozen=True, slots=True)
class Batch:
    """One Arrow record batch: document i has tokens[starts[i]:starts[i+1]], and `trained` likewise (empty: all), and
    `weights` (empty: those of `trained`).

    `file` has it in the bytes from `begin` to `end`, which include its header.
    """

    tokens: npt.NDArray[np.integer[Any]]
    starts: npt.NDArray[np.int32]
    trained: Any  # pyarrow.BooleanArray: one bit per token
    trained_starts: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32] | None  # None: the file has none
    weight_starts: npt.NDArray[np.int32]
    file: MappedFile
    begin: int
    end: int


def _batch(file: MappedFile, batch: Any, begin: int, end: int) -> Batch:
    tokens, trained = batch.column("tokens"), batch.column("trained")
    arrays = tokens.values.to_numpy(), tokens.offsets.to_numpy(), trained.values, trained.offsets.to_numpy()
    if "token_weights" not in batch.schema.names:
        return Batch(*arrays, None, arrays[3], file, begin, end)
    weights = batch.column("token_weights")
    return Batch(*arrays, weights.values.to_numpy(), weights.offsets.to_numpy(), file, begin, end)

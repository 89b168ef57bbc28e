"""Index: what is known of all documents of a store without opening its parts, in arrays that are
mapped into memory once for all processes of a machine.

    lengths.npy         int64 [documents]
    trained_tokens.npy  int64 [documents]; only where some is not length - 1
    weights.npy         float64 [documents]; only where some is not 1
    batches.npy         BATCH [batches], by which a document is found in its part

Stores that were prepared without it are read once when they are opened.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longctx.data.store.mapped import MappedFile

LENGTHS = "lengths.npy"
TRAINED = "trained_tokens.npy"
WEIGHTS = "weights.npy"
BATCHES = "batches.npy"
BLOCK = 1 << 20
"""Documents that are compared at once."""
INDEX = (LENGTHS, TRAINED, WEIGHTS, BATCHES)
"""Files of an index, of which the first and the last always exist."""
BATCH = np.dtype(
    [("document", "<i8"), ("begin", "<i8"), ("end", "<i8"), ("part", "<i4"), ("weighted", "<i4")]
)
"""First document of a record batch, its bytes in its part (header included), number of the part,
and whether it has weights of tokens."""


@dataclass(frozen=True)
class Index:
    """Arrays of all documents; `trained_tokens` None: each but the first token of all, `weights`
    None: 1."""

    lengths: npt.NDArray[np.int64]
    trained_tokens: npt.NDArray[np.int64] | None
    weights: npt.NDArray[np.float64] | None
    batches: npt.NDArray[Any]

    def targets(self) -> npt.NDArray[np.int64]:
        """Returns the number of targets of every document."""
        if self.trained_tokens is None:
            return self.lengths - 1
        return self.trained_tokens

    def all_weights(self) -> npt.NDArray[np.float64]:
        """Returns the weight of every document."""
        if self.weights is None:
            return np.ones(len(self.lengths))
        return self.weights

    @classmethod
    def load(cls, files: dict[str, Path]) -> "Index":
        """Maps the files of an index, by name. Raises ValueError if they do not fit together."""
        arrays = {name: np.load(file, mmap_mode="r") for name, file in files.items()}
        lengths = arrays[LENGTHS]
        for name in (TRAINED, WEIGHTS):
            if name in arrays and len(arrays[name]) != len(lengths):
                raise ValueError(f"{name} is of {len(arrays[name]):,} documents")
        if arrays[BATCHES].dtype != BATCH:
            raise ValueError(f"{BATCHES} is of another version")
        return cls(lengths, arrays.get(TRAINED), arrays.get(WEIGHTS), batches=arrays[BATCHES])


def _batches(file: MappedFile, part: int, first: int) -> npt.NDArray[Any]:
    """Returns the batches of a part, whose first document has this number."""
    found = np.zeros(len(file.batches), BATCH)
    for place, batch in enumerate(file.batches):
        found[place] = (first, batch.begin, batch.end, part, "token_weights" in file.columns)
        first += batch.rows.num_rows
    return found


def write_index(folder: Path, parts: Iterable[MappedFile], documents: int) -> None:
    """Writes the index of parts into a folder, one part after the other: it may be larger than
    memory."""
    lengths = _written(folder / LENGTHS, "<i8", documents)
    trained = _written(folder / TRAINED, "<i8", documents)
    weights = _written(folder / WEIGHTS, "<f8", documents)
    batches = [np.zeros(0, BATCH)]
    first = 0
    for number, part in enumerate(parts):
        batches.append(_batches(part, number, first))
        its = slice(first, first + part.table.num_rows)
        if its.stop > documents:
            raise ValueError(f"its parts have more than {documents:,} documents")
        lengths[its] = part.table.column("length").to_numpy()
        trained[its] = part.table.column("trained_tokens").to_numpy()
        weights[its] = part.table.column("weight").to_numpy()
        first = its.stop
    np.save(folder / BATCHES, np.concatenate(batches))
    if _all_equal(trained, lengths, 1):
        (folder / TRAINED).unlink()
    if _all_equal(weights, np.ones(1), 0):
        (folder / WEIGHTS).unlink()


def _written(file: Path, kind: str, documents: int) -> Any:
    """Returns an array that is written to a file."""
    return np.lib.format.open_memmap(file, "w+", kind, (documents,))


def _all_equal(values: Any, others: Any, less: int) -> bool:
    """Returns whether all values are those of `others`, or its only one, minus `less`; block by
    block, as they may be larger than memory."""
    for start in range(0, len(values), BLOCK):
        its = slice(start, start + BLOCK)
        expected = others
        if len(others) == len(values):
            expected = others[its]
        if not np.array_equal(values[its], np.broadcast_to(expected - less, values[its].shape)):
            return False
    return True

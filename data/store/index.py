"""Index: what is known of all documents of a store without opening its parts, in arrays that are
mapped into memory once for all processes of a machine.

    lengths.npy         int32 [documents]
    trained_tokens.npy  int32 [documents]; only where some is not length - 1
    weights.npy         uint16 [documents]; only where some is not 1: its number among
    weight_values.npy   float64 [values], or, with more than 65,536 of them, float64 [documents]
    name_hashes.npy     uint32 [documents], see `held_out.py`
    groups.npy          GROUPS [groups], see `groups.py`
    batches.npy         BATCH [batches], by which a document is found in its part

They have at most 14.1 bytes a document, and 32 a batch; earlier stores have int64 and float64, no
hashes of names and no groups.
Stores that were prepared without it are read once when they are opened.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longctx.data.store.groups import GROUP, GROUPS
from longctx.data.store.held_out import Halves, halves
from longctx.data.store.mapped import MappedFile

LENGTHS = "lengths.npy"
TRAINED = "trained_tokens.npy"
WEIGHTS = "weights.npy"
VALUES = "weight_values.npy"
NAMES = "name_hashes.npy"
GROUPS_FILE = "groups.npy"
BATCHES = "batches.npy"
BLOCK = 1 << 20
"""Documents that are compared at once."""
HASHES = ".names.npy"
"""Ending, in place of a part's, of the file that has the hashes of its names until the index has
them."""
INDEX = (LENGTHS, TRAINED, WEIGHTS, VALUES, NAMES, GROUPS_FILE, BATCHES)
"""Files of an index, of which the first and the last always exist."""
MOST_VALUES = 1 << 16
"""Weights of documents that have numbers."""
BATCH = np.dtype(
    [("document", "<i8"), ("begin", "<i8"), ("end", "<i8"), ("part", "<i4"), ("weighted", "<i4")]
)
"""First document of a record batch, its bytes in its part (header included), number of the part,
and whether it has weights of tokens."""


@dataclass(frozen=True)
class Index:
    """Arrays of all documents, as they are mapped.

    Attributes:
        trained_tokens: None: each but the first token of all.
        weights, values: weights of documents, or their numbers among `values`; None: 1.
        name_hashes, groups: None in earlier stores.
    """

    lengths: npt.NDArray[Any]
    trained_tokens: npt.NDArray[Any] | None
    weights: npt.NDArray[Any] | None
    values: npt.NDArray[np.float64] | None
    name_hashes: Halves | None
    groups: npt.NDArray[Any] | None
    batches: npt.NDArray[Any]

    def lengths_of(self, which: Any) -> npt.NDArray[np.int64]:
        """Returns the lengths of documents, of a slice of them or of an array of their numbers."""
        return np.asarray(self.lengths[which], np.int64)

    def targets_of(self, which: Any) -> npt.NDArray[np.int64]:
        """Returns the number of targets of documents."""
        if self.trained_tokens is None:
            return self.lengths_of(which) - 1
        return np.asarray(self.trained_tokens[which], np.int64)

    def weights_of(self, which: Any) -> npt.NDArray[np.float64]:
        """Returns the weights of documents."""
        if self.weights is None:
            return np.ones(self.lengths[which].shape)
        if self.values is None:
            return np.asarray(self.weights[which], np.float64)
        return np.asarray(self.values[self.weights[which]], np.float64)

    @classmethod
    def load(cls, files: dict[str, Path]) -> "Index":
        """Maps the files of an index, by name. Raises ValueError if they do not fit together."""
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name, file in files.items():
            arrays[name] = np.load(file, mmap_mode="r").view(np.ndarray)
        lengths = arrays[LENGTHS]
        for name in (TRAINED, WEIGHTS, NAMES):
            if name in arrays and len(arrays[name]) != len(lengths):
                raise ValueError(f"{name} is of {len(arrays[name]):,} documents")
        if arrays[BATCHES].dtype != BATCH:
            raise ValueError(f"{BATCHES} is of another version")
        return cls(
            lengths,
            arrays.get(TRAINED),
            weights=arrays.get(WEIGHTS),
            values=arrays.get(VALUES),
            name_hashes=arrays.get(NAMES),
            groups=arrays.get(GROUPS_FILE),
            batches=arrays[BATCHES],
        )


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
    lengths = _written(folder / LENGTHS, "<i4", documents)
    trained = _written(folder / TRAINED, "<i4", documents)
    weights = _written(folder / WEIGHTS, "<f8", documents)
    hashes = _written(folder / NAMES, "<u4", documents)
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
        hashes[its] = _hashes_of(part)
        first = its.stop
    np.save(folder / BATCHES, np.concatenate(batches))
    write_groups(folder, lengths, trained)
    if _all_but_the_first(trained, lengths):
        (folder / TRAINED).unlink()
    _number_weights(folder, weights)


def _hashes_of(part: MappedFile) -> Halves:
    """Returns halves of the hashes of the names of a part, which were written beside it, unless an
    interrupted preparation was tidied up."""
    file = part.path.with_suffix(HASHES)
    if file.is_file():
        written: Halves = np.load(file)
        if len(written) == part.table.num_rows:
            return written
    return halves(part.table.column("name").to_pylist())


def write_groups(folder: Path, lengths: Any, trained: Any = None) -> None:
    """Writes what is known of groups of documents; `trained` None: all but the first tokens."""
    groups = _written(folder / GROUPS_FILE, GROUPS, -(-len(lengths) // GROUP))
    for start in range(0, len(lengths), BLOCK):
        its = np.asarray(lengths[start : start + BLOCK], np.int64)
        learned = its > 1
        if trained is not None:
            learned = trained[start : start + BLOCK] > 0
        firsts = np.arange(0, len(its), GROUP)
        place = slice(start // GROUP, start // GROUP + len(firsts))
        groups["tokens"][place] = np.add.reduceat(its * learned, firsts)
        groups["longest"][place] = np.maximum.reduceat(its * learned, firsts)
        groups["longest_of_all"][place] = np.maximum.reduceat(its, firsts)
        groups["learned"][place] = np.add.reduceat(learned, firsts, dtype=np.int64)


def _number_weights(folder: Path, weights: Any) -> None:
    """Writes the numbers of weights in their place, if they have few values; nothing if all
    are 1."""
    values = np.zeros(0)
    for start in range(0, len(weights), BLOCK):
        values = np.union1d(values, weights[start : start + BLOCK])
        if len(values) > MOST_VALUES:
            return
    file = folder / WEIGHTS
    file.unlink()  # it stays mapped
    if values.tolist() == [1.0]:
        return
    np.save(folder / VALUES, values)
    numbers = _written(file, "<u2", len(weights))
    for start in range(0, len(weights), BLOCK):
        its = slice(start, start + BLOCK)
        numbers[its] = np.searchsorted(values, weights[its])


def _written(file: Path, kind: npt.DTypeLike, documents: int) -> Any:
    """Returns an array that is written to a file."""
    return np.lib.format.open_memmap(file, "w+", kind, (documents,))


def _all_but_the_first(trained: Any, lengths: Any) -> bool:
    """Returns whether each but the first token of all documents is a target; block by block, as
    there may be more of them than memory holds."""
    for start in range(0, len(lengths), BLOCK):
        its = slice(start, start + BLOCK)
        if not np.array_equal(trained[its], lengths[its] - 1):
            return False
    return True

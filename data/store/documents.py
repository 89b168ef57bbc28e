"""Documents: those of one store, each found in a record batch of a part, on this machine or in
object storage."""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import pyarrow

from longctx.data.store.held_out import Halves, halves
from longctx.data.store.index import Index
from longctx.data.store.manifest import TOKEN_FILES, TOKEN_TYPES

KEPT_BATCHES = 8
"""Record batches that are kept open: those of a long document, and of its neighbours."""


class Parts(Protocol):
    """Where the bytes of parts are read; raises ValueError for damaged ones."""

    names: list[str]

    def read(self, part: int, begin: int, end: int) -> Any: ...
    def fetch(self, spans: Sequence[tuple[int, int, int]]) -> None: ...


class Documents:
    """The documents of a store by number; `schemas` are those of parts without and with weights of
    tokens."""

    def __init__(self, index: Index, parts: Parts, schemas: tuple[Any, Any]) -> None:
        self.index = index
        self._parts = parts
        self._schemas = schemas
        self._firsts = index.batches["document"]  # searched as it is mapped
        self._open = OrderedDict[int, Any]()

    def __len__(self) -> int:
        return len(self.index.lengths)

    def row(self, document: int) -> tuple[Any, int]:
        """Returns the record batch of a document, and its row there. Raises ValueError if it is
        damaged, or of another store than the index."""
        number = self._number(document)
        batch = self.batch(number)
        row = document - int(self._firsts[number])
        if batch.column("length")[row].as_py() != self.index.lengths[document]:
            raise ValueError(f"document {document} is not as long as its index says")
        return batch, row

    @cached_property
    def name_hashes(self) -> Halves:
        """Halves of the hashes of all names; of an earlier store, whose index lacks them, all of it
        is read once."""
        if self.index.name_hashes is not None:
            return self.index.name_hashes
        return halves(name for batch in self.batches() for name in batch.column("name").to_pylist())

    def name(self, document: int) -> str:
        """Returns the name of a document. Raises ValueError if it is damaged."""
        batch, row = self.row(document)
        return str(batch.column("name")[row].as_py())

    def batches(self) -> Iterator[Any]:
        """Yields all record batches."""
        for number in range(len(self.index.batches)):
            yield self.batch(number)

    def batch(self, number: int) -> Any:
        """Returns a record batch."""
        if number not in self._open:
            batch = self._read(number)
            while len(self._open) >= KEPT_BATCHES:
                self._open.popitem(last=False)
            self._open[number] = batch
        self._open.move_to_end(number)
        return self._open[number]

    def _read(self, number: int) -> Any:
        """Returns a record batch as its part has it. Raises ValueError if it is damaged."""
        part, begin, end = self._span(number)
        content = self._parts.read(part, begin, end)
        if self._parts.names[part].endswith(TOKEN_FILES):
            return self._in_place(number, content)
        schema = self._schemas[int(self.index.batches[number]["weighted"])]
        try:
            return _parsed(content, schema, is_first=begin == 0)
        except (pyarrow.ArrowException, OSError, StopIteration) as error:
            raise ValueError(f"{self._parts.names[part]}: {error}") from error

    def _in_place(self, number: int, content: Any) -> Any:
        """Returns the record batch of documents in a file of nothing but tokens, uint16 or int32;
        each token is a target."""
        part, _, _ = self._span(number)
        first = int(self._firsts[number])
        stop = len(self)
        if number + 1 < len(self._firsts):
            stop = int(self._firsts[number + 1])
        lengths = self.index.lengths_of(slice(first, stop))
        tokens = int(lengths.sum())
        width = len(content) // tokens
        kind = pyarrow.from_numpy_dtype(np.dtype(TOKEN_TYPES[width]))
        values = pyarrow.Array.from_buffers(kind, tokens, [None, content])
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        of_part = np.searchsorted(self.index.batches["part"], part)
        before = int(self._firsts[of_part])
        numbers = range(first - before, stop - before)
        columns = {
            "name": in_place_names(self._parts.names[part], numbers),
            "tokens": pyarrow.LargeListArray.from_arrays(offsets, values),
            "length": lengths,
        }
        return pyarrow.RecordBatch.from_pydict(columns)

    def fetch(self, documents: Sequence[int]) -> None:
        """Fetches what documents are read from, if that is far away."""
        numbers = dict.fromkeys(map(self._number, documents))
        self._parts.fetch([self._span(number) for number in numbers])

    def _number(self, document: int) -> int:
        """Returns the number of the record batch of a document."""
        return bisect_right(self._firsts, document) - 1

    def _span(self, number: int) -> tuple[int, int, int]:
        """Returns the number of a record batch's part, and where its bytes begin and end there."""
        batch = self.index.batches[number]
        part = int(batch["part"])
        begin = int(batch["begin"])
        end = int(batch["end"])
        return part, begin, end


def in_place_names(part: str, numbers: range) -> list[str]:
    """Returns the names of documents of a file of tokens."""
    names = []
    for number in numbers:
        names.append(f"{part}:{number}")
    return names


def _parsed(content: Any, schema: Any, *, is_first: bool) -> Any:
    """Returns the record batch in the bytes of a part; before the first one is the schema."""
    if is_first:
        batch = pyarrow.ipc.open_stream(content).read_next_batch()
    else:
        batch = pyarrow.ipc.read_record_batch(pyarrow.ipc.read_message(content), schema)
    batch.validate()
    return batch

"""Contexts: what each token may have seen in forward, as sequences that the reference runs one
after the other."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, pairwise
from typing import Literal, NamedTuple

from .gathered import Record

Sight = Literal["causal", "no padding", "both", "next", "no window"]
"""Of what is in a sequence a token sees: it and all earlier ones, these without padding, all, also
the one after it, or earlier ones beyond windows."""


class Sequence(NamedTuple):
    """Tokens that see each other, by their numbers in a probe (-1: padding), and their
    positions."""

    numbers: tuple[int, ...]
    positions: tuple[int, ...]
    sight: Sight = "causal"


class Context(NamedTuple):
    """A way in which attention may have seen the documents: a fault but for APART."""

    name: str
    sequences: tuple[Sequence, ...]


APART = "documents apart"
CUT = "documents are cut: their later parts do not see the earlier ones"
ROW = "documents see each other"
ROW_RESTARTED = "documents see each other, though positions begin anew with each"
COUNTED = "positions count the padding before documents"
SHARD = "ranks see only their own part of a document"
SHARD_RESTARTED = "ranks see only their own part of a document, with positions that begin anew"
RANK_ROW = "a rank's tokens see each other, whatever their document, and none of other ranks"
LOCAL_POSITIONS = "positions begin anew on every rank"
GIVEN = "positions are wrong"
RUN_ON = "positions run on from one document to the next"
BOTH = "attention is not causal"
NEXT = "tokens see the one after them, which they predict"
PADDING = "padding is seen"
ONE_PADDING = "the last token of the padding before documents is seen"
TWICE = "tokens are there twice in their document"
ORDER = "tokens of a document are in another order"
NO_WINDOW = "sliding windows are ignored"
NO_MASK = "documents see each other, and sliding windows are ignored"
FAULTS = (
    *(CUT, ROW, ROW_RESTARTED, COUNTED, SHARD, SHARD_RESTARTED, RANK_ROW, LOCAL_POSITIONS),
    *(GIVEN, RUN_ON, BOTH, NEXT, PADDING, ONE_PADDING, TWICE, ORDER, NO_WINDOW, NO_MASK),
)
"""Names of wrong contexts."""


Numbers = list[int]
"""Tokens of a sequence, by their numbers in a probe; -1 is padding."""


class Rows:
    """The sequences of a step: rows as the model's calls and the batches have them, and what a
    right step would have.

    Attributes:
        whole: rows of batches, without padding.
        parts: rows of the model's calls, without padding.
        padded: rows of batches with padding, if some begin with padding; otherwise none.
        documents: documents of the step, each alone.
        padding: runs of padding in the calls.
        pieces: parts of documents in the calls.
        split: whether ranks hold parts of a document.
        shared: whether a row has several documents.
    """

    def __init__(self, record: Record) -> None:
        self._tokens = record.tokens
        self._given_rows = record.calls
        self._calls = [row.numbers for row in record.calls]
        self._rows = [row.numbers for row in record.rows]
        self.whole = [_real(row) for row in self._rows]
        self.parts = [_real(row) for row in self._calls]
        begins_with_padding = any(row and row[0] < 0 for row in self._rows)
        self.padded = self._rows if begins_with_padding else []
        self.documents = [[*self._tokens.of(document)] for document in record.documents]
        self.padding = [run for row in self._calls for run in _padding(row)]
        self.pieces = [piece for row in self._calls for piece in self._tokens.pieces(row)]
        self.split = _is_split(record)
        self.shared = any(self._documents_in(row) > 1 for row in self.whole)
        self._in_row = _positions_in(self._rows)
        self._in_call = _positions_in(self._calls)
        self._given: dict[int, int] = {}
        for row in record.calls:
            self._given.update(zip(row.numbers, row.positions, strict=False))

    def alone(self) -> list[Numbers]:
        """Returns the documents that have a padded row for themselves, or their first tokens, with
        the padding, then the other documents."""
        rows = [row for row in self._calls if -1 in row and self._begins_document(_real(row))]
        held = [_real(row) for row in rows]
        return rows + [document for document in self.documents if document not in held]

    def _begins_document(self, row: Numbers) -> bool:
        """Returns whether a row without padding is a document, or its first tokens in order."""
        if not row:
            return False
        document = self._tokens.of(self._tokens.document[row[0]])
        return row == [*document[: len(row)]]

    def after_one_padding(self) -> Iterator[Sequence]:
        """Yields documents with one token of the padding before them, where rows begin with some,
        and others alone; none where no row does."""
        if not self.padded:
            return
        held = set[int]()
        for row in self._given_rows:
            real = [at for at, number in enumerate(row.numbers) if number >= 0]
            if not real or real[0] == 0:
                continue
            begin = real[0] - 1
            end = real[-1] + 1
            positions = row.positions or [*range(len(row.numbers))]
            held.update(row.numbers[begin:end])
            yield Sequence(tuple(row.numbers[begin:end]), tuple(positions[begin:end]))
        for document in self.documents:
            if held.isdisjoint(document):
                yield Sequence(tuple(document), tuple(self.own(document)))

    def changed(self) -> Iterator[tuple[str, list[Numbers]]]:
        """Yields names of what is wrong with the order of tokens, with the documents as rows have
        them."""
        runs = [run for row in self.whole for run in self._tokens.runs(row)]
        steps = {after - number for run in runs for number, after in pairwise(run)}
        if 0 in steps:
            yield TWICE, runs
        elif min(steps, default=1) < 0:
            yield ORDER, runs

    def _documents_in(self, row: Numbers) -> int:
        return len({self._tokens.document[number] for number in _real(row)})

    # Positions of the tokens of a sequence.

    def own(self, row: Numbers) -> Numbers:
        """In the document; of padding, in the row."""
        place = self._tokens.place
        return [place[number] if number >= 0 else at for at, number in enumerate(row)]

    def counted(self, row: Numbers) -> Numbers:
        """From 0 on."""
        return [*range(len(row))]

    def run_on(self, row: Numbers) -> Numbers:
        """In the row that holds the document whole."""
        first = self._in_row.get(row[0], 0)
        in_row = [*range(first, first + len(row))]
        if [self._in_row.get(number) for number in row] == in_row:
            return in_row
        return self.counted(row)

    def in_call(self, row: Numbers) -> Numbers:
        """In the row of the call."""
        return [self._in_call.get(number, self._tokens.place[number]) for number in row]

    def given(self, row: Numbers) -> Numbers:
        """As the step gave them to the model."""
        return [self._given.get(number, self._tokens.place[number]) for number in row]


def contexts(record: Record, windows: bool) -> list[Context]:
    """Returns the contexts of a step, no two of them alike; the first one is right."""
    rows = Rows(record)
    documents = rows.documents
    if rows.split:
        cut, shard, mixed = SHARD_RESTARTED, SHARD, RANK_ROW
    else:
        cut, shard, mixed = CUT, CUT, ROW
    on_shards = documents if rows.split else []
    in_windows = documents if windows else []
    made = [
        _context(APART, documents, rows.own),
        _context(APART, [*documents, *rows.padding], rows.own),
        _context(COUNTED if rows.padded else APART, rows.alone(), rows.counted, sight="no padding"),
        *(_context(name, runs, rows.counted) for name, runs in rows.changed()),
        _context(shard, rows.pieces, rows.own),
        _context(cut, rows.pieces, rows.counted),
        _context(ROW, rows.whole, rows.counted),
        _context(ROW_RESTARTED, rows.whole, rows.own),
        _context(mixed, rows.parts, rows.own),
        _context(mixed, rows.parts, rows.counted),
        _context(RUN_ON, documents if rows.shared else [], rows.run_on),
        _context(BOTH, documents, rows.own, sight="both"),
        _context(NEXT, documents, rows.own, sight="next"),
        _context(PADDING, rows.padded, rows.counted),
        Context(ONE_PADDING, tuple(rows.after_one_padding())),
        _context(LOCAL_POSITIONS, on_shards, rows.in_call),
        _context(GIVEN, documents, rows.given),
        _context(NO_WINDOW, in_windows, rows.own, sight="no window"),
        _context(NO_MASK, rows.whole if windows else [], rows.own, sight="no window"),
        _context(NO_MASK, rows.whole if windows else [], rows.counted, sight="no window"),
    ]
    found: dict[tuple[Sequence, ...], Context] = {}
    for context in made:
        found.setdefault(context.sequences, context)
    return [context for context in found.values() if context.sequences]


def _context(
    name: str,
    rows: Iterable[Numbers],
    positions: Callable[[Numbers], Numbers],
    *,
    sight: Sight = "causal",
) -> Context:
    sequences = (Sequence(tuple(row), tuple(positions(row)), sight) for row in rows if row)
    return Context(name, tuple(dict.fromkeys(sequences)))


def _real(row: Numbers) -> Numbers:
    """Returns a row without padding."""
    return [number for number in row if number >= 0]


def _padding(row: Numbers) -> Iterator[Numbers]:
    """Yields the runs of padding in a row."""
    for is_padding, run in groupby(row, lambda number: number < 0):
        if is_padding:
            yield list(run)


def _positions_in(rows: Iterable[Numbers]) -> dict[int, int]:
    """Returns the position of every token in its row, in the last one that has it."""
    return {number: at for row in rows for at, number in enumerate(row)}


def _is_split(record: Record) -> bool:
    """Returns whether ranks hold parts of a document that batches, or else calls of one number,
    have whole."""
    if record.batched and {tuple(call.ids) for call in record.calls} <= {
        tuple(row.ids) for row in record.rows
    }:
        return False
    together = defaultdict[object, set[tuple[int, int]]](set)
    for row in record.calls:
        for number in _real(row.numbers):
            together[row.call, record.tokens.document[number]].add((number, row.rank))
    parts = [held for held in together.values() if len({rank for _, rank in held}) > 1]
    return any(len({number for number, _ in held}) == len(held) for held in parts)

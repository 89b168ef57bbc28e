"""Contexts: what each token may have seen in forward, as sequences that the reference runs one
after the other."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Literal, NamedTuple

from longctx.check.record import Record

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


def contexts(record: Record, windows: bool) -> list[Context]:
    """Returns the contexts of a step, no two of them alike; the first one is right."""
    tokens = record.tokens
    place = record.tokens.place
    calls, rows = ([row.numbers for row in each] for each in (record.calls, record.rows))
    documents = [[*tokens.of(document)] for document in record.documents]
    split = _is_split(record)
    cut, shard, mixed = (SHARD_RESTARTED, SHARD, RANK_ROW) if split else (CUT, CUT, ROW)
    padded = any(row and row[0] < 0 for row in rows)
    pieces = [piece for row in calls for piece in tokens.pieces(row)]
    alone = [
        row
        for row in calls
        if -1 in row and len({tokens.document[number] for number in _real(row)}) == 1
    ]
    alone += [document for document in documents if document not in map(_real, alone)]
    padding = [
        [-1] * len(list(run))
        for row in calls
        for real, run in groupby(row, lambda n: n >= 0)
        if not real
    ]
    whole, parts = ([_real(row) for row in each] for each in (rows, calls))
    in_row = {number: position for row in rows for position, number in enumerate(row)}
    in_call = {number: position for row in calls for position, number in enumerate(row)}
    given = {
        n: at for row in record.calls for n, at in zip(row.numbers, row.positions, strict=False)
    }

    def own(row: list[int]) -> Iterable[int]:
        return [place[number] if number >= 0 else at for at, number in enumerate(row)]

    def counted(row: list[int]) -> Iterable[int]:
        return range(len(row))

    def run_on(row: list[int]) -> Iterable[int]:
        """Positions in the row that holds a document whole."""
        first = in_row.get(row[0], 0)
        held_whole = [in_row.get(number) for number in row] == [*range(first, first + len(row))]
        if held_whole:
            return range(first, first + len(row))
        return range(len(row))

    made = [
        _context(APART, documents, own),
        _context(APART, [*documents, *padding], own),
        _context(COUNTED if padded else APART, alone, counted, "no padding"),
        _context(cut, pieces, counted),
        _context(shard, pieces, own),
        _context(ROW, whole, counted),
        _context(ROW_RESTARTED, whole, own),
        _context(mixed, parts, own),
        _context(mixed, parts, counted),
        _context("positions run on from one document to the next", documents, run_on),
        _context("attention is not causal", documents, own, "both"),
        _context("tokens see the one after them, which they predict", documents, own, "next"),
        _context("padding is seen", rows if padded else [], counted),
        _context(
            LOCAL_POSITIONS,
            documents if split else [],
            lambda row: [in_call.get(n, place[n]) for n in row],
        ),
        _context(GIVEN, documents, lambda row: [given.get(n, place[n]) for n in row]),
        _context("sliding windows are ignored", documents if windows else [], own, "no window"),
    ]
    found: dict[tuple[Sequence, ...], Context] = {}
    for context in made:
        found.setdefault(context.sequences, context)
    return [context for context in found.values() if context.sequences]


def _context(
    name: str,
    rows: Iterable[list[int]],
    positions: Callable[[list[int]], Iterable[int]],
    sight: Sight = "causal",
) -> Context:
    sequences = (Sequence(tuple(row), tuple(positions(row)), sight) for row in rows if row)
    return Context(name, tuple(dict.fromkeys(sequences)))


def _real(row: list[int]) -> list[int]:
    return [number for number in row if number >= 0]


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

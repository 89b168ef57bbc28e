"""Contexts: what each token may have seen in forward, as sequences that the reference runs one after the other."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from longctx.check.probe import Tokens
from longctx.check.record import Record

Sight = Literal["causal", "no padding", "both", "next", "no window"]
"""Of what is in a sequence a token sees: it and all earlier ones, these without padding, all, also the one after it, or earlier
ones beyond windows."""


@dataclass(frozen=True)
class Sequence:
    """Tokens that see each other, by their numbers in a probe (-1: padding), and their positions."""

    numbers: tuple[int, ...]
    positions: tuple[int, ...]
    sight: Sight = "causal"


@dataclass(frozen=True)
class Context:
    """A way in which attention may have seen the documents: a fault but for the first."""

    name: str
    sequences: tuple[Sequence, ...]


APART = "documents apart"
CUT = "documents are cut: their later parts do not see the earlier ones"
ROW = "documents see each other"
ROW_RESTARTED = "documents see each other, though positions begin anew with each"
PADDED = "padding is seen"
COUNTED = "positions count the padding before documents"
RUN_ON = "positions run on from one document to the next"
BOTH = "attention is not causal"
NEXT = "tokens see the one after them, which they predict"
WIDE = "sliding windows are ignored"
SHARD = "ranks see only their own part of a document"
SHARD_RESTARTED = "ranks see only their own part of a document, with positions that begin anew"
RANK_ROW = "a rank's tokens see each other, whatever their document, and none of other ranks"
LOCAL_POSITIONS = "positions begin anew on every rank"
GIVEN = "positions are wrong"


def contexts(record: Record, tokens: Tokens, windows: bool) -> list[Context]:
    """Returns the contexts of a step, no two of them alike; the first one is right."""
    calls = [tokens.numbers(call.ids) for call in record.calls]
    rows = [tokens.numbers(row) for row in record.rows]
    documents = [[*tokens.of(document)] for document in sorted({tokens.document[n] for row in calls for n in row if n >= 0})]
    split, place = _is_split(record, tokens), tokens.place
    cut, shard, mixed = (SHARD_RESTARTED, SHARD, RANK_ROW) if split else (CUT, CUT, ROW)
    pieces = [piece for row in calls for piece in pieces_of(row, tokens)]
    alone = [row for row in calls if -1 in row and len({tokens.document[number] for number in row if number >= 0}) == 1]
    alone += [document for document in documents if document not in (_real(row) for row in alone)]
    padding = [[-1] * len(list(run)) for row in calls for real, run in groupby(row, lambda n: n >= 0) if not real]
    padded = any(row and row[0] < 0 for row in rows)
    given = {n: at for call, row in zip(record.calls, calls, strict=True) for n, at in zip(row, call.positions, strict=False)}
    made = [
        Context(APART, _sequences(documents, lambda row: [place[n] for n in row])),
        Context(
            APART, _sequences([*documents, *padding], lambda row: [place[n] if n >= 0 else at for at, n in enumerate(row)])
        ),
        Context(COUNTED if padded else APART, _sequences(alone, lambda row: range(len(row)), "no padding")),
        Context(cut, _sequences(pieces, lambda row: range(len(row)))),
        Context(shard, _sequences(pieces, lambda row: [place[n] for n in row])),
        Context(ROW, _sequences(map(_real, rows), lambda row: range(len(row)))),
        Context(ROW_RESTARTED, _sequences(map(_real, rows), lambda row: [place[n] for n in row])),
        Context(mixed, _sequences(map(_real, calls), lambda row: [place[n] for n in row])),
        Context(mixed, _sequences(map(_real, calls), lambda row: range(len(row)))),
        Context(RUN_ON, tuple(_run_on(documents, rows))),
        Context(BOTH, _sequences(documents, lambda row: range(len(row)), "both")),
        Context(NEXT, _sequences(documents, lambda row: range(len(row)), "next")),
    ]
    if padded:
        made.append(Context(PADDED, _sequences(rows, lambda row: range(len(row)))))
    if split:
        here = {number: position for row in calls for position, number in enumerate(row)}
        made.append(Context(LOCAL_POSITIONS, _sequences(documents, lambda row: [here.get(n, place[n]) for n in row])))
    made.append(Context(GIVEN, _sequences(documents, lambda row: [given.get(n, place[n]) for n in row])))
    if windows:
        made.append(Context(WIDE, _sequences(documents, lambda row: range(len(row)), "no window")))
    found: dict[tuple[Sequence, ...], Context] = {}
    for context in made:
        found.setdefault(context.sequences, context)
    return list(found.values())


def _is_split(record: Record, tokens: Tokens) -> bool:
    """Returns whether ranks hold parts of a document that batches, or else calls of one number, have whole."""
    if record.batched and {tuple(call.ids) for call in record.calls} <= set(map(tuple, record.rows)):
        return False
    together = defaultdict[object, set[tuple[int, int]]](set)
    for call in record.calls:
        for number in tokens.numbers(call.ids):
            if number >= 0:
                together[call.number, tokens.document[number]].add((number, call.rank))
    parts = [held for held in together.values() if len({rank for _, rank in held}) > 1]
    return any(len({number for number, _ in held}) == len(held) for held in parts)


def pieces_of(row: Iterable[int], tokens: Tokens) -> Iterator[list[int]]:
    """Yields the runs of consecutive tokens of one document."""
    piece: list[int] = []
    for number in row:
        if piece and tokens.next(piece[-1]) != number:
            yield piece
            piece = []
        if number >= 0:
            piece.append(number)
    if piece:
        yield piece


def _real(row: list[int]) -> list[int]:
    return [number for number in row if number >= 0]


def _sequences(
    rows: Iterable[list[int]], positions: Callable[[list[int]], Iterable[int]], sight: Sight = "causal"
) -> tuple[Sequence, ...]:
    return tuple(dict.fromkeys(Sequence(tuple(row), tuple(positions(row)), sight) for row in rows if row))


def _run_on(documents: list[list[int]], rows: list[list[int]]) -> Iterator[Sequence]:
    """Documents at their positions in the row that holds them whole."""
    at = {number: position for row in rows for position, number in enumerate(row)}
    for document in documents:
        first = at.get(document[0], 0)
        together = [at.get(number) for number in document] == list(range(first, first + len(document)))
        yield Sequence(tuple(document), tuple(range(first, first + len(document)) if together else range(len(document))))

"""Sampler: chooses the documents of each step as a function of one integer cursor, independent of
the number of ranks.

Every epoch has its own order of all P pieces (`pieces.py`), given by the seed (`orders.py`). The
cursor is the number of pieces taken: the next piece is number `cursor mod P` in the order of epoch
`cursor div P`. A step takes whole pieces until they have at least `global_tokens` tokens, so the
cursor is all that is needed to repeat it on any ranks. Nothing here takes memory per document.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from longctx.data import TRUNCATED
from longctx.data.orders import ORDER, ORDERS, Order
from longctx.data.pieces import (
    Documents,
    LeftOut,
    LengthsAlone,
    Numbers,
    Piece,
    Pieces,
    SamplerError,
)

LONG_DOCUMENTS = ("split", "drop", "error", *TRUNCATED)
LARGEST_SEED = (1 << 32) - 1
MOST_EPOCHS = 1024
"""Maximum number of epochs in one step; more are a mistake in the settings, and would take too long
to draw."""
MOST_PIECES = 1 << 17
"""Maximum number of documents in one step, on average."""
WINDOW = 512
"""Pieces that are drawn at once."""


def _check_settings(
    global_tokens: int, seed: int, max_length: int, long_documents: str | None
) -> None:
    if global_tokens < 1 or max_length < 1:
        raise SamplerError(
            f"global_tokens is {global_tokens} and max_length {max_length}: both must be at least 1"
        )
    if not 0 <= seed <= LARGEST_SEED:
        raise SamplerError(f"seed is {seed}: it must be from 0 to {LARGEST_SEED}")
    if long_documents is not None and long_documents not in LONG_DOCUMENTS:
        raise SamplerError(
            f"long_documents is {long_documents!r}: it must be one of {', '.join(LONG_DOCUMENTS)}"
        )


def _check_step(global_tokens: int, tokens: int, pieces: int) -> None:
    """Raises SamplerError if a step has too many tokens for `pieces` pieces of `tokens` tokens."""
    if global_tokens > MOST_EPOCHS * tokens:
        raise SamplerError(
            f"global_tokens is {global_tokens:,}: a step would read all {tokens:,} tokens of the "
            f"store more than {MOST_EPOCHS} times; lower batch.global_tokens, or prepare more text"
        )
    if global_tokens > MOST_PIECES * (tokens / pieces):
        raise SamplerError(
            f"global_tokens is {global_tokens:,}: with {tokens / pieces:,.0f} tokens per "
            f"document, a step would have more than {MOST_PIECES:,} of them; lower "
            "batch.global_tokens, or raise data.max_length"
        )


def _why_none_is_left(dropped: int, max_length: int) -> str:
    """Returns the error of a sampler without documents, of which `dropped` were too long."""
    if dropped:
        return (
            f"no document is left: all {dropped} have more than {max_length:,} tokens and "
            "long_documents is drop; set data.long_documents to split, or raise data.max_length"
        )
    return (
        "there are no documents to train on: give a store with more documents, or lower "
        "data.held_out"
    )


class Sampler:
    """Steps over the documents of a store.

    Args:
        documents: a store, of which pieces without a target are left out; or tokens per document
            alone, int64 `[documents]`.
        global_tokens: minimum number of tokens per step.
        long_documents: treatment of longer documents, see `Pieces`.
        source: number of the store, of several.
        left_out: documents that no step takes, see `Pieces`; they are not counted as dropped.
        stream: numbers added to the seed, so that the orders of several stores are independent.
        order: name of the order of an epoch, in `ORDERS`.

    Attributes:
        pieces, tokens, longest: number of pieces P per epoch, number of their tokens, and length of
            the longest piece.
        long: number of documents longer than `max_length`.
        dropped: number of documents that `drop` leaves out of every epoch.
        order: name of the order of an epoch.

    Raises SamplerError for a long document under `error`, and if no document is left.
    """

    start: Any = 0

    def __init__(
        self,
        documents: Documents | Numbers,
        *,
        global_tokens: int,
        seed: int,
        max_length: int,
        long_documents: str | None = None,
        source: int = 0,
        left_out: LeftOut | None = None,
        stream: Sequence[int] = (),
        order: str = ORDER,
    ) -> None:
        _check_settings(global_tokens, seed, max_length, long_documents)
        if isinstance(documents, np.ndarray):
            documents = LengthsAlone(documents)
        self._pieces = Pieces(
            documents,
            max_length=max_length,
            long_documents=long_documents,
            source=source,
            left_out=left_out,
        )
        tally = self._pieces.tally
        self.long = tally.long
        self.dropped = tally.long if long_documents == "drop" else 0
        if tally.documents == self.dropped:
            raise SamplerError(_why_none_is_left(self.dropped, max_length))
        if not tally.pieces:
            raise SamplerError(
                f"none of the {tally.documents - self.dropped:,} documents has a token to train "
                "on: give a store with other documents"
            )
        self.pieces = tally.pieces
        self.tokens = tally.tokens
        self.longest = tally.longest
        _check_step(global_tokens, self.tokens, self.pieces)
        self._seed = seed
        self._stream = stream
        self._global_tokens = global_tokens
        self._window: tuple[int, list[Piece]] = (0, [])
        self.order = order
        self._order = self._made(order)

    def use_order(self, name: str) -> None:
        """Takes another order of every epoch, that in which a run began."""
        self.order = name
        self._order = self._made(name)
        self._window = (0, [])

    def _made(self, name: str) -> Order:
        return ORDERS[name](self.pieces, self._seed, self._stream)

    def step(self, cursor: int) -> tuple[tuple[Piece, ...], int]:
        """Returns the pieces of the step that begins at `cursor`, and the cursor of the next
        step."""
        pieces: list[Piece] = []
        tokens = 0
        while tokens < self._global_tokens:
            pieces.append(self._piece(cursor))
            tokens += pieces[-1].length
            cursor += 1
        return tuple(pieces), cursor

    def in_order(self) -> tuple[Piece, ...]:
        """Returns every piece once, in the order of the store, as of epoch 0."""
        return tuple(self._pieces.in_order())

    def state(self, cursor: int) -> dict[str, Any]:
        """Returns a cursor as plain JSON data, with its epoch and the length of the longest
        piece."""
        return {"cursor": cursor, "epoch": cursor // self.pieces, "longest": self.longest}

    def cursor(self, state: dict[str, Any]) -> int:
        return int(state["cursor"])

    def resume_cursor(self, cursors: Sequence[int | None], epochs: Sequence[int]) -> int:
        """Returns the only entry of `cursors`, or if that is None, the first cursor of the only
        epoch in `epochs`."""
        (cursor,), (epoch,) = cursors, epochs
        if cursor is None:
            return epoch * self.pieces
        return cursor

    def _piece(self, cursor: int) -> Piece:
        first, drawn = self._window
        if not first <= cursor < first + len(drawn):
            size = min(WINDOW, self.pieces)
            first = cursor - cursor % size
            drawn = self._drawn(first, first + size)
            self._window = first, drawn
        return drawn[cursor - first]

    def _drawn(self, start: int, stop: int) -> list[Piece]:
        """Returns the pieces at cursors start … stop - 1."""
        drawn = []
        while start < stop:
            epoch, place = divmod(start, self.pieces)
            count = min(stop - start, self.pieces - place)
            numbers = self._order.numbers(epoch, np.arange(place, place + count))
            spans = np.stack(self._pieces.find(numbers), axis=1)
            for document, begin, end in spans.tolist():
                drawn.append(Piece(document, begin, end, epoch))
            start += count
        return drawn

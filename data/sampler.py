"""Sampler: chooses the documents of each step as a function of one integer cursor, independent of
the number of ranks.

Documents longer than `max_length` are split into pieces, dropped, refused or cut; a piece is
trained as a document of its own, and those without a target are left out. Every epoch has its own
permutation of all P pieces, given by the seed. The cursor is the number of pieces taken: the next
piece is number `cursor mod P` in the permutation of epoch `cursor div P`. A step takes whole pieces
until they have at least `global_tokens` tokens, so the cursor is all that is needed to repeat it on
any ranks.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from longctx.data import TRUNCATED
from longctx.errors import UserError

if TYPE_CHECKING:
    from longctx.data.store.store import Store

LONG_DOCUMENTS = ("split", "drop", "error", *TRUNCATED)
LARGEST_SEED = (1 << 32) - 1
MOST_EPOCHS = 1024
"""Maximum number of epochs in one step; more are a mistake in the settings, and would take too long
to draw."""
MOST_PIECES = 1 << 17
"""Maximum number of documents in one step, on average."""


Numbers = npt.NDArray[np.int64]


class SamplerError(UserError):
    """Settings under which no step can be made."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens start … stop - 1 of a document of the store, as a training document of its own, in one
    epoch."""

    document: int
    start: int
    stop: int
    epoch: int = 0

    @property
    def length(self) -> int:
        return self.stop - self.start


def held_out(names: Iterable[str], share: float) -> npt.NDArray[np.bool_]:
    """Returns which documents are held out for evaluation, bool `[documents]`: about `share` of
    them, by a hash of their names.

    A document stays on its side when others are added or removed. Documents with equal names are on
    the same side.
    """
    below = int(share * 2**64)
    return np.fromiter(
        (int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) < below for name in names),
        np.bool_,
    )


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


def _refuse_long(
    store: "Store | None",
    lengths: Numbers,
    taken: npt.NDArray[np.bool_],
    *,
    max_length: int,
    long_documents: str | None,
) -> None:
    """Raises SamplerError for documents that are too long, naming the longest of them: for all
    under "error", for conversations without a setting."""
    if long_documents == "error":
        among = taken
        what = "documents"
        ways = "split or drop"
    elif long_documents is None and store is not None:
        among = taken & store.partly_trained
        what = "conversations, or other documents with tokens without loss,"
        ways = "drop, truncate_left (keeps the end), truncate_right or split"
    else:
        return
    refused = among & (lengths > max_length)
    if not refused.any():
        return
    longest = int(np.where(refused, lengths, 0).argmax())
    name = str(longest) if store is None else store.name(longest)
    raise SamplerError(
        f"document {name!r} has {lengths[longest]:,} tokens, and {int(refused.sum())} of "
        f"{int(among.sum())} {what} have more than the {max_length:,} that fit: set "
        f"data.long_documents to {ways}, raise data.max_length, or use more ranks or more "
        "batch.tokens_per_rank"
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
    """Steps over documents.

    Args:
        documents: a store, of which pieces without a target are left out; or tokens per document
            alone, int64 `[documents]`.
        global_tokens: minimum number of tokens per step.
        long_documents: treatment of longer documents: split, drop, error, truncate_left (keeps the
            end) or truncate_right. None: error for those of a store that are partly trained, as
            conversations are, split for the others.
        left_out: documents that no step takes, bool `[documents]`; they are not counted as dropped.
        stream: numbers added to the seed, so that the orders of several stores are independent.

    Attributes:
        pieces, tokens, longest: number of pieces P per epoch, number of their tokens, and length of
            the longest piece.
        long: number of documents longer than `max_length`.
        dropped: number of documents that `drop` leaves out of every epoch.

    Raises SamplerError for a long document under `error`, and if no document is left.
    """

    start: Any = 0

    def __init__(
        self,
        documents: "Store | Numbers",
        *,
        global_tokens: int,
        seed: int,
        max_length: int,
        long_documents: str | None = None,
        left_out: npt.NDArray[np.bool_] | None = None,
        stream: Sequence[int] = (),
    ) -> None:
        _check_settings(global_tokens, seed, max_length, long_documents)
        if isinstance(documents, np.ndarray):
            store = None
            lengths = documents
        else:
            store = documents
            lengths = documents.lengths
        taken = np.ones(len(lengths), np.bool_) if left_out is None else ~left_out
        is_long = taken & (lengths > max_length)
        self.long = int(is_long.sum())
        _refuse_long(store, lengths, taken, max_length=max_length, long_documents=long_documents)
        kept = np.flatnonzero(taken & ~is_long if long_documents == "drop" else taken)
        self.dropped = int(taken.sum()) - len(kept)
        if not len(kept):
            raise SamplerError(_why_none_is_left(self.dropped, max_length))
        self._cut(kept, lengths, max_length=max_length, long_documents=long_documents)
        if store is not None:
            self._keep(store.has_targets(self._document, self._start, self._stop))
        self.pieces = len(self._document)
        self.tokens = int((self._stop - self._start).sum())
        _check_step(global_tokens, self.tokens, self.pieces)
        self._seed = seed
        self._stream = stream
        self._global_tokens = global_tokens
        self.longest = int((self._stop - self._start).max())
        self._order: tuple[int, npt.NDArray[np.int64]] = (0, self._permutation(0))

    def _cut(
        self,
        kept: npt.NDArray[np.int64],
        lengths: Numbers,
        *,
        max_length: int,
        long_documents: str | None,
    ) -> None:
        """Sets document, start and stop of every piece of the documents that are kept."""
        if long_documents in TRUNCATED:
            counts = np.ones_like(kept)
        else:
            counts = -(-lengths[kept] // max_length)
        self._document = np.repeat(kept, counts)
        first_piece = np.repeat(np.cumsum(counts) - counts, counts)
        self._start = (np.arange(len(first_piece)) - first_piece) * max_length
        if long_documents == "truncate_left":
            self._start = np.maximum(lengths[kept] - max_length, 0)
        self._stop = np.minimum(self._start + max_length, lengths[self._document])

    def _keep(self, has_target: npt.NDArray[np.bool_]) -> None:
        """Leaves out the pieces without a target."""
        if not has_target.any():
            raise SamplerError(
                f"none of the {len(has_target):,} documents has a token to train on: give a store "
                "with other documents"
            )
        self._document = self._document[has_target]
        self._start = self._start[has_target]
        self._stop = self._stop[has_target]

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
        spans = zip(self._document.tolist(), self._start.tolist(), self._stop.tolist(), strict=True)
        return tuple(Piece(*span) for span in spans)

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
        epoch, place = divmod(cursor, self.pieces)
        if self._order[0] != epoch:
            self._order = (epoch, self._permutation(epoch))
        piece = self._order[1][place]
        return Piece(
            int(self._document[piece]), int(self._start[piece]), int(self._stop[piece]), epoch
        )

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        # RandomState, because NumPy promises never to change its streams (NEP 19); those of
        # Generator may change.
        random = np.random.RandomState([self._seed, epoch, *self._stream])
        return random.permutation(self.pieces).astype(np.int64)

"""Sampler: which documents a step trains on, as a function of one integer cursor that knows nothing of ranks.

Documents longer than `max_length` are first split into pieces of `max_length` tokens and a rest, or dropped, or refused. A
piece is a training document of its own: attention, positions and labels start anew. Below, "piece" means whole documents too.

Every epoch has its own permutation of all P pieces, given by the seed. The cursor counts the pieces taken since the very first
step: piece `cursor mod P` of the permutation of epoch `cursor div P` comes next. A step takes pieces until they hold at least
`global_tokens` tokens, so only its last piece reaches beyond; it goes on into the next epoch, and the one after, when one ends
before. A step takes whole pieces, so the cursor before a step is all that is needed to repeat it, on any number of ranks.

Documents in pairs are never split, and both of a pair are taken, dropped and held out together, one behind the other.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from longctx.errors import UserError

LONG_DOCUMENTS = ("split", "drop", "error")
LARGEST_SEED = (1 << 32) - 1
MOST_EPOCHS = 1024
"""More epochs in one step are a mistake in the settings, and would take forever to draw."""


class SamplerError(UserError):
    """Settings under which no step can be made."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens start … stop - 1 of a document of the store, as a training document of its own."""

    document: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


def held_out(names: Iterable[str], share: float) -> npt.NDArray[np.bool_]:
    """Which documents are for evaluation alone, bool `[documents]`: about `share` of them, by a hash of their names.

    So a document stays on its side whatever is added to or taken from a store, and equal names are on the same side, as are
    NAME#chosen and NAME#rejected of a pair.
    """
    below = int(share * 2**64)
    names = (name.removesuffix("#chosen").removesuffix("#rejected") for name in names)
    return np.fromiter((int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) < below for name in names), np.bool_)


class Steps(Protocol):
    """Which documents every step takes, as a function of a cursor."""

    @property
    def start(self) -> Any:
        """The cursor of the first step."""

    def step(self, cursor: Any) -> tuple[tuple[Piece, ...], Any]:
        """The pieces of the step that begins at `cursor`, and the cursor of the step after it."""

    def state(self, cursor: Any) -> dict[str, Any]:
        """A cursor as plain JSON data, with the epoch that it is in, and the longest piece."""

    def cursor(self, state: dict[str, Any]) -> Any:
        """What `state` was made of."""

    def behind(self, cursors: Sequence[int | None], epochs: Sequence[int]) -> Any:
        """The cursor that goes on at a store's `cursors`, or begins its epoch of `epochs` where that is None."""


def first_lengths(steps: Steps, count: int) -> list[list[int]]:
    """Tokens of the pieces of the first steps."""
    found, cursor = [], steps.start
    for _ in range(count):
        pieces, cursor = steps.step(cursor)
        found.append([piece.length for piece in pieces])
    return found


class Sampler:
    """Steps over documents of the given lengths.

    Args:
        lengths: tokens of every document of the store, int64 `[documents]`.
        global_tokens: tokens that a step holds at least.
        seed: of the permutations.
        max_length: most tokens of a piece.
        long_documents: what to do with longer documents: split, drop or error.
        name: names a document in an error message.
        left_out: documents that no step takes, bool `[documents]`; they are not counted as dropped.
        pairs: documents 2k and 2k + 1 belong together.
        stream: numbers that go into the seed, so that the orders of several stores have nothing to do with each other.

    Attributes:
        pieces, tokens, longest: P, the pieces of an epoch, their tokens, and those of the longest.
        long: number of documents longer than `max_length`.
        dropped, dropped_tokens: what `drop` leaves out of every epoch.

    Raises SamplerError for a long document under `error`, or in a pair under `split`, and if nothing is left to train on.
    """

    start = 0

    def __init__(
        self,
        lengths: npt.NDArray[np.int64],
        *,
        global_tokens: int,
        seed: int,
        max_length: int,
        long_documents: str = "split",
        name: Callable[[int], str] = str,
        left_out: npt.NDArray[np.bool_] | None = None,
        pairs: bool = False,
        stream: Sequence[int] = (),
    ) -> None:
        if global_tokens < 1 or max_length < 1:
            raise SamplerError(f"global_tokens is {global_tokens} and max_length {max_length}: both must be at least 1")
        if not 0 <= seed <= LARGEST_SEED:
            raise SamplerError(f"seed is {seed}: it must be from 0 to {LARGEST_SEED}")
        if long_documents not in LONG_DOCUMENTS:
            raise SamplerError(f"long_documents is {long_documents!r}: it must be one of {', '.join(LONG_DOCUMENTS)}")
        taken = np.ones(len(lengths), np.bool_) if left_out is None else ~left_out
        is_long = taken & (lengths > max_length)
        self.long = int(is_long.sum())
        if pairs and self.long and long_documents == "split":
            raise SamplerError(
                f"{self.long} documents have more than the {max_length:,} tokens that fit, and are of pairs, which are never "
                "split: set data.long_documents to drop, which leaves their pairs out, raise data.max_length, or give more "
                "ranks or batch.tokens_per_rank"
            )
        if pairs:
            is_long = np.repeat(is_long.reshape(-1, 2).any(axis=1), 2)
        if self.long and long_documents == "error":
            longest = int(np.where(taken, lengths, 0).argmax())
            raise SamplerError(
                f"document {name(longest)!r} has {lengths[longest]:,} tokens, and {self.long} of {int(taken.sum())} documents "
                f"have more than the {max_length:,} that fit: set data.long_documents to split or drop, raise data.max_length, "
                "or give more ranks or batch.tokens_per_rank"
            )
        documents = np.flatnonzero(taken & ~is_long if long_documents == "drop" else taken)
        self.dropped = int(taken.sum()) - len(documents)
        self.dropped_tokens = int(lengths[taken].sum() - lengths[documents].sum())
        if not len(documents):
            raise SamplerError(
                f"no document is left: all {self.dropped} have more than {max_length:,} tokens and long_documents is drop"
                if self.dropped
                else "there are no documents"
            )
        self.tokens = int(lengths[documents].sum())
        if global_tokens > MOST_EPOCHS * self.tokens:
            raise SamplerError(
                f"global_tokens is {global_tokens:,}: a step would go {MOST_EPOCHS} times and more through all "
                f"{self.tokens:,} tokens of the store; lower batch.global_tokens, or prepare more text"
            )
        self._together = 2 if pairs else 1
        self._seed, self._stream = seed, stream
        self._global_tokens = global_tokens
        counts = -(-lengths[documents] // max_length)
        self.pieces = int(counts.sum())
        self._document = np.repeat(documents, counts)
        first_piece = np.repeat(np.cumsum(counts) - counts, counts)
        self._start = (np.arange(self.pieces) - first_piece) * max_length
        self._stop = np.minimum(self._start + max_length, lengths[self._document])
        self.longest = int((self._stop - self._start).max())
        self._order: tuple[int, npt.NDArray[np.int64]] = (0, self._permutation(0))

    def step(self, cursor: int) -> tuple[tuple[Piece, ...], int]:
        """The pieces of the step that begins at `cursor`, and the cursor of the step after it."""
        pieces: list[Piece] = []
        tokens = 0
        while tokens < self._global_tokens:
            together = [self._piece(cursor + place) for place in range(self._together)]
            pieces += together
            tokens += sum(piece.length for piece in together)
            cursor += self._together
        return tuple(pieces), cursor

    def in_order(self) -> tuple[Piece, ...]:
        """Every piece once, in the order of the store."""
        spans = zip(self._document.tolist(), self._start.tolist(), self._stop.tolist(), strict=True)
        return tuple(Piece(*span) for span in spans)

    def state(self, cursor: int) -> dict[str, Any]:
        """A cursor as plain JSON data, its epoch, and the longest piece, which tells how documents are cut."""
        return {"cursor": cursor, "epoch": self.epoch(cursor), "longest": self.longest}

    def cursor(self, state: dict[str, Any]) -> int:
        """That of a state."""
        return int(state["cursor"])

    def behind(self, cursors: Sequence[int | None], epochs: Sequence[int]) -> int:
        """The one of `cursors`, or the first cursor of the one of `epochs` if that is None."""
        (cursor,), (epoch,) = cursors, epochs
        return epoch * self.pieces if cursor is None else cursor

    def epoch(self, cursor: int) -> int:
        """How often all pieces have been taken before `cursor`."""
        return cursor // self.pieces

    def _piece(self, cursor: int) -> Piece:
        epoch, place = divmod(cursor, self.pieces)
        if self._order[0] != epoch:
            self._order = (epoch, self._permutation(epoch))
        piece = self._order[1][place]
        return Piece(int(self._document[piece]), int(self._start[piece]), int(self._stop[piece]))

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        # RandomState, because NumPy promises never to change its streams (NEP 19); those of Generator may change.
        random = np.random.RandomState([self._seed, epoch, *self._stream])
        order = random.permutation(self.pieces // self._together).astype(np.int64)
        return (order[:, None] * self._together + np.arange(self._together)).ravel()

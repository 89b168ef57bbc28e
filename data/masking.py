"""Masking: chooses the tokens that an encoder is trained to predict, and what replaces them.

Every token that may be a target is masked with the same probability. As in BERT (Devlin et al., 2019, section 3.1), most
masked tokens become the mask token, some become a random token, and some stay. Labels are the original tokens, in place.

All draws are a pure function of (seed, epoch, document, position): those numbers are the key and the counter of Philox, a
counter-based generator whose streams NumPy promises to keep (NEP 19). So a rank draws only for its own spans, and masks depend
neither on plan, degree and ranks, nor on how long documents are cut.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from longctx.data import IGNORED_LABEL
from longctx.errors import UserError

if TYPE_CHECKING:
    from longctx.data.sampler import Piece
    from longctx.data.store import Store

Ids = npt.NDArray[np.int64]
IS_MASKED, REPLACEMENT, RANDOM_TOKEN = range(3)
"""Purposes of draws: each has its own stream."""
WORDS = 4
"""Numbers of 64 bits per value of Philox's counter."""


class MaskingError(UserError):
    """Settings of masking that are out of range."""


@dataclass(frozen=True, eq=False)
class Masking:
    """Masks of a run.

    Attributes:
        seed: seed of all draws, from 0.
        share: probability that a token is masked, in (0, 1].
        mask_token: id of the mask token.
        ordinary: ids of the tokens that may be masked or be drawn as random tokens: all but special ones, int64 `[tokens]`.
        random, kept: shares of masked tokens that become a random token, and that stay as they are.
    """

    seed: int
    share: float
    mask_token: int
    ordinary: Ids
    random: float = 0.1
    kept: float = 0.1
    _is_ordinary: npt.NDArray[np.bool_] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise MaskingError(f"share is {self.share}: must be above 0, and 1 or less")
        if min(self.random, self.kept) < 0 or self.random + self.kept > 1:
            raise MaskingError(f"random is {self.random} and kept is {self.kept}: must be 0 or more, and at most 1 together")
        ordinary = np.setdiff1d(self.ordinary, [self.mask_token])
        if not len(ordinary):
            raise MaskingError("ordinary is empty: give the ids of all tokens but special ones")
        is_ordinary = np.zeros(int(ordinary[-1]) + 1, np.bool_)
        is_ordinary[ordinary] = True
        object.__setattr__(self, "ordinary", ordinary)
        object.__setattr__(self, "_is_ordinary", is_ordinary)

    def mask(
        self,
        tokens: Ids,
        *,
        epoch: int,
        document: int,
        start: int = 0,
        trained: npt.NDArray[np.bool_] | None = None,
    ) -> tuple[Ids, Ids]:
        """Returns tokens with masks, and labels, both int64 `[tokens]`: -100 except at masked tokens.

        `tokens` are those of a document from position `start` on; `trained` says which may be targets (None: all).
        """
        where = epoch, document, start, len(tokens)
        masked = self._masked(tokens, trained, *where)
        what = _uniform(self._draw(REPLACEMENT, *where))
        drawn = self.ordinary[(_uniform(self._draw(RANDOM_TOKEN, *where)) * len(self.ordinary)).astype(np.int64)]
        replaced = np.where(what < 1 - self.random - self.kept, self.mask_token, np.where(what < 1 - self.kept, drawn, tokens))
        return np.where(masked, replaced, tokens), np.where(masked, tokens, IGNORED_LABEL)

    def read(self, store: "Store", piece: "Piece", start: int, stop: int) -> tuple[Ids, Ids]:
        """Reads tokens with masks, and labels, of positions start … stop - 1 of a piece of a store."""
        first = piece.start + start
        tokens, trained = store.tokens(piece.document, first, piece.start + stop)
        return self.mask(tokens, epoch=piece.epoch, document=piece.document, start=first, trained=trained)

    def targets(self, store: "Store", piece: "Piece") -> npt.NDArray[np.bool_]:
        """Returns which tokens of a piece are masked."""
        tokens, trained = store.tokens(piece.document, piece.start, piece.stop)
        return self._masked(tokens, trained, piece.epoch, piece.document, piece.start, len(tokens))

    def _masked(
        self, tokens: Ids, trained: npt.NDArray[np.bool_] | None, epoch: int, document: int, start: int, count: int
    ) -> npt.NDArray[np.bool_]:
        known = tokens < len(self._is_ordinary)
        candidates = known & self._is_ordinary[np.where(known, tokens, 0)]
        if trained is not None:
            candidates &= trained
        chosen: npt.NDArray[np.bool_] = candidates & (
            _uniform(self._draw(IS_MASKED, epoch, document, start, count)) < self.share
        )
        return chosen

    def _draw(self, purpose: int, epoch: int, document: int, start: int, count: int) -> npt.NDArray[np.uint64]:
        """Returns one number of 64 random bits for every position from `start` on."""
        first = start // WORDS
        blocks = -(-(start + count) // WORDS) - first
        generator: Any = np.random.Philox(key=[self.seed, purpose], counter=[first, epoch, document, 0])
        words: npt.NDArray[np.uint64] = generator.random_raw(blocks * WORDS)
        return words[start - first * WORDS :][:count]


def _uniform(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Returns numbers in [0, 1) from 64 random bits each."""
    result: npt.NDArray[np.float64] = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return result

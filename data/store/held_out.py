"""Held out: which documents are kept for evaluation, by a hash of their names.

A document stays on its side when others are added or removed. Documents with equal names are on the
same side. The index of a store has the first half of every hash, so that no name is read but those
whose half lies on the border.
"""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

HALF = 32
"""Bits of a half of a hash."""
Halves = npt.NDArray[np.uint32]


def name_hash(name: str) -> int:
    """Returns 64 bits of the SHA-256 of a name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])


def halves(names: Iterable[str]) -> Halves:
    """Returns the first halves of the hashes of names, uint32 `[names]`."""
    return np.fromiter((name_hash(name) >> HALF for name in names), np.uint32)


def held_out(names: Iterable[str], share: float) -> npt.NDArray[np.bool_]:
    """Returns which documents are held out for evaluation, bool `[documents]`: about `share` of
    them."""
    below = int(share * 2**64)
    return np.fromiter((name_hash(name) < below for name in names), np.bool_)


class HeldOut:
    """Which documents of a store are held out: about `share` of them; `name` reads the name of one
    of them."""

    def __init__(self, hashes: Halves, name: Callable[[int], str], share: float) -> None:
        self._hashes = hashes
        self._name = name
        self._below = int(share * 2**64)

    def __call__(self, which: Any) -> npt.NDArray[np.bool_]:
        """Returns whether documents are, of a slice of them or of an array of their numbers."""
        found = self._hashes[which].astype(np.uint64)
        border = self._below >> HALF
        is_held: npt.NDArray[np.bool_] = found < border
        undecided = np.flatnonzero(found == border)
        if len(undecided):
            numbers = np.arange(len(self._hashes))[which].ravel()
            for at in undecided.tolist():
                is_held.flat[at] = name_hash(self._name(int(numbers[at]))) < self._below
        return is_held

    def others(self, which: Any) -> npt.NDArray[np.bool_]:
        """Returns whether documents are not."""
        return ~self(which)

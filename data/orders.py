"""Order: which piece of a store comes at which place of an epoch.

A `bijection` is computed place by place, so that an order of any number of pieces takes no memory:
a generalized Feistel network (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002,
section 5), with keys that are a hash of seed and epoch. A `permutation` is drawn whole; runs have
it that began before there were bijections.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

ROUNDS = 16
"""Rounds of the network: with 8, the orders of 5 or 6 pieces are not equally likely."""
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


class Order(Protocol):
    """An order of `size` pieces for every epoch; `stream` is added to the seed, so that the orders
    of several stores are independent."""

    def __init__(self, size: int, seed: int, stream: Sequence[int]) -> None: ...

    def numbers(self, epoch: int, places: Numbers) -> Numbers:
        """Returns the numbers of the pieces at these places of an epoch, int64 `[places]`."""
        ...


class Bijection:
    """An order that is computed place by place, the same on every machine."""

    def __init__(self, size: int, seed: int, stream: Sequence[int]) -> None:
        self._size = np.uint64(size)
        # A place is left + right * width; fewer than `width` places are above the size.
        width = math.isqrt(max(0, size - 1)) + 1
        self._width = np.uint64(width)
        self._height = np.uint64(-(-size // width))
        self._seed = seed
        self._stream = stream

    def numbers(self, epoch: int, places: Numbers) -> Numbers:
        keys = self._keys(epoch)
        found = self._once(places.astype(np.uint64), keys)
        beyond = found >= self._size
        while beyond.any():  # every cycle leads back to where it began, which is below the size
            found[beyond] = self._once(found[beyond], keys)
            beyond = found >= self._size
        return found.astype(np.int64)

    def _keys(self, epoch: int) -> npt.NDArray[np.uint64]:
        """Returns a key for every round, uint64 `[ROUNDS]`."""
        words = np.array([self._seed, epoch, *self._stream], "<u8")
        digest = hashlib.shake_256(words.tobytes()).digest(8 * ROUNDS)
        return np.frombuffer(digest, "<u8").astype(np.uint64)

    def _once(
        self, places: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.uint64]:
        """Returns where the network leads from places: each round adds to one half a hash of the
        other one, so that it can be undone."""
        left = places % self._width
        right = places // self._width
        for number, key in enumerate(keys):
            if number % 2 == 0:
                left = (left + _hashed(right, key) % self._width) % self._width
            else:
                right = (right + _hashed(left, key) % self._height) % self._height
        return left + right * self._width


def _hashed(values: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    """Returns a hash of every value under a key: the finalizer of SplitMix64."""
    mixed = values + key
    mixed = (mixed ^ (mixed >> _SHIFTS[0])) * _FACTORS[0]
    mixed = (mixed ^ (mixed >> _SHIFTS[1])) * _FACTORS[1]
    return mixed ^ (mixed >> _SHIFTS[2])


class Permutation:
    """An order that is drawn whole, of which the last epoch is held: 8 bytes per piece."""

    def __init__(self, size: int, seed: int, stream: Sequence[int]) -> None:
        self._size = size
        self._seed = seed
        self._stream = stream
        self._last: tuple[int, Numbers] | None = None

    def numbers(self, epoch: int, places: Numbers) -> Numbers:
        last = self._last
        if last is None or last[0] != epoch:
            # RandomState, because NumPy promises never to change its streams (NEP 19); those of
            # Generator may change.
            random = np.random.RandomState([self._seed, epoch, *self._stream])
            last = epoch, random.permutation(self._size).astype(np.int64)
            self._last = last
        return last[1][places]


ORDERS: dict[str, type[Order]] = {"bijection": Bijection, "permutation": Permutation}
ORDER = "bijection"
"""Order of new runs."""
EARLIER_ORDER = "permutation"
"""Order of runs that do not say theirs."""

"""List scheduling: documents, the longest first, each to the slot that suits it best at its turn.

A slot has time left, up to the target of its micro-batch, and tokens left of the budget.
`emptiest_first` levels the time (Graham 1969). `neediest_first` also uses up the tokens evenly:
where rings leave much time and few tokens, only long documents, which take most time per token, can
fill it, and they do not fit there once shorter ones have come before them.
"""

import heapq
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from longctx.planning.assignment import Integers


def emptiest_first(
    load: Integers, free: Integers, time: Integers, tokens: Integers
) -> Integers | None:
    """Returns slots for documents of these times and tokens, in order: each gets the least loaded
    slot with enough free tokens.

    Slots without enough tokens wait until shorter documents fit them again; returns None if a
    document fits nowhere.
    """
    count = load.size
    room = free.ravel().tolist()
    # Compare faster than pairs.
    ready = [value * count + slot for slot, value in enumerate(load.ravel().tolist())]
    heapq.heapify(ready)
    waiting: list[tuple[int, int]] = []  # (-free tokens, entry of `ready`)
    slots = []
    for cost, need in zip(time.tolist(), tokens.tolist(), strict=True):
        while waiting and -waiting[0][0] >= need:
            heapq.heappush(ready, heapq.heappop(waiting)[1])
        while ready and room[ready[0] % count] < need:
            entry = heapq.heappop(ready)
            heapq.heappush(waiting, (-room[entry % count], entry))
        if not ready:
            return None
        slot = ready[0] % count
        room[slot] -= need
        heapq.heapreplace(ready, ready[0] + cost * count)
        slots.append(slot)
    return np.array(slots, dtype=np.int64)


def neediest_first(
    left: Integers, free: Integers, time: Integers, tokens: Integers
) -> Integers | None:
    """Returns slots for documents of these times and tokens, in order: of the slots with enough
    time `left` and enough `free` tokens, each gets that with most time left per free token. Without
    such a slot it gets the one with most time left of those with enough tokens.

    Returns None if a document fits nowhere. Example: of two slots with 10 left, one has 10 tokens
    and one has 4; a document of 6 time and 4 tokens goes to the second, and one of 3 time and 3
    tokens to the first.
    """
    chosen: list[int] = []
    if len(time) == 0:
        return np.array(chosen, dtype=np.int64)
    slots = _Slots(left.ravel(), free.ravel(), time=int(time[0]), tokens=int(tokens[0]))
    for cost, need in zip(time.tolist(), tokens.tolist(), strict=True):
        slot = slots.take(cost, need)
        if slot is None:
            return None
        chosen.append(slot)
    return np.array(chosen, dtype=np.int64)


class _Slots:
    """Slots in three heaps: those in which the last documents fit, by need; those with too few
    tokens for them, as (-free tokens, slot); and those with too little time, as (-time left, slot).

    A slot moves to another heap only when a document meets it, so a heap may also hold slots of
    another kind.
    """

    def __init__(self, left: Integers, free: Integers, *, time: int, tokens: int) -> None:
        """`time` and `tokens` are those of the first document."""
        self.left: list[int] = left.tolist()
        self.free: list[int] = free.tolist()
        self.count = len(self.left)
        has_tokens = free >= tokens
        fits = has_tokens & (left >= time)
        # An entry is a slot and its need in one number, as numbers compare faster than pairs.
        entries = np.arange(self.count) - left // np.maximum(free, 1) * self.count
        self.neediest: list[int] = entries[fits].tolist()
        self.short_of_tokens = _sorted_by(-free, ~has_tokens & (free > 0))
        self.short_of_time = _sorted_by(-left, has_tokens & ~fits)
        heapq.heapify(self.neediest)

    def take(self, time: int, tokens: int) -> int | None:
        """Returns the slot for a document, with its time and tokens taken off; None if it fits
        nowhere."""
        self._wake(time, tokens)
        slot = self._with_most_need(time, tokens)
        if slot is None:
            slot = self._with_most_time(tokens)
        if slot is None:
            return None
        self.left[slot] -= time
        self.free[slot] -= tokens
        if self.free[slot] > 0:
            heapq.heappush(self.neediest, self._entry(slot))
        return slot

    def _entry(self, slot: int) -> int:
        need = self.left[slot] // self.free[slot]
        return slot - need * self.count

    def _wake(self, time: int, tokens: int) -> None:
        """Moves slots in which documents fit again, as these become shorter, to the neediest."""
        while self.short_of_tokens and -self.short_of_tokens[0][0] >= tokens:
            _, slot = heapq.heappop(self.short_of_tokens)
            if self.left[slot] < time:
                heapq.heappush(self.short_of_time, (-self.left[slot], slot))
            else:
                heapq.heappush(self.neediest, self._entry(slot))
        while self.short_of_time and -self.short_of_time[0][0] >= time:
            _, slot = heapq.heappop(self.short_of_time)
            heapq.heappush(self.neediest, self._entry(slot))

    def _with_most_need(self, time: int, tokens: int) -> int | None:
        """Takes out the slot with most time left per free token in which a document fits."""
        while self.neediest:
            slot = heapq.heappop(self.neediest) % self.count
            if self.free[slot] < tokens:
                heapq.heappush(self.short_of_tokens, (-self.free[slot], slot))
            elif self.left[slot] < time:
                heapq.heappush(self.short_of_time, (-self.left[slot], slot))
            else:
                return slot
        return None

    def _with_most_time(self, tokens: int) -> int | None:
        """Takes out the slot with most time left of those that have the tokens; none has the
        time."""
        while self.short_of_time:
            _, slot = heapq.heappop(self.short_of_time)
            if self.free[slot] >= tokens:
                return slot
            heapq.heappush(self.short_of_tokens, (-self.free[slot], slot))
        return None


def _sorted_by(values: Integers, which: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Returns some slots with their values, the lowest first, which is a heap."""
    slots = np.flatnonzero(which)
    order = np.argsort(values[slots], kind="stable")
    slots = slots[order]
    return list(zip(values[slots].tolist(), slots.tolist(), strict=True))


def roomiest_first(
    left: Integers, free: Integers, time: Integers, tokens: Integers
) -> Integers | None:
    """Returns what `emptiest_first` does, by the time left."""
    return emptiest_first(-left, free, time, tokens)


Rule = Callable[[Integers, Integers, Integers, Integers], Integers | None]
"""Slots for documents by time left and free tokens of slots, and time and tokens of documents."""
RULES: tuple[Rule, ...] = (neediest_first, roomiest_first)
"""The second rule finds room for some documents for which the first has none left."""

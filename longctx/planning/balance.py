"""Balance: evens out ranks by moving and swapping documents of degree 1 between pairs of them, all pairs at once.

Each round sorts the slots (a rank in a micro-batch) by their room and joins the fullest with the emptiest; every pair makes the
one move or swap that brings it closest to even, within the token budget. Rounds differ in who meets whom.
"""

import numpy as np

from longctx.planning.assignment import Integers

TRIED = 6
"""Documents of a slot that a round looks at."""
TABLE_ROUNDS = 16
"""Rounds until a slot with more documents than that shows others."""
STALE_ROUNDS = 4
"""Rounds in a row without any gain that end the search."""
NONE = -1


def balance(slots: Integers, time: Integers, tokens: Integers, room: Integers, free: Integers, rounds: int) -> Integers:
    """Improves `slots` [documents], where each document of degree 1 stands.

    `room` and `free` [slots] are time under the height and tokens free in every slot without these documents.
    """
    slots = slots.copy()
    count = len(room)
    if len(slots) == 0 or count < 2:
        return slots
    excess = np.bincount(slots, time, count).astype(np.int64) - room
    spare = free - np.bincount(slots, tokens, count).astype(np.int64)
    time, tokens = np.append(time, 0), np.append(tokens, 0)  # at index NONE: no document
    half = count // 2
    stale = 0
    for turn in range(rounds):
        if turn % TABLE_ROUNDS == 0:
            table = _documents_by_slot(slots, count, turn // TABLE_ROUNDS)
        order = np.argsort(-excess, kind="stable")
        high, low = order[:half], np.roll(order[::-1][:half], turn // 2)
        shift = time[table[high]][:, :, None] - time[table[low]][:, None, :]
        load = tokens[table[high]][:, :, None] - tokens[table[low]][:, None, :]
        difference = excess[high] - excess[low]
        pairs, give, take = _best_exchange(shift, load, difference, spare[high], spare[low])
        stale = 0 if len(pairs) else stale + 1
        if stale == STALE_ROUNDS:
            break
        a, b = high[pairs], low[pairs]
        given, taken = table[a, give], table[b, take]
        table[a, give], table[b, take] = taken, given
        slots[given[given != NONE]] = b[given != NONE]
        slots[taken[taken != NONE]] = a[taken != NONE]
        for total, change in ((excess, shift[pairs, give, take]), (spare, -load[pairs, give, take])):
            total[a] -= change
            total[b] += change
    return slots


def _documents_by_slot(slots: Integers, count: int, turn: int) -> Integers:
    """A table [slots, 1 + TRIED] of documents, filled up with NONE, which the first column always is."""
    order = np.argsort(slots, kind="stable")
    sizes = np.bincount(slots, minlength=count)
    place = np.arange(len(slots)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    size = sizes[slots[order]]
    place = np.where(size > TRIED, (place + turn * TRIED) % np.maximum(size, 1), place)
    shown = place < TRIED
    table = np.full((count, 1 + min(TRIED, int(sizes.max()))), NONE, dtype=np.int64)
    table[slots[order][shown], 1 + place[shown]] = order[shown]
    return table


def _best_exchange(
    shift: Integers, load: Integers, difference: Integers, spare_a: Integers, spare_b: Integers
) -> tuple[Integers, Integers, Integers]:
    """For each pair (a, b) of slots the exchange that makes them most equal, if any does within the token budget.

    `shift` and `load` [pairs, given, taken] are the time and tokens that go from a to b; `difference` is how much fuller a is.
    Returns the pairs that gain, and the columns of what they give and take.
    """
    distance = np.abs(difference[:, None, None] - 2 * shift)
    distance[(load > spare_b[:, None, None]) | (-load > spare_a[:, None, None])] = np.iinfo(np.int64).max
    flat = distance.reshape(len(difference), -1)
    best = flat.argmin(axis=1)
    pairs = np.flatnonzero(flat[np.arange(len(best)), best] < difference)
    give, take = np.divmod(best[pairs], shift.shape[2])
    return pairs, give, take

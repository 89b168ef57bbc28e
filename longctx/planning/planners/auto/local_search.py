"""Balance: evens out ranks by moving and swapping documents of degree 1, the fullest ranks first.

Slots (a rank in a micro-batch) have a height to keep to. In each round every document of the slots that exceed theirs most is
compared with documents anywhere that are shorter by about as much as is too much there, and with the emptiest slots: the swap
or move is made after which the fuller of both slots exceeds least, within the token budget. A micro-batch takes as long as its
fullest slot: where that one cannot be helped, the others of its micro-batch may be as full.
"""

import numpy as np

from longctx.planning.assignment import NEVER, Integers

FULLEST = 32
"""How many slots a round looks at, at least."""
SHARE = 16
"""It looks at one in so many of all."""
NEAREST = 16
"""Documents that each document of these slots is compared with."""
EMPTIEST = 8
"""Slots that each of them may move to."""
EXCHANGED = (1.0, 0.5, 0.75)
"""How much of what is too much an exchange should take away, in turn."""
NONE = -1


def balance(
    slots: Integers, time: Integers, tokens: Integers, room: Integers, free: Integers, ranks: int, rounds: int
) -> Integers:
    """Improves `slots` [documents], where each document of degree 1 stands; slot = micro-batch · ranks + rank.

    `room` and `free` [slots] are time under the height and tokens free in every slot without these documents.
    """
    slots, count = slots.copy(), len(room)
    if len(slots) == 0:
        return slots
    shelf = np.arange(count) // ranks
    stuck = np.zeros(count // ranks, dtype=np.int64)  # excess of the fullest slot that cannot be helped
    excess = np.bincount(slots, time, count).astype(np.int64) - room
    spare = free - np.bincount(slots, tokens, count).astype(np.int64)
    by_time = np.argsort(time, kind="stable")
    sorted_time, last = time[by_time], len(time) - 1
    time, tokens = np.append(time, 0), np.append(tokens, 0)  # at index NONE: no document
    nearest = np.arange(NEAREST) - NEAREST // 2
    failed = 0
    for turn in range(rounds):
        over = excess - stuck[shelf]
        high = _greatest(over, max(FULLEST, count // SHARE))
        high = high[over[high] > 0]
        if len(high) == 0:
            break
        low = _greatest(-over, EMPTIEST)[:EMPTIEST]
        is_high = np.zeros(count, dtype=bool)
        is_high[high] = True
        given = np.flatnonzero(is_high[slots])
        a = slots[given]
        wanted = time[given] - (EXCHANGED[turn % len(EXCHANGED)] * over[a]).astype(np.int64)
        place = np.searchsorted(sorted_time, wanted)[:, None] + nearest
        taken = np.full((len(given), NEAREST + len(low)), NONE, dtype=np.int64)
        taken[:, :NEAREST] = by_time[np.minimum(np.maximum(place, 0), last)]
        b = np.empty_like(taken)
        b[:, :NEAREST] = slots[taken[:, :NEAREST]]
        b[:, NEAREST:] = low
        shift, load = time[given][:, None] - time[taken], tokens[given][:, None] - tokens[taken]
        after = np.maximum(over[a][:, None] - shift, over[b] + shift)
        after[(load > spare[b]) | (-load > spare[a][:, None])] = NEVER
        choice = np.arange(len(given)), after.argmin(axis=1)
        after, taken, b, shift, load = after[choice], taken[choice], b[choice], shift[choice], load[choice]
        rows = _disjoint(a, b, after, over)
        if len(rows):
            failed = 0
            a, b, shift, load, taken, given = a[rows], b[rows], shift[rows], load[rows], taken[rows], given[rows]
            slots[given] = b
            slots[taken[taken != NONE]] = a[taken != NONE]
            excess[a] -= shift
            excess[b] += shift
            spare[a] += load
            spare[b] -= load
        else:
            failed += 1
        if failed == len(EXCHANGED):
            failed = 0
            worst = high[over[high].argmax()]
            stuck[shelf[worst]] = excess[worst]
    return slots


def _greatest(values: Integers, count: int) -> Integers:
    """Indices of the `count` greatest values, and of all that equal the least of them: alike on every machine."""
    count = min(count, len(values))
    return np.flatnonzero(values >= np.partition(values, len(values) - count)[len(values) - count])


def _disjoint(a: Integers, b: Integers, after: Integers, over: Integers) -> Integers:
    """Exchanges that gain, at most one for each slot: the fullest slot `a` chooses first, the one that leaves least."""
    gain = np.flatnonzero(after < over[a])
    gain = gain[np.lexsort((after[gain], -over[a[gain]]))]
    used: set[int] = set()
    rows = []
    for row, one, other in zip(gain.tolist(), a[gain].tolist(), b[gain].tolist(), strict=True):
        if one not in used and other not in used:
            used.update((one, other))
            rows.append(row)
    return np.array(rows, dtype=np.int64)

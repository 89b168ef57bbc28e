"""Balance: evens out ranks by moving and swapping documents of degree 1 between pairs of them, all pairs at once.

Each round sorts the slots (a rank in a micro-batch) by their room and joins the fullest with the emptiest; every pair makes the
one move or swap that brings it closest to even, within the token budget. Rounds differ in who meets whom.
"""

import numpy as np

from longctx.planning.assignment import Integers

TRIED = 10
"""Documents of a slot that a round looks at."""


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
    half = count // 2
    stale = 0
    for turn in range(rounds):
        order = np.argsort(-excess, kind="stable")
        high, low = order[:half], np.roll(order[::-1][:half], turn // 2)
        held = _documents_by_slot(slots, count, turn)
        moved = _best_exchange(held[high], held[low], excess[high] - excess[low], time, tokens, spare[high], spare[low])
        pairs, given, taken, shift, weight = moved
        if len(pairs) == 0:
            stale += 1
            if stale > 3:
                break
            continue
        stale = 0
        a, b = high[pairs], low[pairs]
        slots[given[given >= 0]] = b[given >= 0]
        slots[taken[taken >= 0]] = a[taken >= 0]
        excess[a] -= shift
        excess[b] += shift
        spare[a] += weight
        spare[b] -= weight
    return slots


def _documents_by_slot(slots: Integers, count: int, turn: int) -> Integers:
    """A table [slots, 1 + TRIED] of documents, padded with -1; the first column is always -1: no document."""
    order = np.argsort(slots, kind="stable")
    sizes = np.bincount(slots, minlength=count)
    place = np.arange(len(slots)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    size = sizes[slots[order]]
    place = np.where(size > TRIED, (place + turn * TRIED) % np.maximum(size, 1), place)
    shown = place < TRIED
    table = np.full((count, 1 + min(TRIED, int(sizes.max()))), -1, dtype=np.int64)
    table[slots[order][shown], 1 + place[shown]] = order[shown]
    return table


def _best_exchange(
    held_a: Integers,
    held_b: Integers,
    difference: Integers,
    time: Integers,
    tokens: Integers,
    spare_a: Integers,
    spare_b: Integers,
) -> tuple[Integers, Integers, Integers, Integers, Integers]:
    """For each pair of slots: which document a gives and which it takes (-1: none), so that a and b become most equal.

    Returns the pairs that gain, what they give and take, and by how much time and how many tokens a shrinks.
    """
    value, weight = np.append(time, 0), np.append(tokens, 0)  # index -1: no document
    shift = value[held_a][:, :, None] - value[held_b][:, None, :]
    load = weight[held_a][:, :, None] - weight[held_b][:, None, :]
    distance = np.abs(difference[:, None, None] - 2 * shift)
    fits = (load <= spare_b[:, None, None]) & (-load <= spare_a[:, None, None])
    distance = np.where(fits, distance, np.iinfo(np.int64).max).reshape(len(difference), -1)
    best = distance.argmin(axis=1)
    pairs = np.flatnonzero(distance[np.arange(len(best)), best] < difference)
    i, j = np.divmod(best[pairs], held_b.shape[1])
    given, taken = held_a[pairs, i], held_b[pairs, j]
    return pairs, given, taken, shift[pairs, i, j], load[pairs, i, j]

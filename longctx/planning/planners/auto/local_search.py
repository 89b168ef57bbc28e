"""Local search: evens out ranks by moving and swapping documents of degree 1, the fullest ranks first.

A slot is a rank in a micro-batch, with a time to keep to. In each round every document of the slots that exceed theirs most is
compared with documents anywhere that are shorter by about as much as is too much there, and with the emptiest slots: the swap
or move is made after which the fuller of both slots exceeds least, within the token budget. A micro-batch takes as long as its
fullest slot: where that one cannot be helped, the others of its micro-batch may be as full.
"""

from typing import NamedTuple

import numpy as np

from longctx.planning.assignment import NEVER, Integers

FULLEST = 32
"""How many slots a round looks at, at least: more make fewer but slower rounds."""
SHARE = 16
"""It looks at one in so many of all."""
NEAREST = 16
"""Documents that each document of these slots is compared with: a round takes time in proportion."""
EMPTIEST = 8
"""Slots that each of them may move to; the same."""
EXCHANGED = (1.0, 0.5, 0.75)
"""How much of what is too much an exchange should take away, in turn."""
NONE = -1


def balance(
    slots: Integers, time: Integers, tokens: Integers, room: Integers, free: Integers, ranks: int, rounds: int
) -> Integers:
    """Improves `slots` [documents], where each document of degree 1 stands; slot = micro-batch · ranks + rank.

    `room` and `free` [slots] are the nanoseconds to keep to and the free tokens of every slot without these documents. With
    room for 11 in each of two slots, and documents of 9 and 8 in one, of 3 and 2 in the other, 9 and 3 change places.
    """
    if len(slots) == 0:
        return slots.copy()
    state = _Slots(slots, time, tokens, room, free, ranks)
    failed = 0
    for turn in range(rounds):
        over = state.excess - state.accepted[state.micro_batch]
        full = _greatest(over, max(FULLEST, len(over) // SHARE))
        full = full[over[full] > 0]
        if len(full) == 0:
            break
        best = state.best_exchanges(full, over, EXCHANGED[turn % len(EXCHANGED)])
        gaining = best.pick(_disjoint(best, over))
        state.make(gaining)
        failed = 0 if len(gaining.given) else failed + 1
        if failed == len(EXCHANGED):
            failed, worst = 0, full[over[full].argmax()]
            state.accepted[state.micro_batch[worst]] = state.excess[worst]
    return state.of_document


class _Exchanges(NamedTuple):
    """Document `given` goes from a slot to another one, and `taken` (NONE: nothing) comes back (arrays [exchanges]).

    `time` and `tokens` are what that takes from the source and adds to the target, `after` what the fuller one exceeds by then.
    """

    given: Integers
    taken: Integers
    source: Integers
    target: Integers
    time: Integers
    tokens: Integers
    after: Integers

    def pick(self, rows: Integers) -> "_Exchanges":
        return _Exchanges(*(values[rows] for values in self))


class _Slots:
    """Where documents stand, and how full the slots are: nanoseconds in excess of what to keep to, and spare tokens."""

    def __init__(self, slots: Integers, time: Integers, tokens: Integers, room: Integers, free: Integers, ranks: int) -> None:
        count = len(room)
        self.of_document = slots.copy()
        self.micro_batch = np.arange(count) // ranks
        self.accepted = np.zeros(count // ranks, dtype=np.int64)  # excess of the fullest slot that cannot be helped
        self.excess = np.bincount(slots, time, count).astype(np.int64) - room
        self.spare = free - np.bincount(slots, tokens, count).astype(np.int64)
        self.by_time = np.argsort(time, kind="stable")
        self.sorted_time = time[self.by_time]
        self.time, self.tokens = np.append(time, 0), np.append(tokens, 0)  # at index NONE: no document

    def best_exchanges(self, full: Integers, over: Integers, share: float) -> _Exchanges:
        """The best exchange for each document of the `full` slots, one that should take away this share of what is `over`."""
        is_full = np.zeros(len(over), dtype=bool)
        is_full[full] = True
        given = np.flatnonzero(is_full[self.of_document])
        source = self.of_document[given]
        taken, target = self._partners(self.time[given] - (share * over[source]).astype(np.int64), over)
        time = self.time[given][:, None] - self.time[taken]
        tokens = self.tokens[given][:, None] - self.tokens[taken]
        after = np.maximum(over[source][:, None] - time, over[target] + time)
        after[(tokens > self.spare[target]) | (-tokens > self.spare[source][:, None])] = NEVER
        best = np.arange(len(given)), after.argmin(axis=1)
        return _Exchanges(given, taken[best], source, target[best], time[best], tokens[best], after[best])

    def _partners(self, wanted: Integers, over: Integers) -> tuple[Integers, Integers]:
        """Documents of about these times and NONE for the emptiest slots, and where they stand: [documents, partners] each."""
        emptiest = _greatest(-over, EMPTIEST)[:EMPTIEST]
        place = np.searchsorted(self.sorted_time, wanted)[:, None] + (np.arange(NEAREST) - NEAREST // 2)
        taken = np.full((len(wanted), NEAREST + len(emptiest)), NONE, dtype=np.int64)
        taken[:, :NEAREST] = self.by_time[np.minimum(np.maximum(place, 0), len(self.by_time) - 1)]
        target = np.empty_like(taken)
        target[:, :NEAREST] = self.of_document[taken[:, :NEAREST]]
        target[:, NEAREST:] = emptiest
        return taken, target

    def make(self, exchanges: _Exchanges) -> None:
        """Makes these exchanges, no two of which share a slot."""
        given, taken, source, target, time, tokens, _ = exchanges
        self.of_document[given] = target
        self.of_document[taken[taken != NONE]] = source[taken != NONE]
        self.excess[source] -= time
        self.excess[target] += time
        self.spare[source] += tokens
        self.spare[target] -= tokens


def _greatest(values: Integers, count: int) -> Integers:
    """Indices of the `count` greatest values, and of all that equal the least of them: alike on every machine."""
    count = min(count, len(values))
    return np.flatnonzero(values >= np.partition(values, len(values) - count)[len(values) - count])


def _disjoint(exchanges: _Exchanges, over: Integers) -> Integers:
    """Exchanges that gain, at most one for each slot: the fullest source chooses first, the one that leaves least."""
    before = over[exchanges.source]
    gain = np.flatnonzero(exchanges.after < before)
    gain = gain[np.lexsort((exchanges.after[gain], -before[gain]))]
    used: set[int] = set()
    rows = []
    slots = exchanges.source[gain].tolist(), exchanges.target[gain].tolist()
    for row, source, target in zip(gain.tolist(), *slots, strict=True):
        if source not in used and target not in used:
            used.update((source, target))
            rows.append(row)
    return np.array(rows, dtype=np.int64)

"""Local search: balances ranks by moving and swapping documents of degree 1, starting with the
fullest ranks.

A slot is a rank in a micro-batch, with a target time. Every document of the slots that most exceed
theirs is compared with documents shorter by about that excess, and with the emptiest slots; the
swap or move that leaves the smallest excess within the token budget is made. If the fullest slot of
a micro-batch cannot be improved, its other slots may be as full.
"""

from typing import NamedTuple

import numpy as np

from longctx.planning.assignment import NEVER, Integers

FULLEST = 32
"""Minimum number of slots per round: a larger number means fewer but slower rounds."""
SHARE = 16
"""A round looks at 1/SHARE of all slots, if that is more than FULLEST."""
NEAREST = 16
"""Number of documents that each document of these slots is compared with; the time of a round is
proportional."""
EMPTIEST = 8
"""Number of slots that each document may move to; the time of a round is proportional."""
EXCHANGED = (1.0, 0.5, 0.75)
"""Shares of the excess that an exchange should remove, tried in turn."""
NONE = -1


def balance(
    slots: Integers,
    time: Integers,
    tokens: Integers,
    room: Integers,
    free: Integers,
    ranks: int,
    rounds: int,
) -> Integers:
    """Returns improved `slots` [documents] of documents of degree 1; slot = micro-batch · ranks +
    rank.

    `room` and `free` [slots] are the target nanoseconds and the free tokens of every slot without
    these documents. Example: two slots have room for 11 each and hold documents of 9 and 8, and of
    3 and 2: 9 and 3 change places.
    """
    if len(slots) == 0:
        return slots.copy()
    state = _Slots(slots, time, tokens, room=room, free=free, ranks=ranks)
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
        failed = 0 if len(gaining.leaving) else failed + 1
        if failed == len(EXCHANGED):
            failed = 0
            worst = full[over[full].argmax()]
            state.accepted[state.micro_batch[worst]] = state.excess[worst]
    return state.of_document


class _Exchanges(NamedTuple):
    """Exchanges of document `leaving` in slot `source` for `taken` (NONE: nothing) in slot `target`
    (arrays [exchanges]).

    `time` and `tokens` move from source to target; `after` is the excess of the fuller slot
    afterwards.
    """

    leaving: Integers
    taken: Integers
    source: Integers
    target: Integers
    time: Integers
    tokens: Integers
    after: Integers

    def pick(self, rows: Integers) -> "_Exchanges":
        return _Exchanges._make(values[rows] for values in self)


class _Slots:
    """The slot of every document, and the excess nanoseconds and spare tokens of every slot."""

    def __init__(
        self,
        slots: Integers,
        time: Integers,
        tokens: Integers,
        room: Integers,
        free: Integers,
        ranks: int,
    ) -> None:
        """Arguments as in `balance`."""
        count = len(room)
        self.of_document = slots.copy()
        self.micro_batch = np.arange(count) // ranks
        # Excess of the fullest slot that cannot be improved.
        self.accepted = np.zeros(count // ranks, dtype=np.int64)
        self.excess = np.bincount(slots, time, count).astype(np.int64) - room
        self.spare = free - np.bincount(slots, tokens, count).astype(np.int64)
        self.by_time = np.argsort(time, kind="stable")
        self.sorted_time = time[self.by_time]
        # At index NONE: no document.
        self.time, self.tokens = np.append(time, 0), np.append(tokens, 0)

    def best_exchanges(self, full: Integers, over: Integers, share: float) -> _Exchanges:
        """Returns the best exchange for each document of the `full` slots; it should remove about
        `share` of their excess."""
        is_full = np.zeros(len(over), dtype=bool)
        is_full[full] = True
        leaving = np.flatnonzero(is_full[self.of_document])
        source = self.of_document[leaving]
        about = self.time[leaving] - (share * over[source]).astype(np.int64)
        taken, target = self._partners(about, over)
        time = self.time[leaving][:, None] - self.time[taken]
        tokens = self.tokens[leaving][:, None] - self.tokens[taken]
        after = np.maximum(over[source][:, None] - time, over[target] + time)
        after[(tokens > self.spare[target]) | (-tokens > self.spare[source][:, None])] = NEVER
        best = np.arange(len(leaving)), after.argmin(axis=1)
        return _Exchanges(
            leaving=leaving,
            taken=taken[best],
            source=source,
            target=target[best],
            time=time[best],
            tokens=tokens[best],
            after=after[best],
        )

    def _partners(self, budget: Integers, over: Integers) -> tuple[Integers, Integers]:
        """Returns documents of about the times `budget`, plus NONE for the emptiest slots, and
        their slots.

        Both arrays are [documents, partners].
        """
        emptiest = _greatest(-over, EMPTIEST)[:EMPTIEST]
        distance = np.arange(NEAREST) - NEAREST // 2
        index = np.searchsorted(self.sorted_time, budget)[:, None] + distance
        index = np.minimum(np.maximum(index, 0), len(self.by_time) - 1)
        taken = np.full((len(budget), NEAREST + len(emptiest)), NONE, dtype=np.int64)
        taken[:, :NEAREST] = self.by_time[index]
        target = np.empty_like(taken)
        target[:, :NEAREST] = self.of_document[taken[:, :NEAREST]]
        target[:, NEAREST:] = emptiest
        return taken, target

    def make(self, exchanges: _Exchanges) -> None:
        """Applies exchanges, no two of which may share a slot."""
        leaving, taken, source, target, time, tokens, _ = exchanges
        self.of_document[leaving] = target
        self.of_document[taken[taken != NONE]] = source[taken != NONE]
        self.excess[source] -= time
        self.excess[target] += time
        self.spare[source] += tokens
        self.spare[target] -= tokens


def _greatest(values: Integers, count: int) -> Integers:
    """Returns the indices of the `count` largest values and of all ties with the last: the same on
    every machine."""
    count = min(count, len(values))
    return np.flatnonzero(values >= np.partition(values, len(values) - count)[len(values) - count])


def _disjoint(exchanges: _Exchanges, over: Integers) -> Integers:
    """Returns the rows of exchanges that gain, at most one per slot; the fullest sources choose
    their best exchange first."""
    before = over[exchanges.source]
    gain = np.flatnonzero(exchanges.after < before)
    gain = gain[np.lexsort((exchanges.after[gain], -before[gain]))]
    used: set[int] = set()
    rows = []
    sources, targets = exchanges.source[gain].tolist(), exchanges.target[gain].tolist()
    for row, source, target in zip(gain.tolist(), sources, targets, strict=True):
        if source not in used and target not in used:
            used.update((source, target))
            rows.append(row)
    return np.array(rows, dtype=np.int64)

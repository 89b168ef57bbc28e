"""Shortest path: layouts in which every micro-batch has a limit of its own, where documents are too long for even ones.

Documents are cut into runs, longest first: each run is what the rings of one micro-batch hold, side by side on all ranks, if
each takes the smallest degree at which it is done within that micro-batch's limit. The best cuts and limits are a shortest path
from the longest document to the shortest (dynamic programming over documents × limits). Room that rings leave is worth a price,
for short documents will take it: at price 1 they fill all of it, at 0 there are none. Which price is right shows when the
layouts are placed, so the caller tries some.
"""

from dataclasses import dataclass

import numpy as np

from longctx.planning.assignment import NEVER, Integers
from longctx.planning.cost.model import Floats

FINER = 1.05
"""Each limit as a multiple of the one below: closer ones find lower paths, and the graph and its time grow."""


@dataclass(frozen=True)
class LimitGraph:
    """Edges from a document to the first one that its micro-batch no longer holds, one for each limit.

    Attributes (arrays [documents, limits]):
        index: the first degree by which a document is done within the limit, as a column of the table it came from.
        stop: where the run of documents ends that such a micro-batch holds.
        time, room: nanoseconds that it takes, and that each of its ranks has for short documents on average.
    """

    index: Integers
    stop: Integers
    time: Floats
    room: Floats

    @classmethod
    def of(
        cls,
        time: Integers,
        tokens: Integers,
        degrees: Integers,
        ranks: int,
        tokens_per_rank: int,
        ns_per_token: float,
        launch_ns: int,
    ) -> "LimitGraph":
        """From the nanoseconds and tokens of each document on a rank [documents, degrees], longest document first.

        `time` is NEVER where a document does not fit; each fits somewhere. A token of short documents takes `ns_per_token`.
        """
        limits = _limits(int(time.min()), int(time[time < NEVER].max()))
        documents, count = len(time), len(limits)
        index = np.full((documents, count + 1), len(degrees), dtype=np.int64)
        enough = np.searchsorted(limits, time)  # the first limit for which a degree is fast enough
        for i in reversed(range(len(degrees))):
            index[np.arange(documents), enough[:, i]] = i
        index = np.minimum.accumulate(index[:, :count], axis=1)
        possible = index < len(degrees)
        index = np.where(possible, index, 0)
        width = np.where(possible, degrees[index], ranks + 1)
        row = np.arange(documents)[:, None]
        upto = _sums(width)
        stop = np.stack([np.searchsorted(column, column[:-1] + ranks, side="right") - 1 for column in upto.T], axis=1)
        used, held = (
            np.take_along_axis(sums, stop, axis=0) - sums[:-1]
            for sums in (_sums(np.where(possible, width * table[row, index], 0)) for table in (time, tokens))
        )
        room = np.minimum(ranks * limits - used, (ranks * tokens_per_rank - held) * ns_per_token) / ranks
        return cls(index, stop, np.where(stop > row, limits + float(launch_ns), np.inf), room)

    def shortest_path(self, price: float) -> tuple[Integers, Integers]:
        """Degree (its index) and micro-batch of every document, if room is worth that share of its time.

        From the last document i back, left(i) = least over the limits of time - price · room + left(stop).
        """
        documents = len(self.stop)
        cost, left = self.time - price * self.room, np.zeros(documents + 1)
        best = np.zeros(documents, dtype=np.int64)
        for i in reversed(range(documents)):
            total = cost[i] + left[self.stop[i]]
            best[i] = total.argmin()
            left[i] = total[best[i]]
        index, micro_batch = np.zeros((2, documents), dtype=np.int64)
        start, number = 0, 0
        while start < documents:
            limit = best[start]
            stop = self.stop[start, limit]
            index[start:stop], micro_batch[start:stop] = self.index[start:stop, limit], number
            start, number = stop, number + 1
        return index, micro_batch


def _limits(lowest: int, highest: int) -> Integers:
    limits = [lowest]
    while limits[-1] < highest:
        limits.append(int(limits[-1] * FINER) + 1)
    return np.array(limits, dtype=np.int64)


def _sums(values: Integers) -> Integers:
    """Sums of the first 0, 1, 2, … rows."""
    return np.concatenate([np.zeros((1, values.shape[1]), dtype=np.int64), np.cumsum(values, axis=0)])

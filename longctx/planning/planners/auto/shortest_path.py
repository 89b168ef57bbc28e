"""Stairs: layouts in which every micro-batch has a limit of its own, for steps with documents too long for even heights.

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
"""Each limit as a multiple of the one below."""


@dataclass(frozen=True)
class Stairs:
    """What a micro-batch that begins with a document costs at each limit (arrays [documents, limits]).

    Attributes:
        option: the first degree by which a document is done within the limit, as a column of the table it came from.
        stop: where the run of documents ends that such a micro-batch holds.
        time, room: nanoseconds that it takes, and that each of its ranks has for short documents on average.
    """

    option: Integers
    stop: Integers
    time: Floats
    room: Floats

    @classmethod
    def of(
        cls,
        cost: Integers,
        shard: Integers,
        degree: Integers,
        ranks: int,
        tokens_per_rank: int,
        ns_per_token: float,
        launch_ns: int,
    ) -> "Stairs":
        """From the nanoseconds and tokens of each document on a rank [documents, degrees], longest document first.

        `cost` is NEVER where a document does not fit; each fits somewhere. A token of short documents takes `ns_per_token`.
        """
        limits = _limits(int(cost.min()), int(cost[cost < NEVER].max()))
        documents, count = len(cost), len(limits)
        option = np.full((documents, count + 1), len(degree), dtype=np.int64)
        enough = np.searchsorted(limits, cost)  # the first limit for which a degree is fast enough
        for i in reversed(range(len(degree))):
            option[np.arange(documents), enough[:, i]] = i
        option = np.minimum.accumulate(option[:, :count], axis=1)
        possible = option < len(degree)
        option = np.where(possible, option, 0)
        width = np.where(possible, degree[option], ranks + 1)
        row = np.arange(documents)[:, None]
        upto = _sums(width)
        stop = np.stack([np.searchsorted(column, column[:-1] + ranks, side="right") - 1 for column in upto.T], axis=1)
        used, tokens = (
            np.take_along_axis(sums, stop, axis=0) - sums[:-1]
            for sums in (_sums(np.where(possible, width * table[row, option], 0)) for table in (cost, shard))
        )
        room = np.minimum(ranks * limits - used, (ranks * tokens_per_rank - tokens) * ns_per_token) / ranks
        return cls(option, stop, np.where(stop > row, limits + float(launch_ns), np.inf), room)

    def shortest(self, price: float) -> tuple[Integers, Integers]:
        """Option and micro-batch of every document, if room for short documents is worth that share of its time."""
        documents = len(self.stop)
        cost, left = self.time - price * self.room, np.zeros(documents + 1)
        best = np.zeros(documents, dtype=np.int64)
        for i in reversed(range(documents)):
            total = cost[i] + left[self.stop[i]]
            best[i] = total.argmin()
            left[i] = total[best[i]]
        option, micro_batch = np.zeros((2, documents), dtype=np.int64)
        start, number = 0, 0
        while start < documents:
            limit = best[start]
            stop = self.stop[start, limit]
            option[start:stop], micro_batch[start:stop] = self.option[start:stop, limit], number
            start, number = stop, number + 1
        return option, micro_batch


def _limits(lowest: int, highest: int) -> Integers:
    limits = [lowest]
    while limits[-1] < highest:
        limits.append(int(limits[-1] * FINER) + 1)
    return np.array(limits, dtype=np.int64)


def _sums(values: Integers) -> Integers:
    """Sums of the first 0, 1, 2, … rows."""
    return np.concatenate([np.zeros((1, values.shape[1]), dtype=np.int64), np.cumsum(values, axis=0)])

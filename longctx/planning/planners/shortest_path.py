"""Shortest path: rings with a separate time limit per micro-batch, for documents too long for even
micro-batches.

Documents, longest first, are cut into runs, whose rings fill one micro-batch side by side, each at
the smallest degree that meets its limit. The best cuts and limits are a shortest path from the
longest to the shortest document (dynamic programming). Room left by rings has a price, as short
documents can use it: all of it at price 1, none at 0. The caller tries several.
"""

from dataclasses import dataclass

import numpy as np

from longctx.planning.assignment import NEVER, Integers
from longctx.planning.cost.work_overrides import Floats

FINER = 1.05
"""Ratio of consecutive limits: a smaller ratio finds shorter paths but makes the graph larger and
slower."""


@dataclass(frozen=True)
class LimitGraph:
    """Edges from each document to the first document of the next micro-batch, one edge per limit.

    Attributes (arrays [documents, limits]):
        index: smallest degree that meets the limit, as a column of the degree table.
        stop: end (exclusive) of the run of documents in the micro-batch.
        time, room: nanoseconds of the micro-batch, and mean nanoseconds per rank left for short
            documents.
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
        """Builds the graph from nanoseconds and tokens per rank of each document [documents,
        degrees], longest first.

        `time` is NEVER where a document does not fit; every document fits at some degree. Short
        documents take `ns_per_token`.
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
        # The run from a document on has all documents that are side by side on the ranks.
        ends = [
            np.searchsorted(sums, sums[:-1] + ranks, side="right") - 1 for sums in _sums(width).T
        ]
        stop = np.stack(ends, axis=1)

        def of_runs(table: Integers) -> Integers:
            """Returns a quantity per rank of each ring, summed over the ranks of every run."""
            sums = _sums(np.where(possible, width * table[row, index], 0))
            result: Integers = np.take_along_axis(sums, stop, axis=0) - sums[:-1]
            return result

        free_ns = ranks * limits - of_runs(time)
        free_tokens = ranks * tokens_per_rank - of_runs(tokens)
        return cls(
            index=index,
            stop=stop,
            time=np.where(stop > row, limits + float(launch_ns), np.inf),
            room=np.minimum(free_ns, free_tokens * ns_per_token) / ranks,
        )

    def shortest_path(self, price: float) -> tuple[Integers, Integers]:
        """Returns degree index and micro-batch of every document if room is worth `price` times its
        nanoseconds.

        Backward recursion over documents i: left(i) = min over limits of time - price · room +
        left(stop).
        """
        documents = len(self.stop)
        cost, left = self.time - price * self.room, np.zeros(documents + 1)
        best = np.zeros(documents, dtype=np.int64)
        for i in reversed(range(documents)):
            total = cost[i] + left[self.stop[i]]
            best[i] = total.argmin()
            left[i] = total[best[i]]
        index, micro_batch = np.zeros((2, documents), dtype=np.int64)
        start = number = 0
        while start < documents:
            limit = best[start]
            stop = self.stop[start, limit]
            index[start:stop] = self.index[start:stop, limit]
            micro_batch[start:stop] = number
            start = stop
            number += 1
        return index, micro_batch


def _limits(lowest: int, highest: int) -> Integers:
    limits = [lowest]
    while limits[-1] < highest:
        limits.append(int(limits[-1] * FINER) + 1)
    return np.array(limits, dtype=np.int64)


def _sums(values: Integers) -> Integers:
    """Returns the sums of the first 0, 1, 2, … rows."""
    return np.concatenate(
        [np.zeros((1, values.shape[1]), dtype=np.int64), np.cumsum(values, axis=0)]
    )

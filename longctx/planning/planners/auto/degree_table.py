"""Degree table: the cost of long documents at every useful degree, and the degrees that meet a time limit."""

from functools import cached_property

import numpy as np

from longctx.planning.assignment import NEVER, Integers, least_degrees
from longctx.planning.planners.auto.settings import SearchSettings
from longctx.planning.planners.step import Degrees, Step


class DegreeTable:
    """Costs of the long documents, which may need a ring (arrays [long documents, degrees]); the others stay on one rank.

    Attributes:
        long: indices of the long documents, longest first.
        degrees: candidate degrees, ascending.
        time, tokens: nanoseconds and tokens of a document on each of its ranks; time is NEVER where it does not fit.
        times: `time` for each value of `settings.waste`, NEVER also where the work exceeds that multiple of the minimum.
        quickest, least_work: minimum time of each document, and minimum time summed over its ranks.
        work: minimum work of all documents, including short ones.
        short_ns_per_token: mean time per token of short documents.
        width: ranks that a ring occupies alone; 0 for degree 1, as other documents may share the rank.
    """

    def __init__(self, step: Step, settings: SearchSettings) -> None:
        self.step, self.settings = step, settings
        even = int(step.single_ns.sum()) // (step.ranks * (step.fewest_micro_batches + 1))
        is_long = (step.single_ns > settings.short * even) | (2 * step.single_tokens > step.tokens_per_rank)
        long, short = np.flatnonzero(is_long), np.flatnonzero(~is_long)
        self.long = long[np.argsort(-step.lengths[long], kind="stable")]
        least = least_degrees(step.lengths, step.ranks, step.tokens_per_rank, step.block)
        self.degrees = _degrees(step.ranks, least, max(1, step.profile.ranks_per_node // step.block))
        length, degree = np.broadcast_arrays(step.lengths[self.long][:, None], self.degrees)
        self.tokens = step.shards(length, degree)
        fits = self.tokens <= step.tokens_per_rank
        self.time = np.where(fits, step.alone_ns(length, degree), NEVER)
        work = np.where(fits, self.time * self.degrees.astype(np.float64), np.inf)
        least_work = work.min(axis=1)
        self.times = [np.where(work <= waste * least_work[:, None], self.time, NEVER) for waste in settings.waste]
        self.quickest, self.least_work = self.time.min(axis=1), least_work.astype(np.int64)
        short_ns = int(step.single_ns[short].sum())
        self.work = short_ns + int(self.least_work.sum())
        self.short_ns_per_token = short_ns / max(1, int(step.single_tokens[short].sum()))
        self.width = np.where(self.degrees > 1, self.degrees, 0)

    def split(self, index: Integers) -> Degrees:
        """Returns all documents with long ones at the given degrees (indices into `degrees`) and the others on one rank."""
        row, step = np.arange(len(self.long)), self.step
        degree, time, tokens = np.ones_like(step.lengths), step.single_ns.copy(), step.single_tokens.copy()
        degree[self.long], time[self.long], tokens[self.long] = (
            self.degrees[index],
            self.time[row, index],
            self.tokens[row, index],
        )
        return Degrees(degree, time, tokens)

    def side_by_side(self, ranks: int) -> int:
        """Returns the number of longest documents that fit side by side on `ranks`."""
        narrowest = self.width[(self.time < NEVER).argmax(axis=1)]
        return int(np.searchsorted(np.cumsum(np.maximum(1, narrowest)), ranks, side="right"))

    def even_ns(self, slots: int) -> int:
        """Returns the minimum time in which `slots` (a rank in a micro-batch each) can do all work, evenly spread.

        No document takes longer than this time.
        """
        low, high = self.work // slots, int(self.quickest.max(initial=0)) + 2 * self.work // slots
        while high - low > low // 256:
            middle = (low + high) // 2
            index = self.within(middle, self.time)
            time = self.time[np.arange(len(index)), index]
            enough = self.work + int((self.degrees[index] * time - self.least_work).sum()) <= slots * middle
            low, high = (low, middle) if enough and int(time.max(initial=0)) <= middle else (middle + 1, high)
        return high

    def within(self, limit: int, time: Integers) -> Integers:
        """Returns, for every long document, the index of the smallest degree with time ≤ `limit`, or of the fastest degree.

        With a `time` of 8, 5, 4, 4 on 1 to 4 ranks, a limit of 5 gives index 1, and a limit of 3 gives index 2.
        """
        result: Integers = (time <= np.maximum(limit, time.min(axis=1))[:, None]).argmax(axis=1)
        return result

    def lowest_limit(self, documents: int, ranks: int) -> tuple[int, Integers]:
        """Returns the lowest limit at which the longest `documents` fit side by side on `ranks`, and their degree indices.

        Example: two documents that take 8, 4 and 2 ns on 1, 2 and 4 ranks. On 4 ranks the limit is 4, where both take 2 ranks.
        Each document needs 2 more ranks below 8 and again below 4; by descending limit, the third of these steps is too many.
        """
        limits, wider, row = self._widenings
        here = np.flatnonzero(row < documents)
        too_wide = np.cumsum(wider[here]) > ranks
        limit = int(limits[here[too_wide.argmax()]]) if too_wide.any() else 0
        time = self.time[:documents]
        limit = min(limit, int(time[time < NEVER].max(initial=0)))  # token budgets may force wider rings than the limit
        return max(limit, int(self.quickest[:documents].max(initial=0))), self.within(limit, time)

    @cached_property
    def _widenings(self) -> tuple[Integers, Integers, Integers]:
        """The steps to higher degrees as the limit falls: the limit below which each occurs, its extra ranks and its row."""
        before = np.minimum.accumulate(self.time, axis=1)[:, :-1]
        row, index = np.nonzero(self.time[:, 1:] < before)
        wider = self.width[index + 1].copy()
        again = row[1:] == row[:-1]
        wider[1:][again] -= self.width[index[:-1] + 1][again]
        order = np.argsort(-before[row, index], kind="stable")
        return before[row, index][order], wider[order], row[order]


def _degrees(ranks: int, least: Integers, node: int) -> Integers:
    """Returns all degrees up to 32, then whole nodes or steps of about 3 %, N, and the smallest degree of each document.

    A ring that crosses nodes waits longest where it has the fewest ranks in a node, so whole nodes are best.
    """
    steps = [1]
    while steps[-1] < ranks:
        after = steps[-1] + max(1, steps[-1] // 32)
        if after > 32 and node < after:
            after = -(-after // node) * node
        steps.append(min(ranks, after))
    return np.unique(np.concatenate([np.array(steps, dtype=np.int64), least]))

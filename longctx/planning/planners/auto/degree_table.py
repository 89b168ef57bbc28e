"""Degree table: what long documents would cost at every degree worth looking at, and the degrees that keep a limit."""

from functools import cached_property

import numpy as np

from longctx.planning.assignment import NEVER, Integers, largest_shards, least_degrees
from longctx.planning.cost.model import alone_ns
from longctx.planning.planners.auto.settings import SearchSettings
from longctx.planning.planners.step import Degrees, Step


class DegreeTable:
    """Costs of the documents that may need a ring (arrays [long documents, degrees]); what else there is stays on one rank.

    Attributes:
        long: these documents, longest first; `degrees` are ascending.
        time, tokens: nanoseconds (NEVER where a document does not fit) and tokens of a document on each of its ranks.
        times: `time` for each of `settings.waste`, NEVER also where work is wasted beyond that.
        quickest, least_work: the least time of each document, and the least nanoseconds over all its ranks.
        work: the least of all documents, short ones among them; these take `short_ns_per_token`.
        width: ranks that a ring has for itself; 0 for degree 1, whose rank others may share.
    """

    def __init__(self, step: Step, settings: SearchSettings) -> None:
        self.step, self.settings = step, settings
        even = int(step.single_ns.sum()) // (step.ranks * (step.fewest_micro_batches + 1))
        is_long = (step.single_ns > settings.short * even) | (2 * step.lengths > step.tokens_per_rank)
        long, short = np.flatnonzero(is_long), np.flatnonzero(~is_long)
        self.long = long[np.argsort(-step.lengths[long], kind="stable")]
        least = least_degrees(step.lengths, step.ranks, step.tokens_per_rank)
        self.degrees = _degrees(step.ranks, least, step.profile.ranks_per_node)
        length, degree = np.broadcast_arrays(step.lengths[self.long][:, None], self.degrees)
        self.tokens = largest_shards(length, degree)
        fits = self.tokens <= step.tokens_per_rank
        self.time = np.where(fits, alone_ns(step.profile, length, degree), NEVER)
        work = np.where(fits, self.time * self.degrees.astype(np.float64), np.inf)
        least_work = work.min(axis=1)
        self.times = [np.where(work <= waste * least_work[:, None], self.time, NEVER) for waste in settings.waste]
        self.quickest, self.least_work = self.time.min(axis=1), least_work.astype(np.int64)
        short_ns = int(step.single_ns[short].sum())
        self.work = short_ns + int(self.least_work.sum())
        self.short_ns_per_token = short_ns / max(1, int(step.lengths[short].sum()))
        self.width = np.where(self.degrees > 1, self.degrees, 0)

    def split(self, index: Integers) -> Degrees:
        """All documents, the long ones on these degrees (indices of `degrees`), the others on one rank."""
        row, step = np.arange(len(self.long)), self.step
        degree, time, tokens = np.ones_like(step.lengths), step.single_ns.copy(), step.lengths.copy()
        degree[self.long], time[self.long], tokens[self.long] = (
            self.degrees[index],
            self.time[row, index],
            self.tokens[row, index],
        )
        return Degrees(degree, time, tokens)

    def side_by_side(self, ranks: int) -> int:
        """How many of the longest documents fit side by side on that many ranks."""
        narrowest = self.width[(self.time < NEVER).argmax(axis=1)]
        return int(np.searchsorted(np.cumsum(np.maximum(1, narrowest)), ranks, side="right"))

    def even_ns(self, slots: int) -> int:
        """The least time of a slot that holds an even share of all work, and no document that takes longer."""
        low, high = self.work // slots, int(self.quickest.max(initial=0)) + 2 * self.work // slots
        while high - low > low // 256:
            middle = (low + high) // 2
            index = self.within(middle, self.time)
            time = self.time[np.arange(len(index)), index]
            enough = self.work + int((self.degrees[index] * time - self.least_work).sum()) <= slots * middle
            low, high = (low, middle) if enough and int(time.max(initial=0)) <= middle else (middle + 1, high)
        return high

    def within(self, limit: int, time: Integers) -> Integers:
        """For every long document the smallest degree (its index) by which it takes at most `limit`, or the quickest one.

        With a `time` of 8, 5, 4, 4 on 1 to 4 ranks, a limit of 5 gives index 1, and a limit of 3 gives index 2.
        """
        result: Integers = (time <= np.maximum(limit, time.min(axis=1))[:, None]).argmax(axis=1)
        return result

    def lowest_limit(self, documents: int, ranks: int) -> tuple[int, Integers]:
        """The lowest limit at which so many of the longest documents fit side by side on that many ranks, and their degrees.

        Two documents that take 8, 4 and 2 ns on 1, 2 and 4 ranks: on 4 ranks the limit is 4, by which both take 2. Below 8 and
        below 4 each takes 2 ranks more; of these four steps, in descending order of limits, the third is one too many.
        """
        limits, wider, row = self._widenings
        here = np.flatnonzero(row < documents)
        too_wide = np.cumsum(wider[here]) > ranks
        limit = int(limits[here[too_wide.argmax()]]) if too_wide.any() else 0
        time = self.time[:documents]
        limit = min(limit, int(time[time < NEVER].max(initial=0)))  # rings are wider than asked for if they must be
        return max(limit, int(self.quickest[:documents].max(initial=0))), self.within(limit, time)

    @cached_property
    def _widenings(self) -> tuple[Integers, Integers, Integers]:
        """As the limit falls, documents take ever higher degrees: below which limit, how many ranks more, and whose row."""
        before = np.minimum.accumulate(self.time, axis=1)[:, :-1]
        row, index = np.nonzero(self.time[:, 1:] < before)
        wider = self.width[index + 1].copy()
        again = row[1:] == row[:-1]
        wider[1:][again] -= self.width[index[:-1] + 1][again]
        order = np.argsort(-before[row, index], kind="stable")
        return before[row, index][order], wider[order], row[order]


def _degrees(ranks: int, least: Integers, node: int) -> Integers:
    """Every degree up to 32, then whole nodes or steps of about 3 %, N, and the smallest degree of each document.

    A ring beyond its node waits for the network where it has fewest mates in the node: whole nodes are best.
    """
    steps = [1]
    while steps[-1] < ranks:
        after = steps[-1] + max(1, steps[-1] // 32)
        if after > 32 and node < after:
            after = -(-after // node) * node
        steps.append(min(ranks, after))
    return np.unique(np.concatenate([np.array(steps, dtype=np.int64), least]))

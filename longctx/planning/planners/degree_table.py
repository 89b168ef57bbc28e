"""Degree table: the cost of long documents at every useful degree, and the degrees that meet a time
limit."""

import numpy as np

from longctx.planning.assignment import NEVER, Integers, least_degrees
from longctx.planning.planners.settings import SearchSettings
from longctx.planning.planners.step import Degrees, Step


class DegreeTable:
    """Costs of the long documents, which may need a ring (arrays [long documents, degrees]); the
    others stay in one place.

    Attributes:
        long: indices of the long documents, longest first.
        time, tokens: nanoseconds and tokens of a document in each of its places; time is NEVER
            where it does not fit.
        quickest, least_work: minimum time of each document, and minimum time summed over its
            places.
        work: minimum work of all documents, including short ones.
        short_ns_per_token: mean time per token of short documents.
    """

    def __init__(self, step: Step, settings: SearchSettings) -> None:
        self.step, self.settings = step, settings
        even = int(step.single_ns.sum()) // (step.places * (step.fewest_micro_batches + 1))
        is_long = (step.single_ns > settings.short * even) | (
            2 * step.single_tokens > step.tokens_per_rank
        )
        long, short = np.flatnonzero(is_long), np.flatnonzero(~is_long)
        self.long = long[np.argsort(-step.lengths[long], kind="stable")]
        least = least_degrees(step.lengths, step.places, step.tokens_per_rank, step.block)
        self.degrees = _degrees(
            step.places, least, max(1, step.profile.ranks_per_node // step.block)
        )
        length, degree = np.broadcast_arrays(step.lengths[self.long][:, None], self.degrees)
        self.tokens = step.shards(length, degree)
        fits = self.tokens <= step.tokens_per_rank
        self.time = np.where(fits, step.alone_ns(self.long[:, None], degree), NEVER)
        least_work = np.where(fits, self.time * self.degrees.astype(np.float64), np.inf).min(axis=1)
        self.quickest, self.least_work = self.time.min(axis=1), least_work.astype(np.int64)
        short_ns = int(step.single_ns[short].sum())
        self.work = short_ns + int(self.least_work.sum())
        self.short_ns_per_token = short_ns / max(1, int(step.single_tokens[short].sum()))

    def with_degrees(self, index: Integers) -> Degrees:
        """Returns all documents with long ones at the given degrees (indices into `degrees`) and
        the others in one place."""
        row, step = np.arange(len(self.long)), self.step
        degree, time, tokens = (
            np.ones_like(step.lengths),
            step.single_ns.copy(),
            step.single_tokens.copy(),
        )
        degree[self.long], time[self.long], tokens[self.long] = (
            self.degrees[index],
            self.time[row, index],
            self.tokens[row, index],
        )
        return Degrees(degree, time, tokens)

    def even_ns(self, slots: int) -> int:
        """Returns the minimum time in which `slots` (a rank in a micro-batch each) can do all work,
        evenly spread.

        No document takes longer than this time.
        """
        low, high = self.work // slots, int(self.quickest.max(initial=0)) + 2 * self.work // slots
        while high - low > low // 256:
            middle = (low + high) // 2
            index = self.smallest_degrees_within(middle)
            time = self.time[np.arange(len(index)), index]
            enough = (
                self.work + int((self.degrees[index] * time - self.least_work).sum())
                <= slots * middle
            )
            low, high = (
                (low, middle)
                if enough and int(time.max(initial=0)) <= middle
                else (middle + 1, high)
            )
        return high

    def smallest_degrees_within(self, limit: int) -> Integers:
        """Returns, for every long document, the index of the smallest degree with time ≤ `limit`,
        or of the fastest degree.

        With times of 8, 5, 4, 4 on 1 to 4 ranks, a limit of 5 gives index 1, and a limit of 3 gives
        index 2.
        """
        result: Integers = (self.time <= np.maximum(limit, self.quickest)[:, None]).argmax(axis=1)
        return result


def _degrees(ranks: int, least: Integers, node: int) -> Integers:
    """Returns all degrees up to 32, then whole nodes or steps of about 3 %, N, and the smallest
    degree of each document.

    A ring that crosses nodes waits longest where it has the fewest ranks in a node, so whole nodes
    are best.
    """
    steps = [1]
    while steps[-1] < ranks:
        after = steps[-1] + max(1, steps[-1] // 32)
        if after > 32 and node < after:
            after = -(-after // node) * node
        steps.append(min(ranks, after))
    return np.unique(np.concatenate([np.array(steps, dtype=np.int64), least]))

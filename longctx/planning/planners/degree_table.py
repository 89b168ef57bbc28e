"""Degree table: the cost of long documents at every useful degree, and the degrees that meet a time
limit."""

import numpy as np
from numpy.typing import NDArray

from longctx.planning.assignment import NEVER, Integers, least_degrees
from longctx.planning.planners.finer_slots import halves
from longctx.planning.planners.planning_input import Degrees, PlanningInput
from longctx.planning.planners.settings import SearchSettings


def long_documents(given: PlanningInput, settings: SearchSettings) -> NDArray[np.bool_]:
    """Returns a mask of the documents that may need a ring: `settings.short` says which."""
    even_ns = int(given.single_ns.sum()) // (given.slots * (given.fewest_micro_batches + 1))
    takes_long = given.single_ns > settings.short * even_ns
    result: NDArray[np.bool_] = takes_long | (2 * given.single_tokens > given.tokens_per_rank)
    return result


def needs_no_ring(given: PlanningInput) -> bool:
    """Returns whether every document fits one slot, and takes no longer there than evenly spread
    work."""
    if int(given.single_tokens.max()) > given.tokens_per_rank:
        return False
    slots = given.slots * given.fewest_micro_batches
    return int(given.single_ns.max()) * slots <= int(given.single_ns.sum())


class DegreeTable:
    """Costs of the long documents, which may need a ring (arrays [long documents, degrees]); the
    others stay in one slot.

    Attributes:
        halves: `given` in slots of half a block, a quarter, …, one rank.
        long: indices of the long documents, longest first.
        time, tokens: nanoseconds and tokens of a document in each of its slots; time is NEVER where
            it does not fit.
        quickest, least_work: minimum time of each document, and minimum time summed over its slots.
        work: minimum work of all documents, including short ones.
        short_ns_per_token: mean time per token of short documents.
    """

    def __init__(self, given: PlanningInput, settings: SearchSettings) -> None:
        self.given = given
        self.settings = settings
        self.halves = halves(given)
        single_ns = given.single_ns
        single_tokens = given.single_tokens
        is_long = long_documents(given, settings)
        long = np.flatnonzero(is_long)
        short = np.flatnonzero(~is_long)
        self.long = long[np.argsort(-given.lengths[long], kind="stable")]

        least = least_degrees(given.lengths, given.slots, given.tokens_per_rank, given.block)
        node = max(1, given.profile.ranks_per_node // given.block)
        self.degrees = _degrees(given.slots, least, node)
        length, degree = np.broadcast_arrays(given.lengths[self.long][:, None], self.degrees)
        self.tokens = given.shards(length, degree)
        fits = self.tokens <= given.tokens_per_rank
        self.time = np.where(fits, given.alone_ns(self.long[:, None], degree), NEVER)

        work = np.where(fits, self.time * self.degrees.astype(np.float64), np.inf)
        self.least_work = work.min(axis=1).astype(np.int64)
        self.quickest = self.time.min(axis=1)
        short_ns = int(single_ns[short].sum())
        self.work = short_ns + int(self.least_work.sum())
        self.short_ns_per_token = short_ns / max(1, int(single_tokens[short].sum()))

    def with_degrees(self, index: Integers) -> Degrees:
        """Returns all documents with long ones at the given degrees (indices into `degrees`) and
        the others in one slot."""
        row = np.arange(len(self.long))
        degree = np.ones_like(self.given.lengths)
        degree[self.long] = self.degrees[index]
        time = self.given.single_ns.copy()
        time[self.long] = self.time[row, index]
        tokens = self.given.single_tokens.copy()
        tokens[self.long] = self.tokens[row, index]
        return Degrees(degree, time, tokens)

    def even_ns(self, micro_batches: int) -> int:
        """Returns the minimum time in which the slots of so many micro-batches can do all work,
        evenly spread.

        No document takes longer than this time.
        """
        slots = micro_batches * self.given.slots
        low = self.work // slots
        high = int(self.quickest.max(initial=0)) + 2 * self.work // slots
        while high - low > low // 256:
            middle = (low + high) // 2
            index = self.smallest_degrees_within(middle)
            time = self.time[np.arange(len(index)), index]
            more_work = int((self.degrees[index] * time - self.least_work).sum())
            all_fit = self.work + more_work <= slots * middle
            if all_fit and int(time.max(initial=0)) <= middle:
                high = middle
            else:
                low = middle + 1
        return high

    def smallest_degrees_within(self, limit: int) -> Integers:
        """Returns, for every long document, the index of the smallest degree with time ≤ `limit`,
        or of the fastest degree.

        With times of 8, 5, 4, 4 on 1 to 4 ranks, a limit of 5 gives index 1, and a limit of 3 gives
        index 2.
        """
        result: Integers = (self.time <= np.maximum(limit, self.quickest)[:, None]).argmax(axis=1)
        return result


def _degrees(slots: int, least: Integers, node: int) -> Integers:
    """Returns all degrees up to 32, then whole nodes or steps of about 3 %, all slots, and the
    smallest degree of each document; `node`: slots of a node.

    A ring that crosses nodes waits longest where it has the fewest ranks in a node, so whole nodes
    are best.
    """
    steps = [1]
    while steps[-1] < slots:
        after = steps[-1] + max(1, steps[-1] // 32)
        if after > 32 and node < after:
            after = -(-after // node) * node
        steps.append(min(slots, after))
    return np.unique(np.concatenate([np.array(steps, dtype=np.int64), least]))

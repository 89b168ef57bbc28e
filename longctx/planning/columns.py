"""Columns: the planner of mode `auto`. It chooses how many micro-batches a step has and the degree of every document.

For K micro-batches the ideal height of a shelf is M = work / (N·K). A document takes the smallest degree at which its ranks are
done within a share of M; splitting more than M asks for makes finer pieces, which pack better but lose kernel efficiency.
Several K and shares are packed (`shelves.py`), each is scored exactly, and the best is kept.
"""

import numpy as np

from longctx.planning.assignment import Assignment, Integers, largest_shards
from longctx.planning.cost import alone_ns, score
from longctx.planning.profile import HardwareProfile
from longctx.planning.request import least_degrees
from longctx.planning.shelves import pack

SHARES = (1.0, 0.6, 0.35)
"""Time of one document on its ranks, as a share of the ideal height, that the search allows."""
EXTRA_MICRO_BATCHES = 1
"""How many micro-batches beyond the fewest that can be packed the search tries."""


def plan_columns(profile: HardwareProfile, lengths: Integers, ranks: int, tokens_per_rank: int) -> tuple[Assignment, int]:
    """The best packing found and its makespan in nanoseconds. Every document must fit at some degree."""
    fewest = -(-int(lengths.sum()) // (ranks * tokens_per_rank))
    work = int(alone_ns(profile, lengths, np.ones_like(lengths)).sum())
    shortest = int(min(SHARES) * work) // (ranks * (fewest + EXTRA_MICRO_BATCHES))
    menu = Menu(profile, lengths, ranks, tokens_per_rank, shortest)
    best: tuple[int, Assignment] | None = None
    micro_batches, extra = fewest, 0
    while extra <= EXTRA_MICRO_BATCHES:
        packed = False
        for share in SHARES:
            degrees = menu.degrees(micro_batches, share)
            plan = pack(profile, lengths, degrees, ranks, tokens_per_rank, micro_batches)
            if plan is not None:
                packed = True
                makespan = score(profile, lengths, plan, ranks).makespan_ns
                if best is None or makespan < best[0]:
                    best = makespan, plan
        extra += best is not None
        micro_batches += 1 if packed else max(1, micro_batches // 8)
    assert best is not None
    return best[1], best[0]


class Menu:
    """What documents cost at every degree worth looking at; those short enough for one rank in any case are left out."""

    def __init__(self, profile: HardwareProfile, lengths: Integers, ranks: int, tokens_per_rank: int, least_time: int) -> None:
        self.ranks = ranks
        self.single = alone_ns(profile, lengths, np.ones_like(lengths))
        least = least_degrees(lengths, ranks, tokens_per_rank)
        self.long = np.flatnonzero((self.single > least_time) | (least > 1))
        self.options = _degree_options(ranks, least)
        length, degree = np.broadcast_arrays(lengths[self.long][:, None], self.options)
        fits = largest_shards(length, degree) <= tokens_per_rank
        self.cost = np.where(fits, alone_ns(profile, length, degree), np.iinfo(np.int64).max)
        self.quickest = self.cost.min(axis=1)

    def degrees(self, micro_batches: int, share: float) -> Integers:
        """The smallest degree of every document whose time is within `share` of the ideal height for that many micro-batches.

        Work grows with the degrees, and the height with the work: three turns settle it.
        """
        degrees, work = np.ones_like(self.single), self.single.copy()
        for _ in range(3):
            height = int(work.sum()) // (self.ranks * micro_batches)
            limit = np.maximum(int(height * share), self.quickest + self.quickest // 20)
            index = (self.cost <= limit[:, None]).argmax(axis=1)
            degrees[self.long] = self.options[index]
            work[self.long] = self.cost[np.arange(len(index)), index] * degrees[self.long]
        return degrees


def _degree_options(ranks: int, least: Integers) -> Integers:
    """Every degree up to 64, then steps of about 3 %, N, and the smallest degree of each document."""
    steps = [1]
    while steps[-1] < ranks:
        steps.append(min(ranks, steps[-1] + max(1, steps[-1] // 32)))
    return np.unique(np.concatenate([np.array(steps, dtype=np.int64), least]))

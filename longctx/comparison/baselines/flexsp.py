"""FlexSP-like: similar documents share a micro-batch, and each micro-batch has its own power-of-two groups of ranks.

Our reading of "FlexSP: Accelerating Large Language Model Training via Flexible Sequence Parallelism" (ASPLOS 2025, arXiv
2412.01523): documents are sorted by length and cut into micro-batches so that the fullest has the fewest tokens; in each,
groups of ranks whose degrees are powers of two, and who holds which document, are chosen so that the slowest group finishes
first; a few numbers of micro-batches are tried and the best is kept. FlexSP solves each micro-batch as an integer program in 5
to 15 s; here a bisection on the finishing time with greedy placement (longest first, smallest degree that makes it, emptiest
group of that degree) stands in for it.
"""

import heapq
import itertools

import numpy as np

from longctx.comparison.baselines.groups import Group, powers_of_two, shards_by_degree, stand_in_rows
from longctx.planning.assignment import Assignment, Integers
from longctx.planning.cost.hardware_profile import HardwareProfile
from longctx.planning.cost.model import alone_ns, score
from longctx.planning.plan import PlanError

NUMBERS_TRIED = 4
"""How many numbers of micro-batches that hold the documents are tried."""
PRECISION = 0.01
"""Bisection stops when a finishing time is known to this share."""


def place_flexsp(profile: HardwareProfile, lengths: Integers, ranks: int, tokens_per_rank: int) -> Assignment:
    """Where every document stands. Raises PlanError if a document needs more ranks than a power of two provides."""
    degrees = powers_of_two(ranks)
    shards = shards_by_degree("FlexSP", lengths, degrees, tokens_per_rank)
    times = np.stack([alone_ns(profile, lengths, np.full_like(lengths, degree)) for degree in degrees], axis=1)
    packer = _Packer(degrees, times.tolist(), shards, ranks, tokens_per_rank)
    order = np.argsort(-lengths, kind="stable")
    best: tuple[int, Assignment] | None = None
    tried, number = 0, max(1, -(-int(lengths.sum()) // (ranks * tokens_per_rank)))
    while tried < NUMBERS_TRIED and number <= len(lengths):
        rows = packer.rows(_even_cuts(order, lengths, number))
        number += 1
        if rows is None:
            number += number // 16  # far from holding them: do not creep
            continue
        tried += 1
        plan = stand_in_rows(rows, lengths)
        makespan = score(profile, lengths, plan, ranks).makespan_ns
        if best is None or makespan < best[0]:
            best = makespan, plan
    if best is None:
        raise PlanError("FlexSP-like packing found no micro-batches that hold these documents")
    return best[1]


def _even_cuts(order: Integers, lengths: Integers, number: int) -> list[list[int]]:
    """Cuts the sorted documents into at most `number` runs so that the fullest run of several has the fewest tokens."""
    total = np.concatenate([[0], np.cumsum(lengths[order])])
    low, high = int(total[-1]) // number, int(total[-1])
    while low < high:
        middle = (low + high) // 2
        if len(_cuts(total, middle)) <= number:
            high = middle
        else:
            low = middle + 1
    edges = [0, *_cuts(total, low)]
    return [order[start:stop].tolist() for start, stop in itertools.pairwise(edges)]


def _cuts(total: Integers, most: int) -> list[int]:
    """Where runs of at most `most` tokens end; a longer document is a run of its own."""
    cuts = [0]
    while cuts[-1] < len(total) - 1:
        cuts.append(max(cuts[-1] + 1, int(np.searchsorted(total, total[cuts[-1]] + most, side="right")) - 1))
    return cuts[1:]


class _Packer:
    """Finds the groups of a micro-batch; `times` and `shards` are [documents][degrees]."""

    def __init__(
        self, degrees: list[int], times: list[list[int]], shards: list[list[int]], ranks: int, tokens_per_rank: int
    ) -> None:
        self.degrees, self.times, self.shards = degrees, times, shards
        self.ranks, self.tokens_per_rank = ranks, tokens_per_rank

    def rows(self, micro_batches: list[list[int]]) -> list[list[Group]] | None:
        """The groups of every micro-batch, widest first; None if one does not hold its documents."""
        rows = []
        for documents in micro_batches:
            groups = self.fastest(documents)
            if groups is None:
                return None
            rows.append(sorted(groups, key=lambda group: -group.degree))
        return rows

    def fastest(self, documents: list[int]) -> list[Group] | None:
        """The groups that finish first, by bisection on the time; documents come longest first."""
        low = max(min(self.times[document]) for document in documents)
        high = sum(max(self.times[document]) for document in documents)
        found = self.within(documents, high)
        while found is not None and high - low > PRECISION * high:
            middle = (low + high) // 2
            groups = self.within(documents, middle)
            if groups is None:
                low = middle
            else:
                found, high = groups, int(max(group.time for group in groups))
        return found

    def within(self, documents: list[int], limit: int) -> list[Group] | None:
        """Groups that hold the documents and finish within `limit`; None if greedy placement finds none."""
        heaps: list[list[tuple[float, int]]] = [[] for _ in self.degrees]  # (time, group) of each degree
        groups: list[Group] = []
        free = self.ranks
        for document in documents:
            times, shards = self.times[document], self.shards[document]
            for i, heap in enumerate(heaps):
                if not heap or heap[0][0] + times[i] > limit:
                    continue
                time, chosen = heap[0]
                if groups[chosen].tokens + shards[i] <= self.tokens_per_rank:
                    groups[chosen].add(document, times[i], shards[i])
                    heapq.heapreplace(heap, (time + times[i], chosen))
                    break
            else:  # no open group takes it
                for i, degree in enumerate(self.degrees):
                    if degree <= free and times[i] <= limit and shards[i] <= self.tokens_per_rank:
                        groups.append(Group(degree))
                        groups[-1].add(document, times[i], shards[i])
                        heapq.heappush(heaps[i], (times[i], len(groups) - 1))
                        free -= degree
                        break
                else:
                    return None
        return groups

"""Megatron dev: our reading of the packing-aware dynamic context parallelism on Megatron-LM's dev branch.

Work is length² / degree, degrees are powers of two (and N). Each micro-batch starts with the longest document at its smallest
degree. Every other document, longest first, takes the degree and group that minimize the work of the busiest rank (ties: the
smaller degree, the earlier group), within the token budget and 1.05 × the work of a rank full of documents as long as the
first. Documents that do not fit are left to the next micro-batch. No rank may be empty: the first of the smallest groups is
doubled until none is, and if that is impossible, the micro-batch becomes one group of all ranks. Written from that description,
without code of Megatron.

Its code at commit d48bd6be0a, run on the same steps, makes the same plans: 132 of 132 up to rounding, with equal makespans in
45 settings. Its padding of every document to a multiple of dp · cp · 2 · sp is not modelled; it would cost it 0 to 22 %.
"""

import heapq

import numpy as np

from longctx.comparison.baselines.groups import Group, powers_of_two, shards_by_degree, stand_in_rows
from longctx.planning.assignment import Assignment, Integers
from longctx.planning.cost.hardware_profile import HardwareProfile
from longctx.planning.plan import PlanError

SLACK = 1.05


def place_megatron_dev(profile: HardwareProfile, lengths: Integers, ranks: int, tokens_per_rank: int) -> Assignment:
    """Assigns every document. `profile` is not used: this scheduler has no hardware model."""
    degrees = sorted({*powers_of_two(ranks), ranks})
    shards = shards_by_degree("Megatron dev", lengths, degrees, tokens_per_rank).tolist()
    scheduler = _Scheduler(lengths.tolist(), degrees, shards, ranks, tokens_per_rank)
    waiting = np.argsort(-lengths, kind="stable").tolist()
    rows: list[list[Group]] = []
    while waiting:
        row, waiting = scheduler.next_micro_batch(waiting)
        rows.append(row)
    return stand_in_rows(rows, lengths)


class _Scheduler:
    """Forms one micro-batch at a time; groups take ranks in the order in which they were opened."""

    def __init__(
        self, lengths: list[int], degrees: list[int], shards: list[list[int]], ranks: int, tokens_per_rank: int
    ) -> None:
        self.lengths, self.degrees, self.shards = lengths, degrees, shards
        self.ranks, self.tokens_per_rank = ranks, tokens_per_rank

    def next_micro_batch(self, documents: list[int]) -> tuple[list[Group], list[int]]:
        """Returns the groups of the next micro-batch and the documents left over; `documents` are sorted longest first."""
        first = documents[0]
        limit = SLACK * self.lengths[first] * self.tokens_per_rank
        opening = self._smallest(first)
        groups = [Group(self.degrees[opening])]
        groups[0].add(first, self._work(first, opening), self.shards[first][opening])
        by_degree: list[list[int]] = [[] for _ in self.degrees]
        by_degree[opening].append(0)
        busiest, free = groups[0].time, self.ranks - groups[0].degree
        left: list[int] = []
        for document in documents[1:]:
            best: tuple[float, int, int] | None = None  # (busiest rank's work, index of degree, group; -1: a new group)
            for i in range(self._smallest(document), len(self.degrees)):
                work, tokens = self._work(document, i), self.shards[document][i]
                found = self._group(groups, by_degree[i], busiest, work, tokens)
                if found is not None and (best is None or found[0] < best[0]):
                    best = found[0], i, found[1]
                if free >= self.degrees[i] and (best is None or max(busiest, work) < best[0]):
                    best = max(busiest, work), i, -1
                if best is not None and best[0] <= busiest:
                    break  # no other choice lowers the work of the busiest rank
            if best is None or best[0] > limit:
                left.append(document)
                continue
            busiest, i, chosen = best
            if chosen < 0:
                chosen = len(groups)
                groups.append(Group(self.degrees[i]))
                by_degree[i].append(chosen)
                free -= self.degrees[i]
            groups[chosen].add(document, self._work(document, i), self.shards[document][i])
        return self._leave_no_rank_empty(groups, left, documents, free)

    def _group(
        self, groups: list[Group], members: list[int], busiest: float, work: float, tokens: int
    ) -> tuple[float, int] | None:
        """Returns the least work of the busiest rank, and the earliest group that gives it; None if no group has room."""
        best: tuple[float, int] | None = None
        for index in members:
            group = groups[index]
            if group.tokens + tokens > self.tokens_per_rank:
                continue
            projected = max(busiest, group.time + work)
            if best is None or projected < best[0]:
                best = projected, index
                if projected <= busiest:
                    break
        return best

    def _leave_no_rank_empty(
        self, groups: list[Group], left: list[int], documents: list[int], free: int
    ) -> tuple[list[Group], list[int]]:
        heap = [(group.degree, index) for index, group in enumerate(groups)]
        heapq.heapify(heap)
        while free:
            degree, index = heap[0]
            wider = next((d for d in self.degrees if d > degree), None)
            if wider is None or wider - degree > free:
                return self._one_group(documents)
            groups[index].degree = wider
            heapq.heapreplace(heap, (wider, index))
            free -= wider - degree
        return groups, left

    def _one_group(self, documents: list[int]) -> tuple[list[Group], list[int]]:
        """Returns one group of all ranks, filled in order, and the documents that do not fit."""
        group, left = Group(self.ranks), []
        for document in documents:
            tokens = self.shards[document][-1]
            if group.tokens + tokens <= self.tokens_per_rank:
                group.add(document, self._work(document, len(self.degrees) - 1), tokens)
            else:
                left.append(document)
        if not group.documents:
            raise PlanError(f"no document fits on all {self.ranks} ranks at {self.tokens_per_rank} tokens per rank")
        return [group], left

    def _smallest(self, document: int) -> int:
        """Returns the index of the smallest degree that holds the document."""
        return next(i for i, tokens in enumerate(self.shards[document]) if tokens <= self.tokens_per_rank)

    def _work(self, document: int, index: int) -> float:
        return self.lengths[document] ** 2 / self.degrees[index]

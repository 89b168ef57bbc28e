"""Schedulers of other systems, and a plain one, to compare with: RIVALS. Modelled by our cost
model, in our ring attention.

Plain static: one power-of-two degree for all documents of a step, the best one, packed best-fit by
tokens without a cost model.

Megatron main. The scheduler of Megatron-LM's hybrid context parallelism, unchanged from the wheel
`megatron-core` (extra `bench`). Theirs: `BalancedCPScheduler` (0.16:
`megatron/core/pipeline_parallel/hybrid_cp_schedule.py`) forms groups of documents between barriers,
with a list per rank that runs one after the other. Ours: the list of each ring is packed into
micro-batches, longest first, up to the token budget. Megatron's runtime has no barrier between the
documents of a group, so the packing can make it slower here.

FlexSP-like. Our reading of "FlexSP: Accelerating Large Language Model Training via Flexible
Sequence Parallelism" (ASPLOS 2025, arXiv 2412.01523): documents are sorted by length and cut into
micro-batches such that the largest has the fewest tokens; in each, groups with power-of-two degrees
and their documents are chosen to minimize the time of the slowest group; a few numbers of
micro-batches are tried and the best is kept. FlexSP solves each micro-batch as an integer program
in 5 to 15 s; here a bisection on the finishing time with greedy placement (longest first, smallest
sufficient degree, emptiest group) replaces it. The authors' solver (branch flexsp of
Hetu-Galvatron), run on the same steps, is between 6 % better and 18 % worse than this reading; mode
auto was behind it in no setting.

Megatron dev. Our reading of the packing-aware dynamic context parallelism on Megatron-LM's dev
branch. Work is length² / degree, degrees are powers of two (and N). Each micro-batch starts with
the longest document at its smallest degree. Every other document, longest first, takes the degree
and group that minimize the work of the busiest rank (ties: the smaller degree, the earlier group),
within the token budget and 1.05 × the work of a rank full of documents as long as the first.
Documents that do not fit are left to the next micro-batch. No rank may be empty: the first of the
smallest groups is doubled until none is, and if that is impossible, the micro-batch becomes one
group of all ranks. Written from that description, without code of Megatron. Its code at commit
d48bd6be0a, run on the same steps, makes the same plans: 132 of 132 up to rounding, with equal
makespans in 45 settings. Its padding of every document to a multiple of dp · cp · 2 · sp is not
modelled; it would cost it 0 to 22 %.
"""

import heapq
import importlib
import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from longctx.comparison.baselines import Place, RankGroup, powers_of_two, stand_in_rows
from longctx.errors import install
from longctx.planning.assignment import Assignment, Integers, largest_shards
from longctx.planning.cost.model import alone_ns, score
from longctx.planning.cost.rounds import choose_rounds
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.plan import PlanError
from longctx.planning.planners.static import best_fit

NUMBERS_TRIED = 4
"""Number of feasible numbers of micro-batches that are tried."""
PRECISION = 0.01
"""Relative precision of the bisection on the finishing time."""
SLACK = 1.05
Choice = tuple[list[int], list[int]]
"""Nanoseconds (0 where it does not fit) and tokens per rank of a document, for every group
width."""
MODULE = "megatron.core.pipeline_parallel.hybrid_cp_schedule"


@dataclass(slots=True)
class LoadedGroup(RankGroup):
    """A group, and the time and tokens of its documents on each of its ranks."""

    time: float = 0.0
    tokens: int = 0

    def add(self, document: int, time: float, tokens: int) -> None:
        self.documents.append(document)
        self.time += time
        self.tokens += tokens


def place_plain_static(
    profile: HardwareProfile, lengths: Integers, ranks: int, tokens_per_rank: int
) -> Assignment:
    """Assigns every document at the best power-of-two degree. Raises PlanError if the largest does
    not hold every document."""
    plans: list[Assignment] = []
    degrees = powers_of_two(ranks)
    for degree, tokens in zip(
        degrees, shards_by_degree("Plain static", lengths, degrees, tokens_per_rank).T, strict=True
    ):
        if int(tokens.max()) > tokens_per_rank:
            continue
        pack = best_fit(tokens, tokens_per_rank)
        packed = [
            RankGroup(degree, np.flatnonzero(pack == number).tolist())
            for number in range(int(pack.max()) + 1)
        ]
        groups = ranks // degree
        rows = [packed[i : i + groups] for i in range(0, len(packed), groups)]
        plans.append(stand_in_rows(rows, lengths))
    return fastest(profile, lengths, plans, ranks)


def fastest(
    profile: HardwareProfile, lengths: Integers, plans: Sequence[Assignment], ranks: int
) -> Assignment:
    """Returns the assignment with the smallest predicted makespan, the first of equals."""
    return min(
        plans,
        key=lambda plan: (
            choose_rounds(profile, lengths, plan, score(profile, lengths, plan, ranks))[
                1
            ].makespan_ns
        ),
    )


def shards_by_degree(
    system: str, lengths: Integers, degrees: list[int], tokens_per_rank: int
) -> Integers:
    """Returns the tokens of each document on the fullest rank at each degree, [documents, degrees].

    Raises PlanError, naming the system, if the largest degree does not hold a document.
    """
    shards = largest_shards(*np.broadcast_arrays(lengths[:, None], np.array(degrees)))
    unfit = np.flatnonzero(shards[:, -1] > tokens_per_rank)
    if len(unfit):
        raise PlanError(
            f"{system} cannot hold document {unfit[0]} of {lengths[unfit[0]]} tokens: its largest "
            f"degree here is {degrees[-1]}, which holds {degrees[-1] * tokens_per_rank} at "
            f"{tokens_per_rank} tokens per rank"
        )
    return shards


def place_flexsp(
    profile: HardwareProfile, lengths: Integers, ranks: int, tokens_per_rank: int
) -> Assignment:
    """Assigns every document. Raises PlanError if a document needs more ranks than the largest
    power of two."""
    degrees = powers_of_two(ranks)
    shards = shards_by_degree("FlexSP", lengths, degrees, tokens_per_rank)
    times = alone_ns(profile, *np.broadcast_arrays(lengths[:, None], np.array(degrees)))
    times = np.where(shards <= tokens_per_rank, times, 0)
    choices: list[Choice] = list(zip(times.tolist(), shards.tolist(), strict=True))
    order = np.argsort(-lengths, kind="stable")
    plans: list[Assignment] = []
    number = max(1, -(-int(lengths.sum()) // (ranks * tokens_per_rank)))
    while len(plans) < NUMBERS_TRIED and number <= len(lengths):
        parts = _even_cuts(order, lengths, number)
        number += 1
        rows = list(
            itertools.takewhile(
                bool, (_fastest(part, choices, degrees, tokens_per_rank, ranks) for part in parts)
            )
        )
        if len(rows) < len(parts):
            number += number // 16  # far from feasible: take larger steps
            continue
        plans.append(stand_in_rows(rows, lengths))
    if not plans:
        raise PlanError("FlexSP-like packing found no micro-batches that hold these documents")
    return fastest(profile, lengths, plans, ranks)


def _even_cuts(order: Integers, lengths: Integers, number: int) -> list[list[int]]:
    """Cuts the sorted documents into at most `number` runs, minimizing the tokens of the largest
    run."""
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
    """Returns the ends of runs of at most `most` tokens; a longer document is a run by itself."""
    cuts = [0]
    while cuts[-1] < len(total) - 1:
        cuts.append(
            max(cuts[-1] + 1, int(np.searchsorted(total, total[cuts[-1]] + most, side="right")) - 1)
        )
    return cuts[1:]


def _fastest(
    documents: list[int],
    choices: list[Choice],
    degrees: list[int],
    tokens_per_rank: int,
    ranks: int,
) -> list[LoadedGroup]:
    """Returns the groups of a micro-batch with the least finishing time, largest degree first; none
    if it cannot hold them.

    Bisects on the finishing time. `documents` must be sorted longest first.
    """
    chosen = [choices[document] for document in documents]
    low = max(min(filter(None, times)) for times, _ in chosen)
    high = sum(max(times) for times, _ in chosen)
    found: list[LoadedGroup] = []
    while not found or high - low > PRECISION * high:
        middle = (low + high) // 2 if found else high
        places = place_within(middle, chosen, degrees, ranks, tokens_per_rank)
        if places is None and not found:
            return []
        if places is None:
            low = middle
            continue
        groups: dict[tuple[int, int], LoadedGroup] = {}
        for document, (times, tokens), (i, group) in zip(documents, chosen, places, strict=True):
            groups.setdefault((-i, group), LoadedGroup(degrees[i])).add(
                document, times[i], tokens[i]
            )
        found, high = (
            [groups[key] for key in sorted(groups)],
            int(max(group.time for group in groups.values())),
        )
    return found


def place_within(
    limit: int, choices: list[Choice], widths: list[int], ranks: int, tokens_per_rank: int
) -> list[tuple[int, int]] | None:
    """Returns, for every document, longest first, the index of its group's width and the group's
    number at that width.

    Returns None if the documents do not all fit within the limit on `ranks`.
    """
    # (time, tokens, number) of the groups of each width.
    groups: list[list[tuple[int, int, int]]] = [[] for _ in choices[0][0]]
    free, places = ranks, []
    for times, shards in choices:
        for i, time in enumerate(times):
            heap = groups[i]
            if (
                time
                and heap
                and heap[0][0] + time <= limit
                and heap[0][1] + shards[i] <= tokens_per_rank
            ):
                before, tokens, number = heap[0]
                heapq.heapreplace(heap, (before + time, tokens + shards[i], number))
                break
        else:
            i = next(
                (i for i, time in enumerate(times) if 0 < time <= limit and widths[i] <= free), -1
            )
            if i < 0:
                return None
            number = len(groups[i])
            heapq.heappush(groups[i], (times[i], shards[i], number))
            free -= widths[i]
        places.append((i, number))
    return places


def place_megatron_dev(
    profile: HardwareProfile, lengths: Integers, ranks: int, tokens_per_rank: int
) -> Assignment:
    """Assigns every document. `profile` is not used: this scheduler has no hardware model."""
    degrees = sorted({*powers_of_two(ranks), ranks})
    shards = shards_by_degree("Megatron dev", lengths, degrees, tokens_per_rank).tolist()
    scheduler = _Scheduler(lengths.tolist(), degrees, shards, ranks, tokens_per_rank)
    waiting = np.argsort(-lengths, kind="stable").tolist()
    rows: list[list[LoadedGroup]] = []
    while waiting:
        row, waiting = scheduler.next_micro_batch(waiting)
        rows.append(row)
    return stand_in_rows(rows, lengths)


class _Scheduler:
    """Forms one micro-batch at a time; groups take ranks in the order in which they were opened."""

    def __init__(
        self,
        lengths: list[int],
        degrees: list[int],
        shards: list[list[int]],
        ranks: int,
        tokens_per_rank: int,
    ) -> None:
        self.lengths, self.degrees, self.shards = lengths, degrees, shards
        self.ranks, self.tokens_per_rank = ranks, tokens_per_rank

    def next_micro_batch(self, documents: list[int]) -> tuple[list[LoadedGroup], list[int]]:
        """Returns the groups of the next micro-batch and the documents left over; `documents` are
        sorted longest first."""
        first = documents[0]
        limit = SLACK * self.lengths[first] * self.tokens_per_rank
        opening = self._smallest(first)
        groups = [LoadedGroup(self.degrees[opening])]
        groups[0].add(first, self._work(first, opening), self.shards[first][opening])
        by_degree: list[list[int]] = [[] for _ in self.degrees]
        by_degree[opening].append(0)
        busiest, free = groups[0].time, self.ranks - groups[0].degree
        left: list[int] = []
        for document in documents[1:]:
            # (busiest rank's work, index of degree, group; -1: a new group).
            best: tuple[float, int, int] | None = None
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
                groups.append(LoadedGroup(self.degrees[i]))
                by_degree[i].append(chosen)
                free -= self.degrees[i]
            groups[chosen].add(document, self._work(document, i), self.shards[document][i])
        return self._leave_no_rank_empty(groups, left, documents, free)

    def _group(
        self,
        groups: list[LoadedGroup],
        members: list[int],
        busiest: float,
        work: float,
        tokens: int,
    ) -> tuple[float, int] | None:
        """Returns the least work of the busiest rank, and the earliest group that gives it; None if
        no group has room."""
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
        self, groups: list[LoadedGroup], left: list[int], documents: list[int], free: int
    ) -> tuple[list[LoadedGroup], list[int]]:
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

    def _one_group(self, documents: list[int]) -> tuple[list[LoadedGroup], list[int]]:
        """Returns one group of all ranks, filled in order, and the documents that do not fit."""
        group, left = LoadedGroup(self.ranks), []
        for document in documents:
            tokens = self.shards[document][-1]
            if group.tokens + tokens <= self.tokens_per_rank:
                group.add(document, self._work(document, len(self.degrees) - 1), tokens)
            else:
                left.append(document)
        if not group.documents:
            raise PlanError(
                f"no document fits on all {self.ranks} ranks at {self.tokens_per_rank} tokens per "
                "rank"
            )
        return [group], left

    def _smallest(self, document: int) -> int:
        """Returns the index of the smallest degree that holds the document."""
        return next(
            i for i, tokens in enumerate(self.shards[document]) if tokens <= self.tokens_per_rank
        )

    def _work(self, document: int, index: int) -> float:
        return self.lengths[document] ** 2 / self.degrees[index]


class MissingWheel(PlanError):
    """Raised if the wheel is not installed."""


def place_megatron_main(
    profile: HardwareProfile, lengths: Integers, ranks: int, tokens_per_rank: int
) -> Assignment:
    """Assigns every document. Raises PlanError if the scheduler fails, MissingWheel without the
    wheel."""
    groups = scheduled(lengths, ranks, tokens_per_rank)
    shards = largest_shards(lengths, groups.degree)
    over = np.flatnonzero(shards > tokens_per_rank)
    if len(over):
        document = int(over[0])
        raise PlanError(
            f"Megatron main splits document {document} of {lengths[document]} tokens over "
            f"{groups.degree[document]} ranks, which hold "
            f"{groups.degree[document] * tokens_per_rank}: exceeds the budget of "
            f"{tokens_per_rank} tokens per rank"
        )
    return _within_budget(groups, shards, tokens_per_rank)


def scheduled(lengths: Integers, ranks: int, tokens_per_rank: int) -> Assignment:
    """Returns the scheduler's result, with its groups as micro-batches; tokens per rank may exceed
    the budget."""
    process_group = SimpleNamespace(size=lambda: ranks)
    scheduler = load_scheduler()(tokens_per_rank, process_group)
    try:
        _, groups = scheduler.get_groups_and_subsamples(list(enumerate(lengths.tolist())), None)
    except (
        Exception
    ) as error:  # any failure inside Megatron: the comparison continues without this baseline
        raise PlanError(
            f"Megatron main cannot plan this: {type(error).__name__} {error}".rstrip()
        ) from error
    ranks_of: dict[int, list[tuple[int, int]]] = {}
    for row, lists in enumerate(groups):
        for rank, documents in enumerate(lists):
            for document in documents:
                ranks_of.setdefault(document, []).append((row, rank))
    micro_batch, first, degree = (np.zeros(len(lengths), dtype=np.int64) for _ in range(3))
    for document in range(len(lengths)):
        places = ranks_of.get(document, [])
        rows, ring = {row for row, _ in places}, sorted(rank for _, rank in places)
        if len(rows) != 1 or ring != list(range(ring[0], ring[0] + len(ring))):
            raise PlanError(
                f"Megatron main puts document {document} on {places[:8]}: not consecutive ranks of "
                "one group"
            )
        micro_batch[document], first[document], degree[document] = rows.pop(), ring[0], len(ring)
    return Assignment(micro_batch, first, degree, np.zeros(len(lengths), dtype=bool))


def _within_budget(groups: Assignment, shards: Integers, tokens_per_rank: int) -> Assignment:
    """Splits groups into micro-batches: each ring's documents, longest first, fill one micro-batch
    after the other."""
    rings: dict[tuple[int, int], list[int]] = {}
    for document in np.argsort(-shards * groups.degree, kind="stable").tolist():
        rings.setdefault(
            (int(groups.micro_batch[document]), int(groups.first_rank[document])), []
        ).append(document)
    part = np.zeros_like(shards)
    for documents in rings.values():
        row, tokens = 0, 0
        for document in documents:
            if tokens + shards[document] > tokens_per_rank:
                row, tokens = row + 1, 0
            part[document] = row
            tokens += int(shards[document])
    parts = np.zeros(groups.micro_batches, dtype=np.int64)
    np.maximum.at(parts, groups.micro_batch, part + 1)
    micro_batch = (np.cumsum(parts) - parts)[groups.micro_batch] + part
    return Assignment(micro_batch, groups.first_rank, groups.degree, groups.reversed)


def load_scheduler() -> Any:
    """Imports Megatron's scheduler class. Raises MissingWheel without the wheel."""
    try:
        with warnings.catch_warnings():
            # Warnings about kernels for training, which are not used.
            warnings.simplefilter("ignore")
            return importlib.import_module(MODULE).BalancedCPScheduler
    except ImportError as error:
        raise MissingWheel(
            f"Megatron main needs the package megatron-core ({error}): {install('bench')}"
        ) from error


RIVALS: dict[str, Place] = {
    "plain-static": place_plain_static,
    "megatron-main": place_megatron_main,
    "megatron-dev": place_megatron_dev,
    "flexsp": place_flexsp,
}
TITLES = {
    "plain-static": "plain static",
    "megatron-main": "Megatron main",
    "megatron-dev": "Megatron dev",
}
TITLES["flexsp"] = "FlexSP-like"

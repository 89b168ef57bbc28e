"""FlexSP-like: documents of similar length share a micro-batch, and each micro-batch has its own power-of-two groups of ranks.

Our reading of "FlexSP: Accelerating Large Language Model Training via Flexible Sequence Parallelism" (ASPLOS 2025, arXiv
2412.01523): documents are sorted by length and cut into micro-batches such that the largest has the fewest tokens; in each,
groups with power-of-two degrees and their documents are chosen to minimize the time of the slowest group; a few numbers of
micro-batches are tried and the best is kept. FlexSP solves each micro-batch as an integer program in 5 to 15 s; here a
bisection on the finishing time with greedy placement (longest first, smallest sufficient degree, emptiest group) replaces it.
The authors' solver (branch flexsp of Hetu-Galvatron), run on the same steps, is between 6 % better and 18 % worse than this
reading; mode auto was behind it in no setting.
"""

import itertools

import numpy as np

from longctx.comparison.baselines.groups import Group, fastest, powers_of_two, shards_by_degree, stand_in_rows
from longctx.planning.assignment import Assignment, Integers
from longctx.planning.cost.hardware_profile import HardwareProfile
from longctx.planning.cost.model import alone_ns
from longctx.planning.plan import PlanError
from longctx.planning.planners.auto.shared_rings import Choice, place_within

NUMBERS_TRIED = 4
"""Number of feasible numbers of micro-batches that are tried."""
PRECISION = 0.01
"""Relative precision of the bisection on the finishing time."""


def place_flexsp(profile: HardwareProfile, lengths: Integers, ranks: int, tokens_per_rank: int) -> Assignment:
    """Assigns every document. Raises PlanError if a document needs more ranks than the largest power of two."""
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
        rows = list(itertools.takewhile(bool, (_fastest(part, choices, degrees, tokens_per_rank, ranks) for part in parts)))
        if len(rows) < len(parts):
            number += number // 16  # far from feasible: take larger steps
            continue
        plans.append(stand_in_rows(rows, lengths))
    if not plans:
        raise PlanError("FlexSP-like packing found no micro-batches that hold these documents")
    return fastest(profile, lengths, plans, ranks)


def _even_cuts(order: Integers, lengths: Integers, number: int) -> list[list[int]]:
    """Cuts the sorted documents into at most `number` runs, minimizing the tokens of the largest run."""
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
        cuts.append(max(cuts[-1] + 1, int(np.searchsorted(total, total[cuts[-1]] + most, side="right")) - 1))
    return cuts[1:]


def _fastest(documents: list[int], choices: list[Choice], degrees: list[int], tokens_per_rank: int, ranks: int) -> list[Group]:
    """Returns the groups of a micro-batch with the least finishing time, largest degree first; none if it cannot hold them.

    Bisects on the finishing time. `documents` must be sorted longest first.
    """
    chosen = [choices[document] for document in documents]
    low = max(min(filter(None, times)) for times, _ in chosen)
    high = sum(max(times) for times, _ in chosen)
    found: list[Group] = []
    while not found or high - low > PRECISION * high:
        middle = (low + high) // 2 if found else high
        places = place_within(middle, chosen, degrees, ranks, tokens_per_rank)
        if places is None and not found:
            return []
        if places is None:
            low = middle
            continue
        groups: dict[tuple[int, int], Group] = {}
        for document, (times, tokens), (i, group) in zip(documents, chosen, places, strict=True):
            groups.setdefault((-i, group), Group(degrees[i])).add(document, times[i], tokens[i])
        found, high = [groups[key] for key in sorted(groups)], int(max(group.time for group in groups.values()))
    return found

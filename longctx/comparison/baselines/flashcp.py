"""FlashCP-like: one degree for all groups, but documents of a group stay whole on one of its ranks where that balances.

Our reading of "FlashCP: Load-Balanced Communication-Efficient Context Parallelism for LLM Training" (arXiv 2606.08476), from
its description: packs of a static context-parallel group, as in `fixed_static.py`; in each pack, documents are either split
over all ranks of the group or whole on one of them, which needs no exchange. The authors search for the mix by a heuristic;
here the longest documents are split and the others whole, longest first on the rank with the least time that has room, for
several numbers of split documents, and the fastest mix is kept. The degree is the best power of two of the step, which is
stronger than one degree for the whole run.
"""

import heapq

import numpy as np

from longctx.comparison.baselines.fixed_static import place_fixed_static
from longctx.comparison.baselines.groups import fastest, powers_of_two, too_long
from longctx.planning.assignment import Assignment, Integers, largest_shards
from longctx.planning.cost.hardware_profile import HardwareProfile
from longctx.planning.cost.model import alone_ns


def place_flashcp(profile: HardwareProfile, lengths: Integers, ranks: int, tokens_per_rank: int) -> Assignment:
    """Assigns every document. Raises PlanError if no degree holds a document."""
    plans = []
    for degree in powers_of_two(ranks):
        if ranks % degree or int(largest_shards(lengths, np.full_like(lengths, degree)).max()) > tokens_per_rank:
            continue
        plan = place_fixed_static(profile, lengths, ranks, tokens_per_rank, degree)
        plans.append(_mixed(profile, lengths, plan, degree, tokens_per_rank))
    if not plans:
        raise too_long("FlashCP", int(lengths.argmax()), lengths, powers_of_two(ranks)[-1], tokens_per_rank)
    return fastest(profile, lengths, plans, ranks)


def _mixed(profile: HardwareProfile, lengths: Integers, plan: Assignment, degree: int, tokens_per_rank: int) -> Assignment:
    """Returns the plan with the fastest mix of whole and split documents in every pack."""
    first_rank, degrees = plan.first_rank.copy(), plan.degree.copy()
    packs: dict[tuple[int, int], list[int]] = {}
    for document, pack in enumerate(zip(plan.micro_batch.tolist(), plan.first_rank.tolist(), strict=True)):
        packs.setdefault(pack, []).append(document)
    whole_ns, split_ns = (alone_ns(profile, lengths, np.full_like(lengths, ranks)) for ranks in (1, degree))
    shards = largest_shards(lengths, np.full_like(lengths, degree))
    for (_, first), documents in packs.items():
        order = sorted(documents, key=lambda document: -int(lengths[document]))
        best = sum(int(split_ns[document]) for document in order)
        for number in _numbers(len(order)):
            split, whole = order[:number], order[number:]
            times = np.full(degree, sum(int(split_ns[document]) for document in split), dtype=np.int64)
            tokens = np.full(degree, sum(int(shards[document]) for document in split), dtype=np.int64)
            at = _spread(times, tokens, whole_ns[whole], lengths[whole], tokens_per_rank)
            if at is not None and int(times.max()) < best:
                best = int(times.max())
                degrees[documents], first_rank[documents] = degree, first
                degrees[whole], first_rank[whole] = 1, first + np.array(at)
    return Assignment(plan.micro_batch, first_rank, degrees, plan.reversed)


def _numbers(documents: int) -> list[int]:
    """Returns the numbers of split documents to try: 0, 1, 2, 3, 4, 6, 9, …, below the number of documents."""
    numbers = [0]
    while numbers[-1] < documents - 1:
        numbers.append(max(numbers[-1] + 1, numbers[-1] * 3 // 2))
    return [number for number in numbers if number < documents]


def _spread(times: Integers, tokens: Integers, more: Integers, lengths: Integers, tokens_per_rank: int) -> list[int] | None:
    """Puts documents one by one on the rank with the least time that has room, adding to `times` and `tokens`; None if none."""
    at = []
    ranks = list(zip(times.tolist(), range(len(times)), strict=True))
    heapq.heapify(ranks)
    for time, length in zip(more.tolist(), lengths.tolist(), strict=True):
        full = []
        while ranks and tokens[ranks[0][1]] + length > tokens_per_rank:
            full.append(heapq.heappop(ranks))
        if not ranks:
            return None
        before, rank = heapq.heappop(ranks)
        for each in (*full, (before + time, rank)):
            heapq.heappush(ranks, each)
        times[rank] += time
        tokens[rank] += length
        at.append(rank)
    return at

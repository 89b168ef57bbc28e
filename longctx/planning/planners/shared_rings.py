"""Shared rings: placements for steps with few documents per rank, where several split documents share the same ranks.

All documents run in one micro-batch within a time limit. Each document, longest first, joins the narrowest group of ranks that
has time and tokens left for it, or opens the narrowest group that is fast enough. Only few widths are used, so documents of
similar length share a group. Bisection finds the lowest limit at which the domain holds all groups. FlexSP (ASPLOS 2025,
arXiv 2412.01523) forms such groups by integer programming; this greedy choice replaces it.
"""

import heapq

import numpy as np

from longctx.planning.assignment import largest_shards
from longctx.planning.cost.model import alone_ns
from longctx.planning.planners.packing import PlacedRings
from longctx.planning.planners.step import Degrees, Step

PRECISION = 512
"""Bisection stops at 1/PRECISION of the even time."""

Choice = tuple[list[int], list[int]]
"""Nanoseconds (0 where it does not fit) and tokens per rank of a document, for every group width."""


def shared_rings(step: Step, even_ns: int) -> PlacedRings | None:
    """Returns the fastest placement found with a time between `even_ns` and twice that, or None.

    Widths are powers of two.
    """
    widths = 1 << np.arange(step.ranks.bit_length())
    lengths, width = np.broadcast_arrays(step.lengths[:, None], widths)
    shards = largest_shards(lengths, width)
    images = step.encoding.ring_ns(np.arange(len(lengths))[:, None], width)
    alone = alone_ns(step.profile, lengths, width, amounts=step.amounts[:, None], encoding=images)
    times = np.where(shards <= step.tokens_per_rank, alone, 0)
    order = np.argsort(-step.lengths, kind="stable")
    choices = list(zip(times[order].tolist(), shards[order].tolist(), strict=True))
    low, high, best = even_ns, 2 * even_ns, None
    while high - low > max(1, even_ns // PRECISION):
        limit = (low + high) // 2
        placed = place_within(limit, choices, widths.tolist(), step.ranks, step.tokens_per_rank)
        low, high, best = (limit, high, best) if placed is None else (low, limit, placed)
    if best is None:
        return None
    which, group = np.empty((2, len(order)), dtype=np.int64)
    which[order], group[order] = np.array(best, dtype=np.int64).T
    groups = [int(group[which == i].max(initial=-1)) + 1 for i in range(len(widths))]
    wider = np.cumsum((widths * groups)[::-1])[::-1] - widths * groups  # ranks of all wider groups, which come first
    document, degree = np.arange(len(order)), widths[which]
    split = Degrees(degree, times[document, which], shards[document, which])
    return PlacedRings.in_one(step, split, wider[which] + group * degree)


def place_within(
    limit: int, choices: list[Choice], widths: list[int], ranks: int, tokens_per_rank: int
) -> list[tuple[int, int]] | None:
    """Returns, for every document, longest first, the index of its group's width and the group's number at that width.

    Returns None if the documents do not all fit within the limit on `ranks`.
    """
    groups: list[list[tuple[int, int, int]]] = [[] for _ in choices[0][0]]  # (time, tokens, number) of the groups of each width
    free, places = ranks, []
    for times, shards in choices:
        for i, time in enumerate(times):
            heap = groups[i]
            if time and heap and heap[0][0] + time <= limit and heap[0][1] + shards[i] <= tokens_per_rank:
                before, tokens, number = heap[0]
                heapq.heapreplace(heap, (before + time, tokens + shards[i], number))
                break
        else:
            i = next((i for i, time in enumerate(times) if 0 < time <= limit and widths[i] <= free), -1)
            if i < 0:
                return None
            number = len(groups[i])
            heapq.heappush(groups[i], (times[i], shards[i], number))
            free -= widths[i]
        places.append((i, number))
    return places

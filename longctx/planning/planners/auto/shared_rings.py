"""Shared rings: layouts for steps with few documents for each rank, where several split documents have to share the same ranks.

All documents are done within a limit, in one micro-batch, if each, longest first, joins the narrowest group of ranks that still
has time and tokens for it, or else opens the narrowest group that is fast enough. Few widths are used, so that documents
of like length meet in one group. The least limit for which the domain holds all groups is found by bisection. The groups are
those of FlexSP (ASPLOS 2025, arXiv 2412.01523), whose integer program this greedy choice replaces.
"""

import heapq

import numpy as np

from longctx.planning.assignment import largest_shards
from longctx.planning.cost.model import alone_ns
from longctx.planning.planners.auto.packing import Rings
from longctx.planning.planners.step import Degrees, Step

PRECISION = 512
"""Limits are told apart to one part of the even time in so many: more take more steps of bisection."""

Choice = tuple[list[int], list[int]]
"""Nanoseconds (0 where it does not fit) and tokens of a document on each rank of a group, for every width."""


def grouped_rings(step: Step, even_ns: int, narrowest: int) -> Rings | None:
    """The quickest layout found that takes between once and twice `even_ns`; None if there is none.

    No group has fewer than `narrowest` ranks: fine pieces pack better where small documents are wanting. Three times a power of
    two is a width then, too.
    """
    bases = (1,) if narrowest == 1 else (1, 3)
    possible = sorted(base << power for base in bases for power in range(step.ranks.bit_length()))
    widths = np.array([width for width in possible if narrowest <= width <= step.ranks], dtype=np.int64)
    lengths, width = np.broadcast_arrays(step.lengths[:, None], widths)
    shards = largest_shards(lengths, width)
    times = np.where(shards <= step.tokens_per_rank, alone_ns(step.profile, lengths, width), 0)
    order = np.argsort(-step.lengths, kind="stable")
    choices = list(zip(times[order].tolist(), shards[order].tolist(), strict=True))
    low, high, best = even_ns, 2 * even_ns, None
    while high - low > max(1, even_ns // PRECISION):
        limit = (low + high) // 2
        found = place_within(limit, choices, widths.tolist(), step.ranks, step.tokens_per_rank)
        low, high, best = (limit, high, best) if found is None else (low, limit, found)
    if best is None:
        return None
    which, group = np.empty((2, len(order)), dtype=np.int64)
    which[order], group[order] = np.array(best, dtype=np.int64).T
    groups = [int(group[which == i].max(initial=-1)) + 1 for i in range(len(widths))]
    wider = np.cumsum((widths * groups)[::-1])[::-1] - widths * groups  # ranks of all wider groups: these stand first
    document, degree = np.arange(len(order)), widths[which]
    split = Degrees(degree, times[document, which], shards[document, which])
    return Rings.in_one(step, split, wider[which] + group * degree)


def place_within(
    limit: int, choices: list[Choice], widths: list[int], ranks: int, tokens_per_rank: int
) -> list[tuple[int, int]] | None:
    """For every document, longest first, which width its group has, and which group of that width it is.

    None if not all are done within the limit on so many ranks.
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

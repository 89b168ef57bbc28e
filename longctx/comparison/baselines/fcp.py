"""FCP-like: groups of any size, not only powers of two, packed by memory first and then widened by time.

Our reading of "Efficient Scaling of LLM Training with Flexible Context Parallelism" (arXiv 2602.21788), from its description:
documents are packed into groups that need as few ranks as their tokens ask (best-fit decreasing, so short ones fill what is
left beside a long one); groups are spread evenly over micro-batches; then the ranks of a micro-batch are divided over its
groups so that the slowest is as fast as possible. The authors divide by dynamic programming; here a bisection on the finishing
time finds the same. A few numbers of micro-batches are tried, and the best is kept.
"""

import numpy as np

from longctx.comparison.baselines.groups import Group, fastest, stand_in_rows, too_long
from longctx.planning.assignment import Assignment, Integers, largest_shards
from longctx.planning.cost.hardware_profile import HardwareProfile
from longctx.planning.cost.model import alone_ns

NUMBERS_TRIED = 4
"""Number of feasible numbers of micro-batches that are tried."""


def place_fcp(profile: HardwareProfile, lengths: Integers, ranks: int, tokens_per_rank: int) -> Assignment:
    """Assigns every document. Raises PlanError if all ranks do not hold a document."""
    least = -(-lengths // tokens_per_rank)
    wide = np.flatnonzero(least > ranks)
    if len(wide):
        raise too_long("FCP", int(wide[0]), lengths, ranks, tokens_per_rank)
    groups = _packed(lengths, least, tokens_per_rank)
    degrees = [_least_degree(lengths, documents, tokens_per_rank, ranks) for documents in groups]
    work = [int(alone_ns(profile, lengths[g], np.ones_like(lengths[g])).sum()) for g in groups]
    plans: list[Assignment] = []
    number = -(-sum(degrees) // ranks)
    while len(plans) < NUMBERS_TRIED and number <= len(groups):
        rows = _even_rows(degrees, work, number, ranks)
        number += 1
        if rows is not None:
            chosen = [[groups[i] for i in row] for row in rows if row]
            widened = [_widened(profile, lengths, row, ranks, tokens_per_rank) for row in chosen]
            plans.append(stand_in_rows(widened, lengths))
    return fastest(profile, lengths, plans, ranks)


def _even_rows(degrees: list[int], work: list[int], number: int, ranks: int) -> list[list[int]] | None:
    """Spreads groups over micro-batches, the most work first, each to the one with the least; None if ranks do not suffice."""
    rows: list[list[int]] = [[] for _ in range(number)]
    free, done = [ranks] * number, [0] * number
    for group in sorted(range(len(degrees)), key=lambda group: -work[group]):
        row = min((row for row in range(number) if free[row] >= degrees[group]), key=lambda row: done[row], default=None)
        if row is None:
            return None
        rows[row].append(group)
        free[row] -= degrees[group]
        done[row] += work[group]
    return rows


def _packed(lengths: Integers, least: Integers, tokens_per_rank: int) -> list[list[int]]:
    """Packs documents into groups that need few ranks, the longest first; a group's first document decides its ranks."""
    groups: list[list[int]] = []
    room: list[int] = []
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        fitting = [number for number, left in enumerate(room) if left >= length]
        best = min(fitting, key=lambda number: room[number], default=len(groups))
        if best == len(groups):
            groups.append([])
            room.append(int(least[document]) * tokens_per_rank)
        groups[best].append(document)
        room[best] -= length
    return groups


def _least_degree(lengths: Integers, documents: list[int], tokens_per_rank: int, ranks: int) -> int:
    """Returns the fewest ranks whose fullest holds its shards of the documents."""
    sizes = lengths[documents]
    degree = max(1, -(-int(sizes.sum()) // tokens_per_rank))
    while degree < ranks and int(largest_shards(sizes, np.full_like(sizes, degree)).sum()) > tokens_per_rank:
        degree += 1
    return degree


def _widened(
    profile: HardwareProfile, lengths: Integers, row: list[list[int]], ranks: int, tokens_per_rank: int
) -> list[Group]:
    """Divides the ranks over the groups of a micro-batch so that the slowest finishes first; widest group first."""
    degrees = np.arange(1, ranks + 1)
    least = [_least_degree(lengths, documents, tokens_per_rank, ranks) for documents in row]
    times = [alone_ns(profile, *np.broadcast_arrays(lengths[documents, None], degrees)).sum(axis=0) for documents in row]

    def chosen(limit: int) -> list[int] | None:
        found = []
        for time, fewest in zip(times, least, strict=True):
            fast = np.flatnonzero(time[fewest - 1 :] <= limit)
            if not len(fast):
                return None
            found.append(fewest + int(fast[0]))
        return found if sum(found) <= ranks else None

    high = max(int(time[fewest - 1]) for time, fewest in zip(times, least, strict=True))
    low = 0
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if chosen(middle) else (middle + 1, high)
    found = chosen(high) or least
    groups = [Group(degree, documents=documents) for degree, documents in zip(found, row, strict=True)]
    return sorted(groups, key=lambda group: -group.degree)

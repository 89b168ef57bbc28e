"""Assignment: where every document stands, as arrays indexed by document, and exact token counts per rank.

Planners, the cost and the checker work on this form; `plan.py` holds the readable one. Token counts come from the cut points of
`layout.py`, so what is scored and checked is what a rank will hold, to the token.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longctx.planning.layout import Placement
from longctx.planning.plan import Plan

Integers = NDArray[np.int64]
NEVER = np.iinfo(np.int64).max
"""A time that no step reaches, in nanoseconds: what something costs that cannot be."""
PAIRS_AT_ONCE = 1 << 20
"""(document, ring member) pairs expanded at a time: bounds the memory of many documents on large degrees."""


@dataclass(frozen=True)
class Assignment:
    """Micro-batch, first rank, degree and direction of every document (arrays [documents])."""

    micro_batch: Integers
    first_rank: Integers
    degree: Integers
    reversed: NDArray[np.bool_]

    @property
    def micro_batches(self) -> int:
        return int(self.micro_batch.max()) + 1

    @classmethod
    def alternating(cls, micro_batch: Integers, first_rank: Integers, degree: Integers) -> "Assignment":
        """Reverses every other document of those that share a ring: low ring indices receive most, and this evens it out."""
        rings = np.flatnonzero(degree > 1)
        order = rings[np.lexsort((degree[rings], first_rank[rings], micro_batch[rings]))]
        key = np.stack([micro_batch[order], first_rank[order], degree[order]])
        new = np.append(True, (np.diff(key, axis=1) != 0).any(axis=0))[: len(order)]
        place = np.arange(len(order)) - np.flatnonzero(new)[np.cumsum(new) - 1]
        reverse = np.zeros(len(degree), dtype=bool)
        reverse[order] = place % 2 == 1
        return cls(micro_batch, first_rank, degree, reverse)

    @classmethod
    def of(cls, plan: Plan) -> "Assignment":
        """The arrays of a plan in which every document stands exactly once (see `check_plan`)."""
        rows = [(p.document, k, p.first_rank, p.degree, p.reversed) for k, mb in enumerate(plan.micro_batches) for p in mb]
        table = np.array(sorted(rows), dtype=np.int64).reshape(-1, 5)
        return cls(table[:, 1], table[:, 2], table[:, 3], table[:, 4].astype(bool))

    def placements(self) -> tuple[tuple[Placement, ...], ...]:
        """The readable form: per micro-batch, in ascending order of first rank, then document."""
        result: list[list[Placement]] = [[] for _ in range(self.micro_batches)]
        order = np.lexsort((self.first_rank, self.micro_batch))
        columns = (order, self.micro_batch[order], self.first_rank[order], self.degree[order], self.reversed[order])
        for document, micro_batch, first, degree, reverse in zip(*(column.tolist() for column in columns), strict=True):
            result[micro_batch].append(Placement(document, first, degree, reverse))
        return tuple(map(tuple, result))


def largest_shards(lengths: Integers, degrees: Integers) -> Integers:
    """Tokens on the fullest rank of each ring: `layout.largest_shard` for arrays, in closed form.

    With L = 2n·q + m the fullest ring index holds 2q tokens if m = 0, 2q + 1 if m divides 2n (every cut that passes a whole
    number then hits it), else 2q + 2.
    """
    quotient, rest = np.divmod(lengths, 2 * degrees)
    hits = (2 * degrees) % np.maximum(rest, 1) == 0
    result: Integers = 2 * quotient + np.where(rest == 0, 0, np.where(hits, 1, 2))
    return result


def least_degrees(lengths: Integers, ranks: int, tokens_per_rank: int) -> Integers:
    """The smallest degree at which each document fits the token budget; 0 where none up to `ranks` does."""
    least = -(-lengths // tokens_per_rank)
    pending = np.arange(len(lengths))
    while len(pending):  # an odd budget may ask for a degree or two more than the quotient
        fits = largest_shards(lengths[pending], least[pending]) <= tokens_per_rank
        pending = pending[~fits & (least[pending] < ranks)]
        least[pending] += 1
    return np.where((least <= ranks) & (largest_shards(lengths, least) <= tokens_per_rank), least, 0)


def spread(values: Integers, rows: Integers, start: Integers, stop: Integers, shape: tuple[int, int]) -> Integers:
    """Sums of `values[i]` over ranks [start[i], stop[i]) of row rows[i]: an array `shape` = [micro-batches, ranks].

    Sums run in float64, which is exact below 2⁵³ (104 days in nanoseconds).
    """
    width = shape[1] + 1
    cells = shape[0] * width
    edges = np.bincount(rows * width + start, values, cells) - np.bincount(rows * width + stop, values, cells)
    return np.cumsum(edges.reshape(shape[0], width), axis=1)[:, :-1].astype(np.int64)


def tokens_on_ranks(lengths: Integers, assignment: Assignment, shape: tuple[int, int]) -> Integers:
    """Exact tokens on every rank in every micro-batch: an array `shape` = [micro-batches, ranks]."""
    a = assignment
    even = lengths % (2 * a.degree) == 0
    even |= a.degree == 1
    stop = a.first_rank + a.degree
    total = spread((lengths // a.degree)[even], a.micro_batch[even], a.first_rank[even], stop[even], shape)
    for part in _slices(np.flatnonzero(~even), a.degree):
        document = np.repeat(part, a.degree[part])
        ring_index = np.arange(len(document)) - np.repeat(np.cumsum(a.degree[part]) - a.degree[part], a.degree[part])
        length, chunks = lengths[document], 2 * a.degree[document]
        tail = chunks - 1 - ring_index
        tokens = (ring_index + 1) * length // chunks - ring_index * length // chunks
        tokens += (tail + 1) * length // chunks - tail * length // chunks
        index = np.where(a.reversed[document], a.degree[document] - 1 - ring_index, ring_index)
        cell = a.micro_batch[document] * shape[1] + a.first_rank[document] + index
        total += np.bincount(cell, tokens, shape[0] * shape[1]).astype(np.int64).reshape(shape)
    return total


def remote_tokens(lengths: Integers, assignment: Assignment, shape: tuple[int, int]) -> Integers:
    """Tokens that the ring mates of every rank hold of its documents, as `tokens_on_ranks`."""
    rings = np.flatnonzero(assignment.degree > 1)
    micro_batch, first_rank, degree = assignment.micro_batch[rings], assignment.first_rank[rings], assignment.degree[rings]
    split = Assignment(micro_batch, first_rank, degree, assignment.reversed[rings])
    whole = spread(lengths[rings], micro_batch, first_rank, first_rank + degree, shape)
    return whole - tokens_on_ranks(lengths[rings], split, shape)


def _slices(documents: Integers, degrees: Integers) -> Iterator[Integers]:
    """Cuts `documents` where their rings have about PAIRS_AT_ONCE members together."""
    if len(documents):
        part = np.cumsum(degrees[documents]) // PAIRS_AT_ONCE
        yield from np.split(documents, np.flatnonzero(np.diff(part)) + 1)

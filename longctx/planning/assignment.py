"""Assignment: the placement of every document as arrays indexed by document, and exact token counts
per rank.

Planners, the cost model and the checker use this form; `plan.py` has the readable one. Token counts
come from the cut points of `layout.py`, so scores and checks use exactly the tokens that each rank
will hold.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from longctx.planning.layout import Placement
from longctx.planning.plan import Plan

Integers = NDArray[np.int64]
NEVER = np.iinfo(np.int64).max
"""Time in nanoseconds of an impossible choice: larger than any step time."""
PAIRS_AT_ONCE = 1 << 20
"""(document, ring member) pairs expanded at a time: bounds memory for many documents at high
degrees."""


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

    def __getitem__(self, documents: Integers) -> "Assignment":
        """Returns the assignment of some documents, by an index array."""
        return Assignment(
            micro_batch=self.micro_batch[documents],
            first_rank=self.first_rank[documents],
            degree=self.degree[documents],
            reversed=self.reversed[documents],
        )

    def runs(self, shape: tuple[int, int]) -> "Runs":
        """Returns the ranks of every document in arrays of `shape` = [micro-batches, ranks]."""
        return Runs(
            row=self.micro_batch,
            start=self.first_rank,
            stop=self.first_rank + self.degree,
            shape=shape,
        )

    @classmethod
    def alternating(
        cls, micro_batch: Integers, first_rank: Integers, degree: Integers
    ) -> "Assignment":
        """Builds an assignment that reverses every second document of each ring: low ring indices
        receive the most K and V."""
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
        """Returns the arrays of a plan that places every document exactly once (see
        `check_plan`)."""
        rows = [
            (p.document, k, p.first_rank, p.degree, p.reversed)
            for k, mb in enumerate(plan.micro_batches)
            for p in mb
        ]
        table = np.array(sorted(rows), dtype=np.int64).reshape(-1, 5)
        return cls(
            micro_batch=table[:, 1],
            first_rank=table[:, 2],
            degree=table[:, 3],
            reversed=table[:, 4].astype(bool),
        )

    def placements(self, rounds: Integers) -> tuple[tuple[Placement, ...], ...]:
        """Returns the placements of each micro-batch, by ascending first rank, then document;
        rounds [documents]."""
        result: list[list[Placement]] = [[] for _ in range(self.micro_batches)]
        # As lists, whose elements are read faster.
        micro_batch, degree = self.micro_batch.tolist(), self.degree.tolist()
        first_rank, direction = self.first_rank.tolist(), self.reversed.tolist()
        for document in np.lexsort((self.first_rank, self.micro_batch)).tolist():
            placement = Placement(
                document,
                first_rank=first_rank[document],
                degree=degree[document],
                reversed=direction[document],
                rounds=int(rounds[document]),
            )
            result[micro_batch[document]].append(placement)
        return tuple(map(tuple, result))


def largest_shards(lengths: Integers, degrees: Integers) -> Integers:
    """Returns the tokens on the fullest rank of each ring: `layout.largest_shard` for arrays, in
    closed form.

    For length L = 2n·q + m at degree n, the fullest ring index holds 2q tokens if m = 0, 2q + 1 if
    m divides 2n (every whole number is then a cut point), else 2q + 2.
    """
    quotient, rest = np.divmod(lengths, 2 * degrees)
    hits = (2 * degrees) % np.maximum(rest, 1) == 0
    result: Integers = 2 * quotient + np.where(rest == 0, 0, np.where(hits, 1, 2))
    return result


def least_degrees(lengths: Integers, ranks: int, tokens_per_rank: int, block: int = 1) -> Integers:
    """Returns the smallest degree at which each document fits the token budget, or 0 if no degree
    up to `ranks` fits.

    Degree and ranks are counted in blocks of `block` ranks.
    """
    least = -(-lengths // (tokens_per_rank * block))
    pending = np.arange(len(lengths))
    while len(pending):  # an odd budget may need one or two ranks more than the quotient
        fits = largest_shards(lengths[pending], least[pending] * block) <= tokens_per_rank
        pending = pending[~fits & (least[pending] < ranks)]
        least[pending] += 1
    return np.where(
        (least <= ranks) & (largest_shards(lengths, least * block) <= tokens_per_rank), least, 0
    )


class Runs(NamedTuple):
    """Runs of ranks [start, stop), each in a row, in arrays of `shape` = [micro-batches, ranks]."""

    row: Integers
    start: Integers
    stop: Integers
    shape: tuple[int, int]

    def spread(self, values: Integers) -> Integers:
        """Adds values[i] to all ranks of run i; returns an array of `shape`.

        Sums in float64, which is exact below 2⁵³ (104 days in nanoseconds).
        """
        rows, ranks = self.shape
        width = ranks + 1
        begun = np.bincount(self.row * width + self.start, values, rows * width)
        ended = np.bincount(self.row * width + self.stop, values, rows * width)
        edges = (begun - ended).reshape(rows, width)
        return np.cumsum(edges, axis=1)[:, :-1].astype(np.int64)


def tokens_on_ranks(lengths: Integers, assignment: Assignment, shape: tuple[int, int]) -> Integers:
    """Returns the exact tokens on every rank in every micro-batch: an array of `shape` =
    [micro-batches, ranks].

    A document of 2n·q + m tokens at degree n has 2q on every rank; ring index r holds f(r + 1) -
    f(r) of the other m, with f(i) = ⌊i·m/2n⌋ + ⌈i·m/2n⌉.
    """
    a = assignment
    quotient, rest = np.divmod(lengths, 2 * a.degree)
    single = a.degree == 1
    even = 2 * quotient + np.where(single, rest, 0)
    total = a.runs(shape).spread(even)
    small = np.int32 if shape[1] < 1 << 15 else np.int64  # i·m is below 2n²
    for part in _slices(np.flatnonzero(~single & (rest > 0)), a.degree):
        degree = a.degree[part]
        last = np.cumsum(degree)
        first = last - degree
        ring_index = np.arange(last[-1]) - np.repeat(first, degree)
        chunks, odd = np.repeat(np.stack([2 * degree, rest[part]]).astype(small), degree, axis=1)
        low, above = np.divmod((ring_index.astype(small) + 1) * odd, chunks)
        upto = 2 * low + (above > 0)
        tokens = np.diff(upto, prepend=0)
        tokens[first] = upto[first]
        direction = np.where(a.reversed[part], -1, 1)
        start = a.micro_batch[part] * shape[1] + a.first_rank[part]
        start += np.where(a.reversed[part], degree - 1, 0)
        cell = np.repeat(start, degree) + np.repeat(direction, degree) * ring_index
        total += np.bincount(cell, tokens, shape[0] * shape[1]).astype(np.int64).reshape(shape)
    return total


def remote_tokens(lengths: Integers, assignment: Assignment, shape: tuple[int, int]) -> Integers:
    """Returns, for every rank, the tokens of its split documents that other ranks hold; same shape
    as `tokens_on_ranks`."""
    rings = np.flatnonzero(assignment.degree > 1)
    split = assignment[rings]
    whole = split.runs(shape).spread(lengths[rings])
    return whole - tokens_on_ranks(lengths[rings], split, shape)


def _slices(documents: Integers, degrees: Integers) -> Iterator[Integers]:
    """Splits `documents` into slices whose rings have about PAIRS_AT_ONCE members in total."""
    if len(documents):
        part = np.cumsum(degrees[documents]) // PAIRS_AT_ONCE
        yield from np.split(documents, np.flatnonzero(np.diff(part)) + 1)

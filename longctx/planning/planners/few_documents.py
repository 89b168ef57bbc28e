"""Few documents on few ranks: documents that fit one rank are whole, and all degrees of the others
are tried, a few documents at a time.

A search has one time limit for all documents of a micro-batch. With few documents, unequal times on
a rank may add up as well, with fewer splits.
"""

import itertools
from typing import NamedTuple

import numpy as np

from longctx.planning.assignment import Assignment, Integers
from longctx.planning.planners.packing import FULL, sliding_max
from longctx.planning.planners.planning_input import Candidate, PlanningInput
from longctx.planning.planners.settings import SearchSettings

MOST_CHOICES = 1024
"""Maximum number of choices of degrees that are tried together."""


def with_other_degrees(
    given: PlanningInput, best: Candidate, settings: SearchSettings
) -> Candidate:
    """Returns a plan that splits fewer documents and takes at most a share `settings.few_gap` more
    time than the best one, or the best one."""
    if len(given.lengths) * given.ranks > settings.few:
        return best
    micro_batches = best.assignment.micro_batches
    even_ns = int(given.single_ns.sum()) // (given.ranks * micro_batches)
    fits = (given.single_ns <= even_ns) & (given.single_tokens <= given.tokens_per_rank)
    degrees = np.where(fits, 1, best.assignment.degree)
    rings = np.flatnonzero(~fits)
    rings = rings[np.argsort(-given.lengths[rings], kind="stable")]
    costs = _Costs.of(given)
    together = _documents_together(given.ranks)
    for first in range(0, len(rings), together):
        some = rings[first : first + together]
        choices = _choices(degrees, some, given.ranks)
        loads = _placed(costs, choices, micro_batches, tokens_per_rank=given.tokens_per_rank)
        degrees = choices[loads.quickest]
    loads = _placed(costs, degrees[None], micro_batches, tokens_per_rank=given.tokens_per_rank)
    if loads.time[0] >= FULL:
        return best
    plan = Assignment.alternating(loads.micro_batch[0], loads.first_rank[0], degrees)
    candidate = given.candidate(best.winner, plan)
    is_quick = candidate.makespan_ns <= (1 + settings.few_gap) * best.makespan_ns
    splits_fewer = candidate.split_documents < best.split_documents
    if is_quick and splits_fewer:
        return candidate
    return best


def _documents_together(ranks: int) -> int:
    """Returns of how many documents all degrees are tried together."""
    count = 1
    while ranks > 1 and ranks ** (count + 1) <= MOST_CHOICES:
        count += 1
    return count


class _Costs(NamedTuple):
    """Nanoseconds and tokens of every document on each of its ranks, by degree - 1 (arrays
    [documents, ranks])."""

    time: Integers
    tokens: Integers

    @classmethod
    def of(cls, given: PlanningInput) -> "_Costs":
        documents = np.arange(len(given.lengths))[:, None]
        degree = np.arange(1, given.ranks + 1)[None, :]
        documents, degree = np.broadcast_arrays(documents, degree)
        tokens = given.shards(given.lengths[documents], degree)
        return cls(given.alone_ns(documents, degree), tokens)


class _Placed(NamedTuple):
    """Placements of all documents with several choices of degrees.

    Attributes:
        time: nanoseconds of all micro-batches of each choice; FULL where tokens do not fit.
        micro_batch, first_rank: where its documents are (arrays [choices, documents]).
    """

    time: Integers
    micro_batch: Integers
    first_rank: Integers

    @property
    def quickest(self) -> int:
        return int(self.time.argmin())


def _choices(degrees: Integers, documents: Integers, ranks: int) -> Integers:
    """Returns the given degrees, and those with every degree of these documents [choices,
    documents]."""
    others = list(itertools.product(range(1, ranks + 1), repeat=len(documents)))
    result = np.tile(degrees, (1 + len(others), 1))
    result[1:, documents] = others
    return result


def _placed(
    costs: _Costs, degrees: Integers, micro_batches: int, *, tokens_per_rank: int
) -> _Placed:
    """Places all documents, those that take longest first, each on the ranks that finish first, for
    every choice of `degrees` [choices, documents]."""
    choices, documents = degrees.shape
    ranks = costs.time.shape[1]
    load = np.zeros((choices, micro_batches, ranks), dtype=np.int64)
    held = np.zeros_like(load)
    micro_batch, first_rank = np.zeros((2, choices, documents), dtype=np.int64)
    fits = np.ones(choices, dtype=bool)
    for document in np.argsort(-costs.time[:, 0], kind="stable").tolist():
        for degree in np.unique(degrees[:, document]).tolist():
            rows = np.flatnonzero(degrees[:, document] == degree)
            time = int(costs.time[document, degree - 1])
            tokens = int(costs.tokens[document, degree - 1])
            room = held[rows] + tokens <= tokens_per_rank
            usable = np.where(room, load[rows], FULL).reshape(-1, ranks)
            done = sliding_max(usable, degree).reshape(len(rows), -1)
            run = done.argmin(axis=1)
            fits[rows] &= done[np.arange(len(rows)), run] < FULL
            row, first = np.divmod(run, ranks - degree + 1)
            micro_batch[rows, document] = row
            first_rank[rows, document] = first
            columns = first[:, None] + np.arange(degree)
            load[rows[:, None], row[:, None], columns] += time
            held[rows[:, None], row[:, None], columns] += tokens
    whole_time = load.max(axis=2).sum(axis=1)
    return _Placed(np.where(fits, whole_time, FULL), micro_batch, first_rank)

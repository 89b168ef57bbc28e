"""Packing: places documents of known degree into K micro-batches of N ranks.

1. Rings and documents that take more than half a micro-batch: longest first, each on the least
   loaded run of ranks.
2. Targets: the time of each micro-batch once it takes the remaining documents, poured in as water
   is, within the token budget.
3. Remaining documents: longest first, each on the rank that needs it most to meet its
   micro-batch's target (`list_scheduling.py`).

The sum of the targets estimates the makespan without step 3, so many placements of rings are
compared and few are filled.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from longctx.planning.assignment import NEVER, Assignment, Integers, Runs
from longctx.planning.cost.slow_ranks import Floats
from longctx.planning.planners.list_scheduling import RULES, Rule, neediest_first
from longctx.planning.planners.local_search import balance
from longctx.planning.planners.planning_input import Degrees, PlanningInput

FULL = NEVER // 2
"""Load of a rank without room for a document's tokens: more than any time, and small enough to add
a time to."""


@dataclass(frozen=True)
class PlacedRings:
    """Rings and other large documents in their places, before the remaining documents are placed.

    Attributes:
        degree, time, tokens: degree, time per rank in nanoseconds and maximum tokens per rank
            (arrays [documents]).
        placed: mask of the documents placed so far; the others have degree 1.
        micro_batch, first_rank: where these documents are (arrays [documents]).
        load, free: their nanoseconds and the free tokens on every rank (arrays [micro-batches,
            ranks]).
        slowness: time of each slot relative to a usual one (an array [slots]); all other times are
            those of a usual one.
        target: nanoseconds of every micro-batch including the remaining documents, poured in as
            water is.
    """

    degree: Integers
    time: Integers
    tokens: Integers
    placed: NDArray[np.bool_]
    micro_batch: Integers
    first_rank: Integers
    load: Integers
    free: Integers
    slowness: Floats
    target: Integers

    @property
    def estimate_ns(self) -> int:
        return int(self.target.sum())

    @cached_property
    def most_load(self) -> Integers:
        """Load of every rank that meets its micro-batch's target (an array [micro-batches,
        ranks])."""
        return (self.target[:, None] / self.slowness).astype(np.int64)

    @property
    def ranks(self) -> int:
        ranks: int = self.load.shape[1]
        return ranks

    @property
    def slots(self) -> Integers:
        """Slot of every placed document: micro-batch · N + first rank (an array [documents])."""
        return self.micro_batch * self.ranks + self.first_rank

    def with_slots(self, slots: Integers) -> Assignment:
        """Returns the assignment of all documents to these slots."""
        micro_batch, first_rank = np.divmod(slots, self.ranks)
        return Assignment.alternating(micro_batch, first_rank, self.degree)

    @cached_property
    def bare(self) -> tuple[Integers, Integers]:
        """Nanoseconds and free tokens of every slot, counting rings only (arrays [slots])."""
        early = np.flatnonzero(self.placed & (self.degree == 1))
        slots = self.slots[early]
        time = np.bincount(slots, self.time[early], self.load.size).astype(np.int64)
        tokens = np.bincount(slots, self.tokens[early], self.load.size).astype(np.int64)
        return self.load.ravel() - time, self.free.ravel() + tokens


def place_rings(
    given: PlanningInput, degrees: Degrees, micro_batches: int, stop: int | None = None
) -> PlacedRings | None:
    """Places rings and large documents, the longest first, in micro-batches before `stop` (all if
    not given), each on the ranks that finish first.

    A document without room there goes to any other micro-batch; returns None if it fits nowhere.
    Example: in one micro-batch of 4 ranks, documents of 30 ns on 2 ranks, 20 ns on 2 and 10 ns on 1
    go to ranks 0 and 1, ranks 2 and 3, and rank 2, then the least loaded.
    """
    load = np.zeros((micro_batches, given.slots), dtype=np.int64)
    free = np.full_like(load, given.tokens_per_rank)
    time = degrees.time.copy()
    micro_batch = np.zeros_like(given.lengths)
    first_rank = np.zeros_like(given.lengths)
    placed = _placed_first(degrees, slots=load.size)
    early = np.flatnonzero(placed)
    early = early[np.argsort(-given.lengths[early], kind="stable")]
    rows = range(micro_batches if stop is None else stop)
    lost = _lost_ns(degrees.work // load.size, given.slowness)
    times = _times_by_first_rank(given, degrees, early)
    for document, by_first_rank in zip(early.tolist(), times, strict=True):
        degree = int(degrees.degree[document])
        tokens = int(degrees.tokens[document])
        ring = _Ring(degree, tokens, by_first_rank)
        busy = load + lost
        run = ring.best_run(busy, free, rows) or ring.best_run(busy, free, range(micro_batches))
        if run is None:
            return None
        row, first = run
        micro_batch[document], first_rank[document] = run
        time[document] = by_first_rank[first]
        load[row, first : first + degree] += time[document]
        free[row, first : first + degree] -= tokens
    return with_targets(
        Degrees(degrees.degree, time, degrees.tokens),
        placed=placed,
        micro_batch=micro_batch,
        first_rank=first_rank,
        load=load,
        free=free,
        slowness=given.slowness,
    )


def place_side_by_side(
    given: PlanningInput,
    degrees: Degrees,
    micro_batches: int,
    *,
    documents: Integers,
    numbers: Integers,
) -> PlacedRings | None:
    """Places rings and large documents in their micro-batches, side by side in the order of
    `documents`; returns None if the tokens of the others do not fit.

    `documents`, of which there are no more in a micro-batch than fit side by side, go to the
    micro-batches `numbers` [documents].
    """
    load = np.zeros((micro_batches, given.slots), dtype=np.int64)
    placed = np.zeros(len(given.lengths), dtype=bool)
    placed[documents] = _placed_first(degrees, slots=load.size)[documents]
    is_placed = placed[documents]
    early = documents[is_placed]
    number = numbers[is_placed]
    order = np.argsort(number, kind="stable")
    early = early[order]
    number = number[order]
    width = degrees.degree[early]
    before = np.cumsum(width) - width
    first_of_number = np.searchsorted(number, np.arange(micro_batches))
    first = before - before[first_of_number[number]]
    time = degrees.time.copy()
    time[early] = given.alone_ns(early, width, first_slot=first)
    runs = Runs(row=number, start=first, stop=first + width, shape=load.shape)
    load = runs.spread(time[early])
    free = given.tokens_per_rank - runs.spread(degrees.tokens[early])
    micro_batch, first_rank = np.zeros((2, len(given.lengths)), dtype=np.int64)
    micro_batch[early] = number
    first_rank[early] = first
    return with_targets(
        Degrees(degrees.degree, time, degrees.tokens),
        placed=placed,
        micro_batch=micro_batch,
        first_rank=first_rank,
        load=load,
        free=free,
        slowness=given.slowness,
    )


def _placed_first(degrees: Degrees, slots: int) -> NDArray[np.bool_]:
    """Returns a mask of rings, and of documents that take more than half the mean time of a
    slot."""
    result: NDArray[np.bool_] = (degrees.degree > 1) | (degrees.time > degrees.work // slots // 2)
    return result


def with_targets(
    degrees: Degrees,
    *,
    placed: NDArray[np.bool_],
    micro_batch: Integers,
    first_rank: Integers,
    load: Integers,
    free: Integers,
    slowness: Floats,
) -> PlacedRings | None:
    """Returns a placement with the targets of its micro-batches; None if the tokens of documents
    that are not placed do not fit."""
    work = int(degrees.time[~placed].sum())
    tokens = int(degrees.tokens[~placed].sum())
    target = _water_filled(load, free, work=work, tokens=tokens)
    if target is None:
        return None
    if (slowness > 1).any():
        lost = _lost_ns(target[:, None], slowness)
        target = _water_filled(load + lost, free, work=work, tokens=tokens)
        assert target is not None  # the same tokens fit
    return PlacedRings(
        degree=degrees.degree,
        time=degrees.time,
        tokens=degrees.tokens,
        placed=placed,
        micro_batch=micro_batch,
        first_rank=first_rank,
        load=load,
        free=free,
        slowness=slowness,
        target=target,
    )


def _lost_ns(time: Integers | int, slowness: Floats) -> Integers:
    """Returns the work of a usual slot that each slot cannot do in this time."""
    return np.ceil(time * (1 - 1 / slowness)).astype(np.int64)


def _times_by_first_rank(given: PlanningInput, degrees: Degrees, documents: Integers) -> Integers:
    """Returns the nanoseconds of documents by the first rank of their ring [documents, ranks],
    equal on every node."""
    node = given.profile.ranks_per_node
    repeat = min(node // math.gcd(node, given.block), given.slots)
    degree = degrees.degree[documents]
    times = given.alone_ns(documents[:, None], degree[:, None], first_slot=np.arange(repeat))
    return times[:, np.arange(given.slots) % repeat]


class _Ring(NamedTuple):
    """A ring to be placed; `time` [ranks] is its time by first rank: crossing a node boundary moves
    exchange to the slow network."""

    degree: int
    tokens: int
    time: Integers

    def best_run(self, load: Integers, free: Integers, rows: range) -> tuple[int, int] | None:
        """Returns micro-batch, one of `rows`, and first rank of the ranks that finish first with
        one more ring; None if tokens do not fit."""
        load = load[rows.start : rows.stop]
        free = free[rows.start : rows.stop]
        done = sliding_max(np.where(free >= self.tokens, load, FULL), self.degree)
        done = done + self.time[: done.shape[1]]
        row, first_rank = divmod(int(done.argmin()), done.shape[1])
        if done[row, first_rank] >= FULL:
            return None
        return rows.start + row, first_rank


def sliding_max(values: Integers, width: int) -> Integers:
    """Returns the maximum over every run of `width` columns."""
    result = values
    covered = 1
    while covered < width:
        step = min(covered, width - covered)
        result = np.maximum(result[:, : result.shape[1] - step], result[:, step:])
        covered += step
    return result


def _water_filled(load: Integers, free: Integers, *, work: int, tokens: int) -> Integers | None:
    """Returns the targets with the smallest sum that take `work` more nanoseconds and `tokens`;
    None if tokens do not fit.

    Water filling: a rank takes work up to its micro-batch's target or until its tokens are used up,
    at the mean time per token. Raising a target adds work to every rank with free tokens, so the
    micro-batch with the most such ranks is raised first. Example: with tokens to spare, loads of 4
    and 2 in one micro-batch and of 3 and 1 in another take 6 more at targets 5 and 3.
    """
    if tokens > int(free.sum()):
        return None
    lowest = load.max(axis=1)
    full = load + np.floor(free * (work / max(1, tokens))).astype(np.int64)
    missing = work - int((np.minimum(full, lowest[:, None]) - load).sum())
    # A target rises from level to level; at each level one more rank is full and rises no further.
    level = np.sort(np.maximum(full, lowest[:, None]), axis=1)
    rise = np.diff(level, axis=1, prepend=lowest[:, None]).ravel()
    micro_batches, ranks = load.shape
    micro_batch = np.repeat(np.arange(micro_batches), ranks)
    ranks_that_rise = np.tile(np.arange(ranks, 0, -1), micro_batches)
    order = np.lexsort((micro_batch, -ranks_that_rise))
    micro_batch = micro_batch[order]
    rise = rise[order]
    ranks_that_rise = ranks_that_rise[order]
    poured = np.cumsum(rise * ranks_that_rise) - rise * ranks_that_rise  # before each rise
    risen = np.clip(-(-(missing - poured) // ranks_that_rise), 0, rise)
    target: Integers = lowest + np.bincount(micro_batch, risen, micro_batches).astype(np.int64)
    return target


def fillings(rings: PlacedRings) -> Iterator[Assignment]:
    """Yields assignments with the documents that are not placed yet, by each rule that finds room
    for their tokens."""
    rest = _longest_first(rings, np.flatnonzero(~rings.placed))
    for rule in RULES:
        chosen = _slots_for(rings, rest, rule)
        if chosen is None:
            continue
        slots = rings.slots
        slots[rest] = chosen
        yield rings.with_slots(slots)


def fill(rings: PlacedRings) -> Assignment | None:
    """Returns the first of `fillings`; None if tokens do not fit."""
    return next(fillings(rings), None)


def place(
    rings: PlacedRings, documents: Integers, rounds: int, rule: Rule = neediest_first
) -> PlacedRings | None:
    """Returns the placement with these documents, each in one slot by a rule and then balanced for
    at most `rounds` rounds; None if their tokens do not fit."""
    order = _longest_first(rings, documents)
    chosen = _slots_for(rings, order, rule)
    if chosen is None:
        return None
    time = rings.time[order]
    tokens = rings.tokens[order]
    room = rings.most_load - rings.load
    slots = balance(
        chosen,
        time,
        tokens,
        room=room.ravel(),
        free=rings.free.ravel(),
        ranks=rings.ranks,
        rounds=rounds,
    )
    placed = rings.placed.copy()
    placed[order] = True
    micro_batch = rings.micro_batch.copy()
    first_rank = rings.first_rank.copy()
    micro_batch[order], first_rank[order] = np.divmod(slots, rings.ranks)
    added_ns = np.bincount(slots, time, rings.load.size).astype(np.int64)
    added_tokens = np.bincount(slots, tokens, rings.load.size).astype(np.int64)
    return replace(
        rings,
        placed=placed,
        micro_batch=micro_batch,
        first_rank=first_rank,
        load=rings.load + added_ns.reshape(rings.load.shape),
        free=rings.free - added_tokens.reshape(rings.load.shape),
    )


def _longest_first(rings: PlacedRings, documents: Integers) -> Integers:
    """Returns the documents in descending order of their time in a slot."""
    return documents[np.argsort(-rings.time[documents], kind="stable")]


def _slots_for(rings: PlacedRings, documents: Integers, rule: Rule) -> Integers | None:
    """Returns slots for the documents, in order, by a rule; None if their tokens do not fit."""
    left = rings.most_load - rings.load
    return rule(left, rings.free, rings.time[documents], rings.tokens[documents])


def even_out(rings: PlacedRings, plan: Assignment, rounds: int) -> Assignment:
    """Moves and swaps documents of degree 1 until all targets are met, for at most `rounds`
    rounds."""
    singles = np.flatnonzero(rings.degree == 1)
    slots = plan.micro_batch * rings.ranks + plan.first_rank
    load, free = rings.bare
    slots[singles] = balance(
        slots[singles],
        rings.time[singles],
        rings.tokens[singles],
        room=rings.most_load.ravel() - load,
        free=free,
        ranks=rings.ranks,
        rounds=rounds,
    )
    return rings.with_slots(slots)

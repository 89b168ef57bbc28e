"""Packing: places documents of known degree into K micro-batches of N ranks.

1. Rings and documents that take more than half a micro-batch: longest first, each on the least
   loaded run of ranks.
2. Targets: the time of each micro-batch once it takes the remaining documents, poured in as water
   is, within the token budget.
3. Remaining documents: longest first, each on the rank with the most room below its micro-batch's
   target (list scheduling, Graham 1969).

The sum of the targets estimates the makespan without step 3, so many placements of rings are
compared and few are filled.
"""

import heapq
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from longctx.planning.assignment import NEVER, Assignment, Integers
from longctx.planning.planners.local_search import balance
from longctx.planning.planners.step import Degrees, Step

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
        micro_batch, first_rank: places of these documents (arrays [documents]).
        load, free: their nanoseconds and the free tokens on every rank (arrays [micro-batches,
            ranks]).
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
    target: Integers

    @property
    def estimate_ns(self) -> int:
        return int(self.target.sum())

    @cached_property
    def bare(self) -> tuple[Integers, Integers]:
        """Nanoseconds and free tokens of every slot, counting rings only (arrays [slots])."""
        early = np.flatnonzero(self.placed & (self.degree == 1))
        slots, cells = (
            self.micro_batch[early] * self.load.shape[1] + self.first_rank[early],
            self.load.size,
        )
        time = np.bincount(slots, self.time[early], cells).astype(np.int64)
        tokens = np.bincount(slots, self.tokens[early], cells).astype(np.int64)
        return self.load.ravel() - time, self.free.ravel() + tokens


def place_rings(
    step: Step,
    degrees: Degrees,
    micro_batches: int,
    start: Integers | int,
    stop: Integers | int,
    *,
    dense: bool = False,
) -> PlacedRings | None:
    """Places rings and large documents in micro-batches `start` to `stop` - 1, which may differ per
    document.

    A document without room there goes to any other micro-batch; returns None if it fits nowhere.
    `dense` places rings side by side even where they cross node boundaries, instead of leaving
    gaps. Example: in one micro-batch of 4 ranks, documents of 30 ns on 2 ranks, 20 ns on 2 and 10
    ns on 1 go to ranks 0 and 1, ranks 2 and 3, and rank 2, then the least loaded.
    """
    load = np.zeros((micro_batches, step.places), dtype=np.int64)
    free = np.full_like(load, step.tokens_per_rank)
    time, micro_batch, first_rank = (
        degrees.time.copy(),
        np.zeros_like(step.lengths),
        np.zeros_like(step.lengths),
    )
    placed = (degrees.degree > 1) | (time > degrees.work // load.size // 2)
    early = np.flatnonzero(placed)
    early = early[np.argsort(-step.lengths[early], kind="stable")]
    starts, stops = (np.broadcast_to(limit, step.lengths.shape) for limit in (start, stop))
    times = _times_by_first_rank(step, degrees, early)
    for document, by_first_rank in zip(early.tolist(), times, strict=True):
        degree, shard = int(degrees.degree[document]), int(degrees.tokens[document])
        extra = np.zeros_like(by_first_rank) if dense else by_first_rank
        run = _best_run(
            load, free, int(starts[document]), int(stops[document]), degree, shard, extra
        )
        run = run or _best_run(load, free, 0, micro_batches, degree, shard, extra)
        if run is None:
            return None
        row, first = micro_batch[document], first_rank[document] = run
        time[document] = by_first_rank[first]
        load[row, first : first + degree] += time[document]
        free[row, first : first + degree] -= shard
    target = _water_filled(load, free, int(time[~placed].sum()), int(degrees.tokens[~placed].sum()))
    if target is None:
        return None
    return PlacedRings(
        degrees.degree, time, degrees.tokens, placed, micro_batch, first_rank, load, free, target
    )


def _times_by_first_rank(step: Step, degrees: Degrees, documents: Integers) -> Integers:
    """Returns the nanoseconds of documents by the first rank of their ring [documents, ranks],
    equal on every node."""
    node = step.profile.ranks_per_node
    repeat = min(node // math.gcd(node, step.block), step.places)
    times = step.alone_ns(documents[:, None], degrees.degree[documents][:, None], np.arange(repeat))
    return times[:, np.arange(step.places) % repeat]


def _best_run(
    load: Integers, free: Integers, start: int, stop: int, degree: int, tokens: int, time: Integers
) -> tuple[int, int] | None:
    """Returns micro-batch and first rank of the `degree` ranks that finish first with one more
    ring; None if tokens do not fit.

    `time` [ranks] is the ring's time by first rank: crossing a node boundary moves exchange to the
    slow network.
    """
    done = _sliding_max(np.where(free[start:stop] >= tokens, load[start:stop], FULL), degree)
    done = done + time[: done.shape[1]]
    row, first_rank = divmod(int(done.argmin()), done.shape[1])
    return (start + row, first_rank) if done[row, first_rank] < FULL else None


def _sliding_max(values: Integers, width: int) -> Integers:
    """Returns the maximum over every run of `width` columns."""
    result, covered = values, 1
    while covered < width:
        step = min(covered, width - covered)
        result = np.maximum(result[:, : result.shape[1] - step], result[:, step:])
        covered += step
    return result


def _water_filled(load: Integers, free: Integers, work: int, tokens: int) -> Integers | None:
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
    micro_batch, ranks_that_rise = (
        np.repeat(np.arange(micro_batches), ranks),
        np.tile(np.arange(ranks, 0, -1), micro_batches),
    )
    order = np.lexsort((micro_batch, -ranks_that_rise))
    micro_batch, rise, ranks_that_rise = micro_batch[order], rise[order], ranks_that_rise[order]
    poured = np.cumsum(rise * ranks_that_rise) - rise * ranks_that_rise  # before each rise
    risen = np.clip(-(-(missing - poured) // ranks_that_rise), 0, rise)
    target: Integers = lowest + np.bincount(micro_batch, risen, micro_batches).astype(np.int64)
    return target


def fill(rings: PlacedRings) -> Assignment | None:
    """Adds the documents that are not placed yet; returns None if their tokens do not fit."""
    rest, ranks = np.flatnonzero(~rings.placed), rings.load.shape[1]
    rest = rest[np.argsort(-rings.time[rest], kind="stable")]
    chosen = emptiest_first(
        rings.load - rings.target[:, None], rings.free, rings.time[rest], rings.tokens[rest]
    )
    if chosen is None:
        return None
    slots = rings.micro_batch * ranks + rings.first_rank
    slots[rest] = chosen
    return _with_slots(rings, slots, ranks)


def even_out(rings: PlacedRings, plan: Assignment, rounds: int) -> Assignment:
    """Moves and swaps documents of degree 1 until all targets are met, for at most `rounds`
    rounds."""
    ranks = rings.load.shape[1]
    singles = np.flatnonzero(rings.degree == 1)
    slots = plan.micro_batch * ranks + plan.first_rank
    load, free = rings.bare
    room = np.repeat(rings.target, ranks) - load
    slots[singles] = balance(
        slots[singles], rings.time[singles], rings.tokens[singles], room, free, ranks, rounds
    )
    return _with_slots(rings, slots, ranks)


def _with_slots(rings: PlacedRings, slots: Integers, ranks: int) -> Assignment:
    """Builds the assignment from slots: slot = micro-batch · N + rank."""
    return Assignment.alternating(*np.divmod(slots, ranks), rings.degree)


def emptiest_first(
    load: Integers, free: Integers, time: Integers, tokens: Integers
) -> Integers | None:
    """Returns slots for documents of these times and tokens, in order: each gets the least loaded
    slot with enough free tokens.

    Slots without enough tokens wait until shorter documents fit them again; returns None if a
    document fits nowhere.
    """
    count, room = load.size, free.ravel().tolist()
    # Compare faster than pairs.
    ready = [value * count + slot for slot, value in enumerate(load.ravel().tolist())]
    heapq.heapify(ready)
    waiting: list[tuple[int, int]] = []  # (-free tokens, entry of `ready`)
    slots = []
    for cost, need in zip(time.tolist(), tokens.tolist(), strict=True):
        while waiting and -waiting[0][0] >= need:
            heapq.heappush(ready, heapq.heappop(waiting)[1])
        while ready and room[ready[0] % count] < need:
            entry = heapq.heappop(ready)
            heapq.heappush(waiting, (-room[entry % count], entry))
        if not ready:
            return None
        slot = ready[0] % count
        room[slot] -= need
        heapq.heapreplace(ready, ready[0] + cost * count)
        slots.append(slot)
    return np.array(slots, dtype=np.int64)

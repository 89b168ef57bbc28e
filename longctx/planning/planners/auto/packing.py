"""Packing: puts documents whose degrees are known into K micro-batches of N ranks.

Three steps. Rings first, and with them whatever takes more than half a micro-batch: longest document first, each on the run of
ranks that is least loaded so far. Then targets: how long each micro-batch must become to take the rest, as if this were a
fluid, within the token budget. Then the rest, longest first, each on the rank with most room under its micro-batch's target
(list scheduling, Graham 1969). The sum of the targets estimates the makespan before the last step: many layouts are compared,
and few are filled.
"""

import heapq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from longctx.planning.assignment import NEVER, Assignment, Integers, spread
from longctx.planning.cost.model import alone_ns
from longctx.planning.planners.auto.local_search import balance
from longctx.planning.planners.step import Degrees, Step

FULL = NEVER // 2
"""Load of a rank without the tokens for a document: more than any time, and another one can be added to it."""


@dataclass(frozen=True)
class Rings:
    """A layout of the rings and of other large documents, before the rest is placed.

    Attributes:
        degree, time, tokens: of every document: ranks, nanoseconds and most tokens on each of them (arrays [documents]).
        placed: which documents have their place already; the others are of degree 1.
        micro_batch, first_rank: where these stand.
        load, free: nanoseconds of them and free tokens on every rank (arrays [micro-batches, ranks]).
        target: nanoseconds of every micro-batch once the rest is in, as a fluid.
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

    @classmethod
    def in_one(cls, step: Step, split: Degrees, first_rank: Integers) -> "Rings":
        """All documents in one micro-batch, on ranks from these on."""
        stop, row = first_rank + split.degree, np.zeros_like(first_rank)
        load = spread(split.time, row, first_rank, stop, (1, step.ranks))
        free = step.tokens_per_rank - spread(split.tokens, row, first_rank, stop, (1, step.ranks))
        placed = np.ones(len(row), dtype=bool)
        return cls(split.degree, split.time, split.tokens, placed, row, first_rank, load, free, load.max(axis=1))

    @property
    def estimate_ns(self) -> int:
        return int(self.target.sum())

    @cached_property
    def bare(self) -> tuple[Integers, Integers]:
        """Nanoseconds and free tokens of every slot with nothing but rings in it (arrays [slots])."""
        early = np.flatnonzero(self.placed & (self.degree == 1))
        slots, cells = self.micro_batch[early] * self.load.shape[1] + self.first_rank[early], self.load.size
        time = np.bincount(slots, self.time[early], cells).astype(np.int64)
        tokens = np.bincount(slots, self.tokens[early], cells).astype(np.int64)
        return self.load.ravel() - time, self.free.ravel() + tokens


def place_rings(
    step: Step, split: Degrees, micro_batches: int, start: Integers | int, stop: Integers | int, *, dense: bool = False
) -> Rings | None:
    """Places rings and large documents on micro-batches `start` to `stop` - 1, which may differ by document.

    Where tokens do not fit there, a document stands on any; None if they fit nowhere. `dense` places rings side by side where
    they would else leave gaps so as not to cross the edges of nodes. In one micro-batch of 4 ranks, documents of 30 ns on 2
    ranks, 20 ns on 2 and 10 ns on 1 stand on ranks 0 and 1, on 2 and 3, and on 2, by then the least loaded.
    """
    load = np.zeros((micro_batches, step.ranks), dtype=np.int64)
    free = np.full_like(load, step.tokens_per_rank)
    time, micro_batch, first_rank = split.time.copy(), np.zeros_like(step.lengths), np.zeros_like(step.lengths)
    placed = (split.degree > 1) | (time > split.work // load.size // 2)
    early = np.flatnonzero(placed)
    early = early[np.argsort(-step.lengths[early], kind="stable")]
    starts, stops = (np.broadcast_to(limit, step.lengths.shape) for limit in (start, stop))
    for document, by_first_rank in zip(early.tolist(), _times_by_first_rank(step, split, early), strict=True):
        degree, shard = int(split.degree[document]), int(split.tokens[document])
        extra = np.zeros_like(by_first_rank) if dense else by_first_rank
        run = _best_run(load, free, int(starts[document]), int(stops[document]), degree, shard, extra)
        run = run or _best_run(load, free, 0, micro_batches, degree, shard, extra)
        if run is None:
            return None
        row, first = micro_batch[document], first_rank[document] = run
        time[document] = by_first_rank[first]
        load[row, first : first + degree] += time[document]
        free[row, first : first + degree] -= shard
    target = _fluid_targets(load, free, int(time[~placed].sum()), int(split.tokens[~placed].sum()))
    if target is None:
        return None
    return Rings(split.degree, time, split.tokens, placed, micro_batch, first_rank, load, free, target)


def _times_by_first_rank(step: Step, split: Degrees, documents: Integers) -> Integers:
    """Nanoseconds of these documents by the first rank of their ring [documents, ranks], which repeats from node to node."""
    offsets = np.arange(min(step.profile.ranks_per_node, step.ranks))
    times = alone_ns(step.profile, step.lengths[documents][:, None], split.degree[documents][:, None], offsets)
    return times[:, np.arange(step.ranks) % len(offsets)]


def _best_run(
    load: Integers, free: Integers, start: int, stop: int, degree: int, tokens: int, time: Integers
) -> tuple[int, int] | None:
    """Micro-batch and first rank of the run of `degree` ranks that is done first with one more ring, if tokens fit anywhere.

    `time` [ranks] is that of the ring by its first rank: crossing the edge of a node moves exchange to the slow network.
    """
    done = _sliding_max(np.where(free[start:stop] >= tokens, load[start:stop], FULL), degree)
    done = done + time[: done.shape[1]]
    row, first_rank = divmod(int(done.argmin()), done.shape[1])
    return (start + row, first_rank) if done[row, first_rank] < FULL else None


def _sliding_max(values: Integers, width: int) -> Integers:
    """Maximum over every run of `width` columns, by doubling."""
    result, covered = values, 1
    while covered < width:
        step = min(covered, width - covered)
        result = np.maximum(result[:, : result.shape[1] - step], result[:, step:])
        covered += step
    return result


def _fluid_targets(load: Integers, free: Integers, work: int, tokens: int) -> Integers | None:
    """The targets with the smallest sum that take `work` more nanoseconds, holding `tokens`; None if tokens do not fit.

    A rank takes work up to the target of its micro-batch or until its tokens are used up, at the mean time per token. Raising a
    target fills as many ranks as have tokens left, so that of the micro-batch where most have is raised first. With tokens to
    spare, loads of 4 and 2 in one micro-batch and of 3 and 1 in another take 6 more at targets 5 and 3.
    """
    if tokens > int(free.sum()):
        return None
    start = load.max(axis=1)
    full = load + np.floor(free * (work / max(1, tokens))).astype(np.int64)
    missing = work - int((np.minimum(full, start[:, None]) - load).sum())
    steps = np.sort(np.maximum(full, start[:, None]), axis=1)
    width = np.diff(steps, axis=1, prepend=start[:, None])
    slope = np.broadcast_to(np.arange(load.shape[1], 0, -1), width.shape)
    order = np.lexsort((np.broadcast_to(np.arange(len(load))[:, None], width.shape).ravel(), -slope.ravel()))
    taken = (width * slope).ravel()[order]
    before = np.cumsum(taken) - taken
    use = np.clip(-(-(missing - before) // slope.ravel()[order]), 0, width.ravel()[order])
    target: Integers = start + np.bincount(order // load.shape[1], use, len(load)).astype(np.int64)
    return target


def fill(rings: Rings) -> Assignment | None:
    """Adds the documents that are not placed yet; None if their tokens do not fit this way."""
    rest, ranks = np.flatnonzero(~rings.placed), rings.load.shape[1]
    slots = _most_room_first(rings, rest[np.argsort(-rings.time[rest], kind="stable")])
    if slots is None:
        return None
    return _with_slots(rings, np.where(rings.placed, rings.micro_batch * ranks + rings.first_rank, slots), ranks)


def even_out(rings: Rings, plan: Assignment, rounds: int) -> Assignment:
    """Moves and swaps documents of degree 1 until all targets are kept, or for that many rounds."""
    ranks = rings.load.shape[1]
    singles = np.flatnonzero(rings.degree == 1)
    slots = plan.micro_batch * ranks + plan.first_rank
    load, free = rings.bare
    room = np.repeat(rings.target, ranks) - load
    slots[singles] = balance(slots[singles], rings.time[singles], rings.tokens[singles], room, free, ranks, rounds)
    return _with_slots(rings, slots, ranks)


def _with_slots(rings: Rings, slots: Integers, ranks: int) -> Assignment:
    """A slot is a rank in a micro-batch: micro-batch · N + rank."""
    return Assignment.alternating(*np.divmod(slots, ranks), rings.degree)


def _most_room_first(rings: Rings, documents: Integers) -> Integers | None:
    """Slots of these documents, taken in this order: each goes to the one with most room whose free tokens hold it.

    A slot without tokens for the document at hand waits aside until the documents, ever shorter, fit it again.
    """
    excess = (rings.load - rings.target[:, None]).ravel().tolist()  # negative room: heaps give the smallest
    free = rings.free.ravel().tolist()
    ready = [(value, slot) for slot, value in enumerate(excess)]
    heapq.heapify(ready)
    waiting: list[tuple[int, int]] = []  # (-free tokens, slot)
    slots = np.zeros(len(rings.time), dtype=np.int64)
    todo = zip(documents.tolist(), rings.time[documents].tolist(), rings.tokens[documents].tolist(), strict=True)
    for document, cost, need in todo:
        while waiting and -waiting[0][0] >= need:
            slot = heapq.heappop(waiting)[1]
            heapq.heappush(ready, (excess[slot], slot))
        while ready and free[ready[0][1]] < need:
            slot = heapq.heappop(ready)[1]
            heapq.heappush(waiting, (-free[slot], slot))
        if not ready:
            return None
        slot = ready[0][1]
        excess[slot] += cost
        free[slot] -= need
        heapq.heapreplace(ready, (excess[slot], slot))
        slots[document] = slot
    return slots

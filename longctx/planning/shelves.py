"""Shelves: packs documents whose degrees are known into K micro-batches, each a shelf of N ranks.

Rings first, longest document first, each on the shelf and the run of ranks that leave most room under the shelf's height; then
documents of degree 1, longest first, each on the rank with most room, of whatever shelf, within the token budget (list
scheduling, Graham 1969). All shelves aim at the same height, work / (N·K), unless a ring makes one taller.
"""

import heapq

import numpy as np

from longctx.planning.assignment import Assignment, Integers, largest_shards
from longctx.planning.balance import balance
from longctx.planning.cost import alone_ns
from longctx.planning.profile import HardwareProfile


class Shelves:
    """Loads and tokens of every rank of every micro-batch while documents are being placed (arrays [micro-batches, ranks])."""

    def __init__(self, micro_batches: int, ranks: int, tokens_per_rank: int, height: int, node: int) -> None:
        self.load = np.zeros((micro_batches, ranks), dtype=np.int64)
        self.free = np.full((micro_batches, ranks), tokens_per_rank, dtype=np.int64)
        self.height = np.full(micro_batches, height, dtype=np.int64)
        self.node = node

    def best_run(self, degree: int, tokens: int) -> tuple[int, int] | None:
        """Shelf and first rank of the run of `degree` ranks with most room under its shelf's height, if tokens fit anywhere.

        A ring no larger than a node stays inside one where it can: crossing the edge moves its exchange to the slow network.
        """
        room = _sliding_min(self.height[:, None] - self.load, degree)
        fits = _sliding_min(self.free, degree) >= tokens
        if not fits.any():
            return None
        if degree <= self.node:
            first = np.arange(room.shape[1])
            inside = fits & (first // self.node == (first + degree - 1) // self.node)
            fits = inside if inside.any() else fits
        shelf, first_rank = divmod(int(np.where(fits, room, np.iinfo(np.int64).min).argmax()), room.shape[1])
        return shelf, first_rank

    def put(self, shelf: int, first_rank: int, degree: int, tokens: int, time: int) -> None:
        run = slice(first_rank, first_rank + degree)
        self.load[shelf, run] += time
        self.free[shelf, run] -= tokens
        self.height[shelf] = max(int(self.height[shelf]), int(self.load[shelf, run].max()))


def _sliding_min(values: Integers, width: int) -> Integers:
    """Minimum over every run of `width` columns, by doubling."""
    result, covered = values, 1
    while covered < width:
        step = min(covered, width - covered)
        result = np.minimum(result[:, : result.shape[1] - step], result[:, step:])
        covered += step
    return result


def pack(
    profile: HardwareProfile, lengths: Integers, degrees: Integers, ranks: int, tokens_per_rank: int, micro_batches: int
) -> Assignment | None:
    """Packs every document at its degree into that many micro-batches; None if tokens do not fit this way."""
    time = alone_ns(profile, lengths, degrees)
    tokens = largest_shards(lengths, degrees)
    height = int((time * degrees).sum()) // (ranks * micro_batches)
    shelves = Shelves(micro_batches, ranks, tokens_per_rank, height, profile.ranks_per_node)
    longest_first = np.argsort(-lengths, kind="stable")
    shelf, first_rank = np.zeros_like(lengths), np.zeros_like(lengths)
    for document in longest_first[degrees[longest_first] > 1].tolist():
        degree, shard = int(degrees[document]), int(tokens[document])
        run = shelves.best_run(degree, shard)
        if run is None:
            return None
        shelves.put(*run, degree, shard, int(time[document]))
        shelf[document], first_rank[document] = run
    singles = longest_first[degrees[longest_first] == 1]
    slots = _emptiest_rank_first(singles, time, tokens, shelves)
    if slots is None:
        return None
    room = (shelves.height[:, None] - shelves.load).ravel()
    slots = balance(slots, time[singles], tokens[singles], room, shelves.free.ravel())
    shelf[singles], first_rank[singles] = np.divmod(slots, ranks)
    return Assignment(shelf, first_rank, degrees, np.zeros(len(lengths), dtype=bool))


def _emptiest_rank_first(documents: Integers, time: Integers, tokens: Integers, shelves: Shelves) -> Integers | None:
    """Documents in the given order, each to the (shelf, rank) slot with most room whose free tokens hold it.

    A slot without tokens for the document at hand waits aside until the documents, ever shorter, fit it again.
    """
    room = (shelves.load - shelves.height[:, None]).ravel().tolist()  # negative room: heaps give the smallest
    free = shelves.free.ravel().tolist()
    ready = [(value, slot) for slot, value in enumerate(room)]
    heapq.heapify(ready)
    waiting: list[tuple[int, int]] = []  # (-free tokens, slot)
    slots = np.zeros(len(documents), dtype=np.int64)
    for i, (cost, need) in enumerate(zip(time[documents].tolist(), tokens[documents].tolist(), strict=True)):
        while waiting and -waiting[0][0] >= need:
            slot = heapq.heappop(waiting)[1]
            heapq.heappush(ready, (room[slot], slot))
        while ready and free[ready[0][1]] < need:
            slot = heapq.heappop(ready)[1]
            heapq.heappush(waiting, (-free[slot], slot))
        if not ready:
            return None
        slot = ready[0][1]
        room[slot] += cost
        free[slot] -= need
        heapq.heapreplace(ready, (room[slot], slot))
        slots[i] = slot
    return slots

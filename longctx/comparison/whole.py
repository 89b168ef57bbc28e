"""Whole documents on ranks: packed into rows as TRL packs, padded to the longest of a batch, or
balanced over ranks.

Trainers without context parallelism place them so: a rank computes the documents of its rows and
splits none. All times are those of the cost model for documents of degree 1. Rows are dealt to
ranks as accelerate deals the batches of a sampler: one after the other, to each rank in turn.
"""

import bisect
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longctx.planning.assignment import NEVER, Assignment, Integers
from longctx.planning.cost.bounds import fewest_micro_batches
from longctx.planning.cost.model import alone_ns, score
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.plan import PlanError
from longctx.planning.planners.list_scheduling import emptiest_first

MAP_BATCH = 1000
"""Documents that TRL packs together: a batch of `datasets.map`."""
MOST_OF_LONGEST = 2
"""Micro-batches of the longest documents that balancing tries."""


@dataclass(frozen=True)
class StepShape:
    """Rows of an optimizer step: of every rank in every micro-batch.

    Attributes:
        micro_batches: `gradient_accumulation_steps`.
        rows_per_rank: `per_device_train_batch_size`.
    """

    micro_batches: int
    ranks: int
    rows_per_rank: int

    @property
    def rows(self) -> int:
        return self.micro_batches * self.ranks * self.rows_per_rank

    @classmethod
    def nearest(
        cls, tokens: int, tokens_of_row: float, ranks: int, rows_per_rank: int
    ) -> "StepShape":
        """Returns the shape whose steps have as nearly as possible `tokens` tokens, if rows have
        `tokens_of_row` in the mean."""
        of_micro_batch = tokens_of_row * ranks * rows_per_rank
        micro_batches = max(1, round(tokens / of_micro_batch))
        return cls(micro_batches, ranks, rows_per_rank)


def pack_as_trl(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Returns the documents of every row, as TRL's `pack_dataset(.., strategy="bfd")` packs a data
    set of these lengths.

    A document of more than `row_tokens` tokens is cut there, and has a row of its own.
    """
    rows: list[list[int]] = []
    for first in range(0, len(lengths), MAP_BATCH):
        batch = [min(length, row_tokens) for length in lengths[first : first + MAP_BATCH]]
        for row in _best_fit_decreasing(batch, row_tokens):
            rows.append([first + document for document in row])
    return rows


def _best_fit_decreasing(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Packs the longest document first, each into the row with least space that holds it; of equal
    ones into the row that had that space first."""
    rows: list[list[int]] = []
    spaces: list[int] = []  # of rows with space, each once, ascending
    rows_with: dict[int, deque[int]] = {}
    longest_first = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    for document in longest_first:
        length = lengths[document]
        at = bisect.bisect_left(spaces, length)
        if at == len(spaces):
            row = len(rows)
            rows.append([])
            space = row_tokens
        else:
            space = spaces[at]
            row = rows_with[space].popleft()
            if not rows_with[space]:
                del spaces[at]
        rows[row].append(document)
        space -= length
        others = rows_with.setdefault(space, deque())
        if space and not others:
            bisect.insort(spaces, space)
        others.append(row)
    return rows


def row_ns(profile: HardwareProfile, lengths: Integers, rows: Sequence[Sequence[int]]) -> Integers:
    """Returns the time of every row on a rank, in nanoseconds [rows]; its documents have
    `lengths`."""
    row_of = np.empty(len(lengths), dtype=np.int64)
    for number, documents in enumerate(rows):
        row_of[list(documents)] = number
    one_micro_batch = np.zeros_like(row_of)
    whole = np.ones_like(row_of)
    forward = np.zeros(len(row_of), dtype=bool)
    each_on_a_rank = Assignment(
        micro_batch=one_micro_batch, first_rank=row_of, degree=whole, reversed=forward
    )
    result: Integers = score(profile, lengths, each_on_a_rank, len(rows)).time[0]
    return result


def padded_ns(profile: HardwareProfile, longest: Integers, documents: int) -> Integers:
    """Returns the time of rows of `documents` documents that are all padded to `longest` tokens, in
    nanoseconds; an array like `longest`."""
    flat = longest.ravel()
    of_document = alone_ns(profile, flat, np.ones_like(flat))
    result: Integers = documents * of_document.reshape(longest.shape)
    return result


def epochs(rows: int, fewest: int, seed: int) -> Integers:
    """Returns the rows in the order of a sampler that shuffles every epoch: whole epochs, with at
    least `fewest` rows in all."""
    random = np.random.default_rng(seed)
    count = math.ceil(fewest / rows)
    return np.concatenate([random.permutation(rows) for _ in range(count)])


def deal(order: Integers, shape: StepShape) -> Integers:
    """Returns the rows of every rank in every micro-batch of all whole steps: an array [steps,
    micro-batches, ranks, rows of a rank]. Rows that are no whole step are left out."""
    steps = len(order) // shape.rows
    dealt = order[: steps * shape.rows]
    return dealt.reshape(steps, shape.micro_batches, shape.ranks, shape.rows_per_rank)


def place_balanced(
    profile: HardwareProfile, lengths: Integers, ranks: int, tokens_per_rank: int
) -> Assignment:
    """Assigns every document to one rank, so that ranks have equal work by predicted time.

    Documents are spread over as few micro-batches as hold them, or the longest ones first fill one
    or more that take no longer than their longest document; whichever takes least time. Raises
    PlanError for a document that a rank does not hold.
    """
    longest = int(lengths.max())
    if longest > tokens_per_rank:
        raise PlanError(
            f"a document of {longest:,} tokens fits on no rank of {tokens_per_rank:,} tokens "
            "whole: raise tokens_per_rank, or split it, as mode auto does"
        )
    time = alone_ns(profile, lengths, np.ones_like(lengths))
    slot = np.full_like(lengths, -1)
    waiting = np.argsort(-time, kind="stable")
    found: list[Assignment] = []
    for first in range(MOST_OF_LONGEST + 1):
        if len(waiting):
            free_slots = first * ranks
            spread = _spread(
                time[waiting], lengths[waiting], ranks=ranks, tokens_per_rank=tokens_per_rank
            )
            complete = slot.copy()
            complete[waiting] = free_slots + spread
            found.append(_whole_in(complete, ranks))
            of_longest = _beside_longest(
                time[waiting], lengths[waiting], ranks=ranks, tokens_per_rank=tokens_per_rank
            )
            taken = of_longest >= 0
            slot[waiting[taken]] = free_slots + of_longest[taken]
            waiting = waiting[~taken]
    times = [score(profile, lengths, each, ranks).makespan_ns for each in found]
    return found[times.index(min(times))]


def _whole_in(slot: Integers, ranks: int) -> Assignment:
    """Returns the assignment of whole documents to slots: a slot is a rank in a micro-batch."""
    forward = np.zeros(len(slot), dtype=bool)
    whole = np.ones_like(slot)
    return Assignment(
        micro_batch=slot // ranks, first_rank=slot % ranks, degree=whole, reversed=forward
    )


def _spread(time: Integers, lengths: Integers, ranks: int, tokens_per_rank: int) -> Integers:
    """Returns slots in as few micro-batches as hold the documents, given longest first: each goes
    to the slot with the least work that holds it. Slots of similar work share a micro-batch."""
    micro_batches = fewest_micro_batches(lengths, ranks, tokens_per_rank)
    slots = None
    while slots is None:
        no_load = np.zeros(micro_batches * ranks, dtype=np.int64)
        slots = emptiest_first(
            load=no_load, free=no_load + tokens_per_rank, time=time, tokens=lengths
        )
        micro_batches += 1
    total = np.bincount(slots, time)
    turn = np.empty(len(total), dtype=np.int64)
    turn[np.argsort(-total, kind="stable")] = np.arange(len(total))
    result: Integers = turn[slots]
    return result


def _beside_longest(
    time: Integers, lengths: Integers, ranks: int, tokens_per_rank: int
) -> Integers:
    """Returns slots in one micro-batch that takes no longer than the first document, given longest
    first; -1 for documents that find no room there."""
    load = np.zeros(ranks, dtype=np.int64)
    free = np.full(ranks, tokens_per_rank, dtype=np.int64)
    slots = np.full_like(lengths, -1)
    limit = time[0]
    for document, (cost, tokens) in enumerate(zip(time, lengths, strict=True)):
        rank = int(np.where(free >= tokens, load, NEVER).argmin())
        if free[rank] < tokens or load[rank] + cost > limit:
            continue
        slots[document] = rank
        load[rank] += cost
        free[rank] -= tokens
    return slots

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

from longctx.planning.assignment import Assignment, Integers
from longctx.planning.cost.bounds import fewest_micro_batches
from longctx.planning.cost.model import alone_ns, score
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.plan import PlanError
from longctx.planning.planners.packing import emptiest_first

MAP_BATCH = 1000
"""Documents that TRL packs together: a batch of `datasets.map`."""


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
    each_on_a_rank = Assignment(one_micro_batch, row_of, whole, forward)
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

    The longest document comes first, each goes to the rank and micro-batch with the least work that
    holds it; those of similar work share a micro-batch. Raises PlanError for a document that a rank
    does not hold.
    """
    longest = int(lengths.max())
    if longest > tokens_per_rank:
        raise PlanError(
            f"a document of {longest:,} tokens fits on no rank of {tokens_per_rank:,} tokens "
            "whole: raise tokens_per_rank, or split it, as mode auto does"
        )
    whole = np.ones_like(lengths)
    time = alone_ns(profile, lengths, whole)
    order = np.argsort(-time, kind="stable")
    micro_batches = fewest_micro_batches(lengths, ranks, tokens_per_rank)
    slots = None
    while slots is None:
        no_load = np.zeros(micro_batches * ranks, dtype=np.int64)
        slots = emptiest_first(no_load, no_load + tokens_per_rank, time[order], lengths[order])
        micro_batches += 1
    slot = np.empty_like(lengths)
    slot[order] = slots
    total = np.bincount(slot, time)
    turn = np.empty(len(total), dtype=np.int64)
    turn[np.argsort(-total, kind="stable")] = np.arange(len(total))
    forward = np.zeros(len(lengths), dtype=bool)
    return Assignment(turn[slot] // ranks, turn[slot] % ranks, whole, forward)

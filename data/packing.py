"""Packing: the buffer that a rank holds in one micro-batch, read from the store by the plan's layout.

The buffer is the concatenation of [head; tail] of the rank's documents, in the order of the layout. Only these spans are read.
Labels are those of the whole document, shifted before it is cut, so that they do not depend on the plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from longctx.data.sampler import Piece
from longctx.data.store import IGNORED_LABEL, Store
from longctx.planning.layout import Layout
from longctx.planning.plan import Plan


@dataclass(frozen=True)
class MicroBatch:
    """What one rank holds in one micro-batch. T is `layout.tokens`, rounded up to the wanted multiple.

    Attributes:
        index: place in the plan.
        layout: who holds what, and which rows of the buffer are whose.
        tokens: int64 `[T]`; padding is 0.
        labels: int64 `[T]`; the next token of the same document, -100 where nothing is to be predicted or in padding.
        positions: int64 `[T]`; place in the document, from 0; padding is 0.
    """

    index: int
    layout: Layout
    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True)
class StepBatch:
    """What one rank needs for one optimizer step.

    Attributes:
        step: counted from 1.
        plan: the same on all ranks.
        documents: names, by the plan's document index, for messages.
        tokens: of all documents of the step, over the whole domain.
        target_tokens: labels other than -100 of the whole step, over the whole domain: what the loss is divided by.
        micro_batches: this rank's share of each of the plan's.
        data_wait_s: how long the caller waited for this batch.
    """

    step: int
    plan: Plan
    documents: tuple[str, ...]
    tokens: int
    target_tokens: int
    micro_batches: tuple[MicroBatch, ...]
    data_wait_s: float = 0.0


def pack(store: Store, pieces: Sequence[Piece], layout: Layout, *, pad_to_multiple_of: int = 1) -> MicroBatch:
    """Reads a rank's share of a micro-batch. `pieces` are the training documents by the plan's document index."""
    padded = -(-layout.tokens // pad_to_multiple_of) * pad_to_multiple_of
    tokens = np.zeros(padded, np.int64)
    labels = np.full(padded, IGNORED_LABEL, np.int64)
    positions = np.zeros(padded, np.int64)
    for shard in layout.shards:
        piece = pieces[shard.document]
        row = shard.offset
        for start, stop in (shard.head, shard.tail):
            rows = slice(row, row + stop - start)
            tokens[rows], labels[rows] = store.read(piece.document, piece.start + start, piece.start + stop, end=piece.stop)
            positions[rows] = np.arange(start, stop)
            row = rows.stop
    return MicroBatch(
        layout.micro_batch, layout, torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(positions)
    )

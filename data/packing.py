"""Packing: the buffer that a rank holds in one micro-batch, by the plan's layout, from a store or from documents in memory.

The buffer is the concatenation of [head; tail] of the rank's documents, in the order of the layout. Only these spans are read.
Labels are those of the whole document, shifted before it is cut, so that they do not depend on the plan. Nothing here needs
more than torch and numpy, so that a trainer of your own can use it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from longctx.data import IGNORED_LABEL
from longctx.errors import UserError
from longctx.planning.layout import Layout
from longctx.planning.plan import Plan

if TYPE_CHECKING:
    from longctx.data.sampler import Piece
    from longctx.data.store import Store

Tokens = Sequence[int] | npt.NDArray[np.integer[Any]] | torch.Tensor
"""Token ids of one document, one axis."""
_Ids = npt.NDArray[np.int64]
_Read = Callable[[int, int, int], tuple[_Ids, _Ids]]
"""(document of the plan, start, stop) → tokens and shifted labels of this span, int64 [stop - start]."""


class PackingError(UserError):
    """Documents that are not those of the plan."""


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
        weights: what each target counts, by the plan's document index; empty: 1 for all.
        target_weight: the weights of all targets of the step together, over the whole domain; `target_tokens` without weights.
        store_documents: which document of the store each is (of), by the plan's document index; empty if there is no store.
        source_tokens: tokens of the whole step by the path of their store; empty if there is one alone.
    """

    step: int
    plan: Plan
    documents: tuple[str, ...]
    tokens: int
    target_tokens: int
    micro_batches: tuple[MicroBatch, ...]
    data_wait_s: float = 0.0
    weights: tuple[float, ...] = ()
    target_weight: float = 0.0
    store_documents: tuple[int, ...] = ()
    source_tokens: Mapping[str, int] = field(default_factory=dict)


def pack(store: "Store", pieces: "Sequence[Piece]", layout: Layout, *, pad_to_multiple_of: int = 1) -> MicroBatch:
    """Reads a rank's share of a micro-batch. `pieces` are the training documents by the plan's document index."""

    def read(document: int, start: int, stop: int) -> tuple[_Ids, _Ids]:
        piece = pieces[document]
        return store.read(piece.document, piece.start + start, piece.start + stop, end=piece.stop)

    return _fill(layout, read, pad_to_multiple_of)


def empty_micro_batch(index: int, rank: int) -> MicroBatch:
    """A micro-batch without a token on any rank."""
    none = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(index, Layout(index, rank, 1, ()), none, none, none)


def pack_documents(
    plan: Plan, rank: int, documents: Sequence[Tokens], labels: Sequence[Tokens] | None = None, *, pad_to_multiple_of: int = 1
) -> tuple[list[MicroBatch], int]:
    """A rank's share of every micro-batch of a step, from documents in memory; for a trainer of your own.

    Args:
        plan: made from the lengths of these documents.
        rank: this rank of the plan's domain.
        documents: token ids, by the plan's document index.
        labels: as long as the documents and NOT shifted, -100 where a token is not to be predicted; None: the documents.
        pad_to_multiple_of: every micro-batch is padded to a multiple of so many tokens.

    Returns the micro-batches in the order of the plan, and the number of targets of the whole step over all ranks: divide the
    sum of token losses by it, and add gradients up over the ranks.
    Raises PackingError if documents, labels and plan do not belong together.
    """
    tokens = _arrays("documents", documents, plan)
    unshifted = tokens if labels is None else _arrays("labels", labels, plan)
    targets = [np.append(label[1:], IGNORED_LABEL) for label in unshifted]

    def read(document: int, start: int, stop: int) -> tuple[_Ids, _Ids]:
        return tokens[document][start:stop], targets[document][start:stop]

    layouts = [plan.layout(index, rank) for index in range(len(plan.micro_batches))]
    target_tokens = sum(int((target != IGNORED_LABEL).sum()) for target in targets)
    return [_fill(layout, read, pad_to_multiple_of) for layout in layouts], target_tokens


def _arrays(name: str, documents: Sequence[Tokens], plan: Plan) -> list[_Ids]:
    arrays = [np.asarray(document, np.int64) for document in documents]
    if len(arrays) != len(plan.lengths):
        raise PackingError(
            f"there are {len(arrays)} {name}, and the plan has {len(plan.lengths)}: make it from these documents"
        )
    for document, (array, length) in enumerate(zip(arrays, plan.lengths, strict=True)):
        if array.shape != (length,):
            raise PackingError(
                f"{name}[{document}] has shape {list(array.shape)}, and the plan's document {document} has {length} tokens: "
                "give one axis of token ids, for the documents that the plan was made from, in the same order"
            )
    return arrays


def _fill(layout: Layout, read: _Read, pad_to_multiple_of: int) -> MicroBatch:
    padded = -(-layout.tokens // pad_to_multiple_of) * pad_to_multiple_of
    tokens = np.zeros(padded, np.int64)
    labels = np.full(padded, IGNORED_LABEL, np.int64)
    positions = np.zeros(padded, np.int64)
    for shard in layout.shards:
        row = shard.offset
        for start, stop in (shard.head, shard.tail):
            rows = slice(row, row + stop - start)
            tokens[rows], labels[rows] = read(shard.document, start, stop)
            positions[rows] = np.arange(start, stop)
            row = rows.stop
    return MicroBatch(
        layout.micro_batch, layout, torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(positions)
    )

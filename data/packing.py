"""Packing: fills the buffer of a rank for one micro-batch, by the plan's layout, from a store or
from documents in memory.

The buffer concatenates the spans [head; tail] of the rank's documents in the order of the layout;
only these spans are read. Labels are shifted in the whole document before it is cut, so that they
do not depend on the plan. This module needs only torch and numpy, so that your own trainer can use
it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from longctx.arguments import LARGEST_ID, Rule, checked, flag, kind, only, token_ids, whole
from longctx.data import IGNORED_LABEL
from longctx.errors import UserError
from longctx.planning.layout import CrossLayout, Layout, Span
from longctx.planning.plan import Plan

if TYPE_CHECKING:
    from longctx.data.pieces import Piece
    from longctx.data.store.store import Store

Tokens = Sequence[int] | npt.NDArray[np.integer[Any]] | torch.Tensor
"""Token ids of one document, `[tokens]`."""
Ids = npt.NDArray[np.int64]
Read = Callable[[int, int, int], tuple[Ids, Ids]]
"""(document of the plan, start, stop) → tokens and shifted labels of this span, int64 [stop -
start]."""


class PackingError(UserError):
    """Documents that do not match the plan."""


@dataclass(frozen=True)
class MicroBatch:
    """Data of one rank for one micro-batch. T is `layout.tokens`, rounded up to the requested
    multiple.

    Attributes:
        layout: spans of documents that the rank holds, and their rows in the buffer.
        tokens: int64 `[T]`; padding is 0.
        labels: int64 `[T]`; the next token of the same document, or of an encoder the token itself;
            -100 without a target and in padding.
        positions: int64 `[T]`; position in the document, or on the path of a tree, from 0; padding
            is 0.
        weights: float32 `[T]`; per-row loss weight; None means 1.
        source: what an encoder-decoder's encoder reads; None for other models. The other fields
            then describe the target: tokens are the start token and target[:-1], labels are the
            target.
    """

    index: int
    layout: Layout
    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    source: "EncoderInput | None" = None
    weights: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        """Number of rows that this rank computes, padding included."""
        return len(self.tokens) + (0 if self.source is None else len(self.source.tokens))


@dataclass(frozen=True)
class EncoderInput:
    """What the encoder of an encoder-decoder reads on one rank in one micro-batch; the `MicroBatch`
    is then of the targets.

    Attributes:
        layout: spans of the sources that the rank holds, and their rows in the buffer.
        cross: layout of cross-attention, in which the tokens of a target see all tokens of its
            source.
        tokens, positions: as in `MicroBatch`.
        hidden: spans of targets, by document of the plan, whose tokens no token of the decoder
            sees.
    """

    layout: Layout
    cross: CrossLayout
    tokens: torch.Tensor
    positions: torch.Tensor
    hidden: Mapping[int, Sequence[Span]] = field(default_factory=dict)

    def layout_of(self, role: str, target: Layout) -> Layout | CrossLayout:
        """Returns the layout of the attention of an encoder, of a decoder, or across; `target` is
        that of the micro-batch."""
        layouts: dict[str, Layout | CrossLayout] = {
            "encoder": self.layout,
            "decoder": target,
            "cross": self.cross,
        }
        return layouts[role]


@dataclass(frozen=True)
class StepBatch:
    """Data of one rank for one optimizer step.

    Attributes:
        step: number of the step, from 1.
        plan: plan of the step, the same on all ranks.
        documents: names of the documents, by the plan's document index, for messages.
        tokens: number of tokens of the step, over the whole domain, before merging.
        target_tokens: number of labels of the step other than -100, over the whole domain. Without
            weights it is the divisor of the loss.
        micro_batches: this rank's share of each micro-batch of the plan.
        data_wait_s: seconds that the caller waited for this batch.
        weights: weight of each target, by sequence; empty: 1 for all.
        target_weight: sum of the weights of all targets of the step, over the whole domain: the
            divisor of the loss; `target_tokens` without weights.
        source_tokens: tokens of the step by the path of their store; empty with a single store.
        rows: document of the plan of every sequence that was merged, and its rows there; empty:
            each document is a sequence.
    """

    step: int
    plan: Plan
    documents: Sequence[str]
    tokens: int
    target_tokens: int
    micro_batches: tuple[MicroBatch, ...]
    data_wait_s: float = 0.0
    weights: tuple[float, ...] = ()
    target_weight: float = 0.0
    source_tokens: Mapping[str, int] = field(default_factory=dict)
    rows: tuple[tuple[int, Ids], ...] = ()

    @property
    def sequences(self) -> int:
        """Number of sequences of the step, before merging."""
        return len(self.rows or self.plan.lengths)


def pack(
    store: "Store",
    pieces: "Sequence[Piece]",
    layout: Layout,
    *,
    pad_to_multiple_of: int = 1,
    weighted: bool = False,
) -> MicroBatch:
    """Reads a rank's share of a micro-batch. `pieces` are the training documents, by the plan's
    document index.

    `weighted`: whether to read weights of tokens, which a step has for all rows or for none.
    """

    def read(document: int, start: int, stop: int) -> tuple[Ids, Ids]:
        piece = pieces[document]
        return store.read(piece.document, piece.start + start, piece.start + stop, end=piece.stop)

    def weights(document: int, start: int, stop: int) -> npt.ArrayLike:
        piece = pieces[document]  # a row has the weight of its label
        found = np.ones(stop - start, np.float32)
        own = store.token_weights(
            piece.document, piece.start + start + 1, min(piece.start + stop + 1, piece.stop)
        )
        if own is not None:
            found[: len(own)] = own
        return found

    filled = fill(layout, read, pad_to_multiple_of)
    if weighted:
        return with_weights(filled, weights)
    return filled


def with_source(
    written: MicroBatch, read: MicroBatch, cross: CrossLayout, **more: Any
) -> MicroBatch:
    """Returns a micro-batch of an encoder-decoder, from those of targets and of sources; `more` is
    of `EncoderInput`."""
    return replace(
        written, source=EncoderInput(cross.sources, cross, read.tokens, read.positions, **more)
    )


def with_weights(
    micro_batch: MicroBatch, read: Callable[[int, int, int], npt.ArrayLike]
) -> MicroBatch:
    """Returns a micro-batch with weights of its rows, from a function that reads those of spans of
    documents."""
    weights = torch.zeros(len(micro_batch.tokens))
    for shard in micro_batch.layout.shards:
        rows = np.concatenate(
            [read(shard.document, *shard.head), read(shard.document, *shard.tail)]
        )
        weights[shard.offset : shard.offset + shard.tokens] = torch.from_numpy(rows)
    return replace(micro_batch, weights=weights)


def empty_micro_batch(index: int, rank: int) -> MicroBatch:
    """Returns a micro-batch without tokens on any rank."""
    none = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(index, Layout(index, rank, ()), tokens=none, labels=none, positions=none)


RULES: dict[str, Rule] = {
    "plan": kind("a Plan of make_plan", Plan),
    "rank": whole(least=0),
    "pad_to_multiple_of": whole(least=1, most=1 << 20),
    "shift": flag,
    "start_token": whole(least=0, most=LARGEST_ID),
}


@checked(PackingError, **only("plan", "rank", "pad_to_multiple_of", "shift", of=RULES))
def pack_documents(
    plan: Plan,
    rank: int,
    documents: Sequence[Tokens],
    labels: Sequence[Tokens] | None = None,
    *,
    pad_to_multiple_of: int = 1,
    shift: bool = True,
) -> tuple[list[MicroBatch], int]:
    """Returns a rank's share of every micro-batch of a step, from documents in memory, for use in
    your own trainer.

    Args:
        plan: plan made from the lengths of these documents.
        rank: this rank in the plan's domain.
        documents: token ids `[tokens]` of each document, by the plan's document index.
        labels: as long as the documents and NOT shifted, -100 where a token is not a target; None:
            the documents.
        pad_to_multiple_of: every micro-batch is padded to a multiple of this number of tokens.
        shift: whether a token predicts the next label; False: the label in its own place, for
            encoders and trees.

    Returns the micro-batches in the order of the plan, and the number of targets of the whole step
    over all ranks: divide the sum of token losses by it, and sum gradients over the ranks. Raises
    PackingError if documents, labels and plan do not match, or if next tokens are needed of a tree.
    """
    if plan.trees and shift:
        raise PackingError(
            f"the plan has {len(plan.trees)} trees, in which a token may have several next ones, "
            f"but shift is {shift}: pack what merge_prefixes returns by pack_merged"
        )
    tokens = _arrays("documents", documents, plan)
    unshifted = tokens if labels is None else _arrays("labels", labels, plan, ignored=IGNORED_LABEL)
    targets = [np.append(label[1:], IGNORED_LABEL) for label in unshifted] if shift else unshifted

    def read(document: int, start: int, stop: int) -> tuple[Ids, Ids]:
        return tokens[document][start:stop], targets[document][start:stop]

    layouts = [plan.layout(index, rank) for index in range(len(plan.micro_batches))]
    target_tokens = sum(int((target != IGNORED_LABEL).sum()) for target in targets)
    return [fill(layout, read, pad_to_multiple_of) for layout in layouts], target_tokens


@checked(PackingError, **only("plan", "rank", "pad_to_multiple_of", "start_token", of=RULES))
def pack_seq2seq(
    plan: Plan,
    rank: int,
    sources: Sequence[Tokens],
    targets: Sequence[Tokens],
    *,
    start_token: int,
    labels: Sequence[Tokens] | None = None,
    pad_to_multiple_of: int = 1,
) -> tuple[list[MicroBatch], int]:
    """Returns a rank's share of every micro-batch of a step of an encoder-decoder, from documents
    in memory.

    Source and target of a document lie on the ranks and at the degree that the plan gives the
    document, and each is cut by its own length. So a rank may hold a few tokens more than the plan
    says, by rounding: fewer than four per split document.

    Args:
        plan: plan made from the lengths of sources and targets together, `len(source) +
            len(target)` of each document.
        rank: this rank in the plan's domain.
        sources, targets: token ids of each document's source and target, at least one of each, by
            the plan's document index.
        start_token: first token that the decoder reads (`decoder.bos_token_id` of T5Gemma); the
            next ones are the target.
        labels: as long as the targets, -100 where a token is no target of the loss; None: the
            targets.
        pad_to_multiple_of: sources and targets of every micro-batch are each padded to a multiple
            of this number of tokens.

    Returns the micro-batches in the order of the plan, and the number of labels of the whole step
    over all ranks. Raises PackingError if the documents do not match the plan, or have an empty
    part.
    """
    read = token_ids("sources", sources, PackingError)
    written = token_ids("targets", targets, PackingError)
    expected = written
    if labels is not None:
        expected = token_ids("labels", labels, PackingError, ignored=IGNORED_LABEL)
    _check_seq2seq(plan, read, written, expected)
    inputs = [np.append(start_token, target[:-1]) for target in written]

    def of(documents: Sequence[Ids], targets: Sequence[Ids]) -> Read:
        return lambda document, start, stop: (
            documents[document][start:stop],
            targets[document][start:stop],
        )

    micro_batches = []
    for index, placements in enumerate(plan.micro_batches):
        cross = CrossLayout.of(
            placements,
            list(map(len, written)),
            sources=placements,
            source_lengths=list(map(len, read)),
            micro_batch=index,
            rank=rank,
        )
        encoded = fill(cross.sources, of(read, read), pad_to_multiple_of)
        decoded = fill(cross.targets, of(inputs, expected), pad_to_multiple_of)
        micro_batches.append(with_source(decoded, encoded, cross))
    return micro_batches, sum(int((label != IGNORED_LABEL).sum()) for label in expected)


def _check_seq2seq(plan: Plan, sources: list[Ids], targets: list[Ids], labels: list[Ids]) -> None:
    """Raises PackingError if the documents do not match the plan, have an empty part, or are
    trees."""
    if plan.trees:
        raise PackingError(
            f"the plan has {len(plan.trees)} trees, which encoder-decoders cannot read: plan "
            "without trees"
        )
    if not len(sources) == len(targets) == len(labels) == len(plan.lengths):
        raise PackingError(
            f"there are {len(sources)} sources, {len(targets)} targets and {len(labels)} labels, "
            f"but the plan has {len(plan.lengths)} documents: make it from these documents"
        )
    for document, (source, target, label) in enumerate(zip(sources, targets, labels, strict=True)):
        if source.ndim != 1 or target.ndim != 1 or label.shape != target.shape:
            raise PackingError(
                f"document {document} has a source of shape {list(source.shape)}, a target of "
                f"{list(target.shape)} and labels of {list(label.shape)}: give one axis of token "
                "ids each, and as many labels as targets"
            )
        if (
            not len(source)
            or not len(target)
            or len(source) + len(target) != plan.lengths[document]
        ):
            raise PackingError(
                f"document {document} has {len(source)} source and {len(target)} target tokens, "
                f"but in the plan {plan.lengths[document]}: give one or more of each, and plan "
                "their sum"
            )


def _arrays(
    name: str, documents: Sequence[Tokens], plan: Plan, *, ignored: int | None = None
) -> list[Ids]:
    arrays = token_ids(name, documents, PackingError, ignored=ignored)
    if len(arrays) != len(plan.lengths):
        raise PackingError(
            f"there are {len(arrays)} {name}, but the plan has {len(plan.lengths)} documents: make "
            "it from these documents"
        )
    for document, (array, length) in enumerate(zip(arrays, plan.lengths, strict=True)):
        if array.shape != (length,):
            raise PackingError(
                f"{name}[{document}] has shape {list(array.shape)}, but the plan's document "
                f"{document} has {length} tokens: give one axis of token ids per document, in the "
                "order that the plan was made from"
            )
    return arrays


def fill(layout: Layout, read: Read, pad_to_multiple_of: int = 1) -> MicroBatch:
    """Returns a rank's share of a micro-batch, from a function that reads spans of documents; empty
    spans may be read, too."""
    padded = -(-layout.tokens // pad_to_multiple_of) * pad_to_multiple_of
    tokens = np.zeros(padded, np.int64)
    labels = np.full(padded, IGNORED_LABEL, np.int64)
    positions = np.zeros(padded, np.int64)
    for shard in layout.shards:
        row = shard.offset
        for start, stop in (shard.head, shard.tail):
            rows = slice(row, row + stop - start)
            tokens[rows], labels[rows] = read(shard.document, start, stop)
            positions[rows] = shard.positions(start, stop)
            row = rows.stop
    return MicroBatch(
        layout.micro_batch,
        layout,
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        positions=torch.from_numpy(positions),
    )

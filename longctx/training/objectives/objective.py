"""Objectives: the weight of every token of a step. The loss is Σ weight · -log p(token), divided by a number of the whole step.

Weights and divisor may depend on anything but the plan: on documents, names and positions, and, after a pass without gradients,
on the log-probabilities of tokens and their sums over documents. So loss and gradients equal those of one process, whatever the
plan. This covers preference losses, whose gradient is that of weighted log-probabilities, with weights from the sums.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from longctx.data import IGNORED_LABEL
from longctx.data.packing import MicroBatch, StepBatch
from longctx.errors import UserError
from longctx.parallel.mesh import Mesh
from longctx.training.objectives.loss import RowWeights


@dataclass(frozen=True)
class StepWeights:
    """Weights of the tokens of a step on this rank.

    Attributes:
        divisor: divisor of the loss of the whole step, the same on all ranks; not 0.
        tokens: weights of the labels, float32 [T] for each micro-batch of this rank, or what computes them in the head; ignored
            where nothing is predicted. None: 1 everywhere.
        loss: loss of the whole step, if the weighted sum over tokens has its gradient but not its value.
        reported: further metrics of the whole step, by name.
        measured: returns, after the passes, this rank's parts of further metrics, and of the loss, by name.
    """

    divisor: float
    tokens: Sequence[torch.Tensor | RowWeights] | None = None
    loss: float | None = None
    reported: Mapping[str, Any] = field(default_factory=dict)
    measured: Callable[[], Mapping[str, float]] = dict


class Objective(ABC):
    """Computes the weights of every step."""

    def needs_log_probabilities(self, batch: StepBatch) -> bool:
        """Returns whether `weights` needs a pass without gradients over all micro-batches of this step first."""
        return False

    @abstractmethod
    def weights(
        self,
        batch: StepBatch,
        log_probabilities: Sequence[torch.Tensor] = (),
        document_sums: torch.Tensor | None = None,
    ) -> StepWeights:
        """Returns the weights of a step on this rank.

        Args:
            batch: this rank's share of the step.
            log_probabilities: if needed, log p of every label, float32 [T] for each micro-batch; 0 without a label, and on
                pipeline ranks without the head.
            document_sums: if needed, log p summed over each sequence of the step on all ranks, float64 [sequences]. Every
                document is one, unless documents were merged to trees.
        """


class TokenMean(Objective):
    """The mean over the valid targets of the step, weighted by document and by row: pre-training and fine-tuning.

    A document or a row of weight 2 counts like two copies of it in the step.
    """

    def weights(
        self,
        batch: StepBatch,
        log_probabilities: Sequence[torch.Tensor] = (),
        document_sums: torch.Tensor | None = None,
    ) -> StepWeights:
        micro_batches = batch.micro_batches
        if not batch.weights and not batch.rows and all(micro_batch.weights is None for micro_batch in micro_batches):
            return StepWeights(divisor=max(1, batch.target_tokens))
        tokens = row_weights(batch, torch.tensor(batch.weights or (1.0,) * batch.sequences, dtype=torch.float64))
        tokens = [
            weights if micro_batch.weights is None else weights * micro_batch.weights
            for weights, micro_batch in zip(tokens, micro_batches, strict=True)
        ]
        return StepWeights(divisor=batch.target_weight or 1.0, tokens=tokens)


def documents_of(micro_batch: MicroBatch) -> torch.Tensor:
    """Returns the document index in the plan of every row of a micro-batch, int64 [T]; 0 for padding."""
    documents = torch.zeros(len(micro_batch.tokens), dtype=torch.int64)
    for shard in micro_batch.layout.shards:
        documents[shard.offset : shard.offset + shard.tokens] = shard.document
    return documents


def row_weights(batch: StepBatch, weights: torch.Tensor) -> list[torch.Tensor]:
    """Returns float32 [T] for each micro-batch: the `weights` [sequences] of all sequences that have a row, added up."""
    held = ((micro_batch, *sequences_of(batch, micro_batch)) for micro_batch in batch.micro_batches)
    return [weights.new_zeros(len(of.tokens)).index_add_(0, rows, weights[ids]).float() for of, rows, ids, _ in held]


def document_sums(batch: StepBatch, values: Sequence[torch.Tensor], mesh: Mesh) -> torch.Tensor:
    """Sums values of targets over each sequence and all ranks. Returns float64 [sequences], the same on all ranks.

    Collective over all ranks of the run, each with its `values` [T] for each micro-batch. Raises UserError if a document is a
    tree, and the batch does not have the rows of its sequences.
    """
    if batch.plan.trees and not batch.rows:
        raise UserError(
            f"the step has {len(batch.plan.trees)} trees, but this objective needs the log-probability of every sequence: give "
            "StepBatch the rows of what merge_prefixes returns, or use documents without merged prefixes"
        )
    sums = torch.zeros(batch.sequences, dtype=torch.float64)
    for micro_batch, of_rows in zip(batch.micro_batches, values, strict=True):
        counted = of_rows.cpu().double().where(micro_batch.labels != IGNORED_LABEL, 0)
        rows, sequences, _ = sequences_of(batch, micro_batch)
        sums.index_add_(0, sequences, counted[rows])
    return mesh.sum(sums)


def sequences_of(batch: StepBatch, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns rows of a micro-batch, a sequence that has each, and the row's place in it, all int64.

    A row of several sequences is there for each; one of padding may be there.
    """
    if not batch.rows:
        return torch.arange(len(micro_batch.tokens)), documents_of(micro_batch), micro_batch.positions
    places = {}  # row in the buffer of every row of a document, -1 on other ranks
    for shard in micro_batch.layout.shards:
        place = places[shard.document] = np.full(shard.length, -1)
        held = [np.arange(*shard.head), np.arange(*shard.tail)]
        place[np.concatenate(held)] = np.arange(shard.offset, shard.offset + shard.tokens)
    paths = [(sequence, places[document][rows]) for sequence, (document, rows) in enumerate(batch.rows) if document in places]
    sequences = np.repeat([sequence for sequence, _ in paths], [len(rows) for _, rows in paths]).astype(np.int64)
    none = np.zeros(0, np.int64)
    rows = np.concatenate([none, *(rows for _, rows in paths)])
    within = np.concatenate([none, *(np.arange(len(rows)) for _, rows in paths)])
    here = rows >= 0
    return torch.from_numpy(rows[here]), torch.from_numpy(sequences[here]), torch.from_numpy(within[here])

"""Objectives: the weight of every token of a step. The loss is Σ weight · -log p(token), divided by a number of the whole step.

Weights and divisor may depend on anything but the plan: on documents, names and positions, and, after a pass without gradients,
on the log-probabilities of tokens and their sums over documents. So loss and gradients equal those of one process, whatever the
plan. This covers preference losses, whose gradient is that of weighted log-probabilities, with weights from the sums.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from longctx.data import IGNORED_LABEL
from longctx.data.packing import MicroBatch, StepBatch
from longctx.errors import UserError
from longctx.parallel.mesh import Mesh


@dataclass(frozen=True)
class StepWeights:
    """Weights of the tokens of a step on this rank.

    Attributes:
        divisor: divisor of the loss of the whole step, the same on all ranks; not 0.
        tokens: weights of the labels, float32 [T] for each micro-batch of this rank; ignored where nothing is predicted.
            None: 1 everywhere.
        loss: loss of the whole step, if the weighted sum over tokens has its gradient but not its value.
        reported: further metrics of the whole step, by name.
    """

    divisor: float
    tokens: Sequence[torch.Tensor] | None = None
    loss: float | None = None
    reported: Mapping[str, Any] = field(default_factory=dict)


class Objective(ABC):
    """Computes the weights of every step."""

    needs_log_probabilities = False
    """True if `weights` needs a pass without gradients over all micro-batches first."""

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
            document_sums: if needed, log p summed over each document of the step on all ranks, float64 [documents].
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
        if not batch.weights and not any(micro_batch.weights is not None for micro_batch in batch.micro_batches):
            return StepWeights(divisor=max(1, batch.target_tokens))
        weights = torch.tensor(batch.weights or (1.0,) * len(batch.plan.lengths), dtype=torch.float32)
        tokens = [
            weights[documents_of(micro_batch)] * (1 if micro_batch.weights is None else micro_batch.weights)
            for micro_batch in batch.micro_batches
        ]
        return StepWeights(divisor=batch.target_weight or 1.0, tokens=tokens)


def documents_of(micro_batch: MicroBatch) -> torch.Tensor:
    """Returns the document index in the plan of every row of a micro-batch, int64 [T]; 0 for padding."""
    documents = torch.zeros(len(micro_batch.tokens), dtype=torch.int64)
    for shard in micro_batch.layout.shards:
        documents[shard.offset : shard.offset + shard.tokens] = shard.document
    return documents


def document_sums(batch: StepBatch, values: Sequence[torch.Tensor], mesh: Mesh) -> torch.Tensor:
    """Sums values of targets over each document and all ranks. Returns float64 [documents], the same on all ranks.

    Collective over all ranks of the run, each with its `values` [T] for each micro-batch. Raises UserError if a document is a
    tree, whose sequences have sums of their own.
    """
    if batch.plan.trees:
        raise UserError(
            f"the step has {len(batch.plan.trees)} trees, but this objective needs the log-probability of every sequence: use "
            "documents without merged prefixes"
        )
    sums = torch.zeros(len(batch.plan.lengths), dtype=torch.float64)
    for micro_batch, rows in zip(batch.micro_batches, values, strict=True):
        counted = rows.cpu().double().where(micro_batch.labels != IGNORED_LABEL, 0)
        sums.index_add_(0, documents_of(micro_batch), counted)
    return mesh.gather(sums.tolist() if mesh.counts else [0.0] * len(sums)).sum(dim=0)

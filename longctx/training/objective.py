"""Objectives: what every token of a step counts. The loss is Σ weight · -log p(token), divided by a number of the whole step.

Weights and divisor may depend on anything that does not depend on the plan: on documents, their names and places, or, after a
pass without gradients, on the log-probability of every token and their sum over each document, whichever ranks hold it. So the
loss and its gradients are those of one process, however the step is planned. A preference loss is one of these: its gradient is
that of weighted log-probabilities, with weights from the documents' sums.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from longctx.data import IGNORED_LABEL
from longctx.data.packing import MicroBatch, StepBatch
from longctx.parallel.mesh import Mesh


@dataclass(frozen=True)
class StepWeights:
    """What the tokens of a step count on this rank.

    Attributes:
        divisor: of the whole step, the same on all ranks; not 0.
        tokens: float32 [T] for each of the rank's micro-batches: what the prediction of each label counts, whatever it is where
            nothing is predicted. None: 1 everywhere.
        loss: of the whole step, where the weights give the gradients of a loss that is not the sum over tokens itself.
        reported: further numbers of the whole step for its metrics, by their names there.
    """

    divisor: float
    tokens: Sequence[torch.Tensor] | None = None
    loss: float | None = None
    reported: Mapping[str, Any] = field(default_factory=dict)


class Objective(ABC):
    """Makes the weights of every step."""

    needs_log_probabilities = False
    """Whether a pass without gradients over all micro-batches comes first."""

    @abstractmethod
    def weights(
        self,
        batch: StepBatch,
        log_probabilities: Sequence[torch.Tensor] = (),
        document_sums: torch.Tensor | None = None,
    ) -> StepWeights:
        """The weights of a step on this rank.

        Args:
            batch: this rank's share of the step.
            log_probabilities: if they are needed: log p of every label, float32 [T] for each micro-batch; 0 without a label,
                and on ranks of a pipeline that do not hold the head.
            document_sums: the same summed over each document of the step, whichever ranks hold it, float64 [documents].
        """


class TokenMean(Objective):
    """The mean over the valid targets of the step, each counted by the weight of its document: pre-training and fine-tuning.

    A document of weight 2 counts as it would if it stood in the step twice.
    """

    def weights(
        self,
        batch: StepBatch,
        log_probabilities: Sequence[torch.Tensor] = (),
        document_sums: torch.Tensor | None = None,
    ) -> StepWeights:
        if not batch.weights:
            return StepWeights(divisor=max(1, batch.target_tokens))
        weights = torch.tensor(batch.weights, dtype=torch.float32)
        tokens = [weights[documents_of(micro_batch)] for micro_batch in batch.micro_batches]
        return StepWeights(divisor=batch.target_weight or 1.0, tokens=tokens)


def documents_of(micro_batch: MicroBatch) -> torch.Tensor:
    """The plan's document of every row of a micro-batch, int64 [T]; that of padding is 0."""
    documents = torch.zeros(len(micro_batch.tokens), dtype=torch.int64)
    for shard in micro_batch.layout.shards:
        documents[shard.offset : shard.offset + shard.tokens] = shard.document
    return documents


def document_sums(batch: StepBatch, values: Sequence[torch.Tensor], mesh: Mesh) -> torch.Tensor:
    """The sum over each document of a value of every target, over all ranks and the same on each, float64 [documents].

    All ranks of the run call it, each with its values [T] for each micro-batch.
    """
    sums = torch.zeros(len(batch.plan.lengths), dtype=torch.float64)
    for micro_batch, rows in zip(batch.micro_batches, values, strict=True):
        counted = rows.cpu().double().where(micro_batch.labels != IGNORED_LABEL, 0)
        sums.index_add_(0, documents_of(micro_batch), counted)
    return mesh.gather(sums.tolist() if mesh.counts else [0.0] * len(sums)).sum(dim=0)

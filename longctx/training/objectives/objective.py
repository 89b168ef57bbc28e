"""Objective: the weight of every token of a step. The loss is Σ weight · -log p(token), divided by
a number of the whole step.

Weights and divisor may depend on anything but the plan: on documents, names and positions. So loss
and gradients equal those of one process, whatever the plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from longctx.data.packing import MicroBatch, StepBatch


@dataclass(frozen=True)
class StepWeights:
    """Weights of the tokens of a step on this rank.

    Attributes:
        divisor: divisor of the loss of the whole step, the same on all ranks; not 0.
        tokens: weights of the labels, float32 [T] for each micro-batch of this rank; ignored where
            nothing is predicted. None: 1 everywhere.
    """

    divisor: float
    tokens: Sequence[torch.Tensor] | None = None


def token_mean(batch: StepBatch) -> StepWeights:
    """Returns the weights of the mean over the valid targets of a step, weighted by document and by
    row.

    A document or a row of weight 2 counts like two copies of it in the step.
    """
    micro_batches = batch.micro_batches
    if (
        not batch.weights
        and not batch.rows
        and all(micro_batch.weights is None for micro_batch in micro_batches)
    ):
        return StepWeights(divisor=max(1, batch.target_tokens))
    tokens = row_weights(
        batch, torch.tensor(batch.weights or (1.0,) * batch.sequences, dtype=torch.float64)
    )
    tokens = [
        weights if micro_batch.weights is None else weights * micro_batch.weights
        for weights, micro_batch in zip(tokens, micro_batches, strict=True)
    ]
    return StepWeights(divisor=batch.target_weight or 1.0, tokens=tokens)


def documents_of(micro_batch: MicroBatch) -> torch.Tensor:
    """Returns the document index in the plan of every row of a micro-batch, int64 [T]; 0 for
    padding."""
    documents = torch.zeros(len(micro_batch.tokens), dtype=torch.int64)
    for shard in micro_batch.layout.shards:
        documents[shard.offset : shard.offset + shard.tokens] = shard.document
    return documents


def row_weights(batch: StepBatch, weights: torch.Tensor) -> list[torch.Tensor]:
    """Returns float32 [T] for each micro-batch: the `weights` [sequences] of all sequences that
    have a row, added up."""
    held = ((micro_batch, *sequences_of(batch, micro_batch)) for micro_batch in batch.micro_batches)
    return [
        weights.new_zeros(len(of.tokens)).index_add_(0, rows, weights[ids]).float()
        for of, rows, ids in held
    ]


def sequences_of(batch: StepBatch, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows of a micro-batch, and a sequence that has each, both int64.

    A row of several sequences is there for each; one of padding may be there.
    """
    if not batch.rows:
        return torch.arange(len(micro_batch.tokens)), documents_of(micro_batch)
    places = {}  # row in the buffer of every row of a document, -1 on other ranks
    for shard in micro_batch.layout.shards:
        place = places[shard.document] = np.full(shard.length, -1)
        held = [np.arange(*shard.head), np.arange(*shard.tail)]
        place[np.concatenate(held)] = np.arange(shard.offset, shard.offset + shard.tokens)
    paths = [
        (sequence, places[document][rows])
        for sequence, (document, rows) in enumerate(batch.rows)
        if document in places
    ]
    sequences = np.repeat(
        [sequence for sequence, _ in paths], [len(rows) for _, rows in paths]
    ).astype(np.int64)
    rows = np.concatenate([np.zeros(0, np.int64), *(rows for _, rows in paths)])
    here = rows >= 0
    return torch.from_numpy(rows[here]), torch.from_numpy(sequences[here])

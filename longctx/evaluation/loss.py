"""Loss and perplexity over documents: overall, by the length of the document, and by position in
it.

Every token is predicted once, with the plans, attention and head of training. Sums are taken in
float64 over all ranks, so that the result is the same as on one process.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from longctx.data import IGNORED_LABEL
from longctx.data.loader import Planner
from longctx.data.packing import MicroBatch
from longctx.parallel.mesh import Mesh
from longctx.training.objectives.objective import documents_of
from longctx.training.runner import Scorer
from longctx.training.validation import Documents

SMALLEST = 64
"""End of the first bucket; each following bucket ends at twice the end of the previous one."""
BUCKETS = 42


@dataclass(frozen=True)
class LossPart:
    """Loss over some of the predictions.

    Attributes:
        first, last: range of lengths or positions, both included; `last` None: no upper end.
        documents: number of documents; None where they are not counted.
        loss: mean of -log p, in nats; NaN without tokens.
    """

    first: int
    last: int | None
    documents: int | None
    tokens: int
    loss: float

    @property
    def perplexity(self) -> float:
        """e to the loss; infinite where a float is too small, NaN for a loss that is NaN."""
        if self.loss >= 700:
            return math.inf
        return math.exp(self.loss)

    def as_json(self) -> dict[str, Any]:
        values = {**asdict(self), "perplexity": self.perplexity}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class LossReport:
    """Losses of an evaluation.

    Attributes:
        by_length: loss by tokens of the document, or of the piece if the document was split.
        by_position: loss by number of tokens of its document that a prediction sees, from 1.
    """

    overall: LossPart
    by_length: tuple[LossPart, ...]
    by_position: tuple[LossPart, ...]

    def as_json(self) -> dict[str, Any]:
        parts = {"by_length": self.by_length, "by_position": self.by_position}
        return {
            "overall": self.overall.as_json(),
            **{name: [part.as_json() for part in of] for name, of in parts.items()},
        }


def bucket(numbers: torch.Tensor) -> torch.Tensor:
    """Returns the bucket of each length or position: 0 below 64, 1 below 128, 2 below 256, and so
    on."""
    _, exponent = torch.frexp(numbers.double())  # 2^(exponent - 1) <= number < 2^exponent, exactly
    return (exponent.long() - SMALLEST.bit_length() + 1).clamp(min=0)


def evaluate(documents: Documents, scorer: Scorer, planner: Planner, mesh: Mesh) -> LossReport:
    """Computes the loss over all tokens of `documents`. All ranks must call it and get the same
    result."""
    lengths = torch.tensor([piece.length for piece in documents.pieces])
    targets = torch.tensor(documents.targets)
    sums = torch.zeros(2, BUCKETS, dtype=torch.float64)  # by length, by position
    seen = torch.zeros(BUCKETS, dtype=torch.float64)
    of_pieces = bucket(lengths)
    for batch in documents.steps(planner, mesh):
        of_documents = of_pieces[: batch.sequences]
        of_pieces = of_pieces[batch.sequences :]
        for micro_batch, values in zip(batch.micro_batches, scorer(batch), strict=True):
            counts = _counts_of(documents, micro_batch)
            losses = -values.cpu().double() * counts
            positions = bucket(micro_batch.positions + 1)
            sums[0].index_add_(0, of_documents[documents_of(micro_batch)], losses)
            sums[1].index_add_(0, positions, losses)
            seen.index_add_(0, positions, counts)
    local = torch.cat([*sums, seen]) * mesh.counts
    by_length, by_position, seen = mesh.gather(local.tolist()).sum(0).view(3, BUCKETS)
    tokens = torch.zeros(BUCKETS, dtype=torch.int64).index_add_(0, bucket(lengths), targets)
    total = int(targets.sum())
    number = np.unique([piece.document for piece in documents.pieces]).size
    overall = LossPart(
        1, None, documents=number, tokens=total, loss=_mean(float(by_length.sum()), total)
    )
    counts = torch.bincount(bucket(lengths), minlength=BUCKETS)
    return LossReport(
        overall,
        _parts(by_length, tokens.tolist(), counts.tolist()),
        _parts(by_position, [int(n) for n in seen.tolist()]),
    )


def _counts_of(documents: Documents, micro_batch: MicroBatch) -> torch.Tensor:
    """Returns what every row counts in the loss, float64 [T].

    That is 0 without a label, and 1 with one. In documents with noise it is the row's weight, so
    that the sum over hidden tokens is, on average, that over all tokens.
    """
    counts = (micro_batch.labels != IGNORED_LABEL).double()
    if documents.merging is None or micro_batch.weights is None:
        return counts
    return counts * micro_batch.weights


def _parts(
    sums: torch.Tensor, tokens: Sequence[int], documents: Sequence[int] | None = None
) -> tuple[LossPart, ...]:
    """Returns the buckets that are not empty."""
    return tuple(
        LossPart(
            1 if index == 0 else SMALLEST << (index - 1),
            (SMALLEST << index) - 1,
            documents=None if documents is None else documents[index],
            tokens=tokens[index],
            loss=_mean(float(sums[index]), tokens[index]),
        )
        for index in range(BUCKETS)
        if tokens[index] or (documents is not None and documents[index])
    )


def _mean(total: float, tokens: int) -> float:
    if tokens:
        return total / tokens
    return math.nan

"""Loss and perplexity over documents: of all, by the length of the document, and by how much of it a prediction could see.

Every token is predicted once, by the plans, attention and head of training. Sums are taken in float64 over all ranks, so that
the result is that of one process.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from longctx.data import IGNORED_LABEL
from longctx.data.loader import Planner
from longctx.parallel.mesh import Mesh
from longctx.training.loss import log_probabilities
from longctx.training.objective import documents_of
from longctx.training.validation import Documents, Look

SMALLEST = 64
"""The first bucket is what is below; the next ones end at its doubles."""
BUCKETS = 42


@dataclass(frozen=True)
class Part:
    """Some of the predictions.

    Attributes:
        first, last: the lengths or positions that count here, both included; `last` None: the greatest there is.
        documents: how many there are, where documents are counted.
        tokens: that were predicted.
        loss: mean of -log p, in nats; NaN without a token.
    """

    first: int
    last: int | None
    documents: int | None
    tokens: int
    loss: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def as_json(self) -> dict[str, Any]:
        found = {"first": self.first, "last": self.last, "documents": self.documents, "tokens": self.tokens}
        return {key: value for key, value in found.items() if value is not None} | {
            "loss": self.loss,
            "perplexity": self.perplexity,
        }


@dataclass(frozen=True)
class LossReport:
    """Attributes:
    overall: all predictions.
    by_length: by the tokens of the document, or of the piece of one that was too long.
    by_position: by the tokens of its document that a prediction sees, from 1 on.
    """

    overall: Part
    by_length: tuple[Part, ...]
    by_position: tuple[Part, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "overall": self.overall.as_json(),
            "by_length": [part.as_json() for part in self.by_length],
            "by_position": [part.as_json() for part in self.by_position],
        }


def bucket(numbers: torch.Tensor) -> torch.Tensor:
    """The bucket of lengths or positions: 0 below 64, 1 below 128, 2 below 256, and so on."""
    _, exponent = torch.frexp(numbers.double())  # 2^(exponent - 1) <= number < 2^exponent, exactly
    return (exponent.long() - SMALLEST.bit_length() + 1).clamp(min=0)


def evaluate(documents: Documents, look: Look, planner: Planner, mesh: Mesh) -> LossReport:
    """The loss of every token of `documents`. All ranks call it, and have the same result."""
    lengths = torch.tensor([piece.length for piece in documents.pieces])
    targets = torch.tensor([documents.store.target_tokens(p.document, p.start, p.stop) for p in documents.pieces])
    sums = torch.zeros(2, BUCKETS, dtype=torch.float64)  # by length, by position
    seen = torch.zeros(BUCKETS, dtype=torch.float64)
    for batch in documents.steps(planner, mesh):
        of_documents = bucket(torch.tensor(batch.plan.lengths))
        for micro_batch, values in zip(batch.micro_batches, look(batch, log_probabilities), strict=True):
            losses = -values.cpu().double()
            positions = bucket(micro_batch.positions + 1)
            sums[0].index_add_(0, of_documents[documents_of(micro_batch)], losses)
            sums[1].index_add_(0, positions, losses)
            seen.index_add_(0, positions, (micro_batch.labels != IGNORED_LABEL).double())
    mine = torch.cat([*sums, seen]) * mesh.counts
    by_length, by_position, seen = mesh.gather(mine.tolist()).sum(0).view(3, BUCKETS)
    tokens = torch.zeros(BUCKETS, dtype=torch.int64).index_add_(0, bucket(lengths), targets)
    total = int(targets.sum())
    number = np.unique([piece.document for piece in documents.pieces]).size
    overall = Part(1, None, number, total, _mean(float(by_length.sum()), total))
    counts = torch.bincount(bucket(lengths), minlength=BUCKETS)
    return LossReport(
        overall, _parts(by_length, tokens.tolist(), counts.tolist()), _parts(by_position, [int(n) for n in seen.tolist()])
    )


def _parts(sums: torch.Tensor, tokens: Sequence[int], documents: Sequence[int] | None = None) -> tuple[Part, ...]:
    """The buckets in which there is something."""
    return tuple(
        Part(
            1 if index == 0 else SMALLEST << (index - 1),
            (SMALLEST << index) - 1,
            None if documents is None else documents[index],
            tokens[index],
            _mean(float(sums[index]), tokens[index]),
        )
        for index in range(BUCKETS)
        if tokens[index] or (documents is not None and documents[index])
    )


def _mean(total: float, tokens: int) -> float:
    return total / tokens if tokens else math.nan

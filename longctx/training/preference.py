"""Preference: direct preference optimization (DPO) on pairs of completions.

The loss of a pair is -log σ(β · m), with m = log p/p_ref of the chosen completion - log p/p_ref of the rejected one; p_ref is
the initial model (Rafailov et al., 2023, eq. 7; label smoothing as in Mitchell, 2023). Given log p of whole documents from a
pass without gradients, the gradient of the loss is that of weighted token losses, with one weight per document. So pairs are
packed and split over ranks like other documents, or merged to trees: a token of the prompt that both learn has weight 0.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import logsigmoid

from longctx.config.settings import DpoSection
from longctx.data.packing import StepBatch
from longctx.data.sampler import Piece
from longctx.data.store import Store
from longctx.training.objectives.objective import Objective, StepWeights, row_weights
from longctx.training.reference import FILE, Reference
from longctx.training.validation import Documents

VALIDATION_FILE = "reference-eval.npz"
"""File of the reference log-probabilities of the documents of `eval.store`."""


@dataclass(frozen=True)
class Preference(Objective):
    """DPO: the mean over the pairs of the step, weighted by pair.

    Attributes:
        beta: β; larger values keep the model closer to the reference.
        label_smoothing: ε; the loss of a pair is -(1 - ε) log σ(β · m) - ε log σ(-β · m).
        reference: log p of the targets of each document of the store, float64 [documents]; NaN where not known.
    """

    beta: float
    label_smoothing: float
    reference: torch.Tensor

    def needs_log_probabilities(self, batch: StepBatch) -> bool:
        return True

    def weights(
        self,
        batch: StepBatch,
        log_probabilities: Sequence[torch.Tensor] = (),
        document_sums: torch.Tensor | None = None,
    ) -> StepWeights:
        assert document_sums is not None
        raised = (document_sums - self.reference[list(batch.store_documents)]).view(-1, 2)
        margins = self.beta * (raised[:, 0] - raised[:, 1])
        counts = torch.tensor(batch.weights or [1.0] * len(raised) * 2, dtype=torch.float64).view(-1, 2)[:, 0]
        pairs, smoothing = float(counts.sum()), self.label_smoothing
        losses = -(1 - smoothing) * logsigmoid(margins) - smoothing * logsigmoid(-margins)
        slopes = self.beta * counts * ((1 - smoothing) * torch.sigmoid(-margins) - smoothing * torch.sigmoid(margins))
        return StepWeights(
            divisor=pairs,
            tokens=row_weights(batch, torch.stack([slopes, -slopes], dim=1).flatten()),
            loss=float((counts * losses).sum()) / pairs,
            reported={
                "reward_accuracy": float((counts * (margins > 0)).sum()) / pairs,
                "reward_margin": float((counts * margins).sum()) / pairs,
            },
        )


def preferences(
    reference: Reference, settings: DpoSection, store: Store, pieces: Iterable[Piece], validation: Documents | None
) -> tuple[Preference, Preference]:
    """Returns the objectives for training on `pieces` of the store, and for the documents for validation.

    Collective. Raises ReferenceError.
    """
    every, same_store = [*pieces], validation is None or validation.store is store
    if validation is not None and same_store:
        every += validation.pieces
    assert settings.beta is not None
    training = Preference(settings.beta, settings.label_smoothing, reference.of(store, every, FILE))
    if validation is None or same_store:
        return training, training
    sums = reference.of(validation.store, validation.pieces, VALIDATION_FILE, store_may_change=True)
    return training, replace(training, reference=sums)

"""Objectives with real-valued weights, and what the ranks of their tests run."""

from collections.abc import Sequence
from pathlib import Path

import torch

from longctx.data.packing import StepBatch
from longctx.training.metrics import StepMetrics
from longctx.training.objectives.objective import Objective, StepWeights, documents_of
from tests.training_cases import start


class ByPlace(Objective):
    """Weights from 0 to 2 by the token's place in its document and that one's length; some documents count nothing."""

    def weights(
        self, batch: StepBatch, log_probabilities: Sequence[torch.Tensor] = (), document_sums: torch.Tensor | None = None
    ) -> StepWeights:
        lengths = torch.tensor(batch.plan.lengths)
        found = []
        for micro_batch in batch.micro_batches:
            length = lengths[documents_of(micro_batch)]
            weight = (micro_batch.positions * 7 + length) % 21 / 10
            found.append(weight.float().where(length % 3 > 0, 0))
        return StepWeights(0.7 * batch.target_tokens, found)


class ByLikelihood(Objective):
    """Unlikely tokens of likely documents count most: as in preference losses, one needs sums over whole documents."""

    def needs_log_probabilities(self, batch: StepBatch) -> bool:
        return True

    def weights(
        self, batch: StepBatch, log_probabilities: Sequence[torch.Tensor] = (), document_sums: torch.Tensor | None = None
    ) -> StepWeights:
        assert document_sums is not None
        of_document = torch.sigmoid(document_sums / torch.tensor(batch.plan.lengths) + 5)
        found = [
            (1 - values.cpu().exp()).square() * of_document[documents_of(micro_batch)].float()
            for micro_batch, values in zip(batch.micro_batches, log_probabilities, strict=True)
        ]
        return StepWeights(float(batch.target_tokens), found)


OBJECTIVES: dict[str, type[Objective]] = {"by place": ByPlace, "by likelihood": ByLikelihood}


def train(store: Path, run: Path, settings: list[str], name: str, steps: int) -> list[StepMetrics]:
    trainer = start(store, run, settings)
    trainer.objective = OBJECTIVES[name]()
    with trainer.loader:
        return [trainer.step() for _ in range(steps)]

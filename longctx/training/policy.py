"""Policy: gradients of clipped policy losses on rollouts, as weights of tokens.

With A the advantage of a token, c the ratio of its probability to that by the old model, and the mean over tokens as named:

    grpo      -min(c·A, clip(c)·A), mean over each completion, then over completions (Shao et al., 2024, eq. 3)
    gspo      the same, with c the geometric mean of the ratios of a completion (Zheng et al., 2025, eq. 5 and 7)
    dr_grpo   the same as grpo, but the sum over a completion divided by a constant length (Liu et al., 2025, section 3.2)
    dapo      the same as grpo, mean over all tokens of the step (Yu et al., 2025, eq. 8); `bnpo` of TRL, over a whole step
    ppo       as dapo (Schulman et al., 2017, eq. 7); give advantages of tokens if you have a critic
    cispo     -min(c, 1 + clip_high) · A · log p, the ratio as a constant, mean over all tokens (MiniMax, 2025, eq. 4 and 5)

They are those of `GRPOTrainer._compute_loss` of TRL 1.16, with its estimate of the KL divergence to a reference, k = p_ref/p -
log(p_ref/p) - 1, times c, and its truncated importance sampling, the factor min(p_old/p_sampler, most). The derivative of the
loss by log p of a token is all that its gradient needs: so rollouts are packed, split and merged like other documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from longctx.config.settings import PolicySection
from longctx.data import IGNORED_LABEL
from longctx.data.packing import MicroBatch, StepBatch
from longctx.data.rollouts import RolloutBatch, flat
from longctx.errors import UserError
from longctx.parallel.mesh import Mesh
from longctx.training.objectives.objective import Objective, StepWeights, sequences_of


@dataclass(frozen=True)
class Policy(Objective):
    """A policy loss on rollouts.

    Attributes:
        mesh: groups of the run.
        settings: the loss, `policy` of the configuration.
    """

    mesh: Mesh
    settings: PolicySection

    def needs_log_probabilities(self, batch: StepBatch) -> bool:
        """Returns False for rollouts of the present model: ratios are 1, and one pass is enough."""
        assert isinstance(batch, RolloutBatch), "a policy loss needs rollouts: call Trainer.step(rollouts)"
        rollouts = batch.rollouts
        if self.settings.kl and rollouts.reference_logps is None:
            raise UserError(
                f"kl is {self.settings.kl:g}, but rollouts have no log-probabilities of a reference: give them, or set kl to 0"
            )
        return bool(self.settings.kl) or rollouts.old_logps is not None or rollouts.sampler_logps is not None

    def weights(
        self,
        batch: StepBatch,
        log_probabilities: Sequence[torch.Tensor] = (),
        document_sums: torch.Tensor | None = None,
    ) -> StepWeights:
        assert isinstance(batch, RolloutBatch)
        rollouts, known = batch.rollouts, self.needs_log_probabilities(batch)
        held = [held_tokens(batch, micro_batch) for micro_batch in batch.micro_batches]
        tokens = torch.cat([numbers for _, numbers in held])
        sequence, counts = rollouts.sequence[tokens], torch.from_numpy(rollouts.counts).double()
        advantage = rollouts.advantages_of_tokens(self.settings.scale_rewards)[tokens]
        present = torch.zeros_like(advantage)
        if known:
            of_rows = zip(log_probabilities, held, strict=True)
            present = torch.cat([values.cpu().double()[rows] for values, (rows, _) in of_rows])
        old = present if rollouts.old_logps is None else flat(rollouts.old_logps)[tokens]
        of_completions = self.settings.loss == "gspo"

        def spread(values: torch.Tensor) -> torch.Tensor:
            """Returns means over completions for all tokens, if ratios are those of completions."""
            return (self._sums(sequence, values, counts) / counts)[sequence] if of_completions else values

        ratio = spread(present - old).exp()
        factor = advantage
        if rollouts.sampler_logps is not None:
            factor = advantage * (old - flat(rollouts.sampler_logps)[tokens]).exp().clamp(max=self.settings.sampler_ratio)
        # The derivatives of the loss by the ratio, and by log p where it does not depend on the ratio.
        if self.settings.loss == "cispo":
            assert self.settings.clip_high is not None
            direct = -ratio.clamp(max=self.settings.clip_high) * factor
            losses, by_ratio = direct * present, torch.zeros_like(ratio)
            clipped = (ratio > self.settings.clip_high) & (advantage > 0)
        else:
            low, high = (
                1 - self.settings.clip,
                1 + (self.settings.clip if self.settings.clip_high is None else self.settings.clip_high),
            )
            clipped = ((ratio < low) & (advantage < 0)) | ((ratio > high) & (advantage > 0))
            losses = -factor * ratio.clamp(low, high).where(clipped, ratio)
            by_ratio, direct = -factor.where(~clipped, 0), torch.zeros_like(ratio)
        divergence = torch.zeros_like(ratio)
        if self.settings.kl:
            assert rollouts.reference_logps is not None
            far = flat(rollouts.reference_logps)[tokens] - present
            divergence = far.exp() - far - 1
            losses = losses + self.settings.kl * ratio * divergence
            by_ratio = by_ratio + self.settings.kl * divergence
            direct = direct + self.settings.kl * ratio * (1 - far.exp())
        slopes = spread(by_ratio) * ratio + direct
        divisor, of_token = float(counts.sum()), torch.ones_like(ratio)
        if self.settings.max_completion_tokens is not None:
            divisor = float(len(counts) * self.settings.max_completion_tokens)
        elif self.settings.loss in ("grpo", "gspo"):
            divisor, of_token = float(len(counts)), 1 / counts[sequence]
        numbers = [
            losses * of_token / divisor,
            *(each / counts.sum() for each in (ratio, clipped, ratio * divergence, -present)),
        ]
        loss, *means = self._add_up(torch.stack([number.sum() for number in numbers])).tolist()
        split = (-slopes * of_token).split([len(rows) for rows, _ in held])
        return StepWeights(
            divisor=divisor,
            tokens=[
                torch.zeros(len(micro_batch.tokens), dtype=torch.float64).index_add_(0, rows, weights).float()
                for micro_batch, (rows, _), weights in zip(batch.micro_batches, held, split, strict=True)
            ],
            loss=loss if known or self.settings.loss != "cispo" else None,
            reported={
                "reward": None if rollouts.rewards is None else float(np.mean(np.asarray(rollouts.rewards))),
                "completion_tokens": float(counts.mean()),
                **dict(zip(("ratio", "clip_share", "kl", "entropy"), means if known else [None] * 4, strict=True)),
            },
        )

    def _sums(self, sequence: torch.Tensor, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Returns the sums of values of tokens over each rollout and all ranks, float64 [rollouts]. Collective."""
        return self._add_up(torch.zeros_like(like).index_add_(0, sequence, values))

    def _add_up(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum of values over all ranks that count. Collective."""
        return self.mesh.gather((values if self.mesh.counts else torch.zeros_like(values)).tolist()).sum(dim=0)


def held_tokens(batch: RolloutBatch, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows of a micro-batch, and the token of the completions that each predicts, by number as in `flat`; both int64.

    A row that several rollouts share is there for each.
    """
    rows, sequences, places = sequences_of(batch, micro_batch)
    learned = micro_batch.labels[rows] != IGNORED_LABEL
    lengths = (batch.rollouts.prompts, batch.rollouts.completions)
    prompts, completions = (torch.tensor([len(tokens) for tokens in each]) for each in lengths)
    first = completions.cumsum(0) - completions - prompts + 1
    return rows[learned], (first[sequences] + places)[learned]

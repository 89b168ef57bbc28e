"""Policy: gradients of clipped policy losses on rollouts, as weights of tokens.

With A the advantage of a token, c the ratio of its probability to that by the old model, and the mean over tokens as named:

    grpo      -min(c·A, clip(c)·A), mean over each completion, then over completions (Shao et al., 2024, eq. 3)
    gspo      the same, with c the geometric mean of the ratios of a completion (Zheng et al., 2025, eq. 5 and 7)
    dr_grpo   as grpo, but the sum over a completion is divided by a constant length (Liu et al., 2025, section 3.2)
    dapo      as grpo, but the mean is over all tokens of the step (Yu et al., 2025, eq. 8)
    ppo       as dapo; give advantages of tokens if you have a critic (Schulman et al., 2017, eq. 7)
    cispo     -min(c, clip_high) · A · log p, the ratio as a constant, mean over all tokens (MiniMax, 2025, eq. 4 and 5)

They are those of `GRPOTrainer._compute_loss` of TRL 1.16 (ppo is its `bnpo` over a whole step), with its estimate of the KL
divergence to a reference, (p_ref/p - log(p_ref/p) - 1) · c, and its correction by the ratio of the old model to the sampler.

The derivative of the loss by log p of a token is all that its gradient needs: so rollouts are packed, split and merged like
other documents. Where that derivative depends on no other token, the output head computes it in the pass that trains; where it
depends on the whole completion, a pass without gradients comes before.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from longctx.attention.host_to_device import copy_to
from longctx.config.settings import PolicySection
from longctx.data import IGNORED_LABEL
from longctx.data.packing import MicroBatch, StepBatch
from longctx.data.rollouts import RolloutBatch, flat
from longctx.errors import UserError
from longctx.parallel.mesh import Mesh
from longctx.training.objectives.loss import Rows
from longctx.training.objectives.objective import Objective, StepWeights, sequences_of

Spread = Callable[[torch.Tensor], torch.Tensor]
"""Replaces values of tokens by their mean over the completion."""
Held = Mapping[str, torch.Tensor]
"""Tokens of completions that this rank predicts in a micro-batch; a row that several completions share is there for each.

    rows        row of the micro-batch, int64 [tokens]
    sequences   number of the rollout, int64 [tokens]; the others are float64 [tokens]
    counts      tokens of the whole completion that are learned
    shares      weight of the token in the loss, times the divisor of the step
    factors     advantage, times the correction for the sampler if that does not depend on the present model
    old, reference, sampler     log p by the old model, the reference and the sampler; absent where not known, or not needed
"""
NUMBERS = ("loss", "ratio", "clip_share", "kl", "entropy")
"""What is reported: the loss, and means over the tokens of the step."""


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
        """Returns whether the weight of a token depends on log p of other tokens by the present model.

        Raises UserError if the rollouts lack what the settings need.
        """
        assert isinstance(batch, RolloutBatch), "a policy loss needs rollouts: call Trainer.step(rollouts)"
        rollouts, settings = batch.rollouts, self.settings
        if settings.kl and rollouts.reference_logps is None:
            raise UserError(
                f"policy.kl is {settings.kl:g}, but rollouts have no reference_logps: give them, or set policy.kl to 0"
            )
        corrected = rollouts.sampler_logps is not None and rollouts.old_logps is None
        if settings.loss == "gspo":
            by_token = rollouts.advantages is not None and any(np.ndim(values) for values in rollouts.advantages)
            return bool(settings.kl) or rollouts.old_logps is not None or corrected or by_token
        return corrected and settings.sampler_correction.startswith("sequence")

    def weights(
        self,
        batch: StepBatch,
        log_probabilities: Sequence[torch.Tensor] = (),
        document_sums: torch.Tensor | None = None,
    ) -> StepWeights:
        assert isinstance(batch, RolloutBatch)
        rollouts, settings = batch.rollouts, self.settings
        counts = torch.from_numpy(rollouts.counts).double()
        every = divisor = float(counts.sum())
        if settings.loss == "dr_grpo":
            assert settings.max_completion_tokens is not None
            divisor = float(len(counts) * settings.max_completion_tokens)
        elif settings.loss in ("grpo", "gspo"):
            divisor = float(len(counts))
        held = self._held(batch, counts)
        rows = [len(micro_batch.tokens) for micro_batch in batch.micro_batches]
        parts = [PolicyWeights(settings, each, count) for each, count in zip(held, rows, strict=True)]
        if self.needs_log_probabilities(batch):
            self._weigh(parts, log_probabilities, counts)

        def measured() -> Mapping[str, float]:
            counted = parts if self.mesh.counts else []
            sums = torch.stack([torch.zeros(len(NUMBERS), dtype=torch.float64), *(part.sums().cpu() for part in counted)]).sum(
                0
            )
            return dict(zip(NUMBERS, (sums / torch.tensor([divisor, *[every] * (len(sums) - 1)])).tolist(), strict=True))

        rewards = rollouts.rewards
        return StepWeights(
            divisor=divisor,
            tokens=parts,
            measured=measured,
            reported={
                "reward": None if rewards is None else float(np.mean(np.asarray(rewards))),
                "completion_tokens": float(counts.mean()),
            },
        )

    def _held(self, batch: RolloutBatch, counts: torch.Tensor) -> list[Held]:
        """Returns the tokens of every micro-batch."""
        rollouts, settings = batch.rollouts, self.settings
        sequence, factors = rollouts.sequence, rollouts.advantages_of_tokens(settings.scale_rewards)
        shares = 1 / counts if settings.loss in ("grpo", "gspo") else torch.ones_like(counts)
        given = {"old": rollouts.old_logps, "reference": rollouts.reference_logps, "sampler": rollouts.sampler_logps}
        known = {name: flat(values) for name, values in given.items() if values is not None}
        if not settings.kl:
            known.pop("reference", None)
        if known.keys() >= {"old", "sampler"}:
            far = known["old"] - known.pop("sampler")
            if settings.sampler_correction.startswith("sequence"):
                learned = torch.from_numpy(np.concatenate(rollouts.learned))
                far = torch.zeros_like(counts).index_add(0, sequence, far * learned)[sequence]
            factors = factors * _bounded(settings, far.exp())
        every = {"sequences": sequence, "counts": counts[sequence], "shares": shares[sequence], "factors": factors, **known}
        held: list[Held] = []
        for micro_batch in batch.micro_batches:
            rows, tokens = held_tokens(batch, micro_batch)
            held.append({"rows": rows, **{name: values[tokens] for name, values in every.items()}})
        return held

    def _weigh(self, parts: Sequence["PolicyWeights"], log_probabilities: Sequence[torch.Tensor], counts: torch.Tensor) -> None:
        """Computes weights that depend on whole completions, from log p [T] of the rows of every micro-batch. Collective."""
        held = [part.held for part in parts]
        joined = {name: torch.cat([one[name] for one in held]) for name in held[0]}
        present = torch.cat([values.cpu().double()[one["rows"]] for values, one in zip(log_probabilities, held, strict=True)])

        def spread(values: torch.Tensor) -> torch.Tensor:
            sums = torch.zeros_like(counts).index_add(0, joined["sequences"], values)
            return (self.mesh.sum(sums) / counts)[joined["sequences"]]

        slopes, numbers = terms(self.settings, joined, present, spread)
        sizes = [len(one["rows"]) for one in held]
        for part, *values in zip(parts, slopes.split(sizes), numbers.split(sizes, dim=1), strict=True):
            part.known = values[0], values[1]


class PolicyWeights:
    """Weights of the rows of a micro-batch, computed in the head from the log p of its rows, or known before.

    Attributes:
        held: the tokens of the micro-batch.
        known: derivatives of the loss [tokens] and numbers [5, tokens], if they depend on whole completions.
    """

    def __init__(self, settings: PolicySection, held: Held, rows: int) -> None:
        self.settings, self.held = settings, held
        self.known: tuple[torch.Tensor, torch.Tensor] | None = None
        self._present = torch.zeros(rows, dtype=torch.float64)

    def to(self, device: torch.device) -> "PolicyWeights":
        """Moves all to `device` once, and returns itself."""
        if self._present.device.type == device.type:
            return self
        self.held = {name: copy_to(values, device) for name, values in self.held.items()}
        self._present = copy_to(self._present, device)
        if self.known is not None:
            self.known = copy_to(self.known[0], device), copy_to(self.known[1], device)
        return self

    def __call__(self, rows: Rows, log_probabilities: torch.Tensor) -> torch.Tensor:
        """Returns the weights of some rows, from their log p."""
        self._present[rows] = log_probabilities.double()
        slopes, _ = self._terms()
        weights = torch.zeros_like(self._present).index_add(0, self.held["rows"], -slopes * self.held["shares"])
        return weights[rows]

    def sums(self) -> torch.Tensor:
        """Returns the sums of NUMBERS over the tokens, float64 [5], when the head has seen all rows."""
        numbers = self._terms()[1]
        return torch.cat([(numbers[:1] * self.held["shares"]).sum(1), numbers[1:].sum(1)])

    def _terms(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.known or terms(self.settings, self.held, self._present[self.held["rows"]], lambda values: values)


def terms(settings: PolicySection, held: Held, present: torch.Tensor, spread: Spread) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the derivatives of the loss of every token by its log p, float64 [tokens], and its NUMBERS [5, tokens]."""
    old = held.get("old", present)
    by_completion = settings.loss == "gspo"
    ratio = (spread(present - old) if by_completion else present - old).exp()
    factors = held["factors"]
    if "sampler" in held:
        far = present - held["sampler"]
        if settings.sampler_correction.startswith("sequence"):
            far = spread(far) * held["counts"]
        factors = factors * _bounded(settings, far.exp())
    # The derivatives of the loss by the ratio, and by log p where it does not depend on the ratio.
    if settings.loss == "cispo":
        assert settings.clip_high is not None
        direct = -ratio.clamp(max=settings.clip_high) * factors
        losses, by_ratio = direct * present, torch.zeros_like(ratio)
        clipped = (ratio > settings.clip_high) & (factors > 0)
    else:
        low, high = 1 - settings.clip, 1 + (settings.clip_high or settings.clip)
        clipped = ((ratio < low) & (factors < 0)) | ((ratio > high) & (factors > 0))
        losses = -factors * ratio.clamp(low, high).where(clipped, ratio)
        by_ratio, direct = -factors.where(~clipped, 0), torch.zeros_like(ratio)
    divergence = torch.zeros_like(ratio)
    if "reference" in held:
        far = held["reference"] - present
        divergence = far.exp() - far - 1
        losses = losses + settings.kl * ratio * divergence
        by_ratio = by_ratio + settings.kl * divergence
        direct = direct + settings.kl * ratio * (1 - far.exp())
    slopes = (spread(by_ratio) if by_completion else by_ratio) * ratio + direct
    return slopes, torch.stack([losses, ratio, clipped.double(), ratio * divergence, -present])


def _bounded(settings: PolicySection, ratio: torch.Tensor) -> torch.Tensor:
    """Returns the ratio of the old model to the sampler, truncated or 0 above its bound."""
    most = settings.sampler_ratio
    return ratio.clamp(max=most) if settings.sampler_correction.endswith("truncate") else ratio.where(ratio <= most, 0)


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

"""Faults of a policy gradient are named, and right steps are silent."""

import math
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from longctx.check import CheckError, Policy, Probe, Step, check_step, record, template
from longctx.check.loop import padded, place
from longctx.check.policy import (
    KINDS,
    NO_SIGN,
    OF_OTHER_DOCUMENTS,
    OTHER_COMPUTED,
    OTHER_SAMPLES,
    RATIOS,
    WRONG_SIGN,
)
from longctx.check.scale import SCALE
from longctx.check.trainer import arguments, step_of
from longctx.check.verdict import OBJECTIVE_OTHER, kinds
from tests.trainer_cases import as_rank
from tests.workers import Workers

SHORT = Probe("short", lengths=(9, 14, 5, 8, 20, 11), prompt=0.3)
OF_TRL = Path(template.__file__).with_name("templates") / "check_trl.py"
ADVANTAGES = [1.2, -0.5, 0.8, -1.5, 0.3, -0.3]


class Rollouts:
    """A right loop of GRPO at its first update, whose methods a fault overrides."""

    per: Any = "target"
    length = 0

    def advantages(self) -> torch.Tensor:
        return torch.tensor(ADVANTAGES)

    def labels(self, labels: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return labels

    def scores(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [rows, tokens - 1], 0 where there is no label."""
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return -losses.view(labels.shape)

    def old(self, scores: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        """What the ratio is to."""
        return scores.detach()

    def sampled(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return Rollouts.scores(self, logits, labels).detach()

    def total(self, losses: torch.Tensor, mask: torch.Tensor, targets: int) -> torch.Tensor:
        return losses.sum() / targets

    def __call__(self, probe: Probe) -> Step:
        model = probe.model("llama")
        rank, ranks = place()
        batch = padded(probe.rows[rank::ranks], probe.pad)
        right = batch.pop("labels")
        labels = self.labels(right, batch["input_ids"])[:, 1:]
        targets = (labels >= 0).sum()
        if dist.is_initialized():
            dist.all_reduce(targets)
        with record(model) as seen:
            logits = model(**batch, use_cache=False).logits[:, :-1].float()
            scores = self.scores(logits, labels)
            sampled = self.sampled(logits, labels)
            ratios = (scores - self.old(scores, sampled)).exp()
            advantages = self.advantages()[rank::ranks, None]
            losses = -torch.minimum(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages)
            mask = labels >= 0
            self.total(losses * mask, mask, int(targets)).backward()
            if dist.is_initialized():
                for weight in model.parameters():
                    dist.all_reduce(weight.grad)
            given = {
                rank + ranks * row: own[is_target].tolist()
                for row, (own, is_target) in enumerate(zip(sampled, right[:, 1:] >= 0, strict=True))
            }
            aim = Policy(ADVANTAGES, per=self.per, length=self.length, sampled=given)
            return seen.step(aim=aim)


class PerDocument(Rollouts):
    """A right one."""

    per = "document"

    def total(self, losses: torch.Tensor, mask: torch.Tensor, targets: int) -> torch.Tensor:
        return (losses.sum(1) / mask.sum(1)).sum() / len(ADVANTAGES)


class PerLength(Rollouts):
    """A right one."""

    per = "length"
    length = 64

    def total(self, losses: torch.Tensor, mask: torch.Tensor, targets: int) -> torch.Tensor:
        return losses.sum() / 64 / len(ADVANTAGES)


class Negated(Rollouts):
    def advantages(self) -> torch.Tensor:
        return -super().advantages()


class Absolute(Rollouts):
    def advantages(self) -> torch.Tensor:
        return super().advantages().abs()


class OfOthers(Rollouts):
    def advantages(self) -> torch.Tensor:
        return super().advantages().roll(1)


class OnlyGood(Rollouts):
    def advantages(self) -> torch.Tensor:
        return super().advantages().clamp_min(0)


class MeansOfDocuments(Rollouts):
    def total(self, losses: torch.Tensor, mask: torch.Tensor, targets: int) -> torch.Tensor:
        return PerDocument.total(self, losses, mask, targets)


class Twice(Rollouts):
    def total(self, losses: torch.Tensor, mask: torch.Tensor, targets: int) -> torch.Tensor:
        return 2 * super().total(losses, mask, targets)


class Prompts(Rollouts):
    def labels(self, labels: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.where(ids > 0, ids, labels)


class AtOtherTemperature(Rollouts):
    """The trainer's softmax is not the one that sampled."""

    def scores(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().scores(logits / 0.7, labels)


class SampledOtherwise(Rollouts):
    def sampled(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().sampled(logits / 0.7, labels)


class WithRatios(SampledOtherwise):
    def sampled(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().sampled(logits / 0.7 * 0.69, labels)

    def old(self, scores: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        return sampled


class NextTokens(Rollouts):
    def sampled(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().sampled(logits, labels).roll(-1, 1)


class NoLogarithm(Rollouts):
    def sampled(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().sampled(logits, labels).exp()


class NotANumber(Rollouts):
    def sampled(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().sampled(logits, labels) * math.nan


class Noise(Rollouts):
    def sampled(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        right = super().sampled(logits, labels)
        return right + 0.1 * torch.sin(torch.arange(right.numel()).float()).view(right.shape)


RIGHT = [Rollouts, PerDocument, PerLength]
FAULTS: dict[type[Rollouts], list[str]] = {
    Negated: [WRONG_SIGN],
    Absolute: [NO_SIGN],
    OfOthers: [OF_OTHER_DOCUMENTS],
    OnlyGood: ["documents have no loss"],
    MeansOfDocuments: ["the loss is a mean of means of rows"],
    Twice: [SCALE],
    Prompts: ["prompts are trained", SCALE],
    AtOtherTemperature: [OBJECTIVE_OTHER],
    SampledOtherwise: [OTHER_SAMPLES],
    WithRatios: [OTHER_SAMPLES, RATIOS],
    NextTokens: [OTHER_SAMPLES],
    NoLogarithm: [OTHER_SAMPLES],
    NotANumber: [OTHER_SAMPLES],
    Noise: [OTHER_SAMPLES],
}


def found_by(loops: list[type[Rollouts]]) -> dict[str, list[str]]:
    """Returns the faults of loops, on every rank."""
    found = {}
    for loop in loops:
        (verdict,) = check_step(loop(), [SHORT]).verdicts
        found[loop.__name__] = [str(finding) for finding in verdict.findings]
    return found


@pytest.mark.parametrize("loop", RIGHT)
def test_a_right_policy_gradient_is_silent(loop: type[Rollouts]) -> None:
    (verdict,) = check_step(loop(), [SHORT]).verdicts
    assert verdict.findings == []
    assert "the logged loss" in verdict.not_tested


@pytest.mark.parametrize("loop", FAULTS)
def test_a_fault_of_a_policy_gradient_is_named(loop: type[Rollouts]) -> None:
    (verdict,) = check_step(loop(), [SHORT]).verdicts
    assert [finding.kind for finding in verdict.findings] == FAULTS[loop]


def test_policies_of_two_ranks(workers: Workers) -> None:
    for found in workers.run(found_by, 2, [Rollouts, Negated], timeout_s=120.0):
        assert found == {"Rollouts": [], "Negated": [f"{WRONG_SIGN}: of all documents"]}


def test_a_fault_of_a_policy_gradient_is_said_as_it_is() -> None:
    found = found_by([Absolute, OfOthers, SampledOtherwise, NextTokens, NoLogarithm, NotANumber])
    other = f"{OTHER_SAMPLES}: off by up to"
    assert found == {
        "Absolute": [f"{NO_SIGN}: of documents 1, 3, 5"],
        "OfOthers": [f"{OF_OTHER_DOCUMENTS}: 6 of 6, document 0 has that of 5"],
        "SampledOtherwise": [f"{other} 0.138: those at a temperature of 0.7"],
        "NextTokens": [f"{other} 5.16: those of the next token"],
        "NoLogarithm": [f"{other} 5.17: probabilities without a logarithm"],
        "NotANumber": [f"{other} nan"],
    }


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises(CheckError, match="an advantage is 0, so that its document shows nothing"):
        Policy([1.0, 0.0])
    with pytest.raises(CheckError, match="per='length' needs the length"):
        Policy([1.0], per="length")
    probe = Probe("fewer", lengths=(9, 14, 5))
    with pytest.raises(CheckError, match="6 advantages of 3 documents"):
        check_step(OfFewer(), [probe])


class OfFewer(Rollouts):
    """A probe of fewer documents."""

    def advantages(self) -> torch.Tensor:
        return super().advantages()[:3]


def test_as_many_log_probabilities_as_targets_are_needed() -> None:
    def make(probe: Probe) -> Step:
        step = Rollouts()(probe)
        step.aim = Policy(ADVANTAGES, computed={1: [0.0]})
        return step

    with pytest.raises(CheckError, match="1 log-probabilities of document 1, which has 10 targets"):
        check_step(make, [SHORT])


def test_log_probabilities_of_the_trainer() -> None:
    def make(probe: Probe) -> Step:
        step = Rollouts()(probe)
        step.aim = Policy(ADVANTAGES, computed={2: [-4.0] * 4})
        return step

    (verdict,) = check_step(make, [SHORT]).verdicts
    assert [finding.kind for finding in verdict.findings] == [OTHER_COMPUTED]
    assert "log-probabilities of the sampler for 6 documents" in verdict.not_tested


def by_trl(probe: Probe, *, factor: float = 1.0, **more: Any) -> Any:
    """A GRPOTrainer of TRL on documents that are given in place of sampled ones."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rank, ranks = place()
    mine = range(len(probe.lengths))[rank::ranks]
    prompts = []
    completions = []
    for document in mine:
        ids = probe.documents[document]
        prompt = probe.prompt_of(document)
        prompts.append(torch.tensor(ids[:prompt]))
        completions.append(torch.tensor(ids[prompt:]))

    class OnGiven(GRPOTrainer):  # type: ignore[misc]  # TRL is untyped here
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
            ones = [torch.ones_like(each) for each in completions]
            of_prompts = [torch.ones_like(each) for each in prompts]
            targets = sum(probe.lengths[n] - probe.prompt_of(n) for n in range(len(probe.lengths)))
            right = {"batch_first": True, "padding_value": probe.pad}
            left = right | {"padding_side": "left"}
            return {
                "prompt_ids": pad_sequence(prompts, **left),
                "prompt_mask": pad_sequence(of_prompts, **left),
                "completion_ids": pad_sequence(completions, **right),
                "completion_mask": pad_sequence(ones, **right),
                "advantages": factor * torch.tensor([ADVANTAGES[document] for document in mine]),
                "num_items_in_batch": torch.tensor(float(targets)),
            }

    given = arguments(
        per_device_train_batch_size=len(mine) // probe.micro_batches,
        gradient_accumulation_steps=probe.micro_batches,
        num_generations=len(probe.lengths),
        max_completion_length=64,
        **more,
    )
    return OnGiven(
        model=probe.model("qwen3"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(**given),
        train_dataset=Dataset.from_list([{"prompt": f"<{n}>"} for n in range(12)]),
        processing_class=runpy.run_path(str(OF_TRL))["tokenizer"](probe),
    )


def found_by_trl(
    probe: Probe, aim: dict[str, Any], options: dict[str, Any] | None = None
) -> list[str]:
    """Returns the faults of a trainer of TRL."""
    if dist.is_initialized():
        as_rank()

    def make(probe: Probe) -> Step:
        return step_of(by_trl(probe, **(options or {})), probe, Policy(ADVANTAGES, **aim))

    (verdict,) = check_step(make, [probe]).verdicts
    return [str(finding) for finding in verdict.findings]


def test_a_trainer_of_trl_on_policies() -> None:
    halves = replace(SHORT, micro_batches=2)
    assert found_by_trl(halves, {}, {}) == []
    of_documents = {"loss_type": "grpo"}
    assert found_by_trl(SHORT, {"per": "document"}, of_documents) == []
    of_length = {"loss_type": "dr_grpo"}
    assert found_by_trl(SHORT, {"per": "length", "length": 64}, of_length) == []
    negated = {"factor": -1.0}
    assert found_by_trl(SHORT, {}, negated) == [f"{WRONG_SIGN}: of all documents"]
    (finding,) = found_by_trl(SHORT, {}, of_documents)
    assert finding.startswith("the loss is a mean of means of rows")


def test_a_policy_of_a_trainer_is_asked_for() -> None:
    with pytest.raises(CheckError, match="GRPOTrainer does not tell its advantages: return "):
        check_step(by_trl, [SHORT])


@pytest.mark.slow
def test_a_trainer_of_trl_on_policies_on_two_ranks(workers: Workers) -> None:
    assert workers.run(found_by_trl, 2, SHORT, {}, timeout_s=240.0) == [[], []]


def test_faults_of_policies_can_be_allowed() -> None:
    assert set(KINDS) <= set(kinds())

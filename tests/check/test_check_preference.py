"""Faults of a step on pairs of preferences are named, and right ones are silent."""

import runpy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from longctx.check import PROBES, CheckError, Preference, Probe, Step, check_step, record, template
from longctx.check.logged import LOGGED_LOSS
from longctx.check.loop import padded, place
from longctx.check.preference import (
    BETA,
    KINDS,
    OTHER_MARGINS,
    OTHER_PAIRS,
    PER_TOKEN,
    SAME_SIGN,
    SWAPPED,
)
from longctx.check.probe import Tokens
from longctx.check.scale import SCALE
from longctx.check.trainer import arguments
from longctx.check.verdict import kinds
from tests.trainer_cases import as_rank
from tests.workers import Workers

SHORT = Probe("short", lengths=(9, 14, 5, 8, 20, 11, 4, 17), prompt=0.3)
BETA_ASKED = 0.5


class Pairs:
    """A right loop of DPO, whose methods a fault overrides."""

    beta = BETA_ASKED
    is_other_reference = True

    def rows(self, probe: Probe) -> list[dict[str, list[int]]]:
        """Chosen and rejected documents of this rank, one after another."""
        rank, ranks = place()
        found = []
        for pair in probe.pairs[rank::ranks]:
            for part in ("chosen_ids", "rejected_ids"):
                prompt = pair["prompt_ids"]
                labels = [-100] * len(prompt) + pair[part]
                found.append({"input_ids": prompt + pair[part], "labels": labels})
        return found

    def batch(self, probe: Probe) -> dict[str, torch.Tensor]:
        return padded(self.rows(probe), probe.pad)

    def scores(self, model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Log-probabilities of rows."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = model(**inputs, use_cache=False).logits[:, :-1].float()
        labels = batch["labels"][:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return self.of_rows(-losses.view(labels.shape), labels)

    def of_rows(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return tokens.sum(1)

    def margins(self, own: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """Margins of pairs, by log-probabilities of rows [2 pairs]."""
        scores = own - others
        return scores[0::2] - scores[1::2]

    def loss(self, margins: torch.Tensor, probe: Probe) -> torch.Tensor:
        return -F.logsigmoid(self.beta * margins).sum() / len(probe.pairs)

    def __call__(self, probe: Probe) -> Step:
        model = probe.model("llama")
        reference = probe.model("llama", initializer_range=0.3)
        batch = self.batch(probe)
        with record(model) as seen:
            own = self.scores(model, batch)
            with torch.no_grad():
                others = self.scores(reference if self.is_other_reference else model, batch)
            loss = self.loss(self.margins(own, others), probe)
            loss.backward()
            total = loss.detach()
            if dist.is_initialized():
                dist.all_reduce(total)
                for weight in model.parameters():
                    dist.all_reduce(weight.grad)
            aim = Preference(BETA_ASKED, reference if self.is_other_reference else None)
            return seen.step(loss=float(total), aim=aim)


class OfItself(Pairs):
    """A right one, whose margins are 0."""

    is_other_reference = False


class Swapped(Pairs):
    def margins(self, own: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return -super().margins(own, others)


class OneSwapped(Pairs):
    def margins(self, own: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        signs = torch.ones(len(own) // 2)
        signs[1] = -1
        return signs * super().margins(own, others)


class AllLikely(Pairs):
    def margins(self, own: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        right = super().margins(own, others)
        return right.detach() + own[0::2] + own[1::2] - (own[0::2] + own[1::2]).detach()


class OtherBeta(Pairs):
    beta = 0.1


class OtherBetaOfItself(OfItself):
    beta = 0.1


class SumOfPairs(Pairs):
    def loss(self, margins: torch.Tensor, probe: Probe) -> torch.Tensor:
        return super().loss(margins, probe) * len(probe.pairs)


class Means(Pairs):
    def of_rows(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return tokens.sum(1) / (labels >= 0).sum(1)


class OtherPartners(Pairs):
    def margins(self, own: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        scores = own - others
        return scores[0::2] - scores[1::2].roll(1)


class NoReference(Pairs):
    def margins(self, own: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return super().margins(own, torch.zeros_like(others))


class AddedReference(Pairs):
    def margins(self, own: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return super().margins(own, -others)


class OwnReference(Pairs):
    def margins(self, own: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return super().margins(own, own.detach())


class ShiftedReference(Pairs):
    """As of a reference that saw other documents."""

    def margins(self, own: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        others = others.clone()
        others[0] += 0.7
        return super().margins(own, others)


class PromptsToo(Pairs):
    def rows(self, probe: Probe) -> list[dict[str, list[int]]]:
        return [row | {"labels": list(row["input_ids"])} for row in super().rows(probe)]

    def of_rows(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return Means.of_rows(self, tokens, labels)


class WithoutLast(Pairs):
    def rows(self, probe: Probe) -> list[dict[str, list[int]]]:
        return [row | {"labels": [*row["labels"][:-1], -100]} for row in super().rows(probe)]


class Packed(Pairs):
    """Both documents of a pair are one row, without positions of their own."""

    def batch(self, probe: Probe) -> dict[str, torch.Tensor]:
        rows = self.rows(probe)
        found = []
        for chosen, rejected in zip(rows[0::2], rows[1::2], strict=True):
            row = {name: chosen[name] + rejected[name] for name in chosen}
            found.append(row | {"first": [len(chosen["labels"])]})
        self.firsts = [row.pop("first")[0] for row in found]
        for row, first in zip(found, self.firsts, strict=True):
            row["labels"][first] = -100
        return padded(found, probe.pad)

    def of_rows(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found = []
        for row, first in zip(tokens, self.firsts, strict=True):
            found += [row[: first - 1].sum(), row[first - 1 :].sum()]
        return torch.stack(found)


RIGHT = [Pairs, OfItself]
SEEN = "documents see each other"
FAULTS: dict[type[Pairs], list[str]] = {
    Swapped: [SWAPPED],
    OneSwapped: [SWAPPED],
    AllLikely: [SAME_SIGN],
    OtherBeta: [BETA],
    OtherBetaOfItself: [SCALE],
    SumOfPairs: [SCALE],
    Means: [PER_TOKEN],
    OtherPartners: [OTHER_PAIRS],
    NoReference: [OTHER_MARGINS],
    AddedReference: [OTHER_MARGINS],
    OwnReference: [OTHER_MARGINS],
    ShiftedReference: [OTHER_MARGINS],
    PromptsToo: ["prompts are trained"],
    WithoutLast: ["last tokens have no loss"],
    Packed: [SEEN],
}


def found_by(loops: list[type[Pairs]]) -> dict[str, list[str]]:
    """Returns the faults of loops, on every rank."""
    found = {}
    for loop in loops:
        (verdict,) = check_step(loop(), [SHORT]).verdicts
        found[loop.__name__] = [str(finding) for finding in verdict.findings]
    return found


@pytest.mark.parametrize("loop", RIGHT)
def test_a_right_step_on_pairs_is_silent(loop: type[Pairs]) -> None:
    (verdict,) = check_step(loop(), [SHORT]).verdicts
    assert verdict.findings == []
    assert ("the margins of pairs" in verdict.not_tested) == (loop is OfItself)


@pytest.mark.parametrize("loop", FAULTS)
def test_a_fault_of_pairs_is_named(loop: type[Pairs]) -> None:
    (verdict,) = check_step(loop(), [SHORT]).verdicts
    assert [finding.kind for finding in verdict.findings] == FAULTS[loop]


def test_a_fault_of_pairs_is_said_as_it_is() -> None:
    found = found_by([OneSwapped, OtherBeta, OtherBetaOfItself, OtherPartners, ShiftedReference])
    assert found == {
        "OneSwapped": [f"{SWAPPED}: in pair 1"],
        "OtherBeta": [f"{BETA}: 0.1 and not 0.5"],
        "OtherBetaOfItself": [f"{SCALE}: × 0.2, or beta is 0.1 and not 0.5"],
        "OtherPartners": [f"{OTHER_PAIRS}: 4 of 4, document 0 with document 7"],
        "ShiftedReference": [f"{OTHER_MARGINS}: -0.2729 and not 0.4271 of pair 0"],
    }


def test_pairs_of_two_ranks(workers: Workers) -> None:
    for found in workers.run(found_by, 2, [Pairs, OtherPartners], timeout_s=120.0):
        assert found["Pairs"] == []
        (finding,) = found["OtherPartners"]
        assert finding.startswith(OTHER_PAIRS)


class LogsAnother(Pairs):
    def loss(self, margins: torch.Tensor, probe: Probe) -> torch.Tensor:
        loss = super().loss(margins, probe)
        return loss + 1.0


def test_the_logged_loss_of_pairs() -> None:
    (finding,) = found_by([LogsAnother])["LogsAnother"]
    assert finding.startswith(f"{LOGGED_LOSS}: 1.")


def test_one_pair_does_not_tell_beta_from_scale() -> None:
    probe = Probe("one", lengths=(9, 14))
    (verdict,) = check_step(OtherBeta(), [probe]).verdicts
    (finding,) = verdict.findings
    assert finding.kind == SCALE
    assert finding.details.endswith(", or another beta or margin")


def test_pairs_of_a_probe_begin_alike() -> None:
    probe = Probe("odd", lengths=(6, 4, 5), prompt=0.5, ends=True)
    (pair,) = probe.pairs
    assert pair["prompt_ids"] == [2, 3]
    assert pair["chosen_ids"] == [4, 5, 6, 1]
    assert pair["rejected_ids"] == [10, 1]
    tokens = Tokens(probe.in_pairs())
    assert tokens.numbers([2, 3, 10, 1, 0]) == [6, 7, 8, 9, -1]
    assert tokens.numbers([2, 3, 4, 5, 6, 1, 2, 3, 10]) == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert tokens.numbers([2, 3]) == [0, 1], "of which document it is, nothing tells"
    assert [probe.in_pairs().trained(1, place) for place in range(4)] == [False, False, True, True]


OF_TRL = Path(template.__file__).with_name("templates") / "check_trl.py"


def by_trl(probe: Probe, *, adapters: bool = False, **more: Any) -> Any:
    """A DPOTrainer of TRL on ids, which it would tokenize again."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer

    class OnIds(DPOTrainer):  # type: ignore[misc]  # TRL is untyped here
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

    _, ranks = place()
    size = max(1, len(probe.pairs) // (ranks * probe.micro_batches))
    given = arguments(
        per_device_train_batch_size=size,
        gradient_accumulation_steps=probe.micro_batches,
        **{"beta": BETA_ASKED, "max_length": None, **more},
    )
    return OnIds(
        model=probe.model("qwen3"),
        ref_model=None if adapters else probe.model("qwen3", initializer_range=0.3),
        args=DPOConfig(**given),
        train_dataset=Dataset.from_list(probe.pairs),
        processing_class=runpy.run_path(str(OF_TRL))["tokenizer"](probe),
        peft_config=LoraConfig(target_modules=["q_proj", "v_proj"]) if adapters else None,
    )


def found_by_trl(probes: list[Probe], **more: Any) -> list[list[str]]:
    if dist.is_initialized():
        as_rank()
    report = check_step(partial(by_trl, **more), probes)
    return [[str(finding) for finding in verdict.findings] for verdict in report.verdicts]


@pytest.mark.slow
def test_a_trainer_of_trl_on_pairs_is_right() -> None:
    assert found_by_trl([*PROBES[:4]]) == [[], [], [], []]
    assert found_by_trl([SHORT], adapters=True) == [[]]


def test_a_trainer_of_trl_on_pairs_is_right_in_bfloat16() -> None:
    """Margins are rounded there, β times as much; ends of texts are hardly told apart."""
    prompts, ends = (replace(PROBES[number], dtype="bfloat16") for number in (1, 2))
    assert found_by_trl([prompts], beta=BETA_ASKED) == [[]]
    assert found_by_trl([ends]) == [[]]


@pytest.mark.slow
def test_a_trainer_of_trl_on_pairs_is_right_on_two_ranks(workers: Workers) -> None:
    for found in workers.run(found_by_trl, 2, [*PROBES[:4]], timeout_s=240.0):
        assert found == [[], [], [], []]


def test_a_trainer_of_trl_whose_reference_is_wrong() -> None:
    def make(probe: Probe) -> Any:
        made = by_trl(probe)
        compute = made._compute_loss

        def with_own(*given: Any) -> Any:
            made.ref_model, kept = made.model, made.ref_model
            try:
                return compute(*given)
            finally:
                made.ref_model = kept

        made._compute_loss = with_own
        return made

    (verdict,) = check_step(make, [SHORT]).verdicts
    assert str(verdict.findings[0]) == f"{OTHER_MARGINS}: the reference is the model itself"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"loss_type": ["ipo"]}, "loss_type is not sigmoid: pairs are judged by"),
        ({"label_smoothing": 0.1}, "label_smoothing is set"),
    ],
)
def test_other_losses_of_pairs_are_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckError, match=said):
        check_step(partial(by_trl, **more), [SHORT])


def test_faults_of_pairs_can_be_allowed() -> None:
    assert set(KINDS) <= set(kinds())

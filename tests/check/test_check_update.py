"""Faults of one update of an optimizer are named, and right ones are silent."""

import re
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from longctx.check import CheckError, Probe, Step, check_step, record
from longctx.check.clipping import (
    CLIPPED_APART,
    CLIPPED_BEFORE,
    CLIPPED_OTHERWISE,
    CLIPPING,
    LATE,
    NOT_CLIPPED,
)
from longctx.check.logged import LOGGED_NORM
from longctx.check.loop import padded_batches, place, targets_of
from longctx.check.updates import (
    APART_AFTER,
    DECAY_MIXED,
    DECAY_OTHER,
    KINDS,
    NOT_UPDATED,
    RATE,
    SOME_VANISHED,
    STEPS,
    TWICE,
    UPDATE,
    UPDATED_OTHERWISE,
    VANISHED,
)
from longctx.check.verdict import APART_RANKS, kinds
from tests.check_cases import trainer
from tests.workers import Workers

SHORT = Probe("short", lengths=(9, 14, 5, 8))
LIMIT = 0.05
RATE_ASKED = 1e-2
DECAY_ASKED = 0.1
AdamW = torch.optim.AdamW


def decaying(model: Any) -> list[dict[str, Any]]:
    """Groups of a right optimizer: matrices decay."""
    weights = list(model.parameters())
    return [
        {"params": [each for each in weights if each.dim() > 1], "weight_decay": DECAY_ASKED},
        {"params": [each for each in weights if each.dim() == 1], "weight_decay": 0.0},
    ]


class Loop:
    """A right loop, whose methods a fault overrides."""

    dtype = "float32"
    asked: ClassVar[dict[str, float]] = {
        "lr": RATE_ASKED,
        "weight_decay": DECAY_ASKED,
        "max_norm": LIMIT,
    }

    def optimizer(self, model: Any) -> Any:
        return AdamW(decaying(model), lr=RATE_ASKED)

    def reduce(self, model: Any) -> None:
        if dist.is_initialized():
            for weight in model.parameters():
                dist.all_reduce(weight.grad)

    def clip(self, model: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT)

    def update(self, optimizer: Any, model: Any) -> None:
        optimizer.step()

    def __call__(self, probe: Probe) -> Step:
        model = probe.model("llama").to(getattr(torch, self.dtype))
        optimizer = self.optimizer(model)
        batches = padded_batches(probe)
        targets = targets_of(batches)
        with record(model) as seen:
            seen.watch(optimizer, **self.asked)
            for batch in batches:
                labels = batch.pop("labels")
                logits = model(**batch, use_cache=False).logits[:, :-1].float()
                losses = cross_entropy(
                    logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
                )
                (losses / targets).backward()
            step = self.finish(seen, model)
            self.update(optimizer, model)
        return step

    def finish(self, seen: Any, model: Any) -> Step:
        self.reduce(model)
        step = seen.step()
        self.clip(model)
        return step


class BySgd(Loop):
    """A right one."""

    def optimizer(self, model: Any) -> Any:
        return torch.optim.SGD(
            decaying(model), lr=RATE_ASKED, momentum=0.9, nesterov=True, dampening=0.0
        )


class ByAdam(Loop):
    """A right one: its decay is in gradients."""

    def optimizer(self, model: Any) -> Any:
        return torch.optim.Adam(decaying(model), lr=RATE_ASKED, amsgrad=True, foreach=False)


class Scheduled(Loop):
    """A right one: a schedule begins with half the rate."""

    def optimizer(self, model: Any) -> Any:
        optimizer = super().optimizer(model)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
        return optimizer


class EverythingDecays(Loop):
    """A right one: norms decay, too."""

    def optimizer(self, model: Any) -> Any:
        return AdamW(model.parameters(), lr=RATE_ASKED, weight_decay=DECAY_ASKED)


class FrozenToo(EverythingDecays):
    """A right one: what is frozen is in its groups, and is not updated."""

    def optimizer(self, model: Any) -> Any:
        optimizer = super().optimizer(model)
        model.model.embed_tokens.weight.requires_grad_(False)
        return optimizer


class InBfloat16(Loop):
    """A right one, whose updates are large enough."""

    dtype = "bfloat16"


class WithoutNorms(Loop):
    def optimizer(self, model: Any) -> Any:
        return AdamW(decaying(model)[:1], lr=RATE_ASKED)


class OldParameters(Loop):
    def optimizer(self, model: Any) -> Any:
        copies = [nn.Parameter(each.detach().clone()) for each in model.parameters()]
        return AdamW(copies, lr=RATE_ASKED, weight_decay=DECAY_ASKED)


class Twice(Loop):
    def optimizer(self, model: Any) -> Any:
        groups = decaying(model)
        groups[1]["params"] *= 2
        with pytest.warns(UserWarning, match="duplicate"):
            return torch.optim.SGD(groups, lr=RATE_ASKED)


class OtherRate(Loop):
    def optimizer(self, model: Any) -> Any:
        return AdamW(decaying(model), lr=RATE_ASKED / 4)


class NoDecay(Loop):
    def optimizer(self, model: Any) -> Any:
        return AdamW(model.parameters(), lr=RATE_ASKED, weight_decay=0.0)


class OneNormDecays(Loop):
    def optimizer(self, model: Any) -> Any:
        groups = decaying(model)
        groups[0]["params"].append(groups[1]["params"].pop())
        return AdamW(groups, lr=RATE_ASKED)


class OneLayerDecays(Loop):
    def optimizer(self, model: Any) -> Any:
        groups = decaying(model)
        weight = model.model.layers[0].mlp.up_proj.weight
        groups[0]["params"] = [each for each in groups[0]["params"] if each is not weight]
        groups[1]["params"].append(weight)
        return AdamW(groups, lr=RATE_ASKED)


class NotClipped(Loop):
    def clip(self, model: Any) -> None:
        return


class ClippedBySum(Loop):
    def clip(self, model: Any) -> None:
        norm = nn.utils.get_total_norm([each.grad for each in model.parameters()])
        nn.utils.clip_grads_with_norm_(model.parameters(), LIMIT, norm**2)


class ClippedByValue(Loop):
    def clip(self, model: Any) -> None:
        nn.utils.clip_grad_value_(model.parameters(), LIMIT)


class EachParameterClipped(Loop):
    def clip(self, model: Any) -> None:
        for weight in model.parameters():
            nn.utils.clip_grad_norm_([weight], LIMIT)


class EachGroupClipped(Loop):
    def clip(self, model: Any) -> None:
        for group in decaying(model):
            nn.utils.clip_grad_norm_(group["params"], LIMIT)


class Doubled(Loop):
    def clip(self, model: Any) -> None:
        for weight in model.parameters():
            weight.grad *= 2


class NormsDropped(Loop):
    def clip(self, model: Any) -> None:
        super().clip(model)
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.grad = None


class Noisy(Loop):
    def clip(self, model: Any) -> None:
        super().clip(model)
        model.lm_head.weight.grad[0] += 1e-3


class SteppedTwice(Loop):
    def update(self, optimizer: Any, model: Any) -> None:
        optimizer.step()
        optimizer.step()


class Half(Loop):
    """As with a factor of one's own."""

    def optimizer(self, model: Any) -> Any:
        optimizer = super().optimizer(model)
        before = [each.detach().clone() for each in model.parameters()]

        def halve(*_: Any) -> None:
            with torch.no_grad():
                for weight, old in zip(model.parameters(), before, strict=True):
                    weight.lerp_(old, 0.5)

        optimizer.register_step_post_hook(halve)
        return optimizer


class DecaysAgain(Loop):
    """By a line beside the optimizer."""

    def optimizer(self, model: Any) -> Any:
        optimizer = super().optimizer(model)

        def decay(*_: Any) -> None:
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(0.99)

        optimizer.register_step_pre_hook(decay)
        return optimizer


class TooSmall(Loop):
    dtype = "bfloat16"
    asked: ClassVar[dict[str, float]] = {"max_norm": LIMIT}

    def optimizer(self, model: Any) -> Any:
        return AdamW(decaying(model), lr=1e-6)


class NormsVanish(Loop):
    """A right one: their weights are near 1, where bfloat16 has steps of 0.4 or 0.8 %."""

    dtype = "bfloat16"
    asked: ClassVar[dict[str, float]] = {"max_norm": LIMIT}

    def optimizer(self, model: Any) -> Any:
        return AdamW(decaying(model), lr=1e-3)


class PutBack(Loop):
    """Weights are written over, which is no rounding."""

    def optimizer(self, model: Any) -> Any:
        optimizer = super().optimizer(model)
        before = [each.detach().clone() for each in model.parameters()]

        def put_back(*_: Any) -> None:
            with torch.no_grad():
                for weight, old in zip(model.parameters(), before, strict=True):
                    weight.copy_(old)

        optimizer.register_step_post_hook(put_back)
        return optimizer


class TwoOptimizers(Loop):
    """A right one, and a fault where a method is overridden."""

    asked: ClassVar[dict[str, float]] = {"max_norm": LIMIT}

    def optimizer(self, model: Any) -> Any:
        matrices, norms = decaying(model)
        self.second = torch.optim.SGD(norms["params"], lr=RATE_ASKED)
        return AdamW([matrices], lr=RATE_ASKED)

    def finish(self, seen: Any, model: Any) -> Step:
        seen.watch(self.second, **self.asked)
        return super().finish(seen, model)

    def update(self, optimizer: Any, model: Any) -> None:
        optimizer.step()
        self.second.step()


class TwoWithoutNorms(TwoOptimizers):
    def optimizer(self, model: Any) -> Any:
        optimizer = super().optimizer(model)
        self.second.param_groups[0]["params"].pop()
        return optimizer


class NotReduced(Loop):
    """After the step was recorded: ranks end with weights of their own."""

    def clip(self, model: Any) -> None:
        super().clip(model)
        if place()[0]:
            model.lm_head.weight.grad *= 0.5


class RanksClipOtherwise(Loop):
    def clip(self, model: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT / (1 + place()[0]))


class ClippedBeforeMean(Loop):
    def reduce(self, model: Any) -> None:
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
            weight.grad /= dist.get_world_size()

    def finish(self, seen: Any, model: Any) -> Step:
        step = seen.step()
        self.clip(model)
        self.reduce(model)
        return step


RIGHT = [Loop, BySgd, ByAdam, Scheduled, EverythingDecays, FrozenToo, InBfloat16, TwoOptimizers]
FAULTS: dict[type[Loop], list[str]] = {
    WithoutNorms: [NOT_UPDATED],
    OldParameters: [NOT_UPDATED],
    Twice: [TWICE],
    OtherRate: [RATE],
    NoDecay: [DECAY_OTHER],
    OneNormDecays: [DECAY_MIXED],
    OneLayerDecays: [DECAY_MIXED],
    NotClipped: [NOT_CLIPPED],
    ClippedBySum: [CLIPPED_OTHERWISE],
    ClippedByValue: [CLIPPED_OTHERWISE],
    EachParameterClipped: [CLIPPED_OTHERWISE],
    EachGroupClipped: [CLIPPED_OTHERWISE],
    Doubled: [LATE],
    NormsDropped: [LATE, NOT_UPDATED],
    Noisy: [LATE],
    SteppedTwice: [STEPS],
    Half: [UPDATED_OTHERWISE],
    DecaysAgain: [UPDATED_OTHERWISE],
    TooSmall: [VANISHED],
    PutBack: [UPDATED_OTHERWISE],
    TwoWithoutNorms: [NOT_UPDATED],
}


def found_by(loops: list[type[Loop]]) -> dict[str, list[str]]:
    """Returns the faults of loops, on every rank."""
    found = {}
    for loop in loops:
        (verdict,) = check_step(loop(), [SHORT]).verdicts
        found[loop.__name__] = [str(finding) for finding in verdict.findings]
    return found


@pytest.mark.parametrize("loop", RIGHT)
def test_a_right_update_is_silent(loop: type[Loop]) -> None:
    (verdict,) = check_step(loop(), [SHORT]).verdicts
    assert verdict.findings == []
    assert not verdict.not_tested.keys() & {CLIPPING, UPDATE}


def test_what_bfloat16_rounds_away_of_few_is_a_choice() -> None:
    (verdict,) = check_step(NormsVanish(), [SHORT]).verdicts
    assert verdict.findings == []
    (choice,) = verdict.choices
    assert choice.kind == SOME_VANISHED
    assert choice.details.startswith("160 of 160 numbers keep their value in bfloat16: ")
    assert verdict.status == 0


@pytest.mark.parametrize("loop", FAULTS)
def test_a_fault_of_an_update_is_named(loop: type[Loop]) -> None:
    (verdict,) = check_step(loop(), [SHORT]).verdicts
    assert [finding.kind for finding in verdict.findings] == FAULTS[loop]


ON_TWO: dict[type[Loop], list[str]] = {
    Loop: [],
    NotReduced: [LATE, APART_AFTER],
    RanksClipOtherwise: [CLIPPED_APART, APART_AFTER],
    ClippedBeforeMean: [APART_RANKS, CLIPPED_BEFORE],
}


def test_updates_of_two_ranks(workers: Workers) -> None:
    for found in workers.run(found_by, 2, list(ON_TWO), timeout_s=120.0):
        kinds_of = {
            name: [words.partition(":")[0] for words in several] for name, several in found.items()
        }
        assert kinds_of == {loop.__name__: each for loop, each in ON_TWO.items()}


def test_a_fault_is_said_as_it_is() -> None:
    found = found_by([Noisy, OldParameters, OtherRate, TooSmall])
    assert found["Noisy"] == [f"{LATE}: those of 1 of 21 parameters: lm_head.weight"]
    (old,) = found["OldParameters"]
    assert old.startswith(f"{NOT_UPDATED}: 21 of 21, in no group of the optimizer: ")
    assert old.endswith("; 21 tensors of the optimizer are none of the model's")
    assert found["OtherRate"] == [f"{RATE}: 0.0025 and not 0.01 (0.25 times)"]
    (small,) = found["TooSmall"]
    assert small.startswith(f"{VANISHED}: 19519 of 19616 numbers keep their value in bfloat16: ")


@pytest.mark.parametrize(
    "more",
    [
        {"weight_decay": DECAY_ASKED},
        {"optim": "sgd"},
        # Its sinks decay, which are no norms.
        {"weight_decay": DECAY_ASKED, "kind": "gpt_oss"},
    ],
)
def test_the_update_of_a_right_trainer(more: dict[str, Any]) -> None:
    (verdict,) = check_step(lambda probe: trainer(probe, **more), [SHORT]).verdicts
    assert verdict.findings == []
    assert not verdict.not_tested.keys() & {CLIPPING, UPDATE}


def test_the_update_of_a_wrong_trainer() -> None:
    def make(probe: Probe) -> Any:
        made = trainer(probe, weight_decay=DECAY_ASKED)

        def create(model: Any = None) -> Any:
            made.optimizer = AdamW(decaying(made.model)[:1], lr=1e-2, weight_decay=0.0)
            for group in made.optimizer.param_groups:
                group["weight_decay"] = 0.0
            return made.optimizer

        made.create_optimizer = create
        made.accelerator.clip_grad_norm_ = lambda *_: torch.tensor(1.0)
        return made

    (verdict,) = check_step(make, [SHORT]).verdicts
    kinds_found = [finding.kind for finding in verdict.findings]
    assert kinds_found == [LOGGED_NORM, RATE, DECAY_OTHER, NOT_CLIPPED, NOT_UPDATED]


@pytest.mark.parametrize(
    ("more", "what", "why"),
    [
        ({"max_grad_norm": 1e3}, CLIPPING, r"their norm is [\d.]+, below the limit"),
        ({"warmup_steps": 2}, UPDATE, "the learning rate of this step is 0"),
        (
            {"optim": "adafactor"},
            UPDATE,
            r"by transformers.optimization.Adafactor, none of torch's",
        ),
    ],
)
def test_what_of_an_update_is_not_tested(more: dict[str, Any], what: str, why: str) -> None:
    (verdict,) = check_step(lambda probe: trainer(probe, **more), [SHORT]).verdicts
    assert verdict.findings == []
    assert re.match(why, verdict.not_tested[what])


class Resumed(Loop):
    def optimizer(self, model: Any) -> Any:
        optimizer = super().optimizer(model)
        for weight in model.parameters():
            optimizer.state[weight]["step"] = torch.tensor(3.0)
            optimizer.state[weight]["exp_avg"] = torch.zeros_like(weight)
            optimizer.state[weight]["exp_avg_sq"] = torch.ones_like(weight)
        return optimizer


class UnknownLimit(Loop):
    asked: ClassVar[dict[str, float]] = {}


def test_what_is_not_said_of_settings_is_not_tested() -> None:
    (verdict,) = check_step(Resumed(), [SHORT]).verdicts
    assert verdict.findings == []
    assert verdict.not_tested[UPDATE] == "the optimizer had made steps before"
    (verdict,) = check_step(UnknownLimit(), [SHORT]).verdicts
    assert verdict.findings == []
    assert verdict.not_tested[CLIPPING] == "gradients are multiplied by 0.01992 (max_norm=)"


class NoStep(Loop):
    def update(self, optimizer: Any, model: Any) -> None:
        return


class NoOptimizer(Loop):
    def optimizer(self, model: Any) -> Any:
        return model


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        (NoStep, "a watched optimizer made no step before the end of `record`"),
        (NoOptimizer, "LlamaForCausalLM is no torch.optim.Optimizer"),
    ],
)
def test_what_made_no_step_is_refused(loop: type[Loop], said: str) -> None:
    with pytest.raises(CheckError, match=said):
        check_step(loop(), [SHORT])


def test_faults_of_updates_can_be_allowed() -> None:
    assert set(KINDS) <= set(kinds())
    (verdict,) = check_step(NotClipped(), [SHORT], allow=[NOT_CLIPPED]).verdicts
    assert verdict.findings == []

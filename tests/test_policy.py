"""Policy losses on packed rollouts are TRL's own, values and gradients, however they are split over ranks or merged."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longctx.data.packing import pack_documents
from longctx.data.trees import merge_prefixes
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.planners.planner import make_plan
from longctx.training.policy import Policy, held_tokens
from longctx.data.rollouts import RolloutBatch, RolloutError, Rollouts
from tests.lora_cases import make_checkpoint
from tests.marks import slow_unless
from tests.policy_cases import LOSSES, draw, log_probabilities, settings_of, step, trl_loss
from tests.preference_cases import SETTINGS
from tests.training_cases import make_store
from tests.workers import Workers

pytest.importorskip("trl")
ALONE = SimpleNamespace(counts=True, gather=lambda values: torch.tensor([values], dtype=torch.float64))
SPLITS = {
    "alone": (1, ["batch.tokens_per_rank=1600"]),
    "two ranks": (2, ["batch.tokens_per_rank=400", "context.mode=static", "context.degree=2"]),
    "three ranks": (3, ["batch.tokens_per_rank=160"]),
}
STEPS = {
    f"{loss} {kind} {split} {merged}": (loss, kind, split, merged)
    for loss in LOSSES
    for kind in ("present", "old", "sampler")
    for split in SPLITS
    for merged in ("true", "false")
}
QUICK = ("grpo old two ranks true", "gspo sampler three ranks true", "gspo sampler alone false", "cispo present two ranks true")
QUICK += ("dapo sampler two ranks false", "dr_grpo present alone true")


def batch_of(rollouts: Rollouts, merged: bool) -> RolloutBatch:
    """One rank's batch of all rollouts."""
    sequences = [torch.cat(both).numpy() for both in zip(rollouts.prompts, rollouts.completions, strict=True)]
    labels = []
    for prompt, completion, learned in zip(rollouts.prompts, rollouts.completions, rollouts.learned, strict=True):
        labels.append(torch.cat([torch.full((len(prompt),), -100), completion.where(torch.from_numpy(learned), -100)]).numpy())
    trees = merge_prefixes(sequences, labels, least_shared=1 if merged else 10**6)
    profile = HardwareProfile.load("h100-nvlink-ib")
    plan = make_plan(trees.lengths, ranks=1, tokens_per_rank=700, profile=profile, trees=trees.trees)
    packed, targets = pack_documents(plan, 0, trees.tokens, trees.labels, shift=False)
    assert bool(trees.trees) == merged
    names, rows = tuple(map(str, trees.lengths)), trees.rows if merged else ()
    return RolloutBatch(1, plan, names, sum(map(len, sequences)), targets, tuple(packed), rows=rows, rollouts=rollouts)


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("kind", ["present", "old", "sampler"])
@pytest.mark.parametrize("loss", LOSSES)
def test_weights_are_the_derivatives_of_trls_loss(loss: str, kind: str, merged: bool) -> None:
    """With log p the same where rollouts share a row."""
    rollouts = draw(kind)
    batch, settings = batch_of(rollouts, merged), settings_of(loss, rollouts)
    torch.manual_seed(1)
    values = [(0.3 * torch.randn(len(each.tokens), dtype=torch.float64) - 5).requires_grad_() for each in batch.micro_batches]
    present = torch.zeros(len(rollouts.sequence), dtype=torch.float64)
    for micro_batch, of_rows in zip(batch.micro_batches, values, strict=True):
        rows, tokens = held_tokens(batch, micro_batch)
        present = present.index_add(0, tokens, of_rows[rows])
    wanted = trl_loss(loss, settings, rollouts, list(present.split([len(each) for each in rollouts.completions])))
    wanted.backward()
    policy = Policy(ALONE, loss, **settings)
    known = policy.needs_log_probabilities(batch)
    assert known == (kind != "present")
    found = policy.weights(batch, [each.detach() for each in values] if known else ())
    assert found.tokens is not None
    value = found.loss
    if value is None:
        pairs = zip(values, found.tokens, strict=True)
        value = sum(float((-each.detach() * weights).sum()) for each, weights in pairs) / found.divisor
    assert value == pytest.approx(wanted.item(), rel=1e-6, abs=1e-9)
    for of_rows, weights in zip(values, found.tokens, strict=True):
        torch.testing.assert_close(-weights.double() / found.divisor, of_rows.grad, rtol=1e-5, atol=1e-9)
    if known and loss not in ("cispo", "gspo"):
        assert 0.01 < found.reported["clip_share"] < 0.9


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama", num_hidden_layers=2)


@pytest.mark.parametrize("name", slow_unless(lambda name: name in QUICK, STEPS))
def test_a_step_has_the_loss_and_gradients_of_trl(
    workers: Workers, store: Path, checkpoint: Path, tmp_path: Path, name: str
) -> None:
    loss, kind, split, merged = STEPS[name]
    near = [each.detach() for each in log_probabilities(checkpoint, draw("present"))[1]]
    rollouts = draw(kind, near)
    model, present = log_probabilities(checkpoint, rollouts)
    wanted = trl_loss(loss, settings_of(loss, rollouts), rollouts, present)
    wanted.backward()
    ranks, settings = SPLITS[split]
    dpo = [setting for setting in SETTINGS if not setting.startswith("dpo.")]
    settings = [*dpo, f"model.from_pretrained={checkpoint}", f"data.merge_prefixes={merged}", *settings]
    for of_rank in workers.run(step, ranks, store, tmp_path, settings, loss, rollouts):
        metrics, gradients = of_rank["metrics"], of_rank["gradients"]
        assert metrics.loss == pytest.approx(wanted.item(), rel=1e-6, abs=1e-6)
        assert of_rank["looks"] == (kind != "present") and (metrics.ratio is None) == (kind == "present")
        assert (metrics.computed_tokens is not None and metrics.computed_tokens < 0.7 * metrics.tokens) == (merged == "true")
        assert ranks == 1 or set(metrics.degrees) != {"1"}, "no document was split"
        squares = [
            ((gradients[key].double() - p.grad).square().sum(), p.grad.square().sum()) for key, p in model.named_parameters()
        ]
        error = float((sum(a for a, _ in squares) / sum(b for _, b in squares)) ** 0.5)
        assert error < 1e-5, error


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "rewards missing": ({"rewards": None}, "neither rewards nor advantages"),
    "a group of one": ({"groups": [0, 0, 0, 0, 1, 1, 1, 2, 3]}, "rollouts 7, 8: are alone in their group"),
    "not finite": ({"advantages": [1.0] * 8 + [float("nan")]}, "rollouts 8: advantages are not finite"),
    "another length": ({"old_logps": [[0.0]] * 9}, "old_logps have another length"),
    "advantages of another length": ({"advantages": [[0.0, 1.0]] * 9}, "advantages have another length"),
    "fewer": ({"rewards": [1.0]}, "9 prompts, but 1 rewards"),
    "no token": ({"masks": None, "completions": [[]] * 9}, "completions are empty"),
}


@pytest.mark.parametrize("name", WRONG)
def test_rollouts_that_cannot_be_learned_from_are_refused(name: str) -> None:
    changes, message = WRONG[name]
    with pytest.raises(RolloutError, match=message):
        replace(draw("present"), **changes)


def test_masks_without_a_token_are_refused() -> None:
    rollouts = draw("present")
    masks = [mask & (number != 2) for number, mask in enumerate(rollouts.learned)]
    with pytest.raises(RolloutError, match="rollouts 2: masks have no token"):
        replace(rollouts, masks=masks)


def test_settings_that_do_not_fit_are_refused() -> None:
    for settings, message in (
        ({"loss": "reinforce"}, "must be one of"),
        ({"loss": "dr_grpo"}, "maximum tokens of a completion"),
        ({"loss": "cispo"}, "clip_high is not given"),
    ):
        with pytest.raises(ValueError, match=message):
            Policy(ALONE, **settings)
    with pytest.raises(ValueError, match="no log-probabilities of a reference"):
        Policy(ALONE, kl=0.1).needs_log_probabilities(batch_of(draw("present"), False))

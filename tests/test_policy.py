"""Policy losses on packed rollouts are TRL's own, values and gradients, however they are split over ranks or merged."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longctx.data.packing import pack_documents
from longctx.data.rollouts import RolloutBatch, RolloutError, Rollouts
from longctx.data.trees import merge_prefixes
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.planners.planner import make_plan
from longctx.training.policy import Policy, held_tokens
from tests.lora_cases import ALPHA, RANK, make_checkpoint
from tests.marks import slow_unless
from tests.native_cases import as_saved
from tests.policy_cases import KINDS, LOSSES, draw, log_probabilities, refusals, settings_of, step, trl_loss
from tests.pretrained_cases import largest_error
from tests.workers import Workers

pytest.importorskip("trl")
ALONE: Any = SimpleNamespace(counts=True, sum=lambda values: values)
NATIVE = "model.implementation=native"
SPLITS = {
    "alone": (1, ["batch.tokens_per_rank=1600"]),
    "two ranks": (2, ["batch.tokens_per_rank=400", "context.mode=static", "context.degree=2"]),
    "three ranks": (3, ["batch.tokens_per_rank=160", "parallel.reduce_after=micro_batch"]),
    "bins": (3, ["batch.tokens_per_rank=300", "context.mode=bins", "context.bins={100: 1, 200: 2, 600: 3}"]),
    "two tensor ranks": (4, [NATIVE, "batch.tokens_per_rank=300", "parallel.tensor_parallel_size=2"]),
    "a pipeline": (4, [NATIVE, "batch.tokens_per_rank=300", "parallel.pipeline_parallel_size=2"]),
    "experts": (
        2,
        [NATIVE, "batch.tokens_per_rank=400", "context.mode=static", "context.degree=2", "parallel.expert_parallel_size=2"],
    ),
    "adapters": (
        2,
        ["batch.tokens_per_rank=400", "context.mode=static", "context.degree=2", f"lora.rank={RANK}", f"lora.alpha={ALPHA}"],
    ),
}
STEPS = {
    f"{loss}, {kind}, {split}, {'merged' if merged else 'apart'}": (loss, kind, split, merged)
    for loss in LOSSES
    for kind in KINDS
    for split in SPLITS
    for merged in (True, False)
}
QUICK = (
    "grpo, old, two ranks, merged",
    "gspo, sampler, three ranks, merged",
    "gspo, sampler alone, bins, apart",
    "dr_grpo, present, alone, merged",
    "cispo, sampler alone, adapters, merged",
    "dapo, sampler alone, two tensor ranks, merged",
    "ppo, advantages, a pipeline, apart",
    "dapo, old, experts, apart",
    "gspo, advantages, two ranks, merged",
)


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


def needs_look(loss: str, kind: str, correction: str) -> bool:
    """Whether a weight depends on log p of a whole completion by the present model."""
    if loss == "gspo":
        return kind != "present"
    return kind == "sampler alone" and correction.startswith("sequence")


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("correction", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_weights_are_the_derivatives_of_trls_loss(loss: str, kind: str, merged: bool, correction: str) -> None:
    """With log p the same where rollouts share a row."""
    rollouts = draw(kind)
    batch, settings = batch_of(rollouts, merged), settings_of(loss, rollouts, sampler_correction=correction)
    torch.manual_seed(1)
    values = [(0.3 * torch.randn(len(each.tokens), dtype=torch.float64) - 5).requires_grad_() for each in batch.micro_batches]
    present = torch.zeros(len(rollouts.sequence), dtype=torch.float64)
    for micro_batch, of_rows in zip(batch.micro_batches, values, strict=True):
        rows, tokens = held_tokens(batch, micro_batch)
        present = present.index_add(0, tokens, of_rows[rows])
    if kind == "sampler alone":  # which the present model must not be far from
        rollouts = replace(
            rollouts,
            sampler_logps=[
                each.detach() + 0.5 / len(each) ** 0.5 * (torch.randn(len(each)).double() - 1)
                for each in present.split([len(each) for each in rollouts.completions])
            ],
        )
        batch = replace(batch, rollouts=rollouts)
    wanted = trl_loss(loss, settings, rollouts, list(present.split([len(each) for each in rollouts.completions])))
    wanted.backward()
    policy = Policy(ALONE, settings)
    known = policy.needs_log_probabilities(batch)
    assert known == needs_look(loss, kind, correction)
    found = policy.weights(batch, [each.detach() for each in values] if known else ())
    assert found.tokens is not None
    for of_rows, weigh in zip(values, found.tokens, strict=True):
        assert not isinstance(weigh, torch.Tensor)
        chunks = torch.arange(len(of_rows)).split(100)
        weights = torch.cat([weigh(chunk, of_rows[chunk].detach()) for chunk in chunks])
        torch.testing.assert_close(-weights / found.divisor, of_rows.grad, rtol=1e-9, atol=1e-12)
    measured = found.measured()
    assert measured["loss"] == pytest.approx(wanted.item(), rel=1e-9, abs=1e-12)
    if kind == "old" and loss not in ("cispo", "gspo"):
        assert 0.01 < measured["clip_share"] < 0.9


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, experts = tmp_path_factory.mktemp("checkpoint"), {"num_experts": 4, "num_experts_per_tok": 2}
    return {
        "llama": make_checkpoint(folder, "llama", num_hidden_layers=2),
        "qwen3_moe": make_checkpoint(folder, "qwen3_moe", num_hidden_layers=2, **experts),
    }


@pytest.mark.parametrize("name", slow_unless(lambda name: name in QUICK, STEPS))
def test_a_step_has_the_loss_and_gradients_of_trl(workers: Workers, checkpoints: dict[str, Path], name: str) -> None:
    loss, kind, split, merged = STEPS[name]
    family = "qwen3_moe" if split == "experts" else "llama"
    checkpoint = checkpoints[family]
    near = [each.detach() for each in log_probabilities(checkpoint, draw("present"))[1]]
    rollouts = draw(kind, near)
    policy = settings_of(loss, rollouts)
    ranks, settings = SPLITS[split]
    steps = workers.run(step, ranks, checkpoint, [f"data.merge_prefixes={str(merged).lower()}", *settings], policy, rollouts)
    model, present = log_probabilities(checkpoint, rollouts, steps[0]["first"])
    wanted = trl_loss(loss, policy, rollouts, present)
    wanted.backward()
    gradients = {key.removeprefix("base_model.model."): p.grad for key, p in model.named_parameters() if p.grad is not None}
    for of_rank in steps:
        metrics = of_rank["metrics"]
        assert metrics.loss == pytest.approx(wanted.item(), rel=1e-6, abs=1e-6)
        assert of_rank["looks"] == needs_look(loss, kind, policy.sampler_correction)
        assert (metrics.computed_tokens is not None and metrics.computed_tokens < 0.7 * metrics.tokens) == merged
        assert split in ("alone", "two tensor ranks", "a pipeline") or set(metrics.degrees) != {"1"}, "no document was split"
        for ours, theirs, mask in zip(of_rank["before"], present, rollouts.learned, strict=True):
            torch.testing.assert_close(ours, theirs.detach().where(torch.from_numpy(mask), 0), rtol=1e-5, atol=1e-5)
        ours, theirs = of_rank["gradients"], as_saved(family, gradients)
        theirs = {key: theirs[key] for key in ours}
        assert len(theirs) >= 10
        assert largest_error({key: g.double() for key, g in ours.items()}, theirs) < 1e-5


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


def test_a_divergence_needs_a_reference() -> None:
    with pytest.raises(ValueError, match=r"policy\.kl is 0\.1, but rollouts have no reference_logps"):
        Policy(ALONE, settings_of("grpo", draw("old"))).needs_log_probabilities(batch_of(draw("present"), False))


def test_rollouts_that_do_not_fit_the_run_are_refused(workers: Workers, checkpoints: dict[str, Path]) -> None:
    for messages in workers.run(refusals, 2, checkpoints["llama"]):
        null, beyond, other, long = messages
        assert "policy.loss is null, but the step has rollouts" in null
        assert "rollouts 8: completions have token ids outside the model's 0 to 259" in beyond
        assert "ranks disagree on the rollouts of step 1" in other
        assert "rollouts 0, 1, 2, 3, 4, 5, 6, 7, 8: have up to 980 tokens, and 800 fit: raise batch.tokens_per_rank" in long

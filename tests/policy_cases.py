"""Rollouts with groups, masks and log-probabilities; TRL's own loss on them; and steps of our trainer over them."""

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from longctx.training.policy import Policy
from longctx.data.rollouts import Rollouts
from tests.lora_cases import whole
from tests.training_cases import start

LENGTHS = ((90, (40, 7, 61, 40)), (31, (12, 80, 1)), (150, (30, 33)))
"""Tokens of each prompt and of its completions."""
LONGEST = 128
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"kl": 0.1},
    "dr_grpo": {"length": LONGEST, "scaled": False},
    "dapo": {"clip_high": 0.28, "kl": 0.05},
    "gspo": {"clip": 0.03, "clip_high": 0.04, "kl": 0.1},
    "cispo": {"clip_high": 1.5, "kl": 0.1},
    "ppo": {},
}
TRL = {"gspo": ("grpo", "sequence"), "ppo": ("bnpo", "token")}
"""Type of the loss and level of the ratios in TRL, where they have other names."""


def draw(kind: str, log_probabilities: list[torch.Tensor] | None = None) -> Rollouts:
    """Returns rollouts; their log-probabilities are near those of the model, or near -5."""
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> torch.Tensor:
        return torch.randint(0, 200, (count,), generator=generator)

    prompts, completions = [], []
    for prompt, ends in ((ids(length), ends) for length, ends in LENGTHS):
        begin = ids(5)
        for end in ends:
            prompts.append(prompt)
            completions.append(torch.cat([begin, ids(end)])[: max(1, end)])
    completions[3] = completions[0].clone()  # a duplicate
    masks = [torch.rand(len(each), generator=generator) < 0.8 for each in completions]
    for mask in masks:
        mask[-1] = True
    near = log_probabilities or [torch.full((len(each),), -5.0) for each in completions]

    def numbers(spread: float) -> list[torch.Tensor]:
        return [each.double() + spread * torch.randn(len(each), generator=generator).double() for each in near]

    given: dict[str, Any] = {}
    if kind != "present":
        given = {"old_logps": numbers(0.3), "reference_logps": numbers(0.5)}
    if kind == "sampler":
        given["sampler_logps"] = [old + 0.6 * torch.randn(len(old), generator=generator).double() for old in given["old_logps"]]
    rewards = torch.randn(len(prompts), generator=generator).tolist()
    return Rollouts(prompts, completions, rewards=rewards, masks=masks, **given)


def trl_loss(loss: str, settings: dict[str, Any], rollouts: Rollouts, present: list[torch.Tensor]) -> torch.Tensor:
    """Returns the loss of `GRPOTrainer._compute_loss` for log p of the completions' tokens."""
    from trl import GRPOTrainer

    def padded(values: Any) -> torch.Tensor:
        return pad_sequence([torch.as_tensor(each) for each in values], batch_first=True)

    kind, level = TRL.get(loss, (loss, "token"))
    inputs = {
        "prompt_ids": padded(rollouts.prompts),
        "prompt_mask": padded([torch.ones(len(each)) for each in rollouts.prompts]),
        "completion_ids": padded(rollouts.completions),
        "completion_mask": padded([torch.ones(len(each), dtype=torch.float64) for each in rollouts.completions]),
        "tool_mask": padded(rollouts.learned).double(),
        "advantages": trl_advantages(rollouts, settings.get("scaled", True)),
        "num_items_in_batch": torch.tensor(float(rollouts.counts.sum())),
    }
    if rollouts.old_logps is not None:
        inputs |= {"old_per_token_logps": padded(rollouts.old_logps), "ref_per_token_logps": padded(rollouts.reference_logps)}
    if rollouts.sampler_logps is not None:  # as in `_generate_and_score_completions`, `token_truncate`
        inputs["importance_sampling_ratio"] = (padded(rollouts.old_logps) - padded(rollouts.sampler_logps)).exp().clamp(max=3.0)
    scores = padded(present)
    high = settings.get("clip_high")
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (scores, torch.zeros_like(scores), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=settings.get("kl", 0.0),
        args=SimpleNamespace(use_bias_correction_kl=True, delta=None, steps_per_generation=1),
        loss_type=kind,
        epsilon_low=settings.get("clip", 0.2),
        epsilon_high=settings.get("clip", 0.2) if high is None else high,
        use_vllm=rollouts.sampler_logps is not None,
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=LONGEST,
        accelerator=SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x),
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    value: torch.Tensor = GRPOTrainer._compute_loss(trainer, None, inputs)
    return value


def trl_advantages(rollouts: Rollouts, scaled: bool) -> torch.Tensor:
    """Returns advantages [rollouts] by the formula of `_generate_and_score_completions`, over groups of LENGTHS."""
    parts = []
    for rewards in torch.tensor(rollouts.rewards, dtype=torch.float64).split([len(ends) for _, ends in LENGTHS]):
        parts.append((rewards - rewards.mean()) / ((rewards.std() + 1e-4) if scaled else 1))
    return torch.cat(parts)


def settings_of(loss: str, rollouts: Rollouts) -> dict[str, Any]:
    """Returns the settings of a loss, without KL divergence where there is no reference."""
    return LOSSES[loss] | ({"kl": 0.0} if rollouts.reference_logps is None else {})


def step(store: Path, run: Path, settings: list[str], loss: str, rollouts: Rollouts) -> dict[str, Any]:
    """On each rank: metrics and gradients of a step over rollouts, and how often the model was run without gradients."""
    trainer, gradients, looks = start(store, run, settings), dict[str, torch.Tensor](), []
    trainer.loader.close()
    trainer.objective = Policy(trainer.mesh, loss, **settings_of(loss, rollouts))

    def look(*_: Any) -> None:
        gradients.update({n: whole(p.grad) for n, p in trainer.model.named_parameters() if p.grad is not None})

    trainer.optimizer.register_step_pre_hook(look)
    original = trainer.passes.look
    trainer.passes.look = lambda *given: (looks.append(1), original(*given))[1]
    metrics = trainer.step(rollouts)
    return {"metrics": metrics, "gradients": gradients, "looks": len(looks)}


def log_probabilities(checkpoint: Path, rollouts: Rollouts) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """Returns the model in float64, and log p of the tokens of each completion, by unpacked sequences."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64, attn_implementation="eager")
    values = []
    for prompt, completion in zip(rollouts.prompts, rollouts.completions, strict=True):
        logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        values.append(logits.log_softmax(-1).gather(1, completion[:, None])[:, 0])
    return model, values

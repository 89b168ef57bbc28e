"""Rollouts with groups, masks and log-probabilities; TRL's own loss on them; and steps of our trainer over them."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from longctx.config import load
from longctx.config.settings import PolicySection
from longctx.data.rollouts import Rollouts
from longctx.model.huggingface import OURS
from longctx.model.pretrained_decoder import PretrainedDecoder
from longctx.parallel.mesh import make_groups
from longctx.training.build import sizes_of_groups
from longctx.training.trainer import Trainer
from tests.lora_cases import ALPHA, RANK, Tensors, weights_of, whole
from tests.native_cases import everyones
from tests.training_cases import SMALL

LENGTHS = ((90, (40, 7, 61, 40)), (31, (12, 80, 1)), (150, (30, 33)))
"""Tokens of each prompt and of its completions."""
LONGEST = 128
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"kl": 0.1, "sampler_correction": "token_truncate"},
    "dr_grpo": {"max_completion_tokens": LONGEST, "scale_rewards": False, "sampler_correction": "token_mask"},
    "dapo": {"clip_high": 0.28, "kl": 0.05, "sampler_correction": "sequence_truncate"},
    "gspo": {"clip": 0.03, "clip_high": 0.04, "kl": 0.1, "sampler_correction": "sequence_mask"},
    "cispo": {"clip_high": 1.5, "kl": 0.1, "sampler_correction": "token_truncate"},
    "ppo": {"sampler_correction": "sequence_mask"},
}
TRL = {"gspo": ("grpo", "sequence"), "ppo": ("bnpo", "token")}
"""Type of the loss and level of the ratios in TRL, where they have other names."""
EAGER = {"experts_implementation": "eager"}  # the default has no float64
KINDS = ("present", "old", "sampler", "sampler alone", "advantages")
"""Which log-probabilities the rollouts have; the last also has an advantage for every token."""
SETTINGS = [
    *(f"model.{name}=null" for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")),
    "model.head_dim=null",
    "optimizer.clip_grad_norm=null",
    "data.max_length=300",
]


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
    if kind.startswith("sampler"):  # so near that some completions, not only tokens, are within the bound
        given["sampler_logps"] = [
            old + 0.5 / len(old) ** 0.5 * (torch.randn(len(old), generator=generator).double() - 1)
            for old in (near if kind == "sampler alone" else given["old_logps"])
        ]
    if kind == "sampler alone":
        del given["old_logps"]
    if kind == "advantages":
        given["advantages"] = [torch.randn(len(each), generator=generator).double() for each in completions]
    rewards = torch.randn(len(prompts), generator=generator).tolist()
    return Rollouts(prompts, completions, rewards=rewards, masks=masks, **given)


def trl_loss(loss: str, settings: PolicySection, rollouts: Rollouts, present: list[torch.Tensor]) -> torch.Tensor:
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
        "advantages": trl_advantages(rollouts, settings.scale_rewards),
        "num_items_in_batch": torch.tensor(float(rollouts.counts.sum())),
    }
    if rollouts.advantages is not None:
        inputs["advantages"] = padded(rollouts.advantages)
    if rollouts.old_logps is not None:
        inputs["old_per_token_logps"] = padded(rollouts.old_logps)
    if rollouts.reference_logps is not None:
        inputs["ref_per_token_logps"] = padded(rollouts.reference_logps)
    if rollouts.sampler_logps is not None:
        old = padded(present).detach() if rollouts.old_logps is None else padded(rollouts.old_logps)
        inputs["importance_sampling_ratio"] = trl_correction(
            settings, old - padded(rollouts.sampler_logps), inputs["tool_mask"]
        )
    scores = padded(present)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (scores, torch.zeros_like(scores), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=settings.kl,
        args=SimpleNamespace(use_bias_correction_kl=True, delta=None, steps_per_generation=1),
        loss_type=kind,
        epsilon_low=settings.clip,
        epsilon_high=settings.clip_high or settings.clip,
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


def trl_correction(settings: PolicySection, difference: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns the importance sampling ratio as `_generate_and_score_completions` computes it, inside the method."""
    difference = difference * mask
    if settings.sampler_correction.startswith("sequence"):
        difference = difference.sum(dim=-1, keepdim=True)
    ratio = difference.exp()
    if settings.sampler_correction.endswith("truncate"):
        return ratio.clamp(max=settings.sampler_ratio)
    return ratio.masked_fill(ratio > settings.sampler_ratio, 0.0)


def trl_advantages(rollouts: Rollouts, scaled: bool) -> torch.Tensor:
    """Returns advantages [rollouts] by the formula of `_generate_and_score_completions`, over groups of LENGTHS."""
    parts = []
    for rewards in torch.tensor(rollouts.rewards, dtype=torch.float64).split([len(ends) for _, ends in LENGTHS]):
        parts.append((rewards - rewards.mean()) / ((rewards.std() + 1e-4) if scaled else 1))
    return torch.cat(parts)


def settings_of(loss: str, rollouts: Rollouts, **others: Any) -> PolicySection:
    """Returns the settings of a loss, without KL divergence where there is no reference."""
    without = {"kl": 0.0} if rollouts.reference_logps is None else {}
    return PolicySection.model_validate({"loss": loss, **LOSSES[loss], **without, **others})


def make_trainer(checkpoint: Path, settings: list[str], policy: PolicySection | None = None) -> Trainer:
    chosen = {} if policy is None else policy.model_dump(exclude_defaults=True)
    everything = [*SMALL, *SETTINGS, *(f"policy.{name}={value}" for name, value in chosen.items())]
    config = load(None, [*everything, f"model.from_pretrained={checkpoint}", *settings], world_size=dist.get_world_size())
    mesh = make_groups(torch.device("cpu"), **sizes_of_groups(config), timeout_s=60.0)
    return Trainer.build(config, mesh, config.model_source())


def step(checkpoint: Path, settings: list[str], policy: PolicySection, rollouts: Rollouts) -> dict[str, Any]:
    """On each rank: metrics and gradients of a step, log p of the rollouts before, and how often a pass had no gradients."""
    trainer, gradients = make_trainer(checkpoint, settings, policy), Tensors()
    first = weights_of(trainer)[0] if "lora.rank=4" in settings else {}
    model, before = trainer.model, trainer.log_probabilities(rollouts)

    def look(*_: Any) -> None:
        named = {
            name.removeprefix(OURS): whole(weight.grad) for name, weight in model.named_parameters() if weight.grad is not None
        }
        gradients.update(everyones(model, named) if isinstance(model, PretrainedDecoder) else named)

    trainer.optimizer.register_step_pre_hook(look)
    with mock.patch.object(trainer.passes, "look", wraps=trainer.passes.look) as looked:
        metrics = trainer.step(rollouts)
    return {"metrics": metrics, "gradients": gradients, "looks": looked.call_count, "before": before, "first": first}


def log_probabilities(
    checkpoint: Path, rollouts: Rollouts, adapters: Tensors | None = None
) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """Returns the model in float64, and log p of the tokens of each completion, by unpacked sequences."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64, attn_implementation="eager", **EAGER)
    if adapters:
        model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", lora_dropout=0.0))
        for name, weight in model.double().eval().named_parameters():
            if weight.requires_grad:
                weight.data.copy_(adapters[name.removeprefix("base_model.model.")])
    values = []
    for prompt, completion in zip(rollouts.prompts, rollouts.completions, strict=True):
        logits = model(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        values.append(logits.log_softmax(-1).gather(1, completion[:, None])[:, 0])
    return model, values


def refusals(checkpoint: Path) -> list[str]:
    """What steps over rollouts that do not fit the run are refused with."""
    messages, rollouts = [], draw("present")
    beyond = replace(rollouts, completions=[*rollouts.completions[:-1], [3, 260]], masks=None)
    other = draw("old") if dist.get_rank() else draw("present")
    long = replace(rollouts, prompts=[torch.zeros(900, dtype=torch.int64)] * len(rollouts.prompts))
    for policy, given in (({}, rollouts), ({"loss": "ppo"}, beyond), ({"loss": "ppo"}, other), ({"loss": "ppo"}, long)):
        trainer = make_trainer(checkpoint, ["batch.tokens_per_rank=400"], PolicySection.model_validate(policy))
        try:
            trainer.step(given)
        except (ValueError, RuntimeError) as error:
            messages.append(str(error))
    return messages

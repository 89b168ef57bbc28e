"""Trainers, collators, masks, adapters and settings drawn at random: each is exact or refused in
words, and nothing else."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch.nn import functional as F

from longctx.errors import UserError
from longctx.trainers import dynamic_context_parallel, restore
from tests.trainer_cases import PROFILE, documents, model, pad
from tests.trainers.test_trainers import trainer
from tests.trainers.test_whole_outputs import CLASSES, collate, labelled, weighed, with_head

CASES, STEPS = 60, 4
"""Trainings that are drawn, and steps of each: the last one is that of an epoch."""
HEADS = ("SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice")


def left(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Puts padding first, in rows of tokens."""
    shifts = (batch["attention_mask"] == 0).sum(-1)
    moved = {}
    for name, field in batch.items():
        rows = (
            [row.roll(int(shift), 0) for row, shift in zip(field, shifts, strict=True)]
            if field.dim() == 2
            else field
        )
        moved[name] = torch.stack(rows) if isinstance(rows, list) else rows
    return moved


def causal(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gives a mask of four axes."""
    mask = batch["attention_mask"]
    triangle = torch.ones(mask.shape[-1], mask.shape[-1], dtype=torch.int64).tril()
    return batch | {"attention_mask": triangle * mask[:, None, None, :]}


CHANGES: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "none": lambda batch: batch,
    "left": left,
    "bool mask": lambda batch: batch | {"attention_mask": batch["attention_mask"].bool()},
    "float mask": lambda batch: batch | {"attention_mask": batch["attention_mask"].float()},
    "additive mask": lambda batch: batch | {"attention_mask": (batch["attention_mask"] - 1) * 1e4},
    "numbered mask": lambda batch: batch | {"attention_mask": batch["attention_mask"] * 2},
    "four axes": causal,
    "hole": lambda batch: (
        batch
        | {
            "attention_mask": batch["attention_mask"]
            * (torch.arange(batch["attention_mask"].shape[-1]) != 1)
        }
    ),
    "short mask": lambda batch: batch | {"attention_mask": batch["attention_mask"][..., :-1]},
    "no mask": lambda batch: {
        name: field for name, field in batch.items() if name != "attention_mask"
    },
    "segments": lambda batch: batch | {"token_type_ids": 0 * batch["input_ids"]},
    "other segments": lambda batch: (
        batch
        | {
            "token_type_ids": (torch.arange(batch["input_ids"].shape[-1]) > 1)
            + 0 * batch["input_ids"]
        }
    ),
    "positions": lambda batch: (
        batch
        | {"position_ids": torch.arange(batch["input_ids"].shape[-1]).expand_as(batch["input_ids"])}
    ),
    "lists": lambda batch: {name: field.tolist() for name, field in batch.items()},
    "tuple": lambda batch: tuple(batch.values()),
    "weights": lambda batch: batch | {"loss_weights": torch.ones(len(batch["input_ids"]))},
    "embedded": lambda batch: batch | {"inputs_embeds": torch.zeros(*batch["input_ids"].shape, 32)},
}
KINDS = ("steps", "mixture", "masked", "function", "own", *HEADS)
ADAPTERS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "lora": lambda: peft.LoraConfig(r=4, target_modules="all-linear"),
    "embedding": lambda: peft.LoraConfig(
        r=4, target_modules=["embed_tokens", "word_embeddings", "q_proj", "query"]
    ),
    "dora": lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "query"], use_dora=True),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=["q_proj", "query"]),
    "dropped": lambda: peft.LoHaConfig(r=4, target_modules=["q_proj", "query"], module_dropout=0.5),
    "sampled": lambda: peft.PveraConfig(r=4, target_modules=["v_proj", "value"]),
    "own loss": lambda: peft.AdaLoraConfig(total_step=99, target_modules=["q_proj", "query"]),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 4},
    {"gradient_checkpointing": True},
    {"label_smoothing_factor": 0.1},
    {"average_tokens_across_devices": False},
    {"dataloader_drop_last": True},
    {"logging_steps": 3},
    {"max_grad_norm": 0.1},
]


def made(kind: str) -> Any:
    if kind in HEADS:
        return with_head(f"{'bert' if kind == 'MultipleChoice' else 'qwen2'} {kind}")
    return model({"mixture": "qwen3_moe", "masked": "bert"}.get(kind, "qwen2"))


def losses(
    folder: Path, case: tuple[str, str, str, Mapping[str, Any]], dynamic: bool
) -> list[float]:
    from transformers import Trainer

    kind, change, adapter, settings = case

    class Own(Trainer):
        def compute_loss(
            self,
            model: Any,
            inputs: Any,
            return_outputs: bool = False,
            num_items_in_batch: Any = None,
        ) -> Any:
            outputs = model(**inputs)
            loss = F.cross_entropy(outputs.logits[:, 0], inputs["input_ids"][:, 0] % CLASSES)
            return (loss, outputs) if return_outputs else loss

    config, of = ADAPTERS[adapter](), made(kind)
    torch.manual_seed(0)
    if config is not None:
        of = peft.get_peft_model(of, config)
        for weight in of.parameters():
            if weight.requires_grad:
                torch.nn.init.normal_(weight, std=0.1)
    rows = labelled(documents(), kind) if kind in HEADS else documents()
    options = {
        "max_steps": STEPS,
        "optim": "sgd",
        "learning_rate": 0.05,
        "include_num_input_tokens_seen": "no",
        **settings,
    }
    ours = trainer(folder, of=of, data=rows, kind=Own if kind == "own" else None, **options)
    ours.data_collator = lambda examples: CHANGES[change](
        (collate if kind in HEADS else pad)(examples)
    )
    ours.compute_loss_func = weighed if kind == "function" else None
    if dynamic:
        dynamic_context_parallel(ours, tokens_per_rank=120, profile=PROFILE)
    try:
        ours.train()
    finally:
        restore(ours)
    logged: list[float] = [entry["loss"] for entry in ours.state.log_history if "loss" in entry]
    return [*logged, ours.state.log_history[-1]["train_loss"]]


def drawn(number: int) -> tuple[str, str, str, dict[str, Any]]:
    """Draws a case: mostly changes of one or two things."""
    random = np.random.default_rng(number)
    kind = KINDS[number % len(KINDS)]
    changes, adapters = list(CHANGES), list(ADAPTERS)
    change = changes[random.integers(len(changes))] if random.random() < 0.6 else "none"
    if change == "left" and kind in ("own", "QuestionAnswering"):
        change = "none"  # they read columns, which are others then
    adapter = adapters[random.integers(len(adapters))] if random.random() < 0.5 else "none"
    return kind, change, adapter, SETTINGS[random.integers(len(SETTINGS))]


def outcome(folder: Path, case: tuple[str, str, str, Mapping[str, Any]]) -> str:
    """Returns what becomes of a case; it begins with WRONG if that is neither exact nor refused."""
    try:
        ours = losses(folder, case, dynamic=True)
    except UserError as refused:
        return f"refused: {refused}"
    except Exception as error:
        if fails_plainly(folder, case):
            return "fails in plain training, too"
        return f"WRONG {case}: {type(error).__name__}: {error}"
    plain = losses(folder, as_plain(*case), dynamic=False)
    return (
        "exact"
        if ours == pytest.approx(plain, rel=2e-5)
        else f"WRONG {case}: {ours} instead of {plain}"
    )


def as_plain(
    kind: str, change: str, adapter: str, settings: Mapping[str, Any]
) -> tuple[str, str, str, Mapping[str, Any]]:
    """Returns the case that plain training is to train.

    Its batch is the step, as it takes means over batches. BERT counts padding on the left as
    positions, and answers are looked for in padding, too, which rows one by one do not have.
    """
    if kind != "own":
        settings = {**settings, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 12}
    if kind == "QuestionAnswering":
        settings = {**settings, "gradient_accumulation_steps": 12, "per_device_train_batch_size": 1}
    return (
        kind,
        "none" if change == "left" and kind in ("masked", "MultipleChoice") else change,
        adapter,
        settings,
    )


def fails_plainly(folder: Path, case: tuple[str, str, str, Mapping[str, Any]]) -> bool:
    try:
        losses(folder, case, dynamic=False)
    except Exception:
        return True
    return False


@pytest.mark.slow
def test_drawn_trainers_are_exact_or_refused(tmp_path: Path) -> None:
    found = {number: outcome(tmp_path, drawn(number)) for number in range(CASES)}
    wrong = [text for text in found.values() if text.startswith("WRONG")]
    assert not wrong, "\n".join(wrong)
    assert sum(text == "exact" for text in found.values()) > CASES // 4
    assert sum(text.startswith("refused") for text in found.values()) > CASES // 8

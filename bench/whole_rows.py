"""CPU seconds of an epoch whose loss needs whole rows, a row per call, on two processes: dynamic
context parallelism beside plain training of the same trainer.

    torchrun --nproc-per-node 2 bench/whole_rows.py          # about 30 minutes on two cores

An epoch of 64 documents of 50 to 500 or to 4,000 tokens, of which the logarithm is uniform, in 4
steps: each rank accumulates 8 batches of a row. A head for classification, an own loss of logits,
TRL's RewardTrainer, with pairs of answers of half the tokens, and its DPOTrainer and KTOTrainer with
their references. Every way in turn, several rounds long, in the same processes with one thread
each. Writes results/whole-rows.csv.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import torch.distributed as dist
import transformers
import trl
from torch.nn import functional as F
from trl import RewardConfig, RewardTrainer

from longctx.trainers import dynamic_context_parallel
from trainers import QUIET, VOCABULARY, StepTimes, in_rounds, model, of_all_ranks, tokenizer

DOCUMENTS, STEPS = 64, 4
LEAST_TOKENS = 50
MOST_TOKENS = (500, 4000)
TOKENS_PER_RANK = 8192
COLUMNS = [
    "loss",
    "most_tokens",
    "way",
    "round",
    "slowest_cpu_s",
    "fastest_cpu_s",
    "slowest_of_steps_cpu_s",
    "train_loss",
]


def main() -> None:
    in_rounds(__doc__, "whole-rows.csv", COLUMNS, by_round)


def by_round(number: int, folder: Path) -> Iterator[dict[str, Any]]:
    for most in MOST_TOKENS:
        for loss in TRAINERS:
            for way in ("plain", "longctx"):
                case = {"loss": loss, "most_tokens": most, "way": way, "round": number}
                yield case | measured(loss, most, way=way, folder=folder)


def measured(loss: str, most: int, *, way: str, folder: Path) -> dict[str, Any]:
    """Trains an epoch, and returns its CPU seconds and its loss."""
    torch.manual_seed(0)
    trainer = TRAINERS[loss](folder, most)
    if way == "longctx":
        dynamic_context_parallel(trainer, tokens_per_rank=TOKENS_PER_RANK, profile="cpu-2core")
    steps = StepTimes()
    trainer.add_callback(steps)
    dist.barrier()
    trainer.train()
    cpu_s = of_all_ranks(torch.tensor(steps.cpu_s).diff())
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "slowest_cpu_s": cpu_s.sum(1).max().item(),
        "fastest_cpu_s": cpu_s.sum(1).min().item(),
        "slowest_of_steps_cpu_s": cpu_s.max(0).values.sum().item(),
        "train_loss": sum(losses) / len(losses),
    }


def options(folder: Path) -> dict[str, Any]:
    """Returns arguments of a trainer that accumulates batches of a row."""
    return {
        "output_dir": str(folder),
        "num_train_epochs": 1,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": DOCUMENTS // STEPS // dist.get_world_size(),
        **QUIET,
    }


def rows(most: int, divided_by: int = 1) -> list[list[int]]:
    """Returns token ids of documents."""
    random = np.random.default_rng(0)
    logarithms = random.uniform(np.log(LEAST_TOKENS), np.log(most), DOCUMENTS)
    lengths = (np.exp(logarithms) / divided_by).astype(int)
    return [random.integers(3, VOCABULARY, length).tolist() for length in lengths]


def with_head(folder: Path, most: int) -> transformers.Trainer:
    """Returns a trainer of a head that classifies rows."""
    config = model().config
    config.num_labels, config.pad_token_id = 3, 0
    torch.manual_seed(0)
    data = [{"input_ids": ids, "label": number % 3} for number, ids in enumerate(rows(most))]
    return transformers.Trainer(
        transformers.Qwen2ForSequenceClassification(config),
        transformers.TrainingArguments(**options(folder)),
        train_dataset=datasets.Dataset.from_list(data),
        processing_class=tokenizer(),
    )


class OwnLoss(transformers.Trainer):
    """A trainer whose loss is the mean over the rows of a batch of the square of each row's."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        ids = inputs["input_ids"]
        outputs = model(input_ids=ids, attention_mask=inputs["attention_mask"])
        losses = F.cross_entropy(
            outputs.logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none"
        )
        loss = (losses.mean(1) ** 2).mean()
        return (loss, outputs) if return_outputs else loss


def with_own_loss(folder: Path, most: int) -> transformers.Trainer:
    """Returns a trainer of a subclass with a loss of its own."""
    return OwnLoss(
        model(),
        transformers.TrainingArguments(**options(folder)),
        train_dataset=datasets.Dataset.from_list([{"input_ids": ids} for ids in rows(most)]),
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False),
    )


def with_rewards(folder: Path, most: int) -> RewardTrainer:
    """Returns a trainer of a reward model."""
    config = model().config
    config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(0)
    data = [{"chosen_ids": ids, "rejected_ids": ids[len(ids) // 2 :]} for ids in rows(most, 2)]
    return RewardTrainer(
        transformers.Qwen2ForSequenceClassification(config),
        args=RewardConfig(**options(folder), max_length=None),
        train_dataset=datasets.Dataset.from_list(data),
        processing_class=tokenizer(),
    )


def with_pairs(folder: Path, most: int) -> trl.DPOTrainer:
    """Returns a trainer of preferences, whose answers have each a quarter of a pair's tokens."""
    data = []
    for ids in rows(most):
        words = [f"w{number}" for number in ids]
        quarter = len(words) // 4
        data.append(
            {
                "prompt": " ".join(words[2 * quarter :]),
                "chosen": " ".join(words[:quarter]),
                "rejected": " ".join(words[quarter : 2 * quarter]),
            }
        )
    return trl.DPOTrainer(
        model=_saved(folder),
        args=trl.DPOConfig(**options(folder), max_length=None),
        train_dataset=datasets.Dataset.from_list(data),
        processing_class=tokenizer(),
    )


def with_labels(folder: Path, most: int) -> trl.KTOTrainer:
    """Returns a trainer of answers that are wanted or not, two in a batch, as TRL asks for."""
    data = []
    for number, ids in enumerate(rows(most)):
        words = [f"w{number}" for number in ids]
        half = len(words) // 2
        prompt, completion = " ".join(words[:half]), " ".join(words[half:])
        data.append({"prompt": prompt, "completion": completion, "label": number % 2 == 0})
    given = options(folder)
    given["per_device_train_batch_size"] = 2
    given["gradient_accumulation_steps"] //= 2
    return trl.KTOTrainer(
        model=_saved(folder),
        args=trl.KTOConfig(**given, max_length=None),
        train_dataset=datasets.Dataset.from_list(data),
        processing_class=tokenizer(),
    )


def _saved(folder: Path) -> str:
    """Returns the folder of a model, from which TRL loads the reference too."""
    base = folder / "base"
    model().save_pretrained(base)  # writes on rank 0
    dist.barrier()
    return str(base)


TRAINERS = {
    "head": with_head,
    "own loss": with_own_loss,
    "rewards": with_rewards,
    "DPO": with_pairs,
    "KTO": with_labels,
}


if __name__ == "__main__":
    main()

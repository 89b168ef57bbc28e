"""CPU seconds of steps of TRL's DPOTrainer and GRPOTrainer on two processes: plain, split, and
split with prefixes merged.

    torchrun --nproc-per-node 2 bench/trainer_trees.py          # about 10 minutes on two cores

DPO: 16 pairs per step, prompts of 512 to 1,023 tokens with answers of 64 to 127. GRPO: 2 prompts of
that length per step with 8 completions of 32 tokens each; the seconds of `generate` are not
counted, as sampling is the same in all ways. Every way in turn, several rounds long, in the same
processes with one thread each. Writes results/trainer-trees.csv.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import torch.distributed as dist
import trl

from longctx.trainers import dynamic_context_parallel
from trainers import QUIET, StepTimes, in_rounds, model, of_all_ranks, tokenizer

STEPS = 3
"""The first one is not counted."""
PROMPT, ANSWER, PAIRS = (512, 1024), (64, 128), 16
GENERATIONS, COMPLETION, ROWS = 8, 32, 16
WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "longctx, rows apart": {"merge_prefixes": False},
    "longctx, prefixes merged": {"merge_prefixes": True},
}
COLUMNS = ["trainer", "way", "round", "slowest_of_steps_cpu_s", "tokens_after_merging", "loss"]


def main() -> None:
    in_rounds(__doc__, "trainer-trees.csv", COLUMNS, by_round)


def by_round(number: int, folder: Path) -> Iterator[dict[str, Any]]:
    for kind in ("DPO", "GRPO"):
        for way, merging in WAYS.items():
            yield {"trainer": kind, "way": way, "round": number} | measured(kind, merging, folder)


def measured(kind: str, merging: dict[str, Any] | None, folder: Path) -> dict[str, Any]:
    """Trains a few steps, and returns the CPU seconds of one on the slowest rank, the mean over
    steps."""
    trainer = made(kind, folder)
    if merging is not None:
        dynamic_context_parallel(trainer, tokens_per_rank=8192, profile="cpu-2core", **merging)
    generating = [0.0]
    generate = trainer.model.generate

    def timed(*arguments: Any, **named: Any) -> Any:
        began = time.process_time()
        result = generate(*arguments, **named)
        generating.append(generating[-1] + time.process_time() - began)
        return result

    trainer.model.generate = timed
    steps = StepTimes(lambda: time.process_time() - generating[-1])
    trainer.add_callback(steps)
    dist.barrier()
    trainer.train()
    cpu_s = of_all_ranks(torch.tensor(steps.cpu_s).diff()[1:])
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "slowest_of_steps_cpu_s": cpu_s.max(0).values.mean().item(),
        "tokens_after_merging": logs[-1].get("tokens_after_merging", 1.0),
        "loss": logs[-1]["loss"],
    }


def made(kind: str, folder: Path) -> Any:
    """Returns a trainer of a small model with random weights."""
    random = np.random.default_rng(0)

    def words(least: int, most: int) -> str:
        return " ".join(
            f"w{number}" for number in random.integers(0, 4000, random.integers(least, most))
        )

    args: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "max_steps": STEPS,
        **QUIET,
        "shuffle_dataset": False,
    }
    more: dict[str, Any] = {}
    base = folder / "base"  # TRL loads the reference model from there
    model().save_pretrained(base)  # writes on rank 0
    dist.barrier()
    ranks = dist.get_world_size()
    if kind == "DPO":
        args |= {"per_device_train_batch_size": PAIRS // ranks, "max_length": None}
        del args["shuffle_dataset"]
        records = [
            {"prompt": words(*PROMPT), "chosen": words(*ANSWER), "rejected": words(*ANSWER)}
            for _ in range(PAIRS * STEPS)
        ]
    else:
        args |= {
            "per_device_train_batch_size": ROWS // ranks,
            "num_generations": GENERATIONS,
            "max_completion_length": COMPLETION,
        }
        more["reward_funcs"] = lambda completions, **_: [
            float(len(set(text.split()))) for text in completions
        ]
        records = [{"prompt": words(*PROMPT)} for _ in range(ROWS // GENERATIONS * STEPS)]
    return getattr(trl, f"{kind}Trainer")(
        model=str(base),
        args=getattr(trl, f"{kind}Config")(**args),
        train_dataset=datasets.Dataset.from_list(records),
        processing_class=tokenizer(),
        **more,
    )


if __name__ == "__main__":
    main()

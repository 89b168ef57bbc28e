"""CPU seconds of GRPO steps on the same rollouts, on two processes: by TRL's GRPOTrainer and by our own trainer.

    torchrun --nproc-per-node 2 bench/policy.py          # about 5 minutes on two cores

2 prompts of 512 to 1,023 tokens per step with 8 completions of 32 tokens each, as in bench/trainer_trees.py. GRPOTrainer runs
plain and with longctx.trainers; it samples, which is not counted. Our own trainer makes steps over what it sampled, from the
same weights. All in turn, several rounds long, in the same processes with one thread each. Writes results/policy.csv.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from longctx import load_config
from longctx.data.rollouts import Rollouts
from longctx.parallel.mesh import make_groups
from longctx.trainers import dynamic_context_parallel
from longctx.training.build import sizes_of_groups
from longctx.training.trainer import Trainer
from trainer_trees import STEPS, made
from trainers import StepTimes, in_rounds, of_all_ranks

TOKENS_PER_RANK, PROFILE = 8192, "cpu-2core"
COLUMNS = ["way", "round", "slowest_of_steps_cpu_s", "first_loss", "first_grad_norm"]


def main() -> None:
    in_rounds(__doc__, "policy.csv", COLUMNS, by_round)


def by_round(number: int, folder: Path) -> Iterator[dict[str, Any]]:
    yield {"way": "TRL", "round": number, **by_trl(folder, dynamic=False)[0]}
    dynamic, rollouts = by_trl(folder, dynamic=True)
    yield {"way": "longctx.trainers", "round": number, **dynamic}
    yield {"way": "longctx train", "round": number, **by_ours(folder, rollouts)}


def by_trl(folder: Path, *, dynamic: bool) -> tuple[dict[str, Any], list[Rollouts]]:
    """Trains a few steps. Returns what a way is measured by, and the rollouts of every step."""
    trainer = made("GRPO", folder)
    if dynamic:
        dynamic_context_parallel(trainer, tokens_per_rank=TOKENS_PER_RANK, profile=PROFILE)
    sampling, steps = [0.0], list[Rollouts]()
    sample = trainer._generate_and_score_completions

    def timed(inputs: Any) -> Any:
        began = time.process_time()
        result = sample(inputs)
        steps.append(of_every_rank(result))
        sampling.append(sampling[-1] + time.process_time() - began)
        return result

    trainer._generate_and_score_completions = timed
    times = StepTimes(lambda: time.process_time() - sampling[-1])
    trainer.add_callback(times)
    dist.barrier()
    trainer.train()
    first = next(entry for entry in trainer.state.log_history if "loss" in entry)
    return measured(torch.tensor(times.cpu_s).diff(), first["loss"], first["grad_norm"]), steps


def of_every_rank(sampled: dict[str, torch.Tensor]) -> Rollouts:
    parts: list[Any] = [None] * dist.get_world_size()
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
    dist.all_gather_object(parts, [sampled[name] for name in names])
    prompts, completions, advantages = [], [], []
    for ids, held, written, learned, values in parts:
        prompts += [row[mask.bool()] for row, mask in zip(ids, held, strict=True)]
        completions += [row[mask.bool()] for row, mask in zip(written, learned, strict=True)]
        advantages += values.tolist()
    return Rollouts(prompts, completions, advantages=advantages)


def by_ours(folder: Path, steps: list[Rollouts]) -> dict[str, Any]:
    settings = {
        "model.from_pretrained": folder / "base",
        "policy.loss": "dapo",  # TRL's default
        "batch.tokens_per_rank": TOKENS_PER_RANK,
        "context.profile": PROFILE,
        "optimizer.learning_rate": 1e-6,
        "optimizer.warmup_steps": 0,
        "train.steps": STEPS,
    }
    config = load_config(None, [f"{name}={value}" for name, value in settings.items()], world_size=dist.get_world_size())
    mesh = make_groups(torch.device("cpu"), **sizes_of_groups(config))
    trainer = Trainer.build(config, mesh, config.model_source())
    times, metrics = [time.process_time()], []
    for rollouts in steps:
        metrics.append(trainer.step(rollouts))
        times.append(time.process_time())
    return measured(torch.tensor(times).diff(), metrics[0].loss, metrics[0].grad_norm)


def measured(cpu_s: torch.Tensor, loss: float, grad_norm: float) -> dict[str, Any]:
    """Returns what a way is measured by; its first step is not counted."""
    slowest = of_all_ranks(cpu_s[-(STEPS - 1) :]).max(0).values.mean().item()
    return {"slowest_of_steps_cpu_s": slowest, "first_loss": loss, "first_grad_norm": grad_norm}


if __name__ == "__main__":
    main()

"""One rank of several_gpus.py: an epoch of TRL's SFTTrainer with its packing, and one with dynamic
context parallelism, by torchrun.

    torchrun --nproc-per-node 8 bench/several_gpus_trl.py TASK.json
"""

import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import torch.distributed as dist
import transformers
from transformers.utils import import_utils
from trl import SFTConfig, SFTTrainer

from longctx.model.presets import PRESETS
from longctx.trainers import dynamic_context_parallel
from trainers import StepTimes, of_all_ranks, tokenizer
from training_gpu import PEER_SIZES
from training_rows import VOCABULARY

QUIET: dict[str, Any] = {
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "logging_steps": 1,
    "num_train_epochs": 1,
    "per_device_train_batch_size": 1,
}


def main(task: dict[str, Any]) -> None:
    gpus = torch.cuda.is_available()
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpus else "gloo")
    answer = {f"{way}_s": epoch(way, task) for way in ("packing", "longctx")}
    if dist.get_rank() == 0:
        Path(task["answer"]).write_text(json.dumps(answer), encoding="utf-8")
    dist.destroy_process_group()


def epoch(way: str, task: dict[str, Any]) -> float:
    """Returns the seconds of the slowest rank for an epoch, from those of the steps after the
    first."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = made(way, task, folder)
        if way == "longctx":
            dynamic_context_parallel(
                trainer, tokens_per_rank=task["tokens_per_rank"], profile=task["profile"]
            )
        steps = StepTimes()
        trainer.add_callback(steps)
        dist.barrier()
        trainer.train()
    device = trainer.args.device
    del trainer
    gc.collect()  # a trainer and its model refer to each other, and the next one needs the memory
    times = of_all_ranks(torch.tensor(steps.wall_s, device=device).diff()).max(0).values
    later = times[1:] if len(times) > 1 else times
    return float(later.mean()) * len(times)


def made(way: str, task: dict[str, Any], folder: str) -> SFTTrainer:
    """Returns a trainer with new weights for an epoch of all documents, in as many steps."""
    random = np.random.default_rng(0)
    documents = [
        {"input_ids": random.integers(3, VOCABULARY, length).tolist()} for length in task["lengths"]
    ]
    ranks = dist.get_world_size()
    rows = len(documents)
    options: dict[str, Any] = {"max_length": None}
    if way == "packing":
        rows = -(-sum(task["lengths"]) // task["longest"])
        options = {"packing": True, "packing_strategy": "bfd", "max_length": task["longest"]}
    options["gradient_accumulation_steps"] = max(1, round(rows / task["steps"] / ranks))
    gpus = torch.cuda.is_available()
    args = SFTConfig(output_dir=folder, bf16=gpus, use_cpu=not gpus, **QUIET, **options)
    data = datasets.Dataset.from_list(documents)
    return SFTTrainer(model(task), args=args, train_dataset=data, processing_class=tokenizer())


def model(task: dict[str, Any]) -> transformers.PreTrainedModel:
    """Returns a Llama of the preset's sizes, with the first flash attention that is here."""
    attention = "sdpa"
    for number in (4, 3, 2):
        available = getattr(import_utils, f"is_flash_attn_{number}_available", lambda: False)
        if torch.cuda.is_available() and attention == "sdpa" and available():
            attention = f"flash_attention_{number}"
    shape = PRESETS[task["preset"]].model_copy(update={"vocab_size": VOCABULARY})
    sizes = shape.model_dump(include=PEER_SIZES)
    rope = {"rope_type": "default", "rope_theta": sizes.pop("rope_theta")}
    config = transformers.LlamaConfig(
        **sizes, rope_parameters=rope, max_position_embeddings=task["longest"]
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))

"""Functions that the evaluation tests run on ranks, and plain references in one process without
packing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from longctx.commands.eval import make_evaluation_planner
from longctx.config import load
from longctx.data.records.tokenizer import END_OF_DOCUMENT, Tokenizer
from longctx.data.store.store import Store
from longctx.evaluation.loss import evaluate
from longctx.evaluation.target import Target
from longctx.parallel.mesh import make_groups
from longctx.training.assembly import assemble
from longctx.training.run import Run
from longctx.training.runner import ModelRunner
from longctx.training.validation import Documents
from tests.huggingface_cases import build_model
from tests.training_cases import SMALL

FOR_CHECKPOINTS = [setting for setting in SMALL if not setting.startswith("model.")]
CHAT = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def save_checkpoint(folder: Path, kind: str = "llama", chat: bool = True) -> Path:
    """Saves a tiny model with a byte-level tokenizer by transformers."""
    model = build_model(
        kind,
        "sdpa",
        vocab_size=257,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=256,
    )
    model.save_pretrained(folder)
    Tokenizer.bytes().save(folder / "given.json")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "given.json"), eos_token=END_OF_DOCUMENT
    )
    (folder / "given.json").unlink()
    if chat:
        tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


def train_checkpoint(folder: Path, store: Path, run: Path) -> None:
    """Trains a checkpoint for a step by transformers' own code, and saves it."""
    settings = [
        *FOR_CHECKPOINTS,
        f"model.from_pretrained={folder}",
        "model.implementation=transformers",
    ]
    settings += [f"data.store={store}", f"train.run_dir={run}", "batch.tokens_per_rank=750"]
    config = load(None, settings, world_size=1)
    (run / "config.yaml").write_text(config.to_yaml(), "utf-8")
    trainer = assemble(Run.open(config), make_groups(torch.device("cpu"), timeout_s=60.0))
    with trainer.loader:
        trainer.step()
        trainer.save()


def opened(name: str, settings: Sequence[str]) -> tuple[Target, ModelRunner]:
    """Opens a run or a checkpoint on this rank of the test's group."""
    target = Target.open(name, settings, dist.get_world_size())
    parallel = target.config.parallel
    mesh = make_groups(
        torch.device("cpu"),
        tensor=parallel.tensor_parallel_size,
        pipeline=parallel.pipeline_parallel_size,
        timeout_s=30,
    )
    runner, target = target.build(mesh)
    return target, runner


def losses(
    name: str, store: Path, settings: Sequence[str], first: int | None = None
) -> dict[str, Any]:
    target, runner = opened(name, settings)
    given = Store.open(store)
    documents = Documents.choose(
        target.config, given, target.max_length(dist.get_world_size()), first
    )
    planner = make_evaluation_planner(runner)
    degrees = [
        degree for step in documents.steps(planner, runner.mesh) for degree in step.plan.degrees
    ]
    report = evaluate(documents, runner.log_probabilities, planner, runner.mesh).as_json()
    return {**report, "degrees": degrees, "notes": target.notes}


def plain_losses(folder: Path, store: Path, max_length: int) -> list[tuple[int, np.ndarray]]:
    """Returns the length of every piece of a store's documents, and -log p of its tokens but the
    first, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    given, found = Store.open(store), []
    for document, length in enumerate(given.lengths.tolist()):
        for start in range(0, length, max_length):
            stop = min(length, start + max_length)
            tokens = torch.from_numpy(given.read(document, start, stop)[0])
            with torch.no_grad():
                logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
            found.append(
                (stop - start, F.cross_entropy(logits, tokens[1:], reduction="none").numpy())
            )
    return found

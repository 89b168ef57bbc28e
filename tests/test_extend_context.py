"""examples/extend_context.yaml at small size: a checkpoint goes through both stages and comes out with the last one's RoPE."""

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from longctx.config import load
from longctx.data.corpus import open_corpus
from longctx.data.prepare import prepare
from longctx.parallel.mesh import make_groups
from longctx.training import checkpoint
from longctx.training.export import export
from longctx.training.stages import train_in_stages
from tests.data_cases import write_jsonl
from tests.huggingface_cases import build_model
from tests.template_cases import FAMILIES
from tests.workers import Workers

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "extend_context.yaml"
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What makes the example small: a tiny Llama of 64 tokens, and documents of up to 256."""
    folder = tmp_path_factory.mktemp("extend")
    checkpoint = FAMILIES["SmolLM2"].save(folder / "checkpoint")
    entries = len(transformers.AutoTokenizer.from_pretrained(checkpoint))
    build_model(
        "llama",
        "eager",
        vocab_size=entries,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ).save_pretrained(checkpoint)
    for name, lengths in {"short": (10, 20, 40, 60), "long": (90, 30, 250, 140)}.items():
        words = Random(name)
        texts = [" ".join(words.choices(["word", "there", "are", "a"], k=length)) for length in lengths * 8]
        source = write_jsonl(folder / f"{name}.jsonl", [{"text": text} for text in texts])
        prepare(open_corpus(str(source)), folder / name, tokenizer=str(checkpoint))
    return [
        f"model.from_pretrained={checkpoint}",
        f"data.stores=[{{path: {folder / 'short'}, weight: 1}}, {{path: {folder / 'long'}, weight: 3}}]",
        "data.held_out=0.1",
        "batch.global_tokens=700",
        "train.dtype=float32",
        f"context.profile={Path(__file__).parent / 'as_given.yaml'}",
        *("stages.1.steps=2", "stages.1.data.max_length=64", "stages.1.batch.tokens_per_rank=128"),
        *("stages.2.steps=3", "stages.2.data.max_length=256", "stages.2.batch.tokens_per_rank=128"),
        "stages.2.model.rope_original_length=64",
        *("optimizer.warmup_steps=1", "optimizer.learning_rate=0.005", "eval.every=2", "eval.documents=3"),
        *("checkpoint.every=1", "checkpoint.keep=null", "log.tensorboard=false"),
    ]


def train(run: Path, settings: list[str]) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, of the whole run or behind its newest checkpoint."""
    config = load(EXAMPLE, [*settings, f"train.run_dir={run}"], world_size=dist.get_world_size())
    run.mkdir(exist_ok=True)
    mesh = make_groups(torch.device("cpu"), timeout_s=60.0)
    dist.barrier()
    assert train_in_stages(config, mesh, checkpoint.newest(run)[0], None, lambda *_: None) == (True, 5)
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def rope(folder: Path) -> tuple[dict[str, Any], int]:
    config = transformers.AutoConfig.from_pretrained(folder)
    return config.rope_parameters, config.max_position_embeddings


@pytest.mark.parametrize("more", [[], ["lora.rank=4"]], ids=["all", "lora"])
def test_the_example_at_small_size(workers: Workers, small: list[str], tmp_path: Path, more: list[str]) -> None:
    run, merge = tmp_path / "run", bool(more)
    rows = workers.run(train, 2, run, [*small, *more])[0]
    assert [max(map(int, row["degrees"])) for row in rows][2:] != [1, 1, 1], "the long documents are split"
    assert [row["validation_loss"] is not None for row in rows] == [False, True, False, True, True]
    export(run, tmp_path / "last", merge=merge)
    export(run, tmp_path / "first", step=2, merge=merge)
    found, longest = rope(tmp_path / "last")
    assert longest == 256 and {key: found[key] for key in YARN} == YARN
    found, longest = rope(tmp_path / "first")
    assert longest == 64 and {key: found[key] for key in PLAIN} == PLAIN
    assert "factor" not in found
    for step in (3, 4, 5):
        shutil.rmtree(run / "checkpoints" / f"step-{step:06d}")
    again = workers.run(train, 1, run, [*small, *more, "stages.2.batch.tokens_per_rank=256"])[0]
    assert [row["loss"] for row in again] == pytest.approx([row["loss"] for row in rows], rel=1e-5)

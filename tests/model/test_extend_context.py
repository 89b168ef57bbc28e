"""The examples that extend the context at small size: a checkpoint goes through two runs and comes
out with another RoPE."""

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
from longctx.data.records.sources import open_corpus
from longctx.data.store.prepare import prepare
from longctx.parallel.mesh import make_groups
from longctx.training.assembly import assemble
from longctx.training.run import Run
from longctx.training.saved import checkpoint
from longctx.training.saved.export import export
from tests.data_cases import write_jsonl
from tests.huggingface_cases import build_model
from tests.template_cases import FAMILIES
from tests.workers import Workers

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


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
        texts = [
            " ".join(words.choices(["word", "there", "are", "a"], k=length))
            for length in lengths * 8
        ]
        source = write_jsonl(folder / f"{name}.jsonl", [{"text": text} for text in texts])
        prepare(open_corpus(str(source)), folder / name, tokenizer=str(checkpoint))
    return [
        f"model.from_pretrained={checkpoint}",
        f"data.store=[{{path: {folder / 'short'}, weight: 1}}, {{path: {folder / 'long'}, weight: "
        f"3}}]",
        "data.held_out=0.1",
        "batch.global_tokens=700",
        "train.dtype=float32",
        f"context.profile={Path(__file__).parents[1] / 'as_given.yaml'}",
        "batch.tokens_per_rank=128",
        *(
            "optimizer.warmup_steps=1",
            "optimizer.learning_rate=0.005",
            "eval.every=2",
            "eval.documents=3",
        ),
        *("checkpoint.every=1", "checkpoint.keep=null", "log.tensorboard=false"),
    ]


SHORT = ["train.steps=2", "data.max_length=64", "optimizer.decay_steps=5"]
LONG = [
    "train.steps=5",
    "data.max_length=256",
    "model.rope_scaling.original_max_position_embeddings=64",
]


def train(runs: Path, settings: list[str]) -> list[dict[str, Any]]:
    """Trains both runs, or goes on behind their newest checkpoints. Returns the rows of both."""
    rows = []
    for name, more in (("extend_context_short", SHORT), ("extend_context", LONG)):
        run = runs / name
        config = load(
            EXAMPLES / f"{name}.yaml",
            [*settings, *more, f"train.run_dir={run}"],
            world_size=dist.get_world_size(),
        )
        run.mkdir(exist_ok=True)
        dist.barrier()
        found = checkpoint.newest(run)[0]
        if found is None and rows:
            found, _ = checkpoint.to_continue(runs / "extend_context_short", config.train.steps)
        mesh = make_groups(torch.device("cpu"), timeout_s=60.0)
        dist.barrier()
        assert assemble(Run.open(config, checkpoint=found), mesh).train()
        rows += [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return rows


def rope(folder: Path) -> tuple[dict[str, Any], int]:
    config = transformers.AutoConfig.from_pretrained(folder)
    return config.rope_parameters, config.max_position_embeddings


@pytest.mark.parametrize(
    "more", [[], pytest.param(["lora.rank=4"], marks=pytest.mark.slow)], ids=["all", "lora"]
)
def test_the_example_at_small_size(
    workers: Workers, small: list[str], tmp_path: Path, more: list[str]
) -> None:
    merge = bool(more)
    rows = workers.run(train, 2, tmp_path, [*small, *more])[0]
    assert [max(map(int, row["degrees"])) for row in rows][2:] != [1, 1, 1], (
        "the long documents are split"
    )
    assert [row["validation_loss"] is not None for row in rows] == [False, True, False, True, True]
    export(tmp_path / "extend_context", tmp_path / "last", merge=merge)
    export(tmp_path / "extend_context_short", tmp_path / "first", merge=merge)
    found, longest = rope(tmp_path / "last")
    assert longest == 256 and {key: found[key] for key in YARN} == YARN
    found, longest = rope(tmp_path / "first")
    assert longest == 64 and {key: found[key] for key in PLAIN} == PLAIN
    assert "factor" not in found
    shutil.rmtree(tmp_path / "extend_context")
    again = workers.run(train, 1, tmp_path, [*small, *more, "batch.tokens_per_rank=256"])[0]
    assert [row["loss"] for row in again] == pytest.approx([row["loss"] for row in rows], rel=1e-5)

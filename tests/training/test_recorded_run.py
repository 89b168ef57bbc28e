"""A store and a checkpoint that an earlier commit wrote are still read, and the run goes on as it
did there.

The record is of 2026-11-27. If a format changes on purpose, it is recorded anew into an empty
folder:

    python -m tests.training.test_recorded_run
"""

import contextlib
import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from longctx.data.records.sources import open_corpus
from longctx.data.store.prepare import prepare
from tests.training_cases import start
from tests.workers import Workers

RECORD = Path(__file__).parents[1] / "recorded_run"
SETTINGS = [
    *(
        "model.overrides.hidden_size=8",
        "model.overrides.intermediate_size=12",
        "model.overrides.num_attention_heads=2",
        "model.overrides.num_key_value_heads=1",
    ),
    *(
        "model.overrides.head_dim=4",
        "model.overrides.num_hidden_layers=1",
        "batch.tokens_per_rank=500",
        "batch.global_tokens=900",
        "data.max_length=500",
    ),
    "checkpoint.every=null",
]
STEPS = 2
"""Before the checkpoint, and after it."""


def digest(model: torch.nn.Module) -> str:
    """SHA-256 of all weights."""
    parts = (
        (name, weight.full_tensor().detach().numpy().tobytes())
        for name, weight in model.named_parameters()
    )
    return hashlib.sha256(b"".join(name.encode() + part for name, part in parts)).hexdigest()


def go_on(run: Path, resume: bool) -> dict[str, Any]:
    """Weights at the start, and the steps from there; without `resume` from the first one, with a
    checkpoint in between."""
    trainer = start(RECORD / "store", run, SETTINGS, resume=resume)
    with trainer.loader:
        if not resume:
            for _ in range(STEPS):
                trainer.step()
            trainer.save()
        weights = digest(trainer.model)
        steps = [trainer.step() for _ in range(STEPS)]
    return {
        "weights": weights,
        "steps": [
            [m.step, m.documents, m.tokens, m.target_tokens, m.loss, m.grad_norm] for m in steps
        ],
    }


def test_a_recorded_run_goes_on(workers: Workers, tmp_path: Path) -> None:
    shutil.copytree(RECORD / "checkpoints", tmp_path / "checkpoints")
    expected = json.loads((RECORD / "expected.json").read_text("utf-8"))
    for found in workers.run(go_on, 2, tmp_path, True):
        assert found["weights"] == expected["weights"], "bit by bit"
        for ours, theirs in zip(found["steps"], expected["steps"], strict=True):
            assert ours[:4] == theirs[:4]
            assert ours[4:] == pytest.approx(theirs[4:], rel=1e-5)


if __name__ == "__main__":
    source, rng = RECORD / "source", random.Random(0)
    source.mkdir(parents=True)
    for number in range(12):
        words = (
            rng.choice(("long ", "context ", "ring\n", "a ", "plan "))
            for _ in range(rng.randint(5, 150))
        )
        (source / f"{number}.txt").write_text("".join(words), "utf-8")
    with contextlib.chdir(RECORD):
        prepare(open_corpus(source.name), "store", tokenizer="bytes")
    shutil.rmtree(source)
    found = Workers().run(go_on, 1, RECORD, False)[0]
    (RECORD / "expected.json").write_text(json.dumps(found) + "\n", "utf-8")
    for name in ("latest", "config.yaml", "metrics.jsonl"):
        (RECORD / name).unlink()
    shutil.rmtree(RECORD / "model")

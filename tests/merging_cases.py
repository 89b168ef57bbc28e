"""Stores whose documents begin alike, and runs over them with and without merging."""

import json
from pathlib import Path
from typing import Any

import torch

from longctx.data.records.sources import open_corpus
from longctx.data.store.prepare import prepare
from tests.data_cases import text_of, write_jsonl
from tests.lora_cases import weights_of
from tests.training_cases import start, whole

SETTINGS = [
    "data.max_length=700",
    "batch.global_tokens=5000",
    "train.steps=3",
    "checkpoint.every=2",
    "optimizer.warmup_steps=0",
    "optimizer.clip_grad_norm=null",
    # Else the first steps go by the sign alone of gradients that are rounding errors.
    "optimizer.eps=1e-3",
]
APART, MERGED = "data.merge_prefixes=false", "data.merge_prefixes=true"


def make_group_store(folder: Path) -> Path:
    """A byte-level store of texts and conversations, some of which begin alike, and some of which
    count more."""
    records: list[dict[str, Any]] = [
        {
            "text": text_of(200, group) + text_of(60 + 37 * place, 10 * group + place),
            "weight": 1 + place % 3,
        }
        for group in (1, 2)
        for place in range(5)
    ]
    prompt = {"role": "user", "content": text_of(150, 3)}
    for place in range(4):
        answer = "the same " + text_of(20 + 80 * place, 50 + place)
        records.append({"messages": [prompt, {"role": "assistant", "content": answer}]})
    records += [{"text": text_of(100 * place, 70 + place)} for place in range(1, 6)]
    records.append(records[1])
    prepare(
        open_corpus(str(write_jsonl(folder / "groups.jsonl", records))),
        folder / "groups",
        tokenizer="bytes",
    )
    return folder / "groups"


def train(store: Path, folder: Path, settings: list[str], resume: bool = False) -> dict[str, Any]:
    """On each rank: the whole loop, with what it logs, its last weights and the gradients of its
    first step."""
    trainer, gradients = (
        start(store, folder, [*SETTINGS, *settings], resume=resume),
        dict[str, torch.Tensor](),
    )

    def look(*_: Any) -> None:
        if not gradients:
            gradients.update(
                {
                    n: whole(p.grad)
                    for n, p in trainer.model.named_parameters()
                    if p.grad is not None
                }
            )

    trainer.optimizer.register_step_pre_hook(look)
    trainer.train()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {"rows": rows, "gradients": gradients, "weights": weights_of(trainer)[0]}

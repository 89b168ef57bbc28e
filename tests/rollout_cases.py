"""Files of rollouts, and what a run on them does on each rank."""

import json
import random
from dataclasses import fields
from pathlib import Path
from typing import Any

from longctx.data.rollout_store import RolloutStore
from longctx.data.rollouts import Rollouts
from longctx.data.tokenizer import Tokenizer
from tests.lora_cases import weights_of
from tests.training_cases import start

Record = dict[str, Any]
FOUR = ("prompt", "completion", "reward", "group")


def records(groups: int = 9) -> list[Record]:
    """A record for each prompt, of token ids, with everything that a rollout may have."""
    draw = random.Random(0)

    def numbers(count: int) -> list[float]:
        return [-5 + draw.random() for _ in range(count)]

    made = []
    for _ in range(groups):
        completions = [[draw.randrange(250) for _ in range(draw.randrange(3, 80))] for _ in range(draw.randrange(2, 5))]
        made.append(
            {
                "prompt": [draw.randrange(250) for _ in range(draw.randrange(20, 90))],
                "completions": completions,
                "rewards": [draw.random() for _ in completions],
                "masks": [[1, *(int(draw.random() < 0.8) for _ in each[1:])] for each in completions],
                **{key: [numbers(len(each)) for each in completions] for key in ("old_logps", "sampler_logps")},
            }
        )
    return made


def one_by_one(several: list[Record]) -> list[Record]:
    """The same rollouts, a record for each completion, by names of TRL where it has some."""
    names = {"completions": "completion_ids", "rewards": "reward", "masks": "mask", "sampler_logps": "logprobs"}
    return [
        {"prompt_ids": record["prompt"]}
        | {names.get(key, key): values[number] for key, values in record.items() if key != "prompt"}
        for record in several
        for number in range(len(record["completions"]))
    ]


def write(folder: Path, made: list[Record]) -> list[str]:
    """Writes rollouts and a tokenizer of bytes. Returns the settings of a run on them with new weights."""
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in made))
    Tokenizer.bytes().save(folder / "tokenizer.json")
    return settings_in(folder)


def settings_in(folder: Path) -> list[str]:
    return [
        "data.store=null",
        f"data.rollouts={folder / 'rollouts.jsonl'}",
        f"data.tokenizer={folder / 'tokenizer.json'}",
        "data.max_length=150",
        "data.long_documents=drop",
        "policy.loss=grpo",
        "batch.global_tokens=700",
        "batch.tokens_per_rank=160",
        "train.steps=6",
        "checkpoint.every=2",
    ]


def run(folder: Path, settings: list[str], steps: int, resume: bool = False) -> dict[str, Any]:
    """On each rank: the next steps, a checkpoint behind them, and the weights then."""
    trainer, done = start(folder, folder / "run", settings, resume=resume), []
    with trainer.loader:
        for _ in range(steps):
            batch = next(trainer.loader)
            metrics = trainer.step(batch)
            done.append((batch.store_documents, metrics.loss, metrics.grad_norm, metrics.reward))
        trainer.save()
    return {"done": done, "weights": weights_of(trainer)[0]}


def first_step_twice(folder: Path, settings: list[str]) -> list[tuple[float, float, Any]]:
    """The first step of a run on a file, and of a loop that has the same rollouts in memory."""
    trainer, by_file = start(folder, folder / "run", settings), start(folder, folder / "other", settings)
    with trainer.loader, by_file.loader:
        store = by_file.loader._store
        assert isinstance(store, RolloutStore)
        pieces, _ = by_file.loader.sampler.step(0)
        chosen = [piece.document for piece in pieces]
        groups = {store.groups[document] for document in chosen}
        assert len(chosen) == sum(group in groups for group in store.groups), "no group is cut"
        columns = {field.name: getattr(store.rollouts, field.name) for field in fields(Rollouts)}
        columns |= {"advantages": None, "groups": None}
        rollouts = Rollouts(**{key: values and [values[each] for each in chosen] for key, values in columns.items()})
        both = trainer.step(rollouts), by_file.step()
    return [(metrics.loss, metrics.grad_norm, metrics.reward) for metrics in both]

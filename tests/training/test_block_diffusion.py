"""Runs of block diffusion: training, validation and `longctx eval` do not depend on the ranks; what
does not go with it is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from longctx.cli import main
from longctx.config import ConfigError, load
from longctx.data.store.store import Store
from longctx.training.data import mask_token_of, validation_noise
from tests.training_cases import SMALL, start
from tests.workers import Workers

DIFFUSION = [
    "objective.name=block_diffusion",
    "objective.block=24",
    "objective.largest_block=40",
    "objective.next_token_weight=0.5",
    "objective.per_document=true",
    "objective.least_noise=0.3",
]
SETTINGS = [
    *DIFFUSION,
    "data.max_length=300",
    "batch.global_tokens=1000",
    "model.overrides.num_hidden_layers=1",
    "eval.every=2",
    "eval.documents=3",
    "data.held_out=0.15",
    "train.steps=2",
    "optimizer.warmup_steps=1",
    "optimizer.eps=1e-3",
]


def run(store: Path, folder: Path, tokens_per_rank: int) -> list[dict[str, Any]]:
    """Returns the rows of metrics.jsonl of a whole run."""
    trainer = start(store, folder, [*SETTINGS, f"batch.tokens_per_rank={tokens_per_rank}"])
    trainer.train()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_losses_do_not_depend_on_the_ranks(
    workers: Workers, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = workers.run(run, 1, store, tmp_path / "one", 700)[0]
    rows = workers.run(run, 3, store, tmp_path / "three", 240)[0]
    assert any(int(degree) > 1 for row in rows for degree in row["degrees"])
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in rows] == pytest.approx(
            [row[name] for row in expected], rel=1e-4
        )
    bound = rows[-1]["validation_loss"]
    assert bound == pytest.approx(expected[-1]["validation_loss"], rel=1e-4)
    assert rows[-1]["computed_tokens"] > 1.5 * rows[-1]["tokens"]
    arguments = ["eval", str(tmp_path / "one"), "--json", "--batch.tokens_per_rank", "700"]
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["overall"]["loss"] == pytest.approx(bound, rel=1e-4)
    total = sum(part["loss"] * part["tokens"] for part in report["by_length"])
    assert total / report["overall"]["tokens"] == pytest.approx(bound, rel=1e-4)


def test_the_mask_token(store: Path) -> None:
    opened = Store.open(store)
    assert mask_token_of(load(None, DIFFUSION), opened) == 256
    assert mask_token_of(load(None, [*DIFFUSION, "objective.mask_token=a"]), opened) == ord("a")
    with pytest.raises(ConfigError, match="'ab', which is 2 tokens of the tokenizer"):
        mask_token_of(load(None, [*DIFFUSION, "objective.mask_token=ab"]), opened)


def test_validation_has_all_levels_of_noise(store: Path) -> None:
    opened = Store.open(store)
    assert validation_noise(load(None, SMALL), opened) is None
    merging: Any = validation_noise(load(None, DIFFUSION), opened)
    noise = merging.keywords["noise"]
    assert (noise.least, noise.most, noise.block) == (0.001, 1.0, 24)
    assert not noise.next_token and not noise.per_document


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["objective.block=4"], "objective.name is next_token: it has no effect"),
        ([*DIFFUSION, "data.merge_prefixes=true"], "noisy blocks have no common beginning"),
        ([*DIFFUSION, "data.max_length=50000"], "data.max_length"),
    ],
)
def test_refusals(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(None, settings, world_size=1)


def test_ranks_hold_documents_of_half_their_tokens() -> None:
    config = load(None, ["batch.tokens_per_rank=200"])
    noisy = load(None, [*DIFFUSION, "batch.tokens_per_rank=200"])
    for ranks in (1, 3):
        assert noisy.capacity(ranks) == config.capacity(ranks) // 2 == 100 * ranks

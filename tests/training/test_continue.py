"""A run that continues another: weights, moments, step and places in the stores go on, bit by bit,
on any ranks."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from longctx.cli import main
from longctx.config import Config, load
from longctx.data.loader import Loader
from longctx.parallel.mesh import Mesh, make_groups
from longctx.training.assembly import assemble
from longctx.training.data import RunData, build_loader
from longctx.training.optimizer import learning_rate
from longctx.training.run import Run
from longctx.training.saved import checkpoint
from longctx.training.saved.checkpoint import Checkpoint
from longctx.training.trainer import Trainer
from tests.data_cases import byte_store
from tests.training_cases import SMALL
from tests.workers import Workers

SETTINGS = [
    one
    for one in SMALL
    if not one.startswith(("train.steps", "data.max_length", "batch.", "checkpoint.every"))
]
COMPARED = ("step", "loss", "grad_norm", "lr", "documents", "tokens", "source_tokens")
ENDS = {"short": 2, "long": 4, "short_again": 5}

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("stores")
    lengths = {
        "short": [60, 90, 120, 200] * 6,
        "long": [100, 700, 300, 900] * 3,
        "chats": [50, 75] * 8,
    }
    return [byte_store(folder, each, name=name).path for name, each in lengths.items()]


def mix(stores: list[Path], *weights: float) -> list[dict[str, Any]]:
    return [
        {"path": str(path), "weight": weight} for path, weight in zip(stores, weights, strict=False)
    ]


@pytest.fixture(scope="module")
def files(stores: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Settings of a run on short documents, then on long ones with another RoPE and mix, then on
    the first data again."""
    short = {"max_length": 200, "store": mix(stores, 3, 1, 1)}
    extended = {
        "rope_theta": 50000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 200,
        },
    }
    runs: dict[str, dict[str, Any]] = {
        "short": {"data": short, "batch": {"global_tokens": 750, "tokens_per_rank": 300}},
        "long": {
            "data": {"max_length": 700, "store": mix(stores, 1, 2)},
            "batch": {"global_tokens": 1250, "tokens_per_rank": 720},
            "model": extended,
            "train": {"recompute": "selective"},
        },
        "short_again": {
            "data": short,
            "model": extended,
            "batch": {"global_tokens": 750, "tokens_per_rank": 300},
        },
    }
    folder = tmp_path_factory.mktemp("settings")
    for name, settings in runs.items():
        settings = {
            "checkpoint": {"every": 1, "keep": None},
            "optimizer": {"decay_steps": 5},
            **settings,
        }
        settings["train"] = {**settings.get("train", {}), "steps": ENDS[name]}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(settings))
    return folder


def settings_of(files: Path, name: str, runs: Path, *more: str) -> Config:
    return load(
        files / f"{name}.yaml",
        [*SETTINGS, f"train.run_dir={runs / name}", *more],
        world_size=dist.get_world_size(),
    )


def joined() -> Mesh:
    return make_groups(torch.device("cpu"), timeout_s=30.0)


def chained(files: Path, runs: Path, names: list[str], *more: str) -> Rows:
    """Trains runs that continue each other, each from its own newest checkpoint if it has one.
    Returns all rows."""
    before: Path | None = None
    rows: Rows = []
    for name in names:
        config = settings_of(files, name, runs, *more)
        folder = config.train.run_dir
        folder.mkdir(exist_ok=True, parents=True)
        found: Checkpoint | None = checkpoint.newest(folder)[0]
        if found is None and before is not None:
            found, _ = checkpoint.to_continue(before, config.train.steps)
        mesh = joined()
        dist.barrier()
        assert assemble(Run.open(config, checkpoint=found), mesh).train()
        rows += [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        before = folder
    return rows


@pytest.fixture(scope="module")
def whole(
    workers: Workers, files: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Rows]:
    """The folder and rows of three uninterrupted runs on two ranks."""
    runs = tmp_path_factory.mktemp("whole")
    return runs, workers.run(chained, 2, files, runs, list(ENDS))[0]


def told(rows: Rows) -> list[list[Any]]:
    return [[row[key] for key in COMPARED] for row in rows]


def by_hand(files: Path, runs: Path) -> Rows:
    """The same runs by the parts that they are made of."""
    mesh, rows, steps, before = joined(), [], 0, None
    for name, end in ENDS.items():
        config = settings_of(files, name, runs)
        data = RunData.open(config)
        loader = build_loader(data.store, config, mesh, config.max_length(mesh.world_size))
        trainer = Trainer.of(config, mesh, config.model_source(data.vocab_size), loader)
        if before is not None:
            found = checkpoint.newest(before)[0]
            loader.continue_from(found.state["data"])
            checkpoint.load(found, trainer.model, trainer.optimizer, mesh.control)
        with loader:
            while steps < end:
                metrics = trainer.step()
                rows.append({key: getattr(metrics, key) for key in COMPARED})
                steps += 1
            trainer.save()
        before = config.train.run_dir
    return rows


@pytest.mark.slow
def test_runs_that_continue_each_other_are_one(
    workers: Workers, files: Path, whole: tuple[Path, Rows], tmp_path: Path
) -> None:
    assert told(whole[1]) == told(workers.run(by_hand, 2, files, tmp_path)[0]), "not bit by bit"
    assert [row["step"] for row in whole[1]] == list(range(1, 6))
    expected = [learning_rate(step, 5, load(None, SETTINGS).optimizer) for step in range(1, 6)]
    assert [row["lr"] for row in whole[1]] == expected, "one schedule over all runs"


@pytest.mark.parametrize(
    ("step", "ranks"),
    [(3, 3), *(pytest.param(2, ranks, marks=pytest.mark.slow) for ranks in (1, 2))],
)
def test_a_run_resumes_from_any_step_on_any_number_of_ranks(
    workers: Workers, files: Path, whole: tuple[Path, Rows], tmp_path: Path, step: int, ranks: int
) -> None:
    """At the beginning of a run that continues another, and within it."""
    for name in ("short", "long"):
        shutil.copytree(whole[0] / name, tmp_path / name, symlinks=True)
    for folder in (tmp_path / "long" / "checkpoints").iterdir():
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)
    # A single process needs more room for the same documents.
    more = ["batch.tokens_per_rank=800"] if ranks == 1 else []
    rows, expected = (
        workers.run(chained, ranks, files, tmp_path, ["short", "long"], *more)[0],
        whole[1][:4],
    )
    if ranks == 2:
        assert told(rows) == told(expected), "not bit by bit"
    for row, reference in zip(rows, expected, strict=True):
        assert row["loss"] == pytest.approx(reference["loss"], rel=1e-5)
        assert [row[key] for key in COMPARED[4:]] == [reference[key] for key in COMPARED[4:]]


def names(store: Path, runs: Path) -> list[list[str]]:
    """The documents of the first two steps of runs that continue each other and split the store at
    other lengths."""
    found: list[list[str]] = []
    state: dict[str, Any] = {}
    for length in (200, 200, 250):
        settings = [
            *SETTINGS,
            f"data.store={store}",
            f"data.max_length={length}",
            f"train.run_dir={runs}",
        ]
        config = load(
            None, [*settings, "batch.global_tokens=200", "batch.tokens_per_rank=300"], world_size=1
        )
        with build_loader(RunData.open(config).store, config, joined(), length) as loader:
            assert isinstance(loader, Loader)
            if state:
                loader.continue_from(state)
            found.append([name for _ in range(2) for name in next(loader).documents])
            state = json.loads(json.dumps(loader.state_dict()))
    return found


def test_a_run_does_not_begin_with_the_documents_of_the_last(
    workers: Workers, stores: list[Path], tmp_path: Path
) -> None:
    """A store that is split as before continues: each document once. A store that is split
    differently has another order."""
    first, second, third = workers.run(names, 1, stores[2], tmp_path)[0]
    assert not set(first) & set(second)
    assert third != first and third[:4] != second[:4]


def train(files: Path, runs: Path, *more: str) -> int:
    settings = [f"--{one}" for one in SETTINGS]
    return main(
        ["train", str(files / "long.yaml"), *settings, f"--train.run_dir={runs / 'next'}", *more]
    )


def test_the_command(
    files: Path, whole: tuple[Path, Rows], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In one process; then again, from its own checkpoint."""
    more = [f"--continue={whole[0] / 'short'}", "--batch.tokens_per_rank=800"]
    assert train(files, tmp_path, *more, "--train.steps=3") == 0
    assert f"from step 2 of {whole[0] / 'short'};" in capfd.readouterr().out
    assert train(files, tmp_path, *more) == 2
    assert "add --resume to continue it" in capfd.readouterr().err
    assert train(files, tmp_path, *more, "--resume-if-any") == 0
    assert "from step 3;" in capfd.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "next/metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == pytest.approx(
        [row["loss"] for row in whole[1][2:4]], rel=1e-5
    )


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--continue=nowhere"], "--continue is nowhere, which has no complete checkpoint"),
        (["--continue={runs}/short", "--train.steps=2"], "has done 2 steps, but train.steps is 2"),
        (["--continue={runs}/short", "--resume"], "--resume continues the run itself"),
        (
            ["--continue={runs}/short", "--model.overrides.num_hidden_layers=1"],
            "contains another model: num_hidden_layers is 1",
        ),
        (["--continue={runs}/short", "--train.seed=5"], "seed is 5, and was"),
    ],
)
def test_what_cannot_go_on_is_refused(
    files: Path,
    stores: list[Path],
    whole: tuple[Path, Rows],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    more: list[str],
    says: str,
) -> None:
    words = [word.format(runs=whole[0], store=stores[0]) for word in more]
    assert train(files, tmp_path, "--batch.tokens_per_rank=800", *words) == 2
    assert says in capfd.readouterr().err

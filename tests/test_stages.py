"""A run in stages equals separate runs that continue each other, bit by bit, interrupted anywhere, on any number of ranks."""

import json
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from longctx.cli import main
from longctx.config import Config, load
from longctx.data.store import Store
from longctx.errors import UserError
from longctx.evaluation.target import Target
from longctx.parallel.mesh import make_groups
from longctx.training import checkpoint
from longctx.training.setup import build_loader, open_data
from longctx.training.stages import train_in_stages
from longctx.training.trainer import Trainer
from tests import launched
from tests.data_cases import byte_store
from tests.marks import slow_unless
from tests.training_cases import SMALL
from tests.workers import Workers

SETTINGS = [one for one in SMALL if not one.startswith(("train.steps", "data.max_length", "batch.", "checkpoint.every"))]
TELLING = ("step", "loss", "grad_norm", "lr", "documents", "tokens", "source_tokens")

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("stores")
    lengths = {"short": [60, 90, 120, 200] * 6, "long": [100, 700, 300, 900] * 3, "chats": [50, 75] * 8}
    return [byte_store(folder, each, name=name).path for name, each in lengths.items()]


def mix(stores: list[Path], *weights: float) -> list[dict[str, Any]]:
    return [{"path": str(path), "weight": weight} for path, weight in zip(stores, weights, strict=False)]


@pytest.fixture(scope="module")
def settings(stores: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short documents, then long ones with another RoPE and another mix, then the first stage's data again."""
    short = {"max_length": 200, "stores": mix(stores, 3, 1, 1)}
    extended = {"rope_theta": 50000.0, "rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_length": 200}
    stages = [
        {"steps": 3, "data": short, "batch": {"global_tokens": 1500, "tokens_per_rank": 300}},
        {
            "steps": 3,
            "data": {"max_length": 700, "stores": mix(stores, 1, 2)},
            "batch": {"global_tokens": 2500, "tokens_per_rank": 720},
            "model": extended,
            "train": {"recompute": "selective"},
        },
        {"steps": 2, "data": short, "model": extended, "batch": {"global_tokens": 1500, "tokens_per_rank": 300}},
    ]
    file = tmp_path_factory.mktemp("settings") / "stages.yaml"
    file.write_text(yaml.safe_dump({"stages": stages, "checkpoint": {"every": 1, "keep": None}}))
    return file


def settings_of(file: Path, run: Path, *more: str) -> Config:
    return load(file, [*SETTINGS, f"train.run_dir={run}", *more], world_size=dist.get_world_size())


def staged(file: Path, run: Path, *more: str) -> Rows:
    """Finishes a run from its newest checkpoint. Returns the rows of metrics.jsonl."""
    config = settings_of(file, run, *more)
    run.mkdir(exist_ok=True)
    # As launched processes have: the position that it is told leads to the trainer.
    mesh = replace(make_groups(torch.device("cpu"), timeout_s=30.0), peers=SimpleNamespace(position=None))
    dist.barrier()
    models: list[weakref.ref[torch.nn.Module]] = []

    def began(trainer: Trainer, *_: object) -> None:
        assert not any(model() for model in models), "the model of an earlier stage is still held"
        models.append(weakref.ref(trainer.model))

    assert train_in_stages(config, mesh, checkpoint.newest(run)[0], None, began) == (True, config.train.steps) and models
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(workers: Workers, settings: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Rows]:
    """The run folder and rows of an uninterrupted run on two ranks."""
    run = tmp_path_factory.mktemp("whole") / "run"
    return run, workers.run(staged, 2, settings, run)[0]


def told(rows: Rows) -> list[list[Any]]:
    return [[row[key] for key in TELLING] for row in rows]


def by_hand(file: Path, run: Path) -> Rows:
    """The same stages as separate runs, each started from the checkpoint of the previous run."""
    whole, mesh, rows, steps = settings_of(file, run), make_groups(torch.device("cpu"), timeout_s=30.0), [], 0
    for number, end in enumerate(whole.stage_ends):
        config = whole.at_stage(number)
        store = open_data(config)
        trainer = Trainer.build(config, mesh, config.model_source(store.tokenizer.vocab_size))
        trainer.loader = build_loader(store, config, mesh, config.max_length(mesh.world_size))
        if number:
            found = checkpoint.of_step(run, steps)[0]
            assert found is not None
            trainer.loader.begin_stage(found.state["data"])
            checkpoint.load(found, trainer.model, trainer.optimizer, mesh.control)
        with trainer.loader:
            while steps < end:
                metrics = trainer.step()
                rows.append({key: getattr(metrics, key) for key in TELLING})
                steps += 1
            trainer.save()
    return rows


def test_a_run_in_stages_equals_separate_runs_that_continue_each_other(
    workers: Workers, settings: Path, whole: tuple[Path, Rows], tmp_path: Path
) -> None:
    assert told(whole[1]) == told(workers.run(by_hand, 2, settings, tmp_path)[0]), "not bit by bit"
    assert [row["step"] for row in whole[1]] == list(range(1, 9))
    assert len({row["lr"] for row in whole[1]}) == 8, "one schedule over all stages"


def beyond_its_end(store: Path, run: Path) -> tuple[bool, int]:
    """Resumes a run of two steps as a run of a single step."""
    given = [*SETTINGS, f"data.store={store}", f"train.run_dir={run}", "checkpoint.every=2", "batch.global_tokens=500"]
    given.append("optimizer.warmup_steps=0")
    run.mkdir()
    mesh = make_groups(torch.device("cpu"), timeout_s=30.0)
    began = train_in_stages(load(None, [*given, "train.steps=2"]), mesh, None, None, lambda *_: None)
    assert began == (True, 2)
    return train_in_stages(load(None, [*given, "train.steps=1"]), mesh, checkpoint.newest(run)[0], None, lambda *_: None)


def test_a_run_beyond_its_last_step_ends(workers: Workers, stores: list[Path], tmp_path: Path) -> None:
    assert workers.run(beyond_its_end, 1, stores[0], tmp_path / "run") == [(True, 2)]


@pytest.mark.parametrize(
    ("step", "ranks"), slow_unless(lambda *case: case in ((3, 2), (4, 3)), [(3, 2), (4, 2), (4, 3), (7, 3), (3, 1)])
)
def test_a_run_resumes_from_any_step_on_any_number_of_ranks(
    workers: Workers, settings: Path, whole: tuple[Path, Rows], tmp_path: Path, step: int, ranks: int
) -> None:
    """At the end of a stage, and within the later ones."""
    run = tmp_path / "run"
    shutil.copytree(whole[0], run, symlinks=True)
    for folder in (run / "checkpoints").iterdir():
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)
    # A single process needs more room for the same documents.
    more = ["stages.1.batch.tokens_per_rank=800", "stages.2.batch.tokens_per_rank=800", "stages.3.batch.tokens_per_rank=800"]
    rows = workers.run(staged, ranks, settings, run, *(more if ranks == 1 else []))[0]
    if ranks == 2:
        assert told(rows) == told(whole[1]), "not bit by bit"
    for ours, theirs in zip(rows, whole[1], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert [ours[key] for key in ("documents", "tokens", "source_tokens")] == [
            theirs[key] for key in ("documents", "tokens", "source_tokens")
        ]


def test_a_checkpoint_records_its_stage(whole: tuple[Path, Rows]) -> None:
    states = [checkpoint.of_step(whole[0], step)[0] for step in range(1, 9)]
    assert [found.stage for found in states if found] == [0, 0, 0, 1, 1, 1, 2, 2]
    thetas = [found.state["model"]["rope_theta"] for found in states if found]
    assert thetas == [500000.0] * 3 + [50000.0] * 5


def names(file: Path, run: Path) -> list[list[str]]:
    """The documents of every stage."""
    config = settings_of(file, run)
    found: list[list[str]] = []
    state: dict[str, Any] = {}
    for number in range(len(config.stages)):
        own = config.at_stage(number)
        loader = build_loader(open_data(own), own, make_groups(torch.device("cpu"), timeout_s=30.0), own.max_length(1))
        with loader:
            if number:
                loader.begin_stage(state)
            found.append([name for _ in range(2) for name in next(loader).documents])
            state = json.loads(json.dumps(loader.state_dict()))
    return found


def test_stages_do_not_start_with_the_same_documents(workers: Workers, stores: list[Path], tmp_path: Path) -> None:
    """A store that is split as before continues: each document once. A store that is split differently has another order."""
    stages = [{"steps": 3, "data": {"max_length": length}} for length in (200, 200, 250)]
    base = {"data": {"store": str(stores[2])}, "batch": {"global_tokens": 200, "tokens_per_rank": 300}}
    file = tmp_path / "stages.yaml"
    file.write_text(yaml.safe_dump({**base, "stages": stages}))
    first, second, third = workers.run(names, 1, file, tmp_path)[0]
    assert not set(first) & set(second)
    assert third != first and third[:4] != second[:4]


def test_evaluation_takes_the_stage_of_the_checkpoint(whole: tuple[Path, Rows]) -> None:
    target = Target.open(str(whole[0]), ["batch.tokens_per_rank=4000"], 1)
    assert target.config.model.rope_scaling == "yarn" and target.config.batch.tokens_per_rank == 4000
    assert target.max_length(1) == 200
    assert target.tokenizer().fingerprint == Store.open(target.config.data.paths[0]).tokenizer.fingerprint


def refusal(capfd: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["train", *map(str, arguments)]) == 2
    return capfd.readouterr().err


def test_invalid_stages_are_refused_before_the_run_starts(
    settings: Path, whole: tuple[Path, Rows], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = [settings, *(f"--{one}" for one in SETTINGS), f"--train.run_dir={tmp_path / 'run'}"]
    said = refusal(capfd, *given, "--stages.2.batch.tokens_per_rank=300")
    assert "stages.2.data.max_length = 700" in said
    said = refusal(capfd, *given, "--stages.2.data.stores=[{path: nowhere, weight: 1}]", "--stages.2.batch.tokens_per_rank=800")
    assert "error: stage 2: there is no store at nowhere" in said or "stages.1" in said


def refused(file: Path, run: Path, *more: str) -> str:
    with pytest.raises(UserError) as caught:
        staged(file, run, *more)
    return str(caught.value)


def test_stages_that_differ_from_the_run_are_refused(
    workers: Workers, settings: Path, whole: tuple[Path, Rows], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for step in (5, 3):
        folder = run / "checkpoints" / f"step-{step:06d}"
        shutil.copytree(whole[0] / "checkpoints" / folder.name, folder)
    steps = "stages.1.steps=6", "stages.2.batch.tokens_per_rank=720"
    assert (
        "step-000005 belongs to stage 2, but with these stages step 5 belongs to stage 1"
        in workers.run(refused, 2, settings, run, *steps)[0]
    )
    other = "stages.2.model={rope_theta: 7.0}"
    assert "contains another model: rope_" in workers.run(refused, 2, settings, run, other)[0]
    shutil.rmtree(run / "checkpoints" / "step-000005")
    at_the_end = workers.run(refused, 2, settings, run, "stages.1.model={rope_theta: 7.0}")[0]
    assert "contains another model: rope_theta is 7.0, was 500000.0" in at_the_end
    assert "seed is 5, and was 0" in workers.run(refused, 2, settings, run, "train.seed=5")[0]


def test_the_command_prints_the_stage_and_its_changes(settings: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    given = [*(f"--{one}" for one in SETTINGS), f"--train.run_dir={run}"]
    given += [f"--stages.{number}.batch.tokens_per_rank=800" for number in (1, 2, 3)]
    printed, _ = launched.run("train", settings, *given)
    lines = printed.splitlines()
    assert lines[0] == "stage 1 of 3, steps 1 to 3"
    assert "short: 24 documents, 2,820 tokens to train on, 60.00% of the mix: at least 0.957 epochs" in printed
    (second,) = (line for line in lines if line.startswith("stage 2 of 3, steps 4 to 6: "))
    assert "model.rope_scaling null → yarn" in second and "data.max_length 200 → 700" in second
    assert [line.split()[1] for line in lines if line.startswith("step ")] == [str(step) for step in range(1, 9)]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(sum(row["source_tokens"].values()) == row["tokens"] for row in rows)
    assert {folder.name for folder in run.glob("model*")} == {"model", "model-2", "model-3"}


def test_estimate_and_dry_run_cover_every_stage(settings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [str(settings), *(f"--{one}" for one in SETTINGS), f"--train.run_dir={tmp_path}", "--ranks=2"]
    assert main(["estimate", *given, "--json"]) == 0
    estimated = json.loads(capsys.readouterr().out)
    totals = []
    for stage in range(3):
        alone = tmp_path / f"{stage}.yaml"
        alone.write_text(load(settings, SETTINGS).at_stage(stage).to_yaml())
        assert main(["estimate", str(alone), "--ranks=2", "--json"]) == 0
        totals.append(json.loads(capsys.readouterr().out)["configured"]["total"])
    assert estimated["configured"]["total"] == max(totals) == totals[estimated["stage"] - 1] > min(totals)
    assert main(["train", *given, "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert told.count("dry run on 2 ranks") == 3 and "stage 3 of 3, steps 7 to 8: " in told


def test_steps_of_two_stages_are_not_traced(settings: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given = [settings, *(f"--{one}" for one in SETTINGS), f"--train.run_dir={tmp_path / 'run'}"]
    given += [f"--stages.{number}.batch.tokens_per_rank=800" for number in (1, 2, 3)]
    assert "goes over step 3, where a stage ends" in refusal(capfd, *given, "--profile-steps=3:4")

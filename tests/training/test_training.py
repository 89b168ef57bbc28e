"""Training does not depend on how the work is split, resumes exactly, and stops with an actionable
error."""

import errno
import importlib.util
import json
import math
import re
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from longctx import start as starting
from longctx.cli import main
from longctx.config import Config, ConfigError, load
from longctx.data.records.sources import open_corpus
from longctx.data.store.prepare import prepare
from longctx.data.store.store import Store
from longctx.training.data import choose_max_length
from longctx.training.health import FiniteLoss, NonFiniteLoss
from longctx.training.metrics import MetricsLog, StepMetrics
from longctx.training.run import Run
from longctx.training.saved import checkpoint, saving
from longctx.training.saved.checkpoint import Checkpoint
from longctx.training.saved.run_folder import RunFolderError, only_run_in, open_run_folder
from tests import launched, training_cases
from tests.training_cases import (
    SMALL,
    make_store,
    pretend_checkpoints,
    steps_in,
    train,
    train_and_save,
    train_then_save,
)
from tests.workers import Workers


def test_one_process_learns(alone: list[StepMetrics]) -> None:
    assert alone[-1].loss < 0.8 * alone[0].loss
    assert [metrics.step for metrics in alone] == list(range(1, 11))


@pytest.mark.parametrize(
    "settings",
    [
        ["batch.tokens_per_rank=376"],
        pytest.param(["parallel.tensor_parallel_size=2"], marks=pytest.mark.slow),
        pytest.param(["parallel.pipeline_parallel_size=2"], marks=pytest.mark.slow),
    ],
    ids=["domain", "tensor", "pipeline"],
)
def test_bfloat16_follows_float32(
    workers: Workers, store: Path, alone: list[StepMetrics], tmp_path: Path, settings: list[str]
) -> None:
    split = workers.run(train, 2, store, tmp_path, ["train.dtype=bfloat16", *settings], 2)[0]
    assert [metrics.loss for metrics in split] == pytest.approx(
        [metrics.loss for metrics in alone[:2]], rel=2e-2
    )
    assert [metrics.loss for metrics in split] != pytest.approx(
        [metrics.loss for metrics in alone[:2]], rel=1e-6
    )
    assert [metrics.grad_norm for metrics in split] == pytest.approx(
        [m.grad_norm for m in alone[:2]], rel=5e-2
    )


def test_resume_on_fewer_ranks_that_hold_every_document(
    workers: Workers, store: Path, tmp_path: Path
) -> None:
    """Without data.max_length, which by default is what all ranks hold together: no document is
    that long."""
    settings = ["data.max_length=null", f"batch.tokens_per_rank={Store.open(store).lengths.max()}"]
    workers.run(train_then_save, 2, store, tmp_path, settings, 1)
    both = workers.run(train, 2, store, tmp_path, settings, 1, True)[0]
    alone = workers.run(train, 1, store, tmp_path, settings, 1, True)[0]
    assert [m.loss for m in alone] == pytest.approx([m.loss for m in both], rel=1e-5)
    apart = [*settings, "eval.every=4", f"eval.store={make_store(tmp_path, (200, 1000))}"]
    with pytest.raises(
        AssertionError, match=r"can hold only \d+: set it to 1001, or start more processes"
    ):
        workers.run(train, 1, store, tmp_path, apart, 1, True)


@pytest.mark.slow
def test_resume_takes_the_settings_of_the_optimizer_from_the_config(
    workers: Workers, store: Path, tmp_path: Path
) -> None:
    """Only the moments are those of the checkpoint."""
    settings = ["batch.tokens_per_rank=376"]
    other = ["optimizer.weight_decay=0.5", "optimizer.betas=[0.8,0.9]", "optimizer.eps=1e-6"]
    for matrices, norms in workers.run(
        training_cases.resumed_with, 2, store, tmp_path, settings, other
    ):
        assert (matrices["weight_decay"], norms["weight_decay"]) == (0.5, 0.0)
        assert all(
            (tuple(group["betas"]), group["eps"]) == ((0.8, 0.9), 1e-6)
            for group in (matrices, norms)
        )


def arguments(store: Path, run: Path, *more: str) -> list[str]:
    settings = [
        f"--{setting}" for setting in [*SMALL, f"data.store={store}", f"train.run_dir={run}"]
    ]
    return ["train", *settings, "--batch.tokens_per_rank=750", *more]


def test_sigterm_saves(store: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    group = launched.start(
        [arguments(store, run, "--train.steps=2000", "--checkpoint.every=1000")],
        tmp_path / "output",
    )
    assert group.until(lambda: len(steps_in(run)) >= 3), group.said
    group.send(signal.SIGTERM, [0])
    assert not group.end(), group.said
    found, damaged = checkpoint.newest(run)
    assert found is not None
    assert found.step >= 3
    assert not damaged
    assert (run / "latest").resolve() == found.folder.resolve()


def test_an_incomplete_checkpoint_is_not_used(
    workers: Workers, store: Path, tmp_path: Path
) -> None:
    workers.run(
        train_and_save,
        1,
        store,
        tmp_path,
        ["train.steps=3", "checkpoint.every=1", "batch.tokens_per_rank=750"],
    )
    folders = sorted((tmp_path / "checkpoints").iterdir())
    assert [folder.name for folder in folders] == ["step-000001", "step-000002", "step-000003"]
    # As a kill in the middle of saving leaves it.
    shutil.copytree(folders[2], folders[2].with_name("step-000004.partial"))
    assert checkpoint.newest(tmp_path)[0].step == 3
    shard = next(folders[2].glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    found, damaged = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.step == 2
    assert len(damaged) == 2
    assert "is damaged" in damaged[1]
    (folders[1] / "state.json").unlink()
    assert checkpoint.newest(tmp_path)[0].step == 1
    (folders[0] / "state.json").write_text("{")
    with pytest.raises(RunFolderError, match="nothing to resume from"):
        open_run_folder(tmp_path, resume=True, checkpoint_bytes=1)


def test_resume_if_any(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that ends before its first checkpoint starts again when it is requeued; later it
    resumes."""
    found: list[int | None] = []

    def note(run: Run, *_: object) -> tuple[bool, int]:
        found.append(None if run.checkpoint is None else run.checkpoint.step)
        return True, 1

    monkeypatch.setattr(starting, "_train", note)
    command = ["train", f"--data.store={store}", f"--train.run_dir={tmp_path}"]
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert main(command) == 2
    assert "add --resume-if-any to start it again" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 2
    assert main([*command, "--resume-if-any"]) == 0
    monkeypatch.setattr(
        checkpoint, "newest", lambda folder: (Checkpoint(folder, {"step": 4}, {}), [])
    )
    assert main([*command, "--resume-if-any"]) == 0
    assert found == [None, 4]


@pytest.mark.parametrize(("when", "later"), [("block", 0), ("step", 2)])
def test_weights_stay_gathered_as_configured(
    workers: Workers, store: Path, tmp_path: Path, when: str, later: int
) -> None:
    settings = [f"parallel.reshard_after={when}", "batch.tokens_per_rank=376"]
    for steps in workers.run(training_cases.gathered_blocks, 2, store, tmp_path, settings):
        assert len(steps) == 2
        for gathered in steps:
            assert len(gathered) > 1
            assert gathered == [0] + [later] * (len(gathered) - 1)


def test_a_run_without_checkpoints(
    workers: Workers,
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = ["train.steps=2", "checkpoint.every=null", "batch.tokens_per_rank=750"]
    assert workers.run(train_and_save, 1, store, tmp_path / "trial", settings) == [True]
    assert len(steps_in(tmp_path / "trial")) == 2
    assert not (tmp_path / "trial" / "checkpoints").exists()
    # No room is needed for what is not written: the next mistake is the one that is told.
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 1000))
    given = [f"--data.store={store}", f"--train.run_dir={tmp_path / 'full'}"]
    assert "but 2 checkpoints" in refusal(capsys, *given)
    best = ("--checkpoint.best=true", "--data.held_out=0.2", "--eval.every=1")
    assert "but 3 checkpoints" in refusal(capsys, *given, *best)
    monkeypatch.setattr(starting, "_train", lambda *_: (True, 1))
    assert main(["train", *given, "--checkpoint.every=null"]) == 0


def test_damaged_checkpoints_are_neither_counted_nor_deleted(
    workers: Workers, store: Path, tmp_path: Path
) -> None:
    """Otherwise `keep` damaged folders of later steps would displace all good checkpoints, the
    newest first."""
    later = tmp_path / "checkpoints" / "step-000100"
    later.mkdir(parents=True)
    settings = [
        "train.steps=3",
        "checkpoint.every=1",
        "checkpoint.keep=2",
        "batch.tokens_per_rank=750",
    ]
    workers.run(train_and_save, 1, store, tmp_path, settings)
    assert sorted(folder.name for folder in later.parent.iterdir()) == [
        "step-000002",
        "step-000003",
        "step-000100",
    ]
    assert checkpoint.newest(tmp_path)[0].step == 3


def test_checkpoints_are_ordered_by_number(tmp_path: Path) -> None:
    pretend_checkpoints(tmp_path, 999_998, 999_999, 1_000_000)
    assert checkpoint.newest(tmp_path)[0].step == 1_000_000
    saving.prune(tmp_path, None, tmp_path / "checkpoints" / "step-1000000")
    assert len(checkpoint.steps(tmp_path)) == 3, "without a limit all stay"
    saving.prune(tmp_path, 2, tmp_path / "checkpoints" / "step-1000000")
    assert sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir()) == [
        "step-1000000",
        "step-999999",
    ]


def test_an_old_checkpoint_that_cannot_be_deleted_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with a file that another process has open on NFS: the run goes on, and later ones are
    deleted."""
    pretend_checkpoints(tmp_path, 1, 2, 3)
    delete = saving.shutil.rmtree

    def fails(folder: Path) -> None:
        if folder.name == "step-000001":
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(folder))
        delete(folder)

    monkeypatch.setattr(saving.shutil, "rmtree", fails)
    saving.prune(tmp_path, 1, tmp_path / "checkpoints" / "step-000003")
    assert checkpoint.steps(tmp_path) == [1, 3]
    assert (
        "step-000001 cannot be deleted: [Errno 39] Directory not empty" in capsys.readouterr().err
    )


@pytest.mark.parametrize("longest", [None, 20001])
@pytest.mark.parametrize(
    ("world_size", "context"),
    [(3, {}), (4, {"mode": "static", "degree": 2}), (5, {"mode": "auto"})],
)
def test_the_budget_for_the_documents_of_a_checkpoint_is_the_least(
    world_size: int, context: dict[str, Any], longest: int | None
) -> None:
    config = Config.model_validate(
        {
            "batch": {"tokens_per_rank": 2000},
            "train": {"float8": "rowwise"},
            "context": context,
        }
    )
    found = Checkpoint(Path("step-000001"), {"data": {"max_length": 32768}}, {})
    wanted = longest or 32768

    def capacity(tokens: int) -> int:
        batch = config.batch.model_copy(update={"tokens_per_rank": tokens})
        return config.model_copy(update={"batch": batch}).capacity(world_size)

    with pytest.raises(ConfigError, match="can hold only") as caught:
        choose_max_length(config, world_size, found, longest)
    least = int(re.search(r"set it to (\d+), or", str(caught.value))[1])
    assert capacity(least - 16) < wanted <= capacity(least) and least % 16 == 0
    bins = config.model_copy(
        update={"context": config.context.model_copy(update={"mode": "bins", "bins": {4000: 2}})}
    )
    with pytest.raises(
        ConfigError,
        match=rf"give context\.bins an entry of {wanted} tokens or more, or start more processes",
    ):
        choose_max_length(bins, world_size, found, longest)


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    with (
        only_run_in(tmp_path),
        pytest.raises(RunFolderError, match="another run is writing"),
        only_run_in(tmp_path),
    ):
        pass
    with only_run_in(tmp_path):
        pass


def test_the_gradient_is_clipped_and_the_rate_is_the_steps(
    workers: Workers, store: Path, tmp_path: Path
) -> None:
    workers.run(training_cases.clipped_and_at_the_right_rate, 2, store, tmp_path)


def test_collections_skip_what_lasts_for_the_run(
    workers: Workers, store: Path, tmp_path: Path
) -> None:
    """A full collection takes longer than many steps have to spare, and all ranks wait for the one
    that makes it."""
    for first, second, third, after in workers.run(
        training_cases.skipped_by_collections, 2, store, tmp_path
    ):
        assert first < second and first < third and after == 0


def test_gradients_are_reduced_in_float32(workers: Workers, store: Path, tmp_path: Path) -> None:
    """In bfloat16, gradients of two ranks that nearly cancel must keep their difference."""
    workers.run(training_cases.reduced_in_float32, 2, store, tmp_path)


@pytest.mark.parametrize(
    ("what", "spoiled", "settings", "skipped", "says"),
    [
        ("loss", [2], [], [False], ["step 2: loss is nan", ".py"]),
        ("gradient", [1], [], [], ["gradient norm is nan"]),
        (
            *(
                "gradient",
                [2, 4, 5, 6, 7],
                ["train.on_nonfinite=skip"],
                [False, True, False, True, True, True],
            ),
            ["step 7: loss is", "gradient norm is nan, after 3 skipped steps"],
        ),
    ],
)
def test_steps_that_are_not_finite_stop_the_run_or_are_skipped(
    workers: Workers,
    store: Path,
    tmp_path: Path,
    what: str,
    spoiled: list[int],
    settings: list[str],
    skipped: list[bool],
    says: list[str],
) -> None:
    first, second = workers.run(
        training_cases.steps_not_finite, 2, store, tmp_path, what, spoiled, settings
    )
    assert first == second and first[0] == skipped
    assert all(text in first[1] for text in says) and bool(says) == bool(first[1])


@pytest.mark.parametrize(("count", "named"), [(20, "19. "), (23, "19 and 3 more. ")])
def test_documents_of_a_step_that_is_not_finite_are_named(count: int, named: str) -> None:
    """The first 20 of them."""
    mesh: Any = SimpleNamespace(gather_objects=lambda names: [names])
    shards = [SimpleNamespace(document=number) for number in range(count)]
    part = SimpleNamespace(layout=SimpleNamespace(shards=shards))
    batch: Any = SimpleNamespace(
        step=1, micro_batches=[part], documents=[f"{number:02}" for number in range(count)]
    )
    with pytest.raises(NonFiniteLoss, match=f"micro-batches: 00, 01, .*, {named}Check"):
        FiniteLoss(load(None, []), mesh).check(
            batch, losses=torch.tensor([torch.nan]), loss=math.nan, grad_norm=1.0
        )


@pytest.mark.parametrize(
    "settings",
    [
        ["parallel.pipeline_parallel_size=2"],
        [
            "model.preset=tiny-moe",
            "model.overrides.moe_intermediate_size=32",
            "model.overrides.shared_expert_intermediate_size=32",
        ],
    ],
)
def test_a_step_without_targets_updates_nothing(
    workers: Workers, store: Path, tmp_path: Path, settings: list[str]
) -> None:
    for _, _, third in workers.run(
        training_cases.without_targets_in_step_3, 2, store, tmp_path, settings
    ):
        assert third.skipped and math.isnan(third.loss) and third.target_tokens == 0
        line = third.console(10, 90.0)
        assert line.startswith("step 3/10 without targets tok/s/rank ")
        assert line.endswith(" eta 2m skipped")


def test_ranks_that_disagree_on_the_plan(workers: Workers, store: Path, tmp_path: Path) -> None:
    with pytest.raises(
        AssertionError,
        match="ranks disagree on the plan of step 1: ranks \\[1\\] differ from rank 0",
    ):
        workers.run(training_cases.with_another_plan_on_rank_1, 2, store, tmp_path)


def test_ranks_that_disagree_on_a_later_plan(workers: Workers, store: Path, tmp_path: Path) -> None:
    with pytest.raises(
        AssertionError,
        match="ranks disagree on the plan of step 3: ranks \\[1\\] differ from rank 0",
    ):
        workers.run(training_cases.with_another_plan_later, 2, store, tmp_path)


@pytest.mark.parametrize(("ready", "gathers"), [(True, 1), (False, 2)])
def test_a_step_gathers_once_over_all_processes(
    workers: Workers, store: Path, tmp_path: Path, ready: bool, gathers: int
) -> None:
    """Once more if the next step is not ready on some rank; the first step compares plans."""
    for counts in workers.run(training_cases.host_gathers, 2, store, tmp_path, [], ready):
        assert counts[1:] == [gathers] * 3 and counts[0] == gathers + ready


@pytest.mark.parametrize("how", ["dies", pytest.param("stays silent", marks=pytest.mark.slow)])
def test_a_rank_that_fails_in_training(
    workers: Workers, store: Path, tmp_path: Path, how: str
) -> None:
    """The others end with an error that names rank, step, micro-batch and layer, within the
    timeout."""
    began = time.monotonic()
    with pytest.raises(AssertionError) as caught:
        workers.run(training_cases.with_rank_1_failing, 2, store, tmp_path, how)
    assert time.monotonic() - began < 60
    assert "rank 0: step 2, micro-batch 0, attention last in layer 1, forward pass" in str(
        caught.value
    )


def test_metrics_of_a_resumed_run_have_no_step_twice(tmp_path: Path) -> None:
    lines = ["}", *(json.dumps({"step": step}) for step in (1, 2, 3, 4))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 5, "lo')
    MetricsLog(
        load(None, [f"train.run_dir={tmp_path}", "log.tensorboard=false"]), after_step=3
    ).close()
    assert [step["step"] for step in steps_in(tmp_path)] == [1, 2, 3]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_weights_and_biases_must_be_installed(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(
        capsys, f"--data.store={store}", f"--train.run_dir={tmp_path / 'run'}", "--log.wandb=mine"
    )
    assert (
        "log.wandb is mine, and the package wandb is not installed" in said
        and not (tmp_path / "run").exists()
    )


def test_weights_and_biases_continue_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str | None, str]] = []
    logged: list[tuple[int, float]] = []

    def init(
        project: str, name: str, id: str | None, config: dict[str, Any], **others: Any
    ) -> SimpleNamespace:
        calls.append((id, name))
        assert (project, config["train"]["run_dir"]) == ("mine", str(tmp_path))
        assert others == {
            "entity": "team",
            "tags": ["long"],
            "resume": "allow",
            "dir": str(tmp_path),
        }
        return SimpleNamespace(id=id or f"run{len(calls)}", log=write, finish=lambda: None)

    def write(values: dict[str, float], step: int) -> None:
        logged.append((step, values["train/loss"]))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    step = {
        "step": 1,
        "loss": 2.5,
        "degrees": {"1": 3},
        "tokens": 7,
        "step_time_s": 1.0,
        "predicted_s": 1.0,
    }
    numbers = {
        name: 0
        for name in StepMetrics.__dataclass_fields__
        if not name.startswith(("validation", "source"))
    }
    wandb = "log.wandb={project: mine, entity: team, tags: [long]}"
    settings = load(None, [f"train.run_dir={tmp_path}", "log.tensorboard=false", wandb])
    for after_step in (0, 1, 0):
        log = MetricsLog(settings, after_step=after_step)
        log.write(StepMetrics(**{**numbers, **step, "step": after_step + 1, "mfu": None}))
        log.close()
    name = tmp_path.name
    assert calls == [(None, name), ("run1", name), (None, name)], (
        "a run that begins again is another one"
    )
    assert logged == [(1, 2.5), (2, 2.5), (1, 2.5)]


def test_the_console_shows_some_steps_and_those_that_matter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (Path(__file__).parents[1] / "recorded_metrics.jsonl").read_text("utf-8").splitlines()
    steps = [StepMetrics(**{**json.loads(line), "validation_loss": None}) for line in lines[:12]]
    steps[7] = replace(steps[7], validation_loss=6.0)
    steps[8] = replace(steps[8], skipped=True)
    settings = [
        f"train.run_dir={tmp_path}",
        "train.steps=12",
        "log.tensorboard=false",
        "log.every=5",
    ]
    log = MetricsLog(load(None, settings), after_step=0)
    for step in steps:
        log.write(step)
    log.close()
    lines = capsys.readouterr().out.splitlines()
    shown = [line for line in lines if line.startswith("step")]
    assert [line.split()[1] for line in shown] == [f"{n}/12" for n in (1, 5, 8, 9, 10, 12)]
    assert len(steps_in(tmp_path)) == 12
    left = 7 * sum(step.step_time_s for step in steps[:5]) / 5
    eta = re.fullmatch(
        r"step 5/12 loss \d+\.\d{3} grad [\d.]+ tok/s/rank [\d.]+k? mem \d+\.\d\d GiB "
        r"degrees [\d-]+ time \d+\.\d\ds eta (\d+)s",
        shown[1],
    )
    assert eta and int(eta[1]) == round(left), "by the mean of the steps so far"
    assert "eta" not in shown[-1], "it is the last"


def test_the_line_of_a_step_has_100_columns_at_most() -> None:
    lines = (Path(__file__).parents[1] / "recorded_metrics.jsonl").read_text("utf-8").splitlines()
    large = replace(
        StepMetrics(**{**json.loads(lines[0]), "validation_loss": None}),
        step=99_999,
        loss=10.1234,
        grad_norm=123.456,
        degrees={str(degree): 1000 for degree in range(1, 65)},
        peak_memory_bytes=140 << 30,
        step_time_s=123.456,
        mfu=0.456,
    )
    line = large.console(100_000, 3600 * 99.0)
    assert "mfu 45.6% mem 140.00 GiB degrees 1-64 time 123.46s eta 99h00m" in line
    assert len(line) <= 100
    assert large.console(100_000, 3600 * 24 * 12.2).endswith(" eta 12d")
    assert large.console(100_000, 3599.0).endswith(" eta 1h00m")


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["train", *arguments]) == 2
    return capsys.readouterr().err


def test_run_folders_that_cannot_be_used(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = f"--data.store={store}"
    assert "nothing to resume from" in refusal(
        capsys, data, f"--train.run_dir={tmp_path / 'new'}", "--resume"
    )
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "metrics.jsonl").write_text("")
    assert "without a checkpoint: add --resume-if-any" in refusal(
        capsys, data, f"--train.run_dir={tmp_path / 'used'}"
    )
    (tmp_path / "latest" / "latest").mkdir(parents=True)
    assert "move it away" in refusal(capsys, data, f"--train.run_dir={tmp_path / 'latest'}")
    (tmp_path / "file").write_text("")
    said = refusal(capsys, data, f"--train.run_dir={tmp_path / 'file'}")
    assert "cannot be written" in said and "choose another folder with --train.run_dir" in said
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", Mock(side_effect=full))
        said = refusal(capsys, data, f"--train.run_dir={tmp_path / 'full'}")
    assert "cannot be written" in said and said.rstrip().endswith("free disk space")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 1000))
    assert "free disk space" in refusal(capsys, data, f"--train.run_dir={tmp_path / 'full'}")


def test_stores_that_cannot_be_used(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = f"--train.run_dir={tmp_path / 'run'}"
    assert "there is no store" in refusal(capsys, run, f"--data.store={tmp_path / 'none'}")
    shutil.copytree(store, tmp_path / "cut")
    arrow = next((tmp_path / "cut").glob("*.arrow"))
    arrow.write_bytes(arrow.read_bytes()[:1000])
    assert "is damaged" in refusal(capsys, run, f"--data.store={tmp_path / 'cut'}")
    assert "must be at least the size" in refusal(
        capsys, run, f"--data.store={store}", "--model.vocab_size=100"
    )
    assert not (tmp_path / "run").exists()


def test_long_documents_under_error(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [
        "--data.long_documents=error",
        "--data.max_length=100",
        "--batch.tokens_per_rank=100",
    ]
    said = refusal(
        capsys, f"--data.store={store}", f"--train.run_dir={tmp_path / 'run'}", *settings
    )
    assert ".py" in said
    assert "split" in said


def test_a_dry_run_refuses_long_conversations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = tmp_path / "records.jsonl"
    records.write_text('{"prompt": "How many?", "completion": "Three."}\n' * 20)
    prepare(open_corpus(str(records)), tmp_path / "store", tokenizer="bytes")
    arguments = [
        "train",
        f"--data.store={tmp_path / 'store'}",
        "--batch.global_tokens=400",
        "--dry-run",
        "--gpus",
        "2",
    ]
    assert main([*arguments, "--batch.tokens_per_rank=200"]) == 0
    assert re.search(
        r"documents  at most 400 tokens \(the longest has \d\d\), ", capsys.readouterr().out
    )
    assert main([*arguments, "--batch.tokens_per_rank=10"]) == 2
    assert "more than the 20 that fit: set data.long_documents to" in capsys.readouterr().err


def test_dry_run(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = [
        f"--data.store={store}",
        "--batch.global_tokens=100000",
        "--batch.tokens_per_rank=1024",
        "--dry-run",
    ]
    assert main(["train", *arguments, "--gpus", "64", "--context.profile=h100-nvlink-ib"]) == 0
    said = capsys.readouterr().out
    assert (
        "dry run on 64 ranks of CPUs, as no GPU is here (--train.device cuda plans for GPUs)\n"
        in said
    )
    assert "best static" in said and " tokens (the longest has " in said and "few for" not in said
    seconds = [
        float(found)
        for found in re.findall(r"^ +\d  .* (\d+\.\d+) s  .*\(static", said, re.MULTILINE)
    ]
    verdict = re.match(
        r"fits: [\d.]+ [GM]iB of [\d.]+ GiB per rank, if all are on this machine \(recompute none, "
        r"degrees? \d.*\); ([\d.]+) s a step, [\d.,]+ tokens/s per process, ([\d.]+) seconds "
        r"for 100 steps, [\d.,]+ process hours per billion tokens\n",
        said,
    )
    assert verdict
    mean = sum(seconds) / len(seconds)
    assert float(verdict[1]) == pytest.approx(mean, rel=0.1)
    assert float(verdict[2]) == pytest.approx(100 * mean, rel=0.1)
    epoch = re.search(r"\nrun        100 steps \(an epoch has (\d+), of [\d,]+ tokens\), ", said)
    assert epoch and int(epoch[1]) == 1
    assert "\nmemory     at " in said
    large = [
        "--context.profile=h100-nvlink-ib",
        "--train.device=cuda",
        "--model.preset=llama-3.2-1b",
    ]
    assert main(["train", *arguments, "--gpus", "64", *large]) == 0
    said = capsys.readouterr().out
    assert (
        "dry run on 64 ranks\n" in said
        and "entries, few for 1.0B parameters: prepare the data by" in said
    )
    assert "longctx export will not write" not in said
    unknown = ["--context.profile=h100-nvlink-ib", "--model.preset=tiny-moe"]
    assert main(["train", *arguments, "--gpus", "2", *unknown, "--train.steps=2"]) == 0
    said = capsys.readouterr().out
    assert (
        "warning: longctx export will not write this model: no supported family of transformers"
        in said
    )
    assert re.findall(r"^ +(\d)  .* s  .*\(static", said, re.MULTILINE) == ["1", "2"]
    assert "--gpus is 0" in refusal(capsys, *arguments, "--gpus", "0")
    assert "must divide the KV heads per rank, 2" in refusal(
        capsys, *arguments, "--gpus", "4", "--context.ulysses_degree=3"
    )
    wide = [
        "--model.overrides.num_attention_heads=32",
        "--model.overrides.num_key_value_heads=32",
        "--parallel.tensor_parallel_size=32",
    ]
    assert "set it to 16, or model.vocab_size to 288" in refusal(
        capsys, *arguments, *wide, "--gpus", "32"
    )
    assert "more than 1024 times" in refusal(
        capsys, *arguments, "--gpus=2", "--batch.global_tokens=10000000000"
    )
    alone = ["--optimizer.groups=[{match: nowhere}]"]
    assert "error: optimizer.groups has match nowhere" in refusal(
        capsys, *arguments, *alone, "--gpus=2"
    )
    for where in (["--gpus=32"], [f"--lengths={store}", "--model.vocab_size=257", "--gpus=32"]):
        several = refusal(capsys, *arguments, *wide, *alone, *where)
        assert (
            "error: 2 problems:\n  parallel.tensor_parallel_size is 32" in several
            and "\n  optimizer.groups has" in several
        )
    assert "--processes is 0" in refusal(capsys, *arguments, "--processes", "0")
    assert "--gpus requires --dry-run" in refusal(capsys, f"--data.store={store}", "--gpus", "4")

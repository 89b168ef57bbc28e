"""The environment of a process: torchrun's variables are believed if they can be, and tasks of
other launchers are refused."""

from pathlib import Path

import pytest

import longctx
from longctx.cli import main
from longctx.config import load
from longctx.errors import UserError
from longctx.parallel.environment import Launch, other_tasks
from longctx.parallel.launch import launches
from tests.training_cases import SMALL

TASKS = (
    {"SLURM_NTASKS": "8"},
    {"SLURM_NTASKS": "8", "SLURM_PROCID": "3", "SLURM_STEP_ID": "0"},
    {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "0"},
    {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
    {"PMI_SIZE": "2", "PMI_RANK": "0"},
    {"MV2_COMM_WORLD_SIZE": "2"},
    {"FLUX_JOB_SIZE": "2"},
)
"""Variables of processes that would each run alone."""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def given(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("variables", TASKS, ids=str)
def test_tasks_that_would_each_train_alone_are_refused(
    variables: dict[str, str],
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given(monkeypatch, variables)
    settings = [*SMALL, f"data.store={store}", f"train.run_dir={tmp_path / 'run'}"]
    with pytest.raises(
        UserError, match=r"torchrun started none of them, .*srun --ntasks-per-node 1 torchrun"
    ):
        longctx.train(load(None, settings))
    options = [f"--{setting}" for setting in settings]
    for command in (["train"], ["measure"], ["calibrate"]):
        assert main([*command, *options]) == 2
        assert "so each would run alone" in capsys.readouterr().err
    assert main(["eval", str(tmp_path)]) == 2
    assert "so each would run alone" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("variables", TASKS[1:], ids=str)
def test_tasks_do_not_start_processes_each(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, variables)
    with pytest.raises(UserError, match=r"--processes is 4, but .* each would run alone"):
        launches(4)


def test_the_script_of_an_allocation_starts_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """sbatch sets the number of tasks in a script that runs once."""
    given(monkeypatch, {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"})
    assert launches(4)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_NTASKS": "1"},
        {"SLURM_NTASKS": "many"},
        {
            "SLURM_NTASKS": "8",
            "RANK": "3",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "3",
            "LOCAL_WORLD_SIZE": "8",
        },
        {"SLURM_NTASKS": "8", "RANK": "0", "WORLD_SIZE": "1"},
        {"OMPI_COMM_WORLD_SIZE": "1"},
    ],
    ids=str,
)
def test_others_run(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, variables)
    assert not other_tasks()
    assert Launch.to_join().world_size == int(variables.get("WORLD_SIZE", 1))


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "3"}, "RANK is 3, but WORLD_SIZE is 1"),
        ({"RANK": "8", "WORLD_SIZE": "8"}, "RANK is 8, but WORLD_SIZE is 8"),
        ({"WORLD_SIZE": "8"}, "WORLD_SIZE is 8, but RANK is not set"),
        ({"RANK": "a", "WORLD_SIZE": "8"}, "it must be a number"),
        ({"RANK": "-1", "WORLD_SIZE": "8"}, "it must be a number"),
    ],
)
def test_places_that_cannot_be(
    variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, variables)
    with pytest.raises(UserError, match=words):
        Launch.to_join()

"""`--resume STEP`: the run goes on from that step's checkpoint, as it did before; later ones are
set aside."""

import re
from pathlib import Path

import pytest

from longctx.cli import main
from longctx.training.saved import checkpoint
from longctx.training.saved.run_folder import RunFolderError, open_run_folder, set_aside
from tests.training_cases import SMALL, pretend_checkpoints, steps_in


def given(store: Path, run: Path, *more: str) -> list[str]:
    sizes = ["batch.tokens_per_rank=400", "data.max_length=300", "batch.global_tokens=700"]
    steps = ["train.steps=4", "optimizer.decay_steps=4", "checkpoint.every=2"]
    return [
        f"--{setting}"
        for setting in [
            *SMALL,
            *sizes,
            *steps,
            f"data.store={store}",
            f"train.run_dir={run}",
            *more,
        ]
    ]


def losses(run: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in steps_in(run)}


@pytest.mark.slow
def test_it_repeats_what_the_run_did(
    shorts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", *given(shorts, run)]) == 0
    before = losses(run)
    assert main(["train", "--resume", "3", *given(shorts, run)]) == 2
    assert (
        "no complete checkpoint of that step: it has those of steps 2, 4" in capfd.readouterr().err
    )
    assert (
        main(
            ["train", "--resume", "2", *given(shorts, run, "model.overrides.intermediate_size=32")]
        )
        == 2
    )
    assert "another model" in capfd.readouterr().err and checkpoint.steps(run) == [2, 4], (
        "a refused run moves nothing"
    )
    assert main(["train", *given(shorts, run, "train.steps=3"), "--resume", "2"]) == 0
    aside = run / "set-aside-1"
    assert f"later checkpoints (step-000004) were moved to {aside}" in capfd.readouterr().err
    assert checkpoint.steps(run) == [2, 3] and checkpoint.steps(aside) == [4]
    assert (run / "latest").resolve().name == "step-000003"
    assert losses(aside) == before and "resumed from step 2" in (aside / "NOTE.txt").read_text(
        "utf-8"
    )
    assert losses(run) == {step: before[step] for step in (1, 2, 3)}, "not bit by bit"
    assert main(["train", *given(shorts, run), "--resume", "2"]) == 0
    assert checkpoint.steps(run / "set-aside-2") == [3] and losses(run) == before


def test_a_damaged_checkpoint_is_not_replaced_by_an_earlier_one(
    shorts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", *given(shorts, run)]) == 0
    (data,) = (run / "checkpoints" / "step-000004").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    assert main(["train", *given(shorts, run), "--resume", "4"]) == 2
    assert re.search(
        "step-000004 is damaged .* Give another step with --resume", capfd.readouterr().err
    )
    assert checkpoint.steps(run) == [2, 4]


def test_what_it_does_not_go_with(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pretend_checkpoints(tmp_path, 2, 4)
    assert open_run_folder(tmp_path, resume=True, step=2, checkpoint_bytes=0)[0].step == 2
    with pytest.raises(RunFolderError, match="nothing to resume from"):
        open_run_folder(tmp_path / "none", resume=True, step=2, checkpoint_bytes=0)
    assert main(["train", "--resume", "2", "--resume-if-any"]) == 2
    assert (
        "--resume is 2, but --resume-if-any takes the newest checkpoint" in capfd.readouterr().err
    )
    file = tmp_path / "run.yaml"
    file.write_text("train: {steps: nothing}")
    assert main(["train", "--resume", str(file)]) == 2
    assert "train.steps" in capfd.readouterr().err, "the file of settings may come after the option"
    assert main(["train", str(file), "--resume", "last"]) == 2
    assert "--resume is last: give the step of a checkpoint" in capfd.readouterr().err


def test_the_link_to_the_latest_checkpoint_goes_back_too(tmp_path: Path) -> None:
    pretend_checkpoints(tmp_path, 2, 4)
    found, _ = checkpoint.of_step(tmp_path, 2)
    assert found is not None
    set_aside(tmp_path, found)
    assert (tmp_path / "latest").resolve().name == "step-000002"

"""The best checkpoint: that of the lowest validation loss, whatever is deleted; a resumed run knows
it; it works as a run."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longctx.cli import main
from longctx.training.saved import checkpoint
from longctx.training.saved.export import export
from longctx.training.saved.run_folder import RunFolderError, open_run_folder
from longctx.training.validation import Validator
from tests.training_cases import start, steps_in
from tests.workers import Workers

LOSSES = {1: 3.0, 2: 2.0, 3: 4.0, 4: float("nan"), 5: 2.5, 6: 1.5}
SETTINGS = [
    *(
        "batch.tokens_per_rank=400",
        "data.max_length=300",
        "batch.global_tokens=700",
        "data.held_out=0.2",
    ),
    *(
        "eval.every=1",
        "checkpoint.best=true",
        "checkpoint.every=4",
        "checkpoint.keep=1",
        "optimizer.decay_steps=6",
    ),
]


def run(
    store: Path, folder: Path, steps: int, resume: bool = False, settings: tuple[str, ...] = ()
) -> dict[int, float]:
    """Trains with validation losses that are given. Returns the best step so far when the run
    begins."""
    trainer = start(store, folder, [*SETTINGS, f"train.steps={steps}", *settings], resume=resume)
    first, original = dict(trainer.best or {}), Validator.validate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Validator,
            "validate",
            lambda self: original(self) | {"validation_loss": LOSSES[trainer.steps_done]},
        )
        trainer.train()
    return first


def kept(folder: Path) -> list[int]:
    return checkpoint.steps(folder / "best")


def test_the_lowest_loss_is_kept_and_known_on_resumption(
    workers: Workers, shorts: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert workers.run(run, 2, shorts, folder, 5)[0] == {}
    assert kept(folder) == [2] and checkpoint.steps(folder) == [5], (
        "it is not deleted with older ones"
    )
    assert workers.run(run, 2, shorts, folder, 6, True) == [{"step": 2, "loss": 2.0}] * 2
    assert kept(folder) == [6] and checkpoint.steps(folder) == [6]
    assert not list(folder.glob("best.*")), "nothing is left behind"


@pytest.mark.slow
def test_a_best_checkpoint_that_is_not_kept_is_kept_on_resumption(
    workers: Workers, shorts: Path, tmp_path: Path
) -> None:
    """As after a kill between both, and after a return to an earlier step."""
    folder = tmp_path / "run"
    workers.run(run, 1, shorts, folder, 2, False, ("checkpoint.keep=null",))
    (folder / "best").rename(tmp_path / "moved")
    assert workers.run(run, 1, shorts, folder, 3, True, ("checkpoint.keep=null",)) == [
        {"step": 2, "loss": 2.0}
    ]
    assert kept(folder) == [2]
    (folder / "best").rename(tmp_path / "again")
    (folder / "checkpoints" / "step-000002").rename(tmp_path / "gone")
    assert workers.run(run, 1, shorts, folder, 5, True, ("checkpoint.keep=null",)) == [{}], (
        "it is gone"
    )
    assert kept(folder) == [5]


@pytest.mark.slow
def test_it_is_exported_and_evaluated_like_a_run(
    shorts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    given = [
        f"--{setting}"
        for setting in [
            *SETTINGS,
            f"data.store={shorts}",
            f"train.run_dir={folder}",
            "train.steps=4",
        ]
    ]
    sizes = [
        "hidden_size=32",
        "intermediate_size=64",
        "num_attention_heads=4",
        "num_key_value_heads=2",
        "head_dim=8",
    ]
    given += [
        *(f"--model.overrides.{size}" for size in sizes),
        "--checkpoint.keep=null",
        "--log.tensorboard=false",
    ]
    assert main(["train", *given]) == 0
    rows = {row["step"]: row["validation_loss"] for row in steps_in(folder)}
    step = min(rows, key=lambda step: rows[step])
    assert kept(folder) == [step]
    export(folder / "best", tmp_path / "best")
    export(folder, tmp_path / "expected", step=step)
    best, expected = (
        load_file(tmp_path / name / "model.safetensors") for name in ("best", "expected")
    )
    assert best.keys() == expected.keys() and all(
        torch.equal(best[name], expected[name]) for name in best
    )
    names = [{file.name for file in (tmp_path / name).iterdir()} for name in ("best", "expected")]
    assert names[0] == names[1], "with the tokenizer"
    assert main(["eval", str(folder / "best")]) == 0
    assert f"best at step {step}" in capfd.readouterr().out
    assert main(["train", *given, "--resume", "1"]) == 0
    assert kept(folder / "set-aside-1") == [step] * (step > 1) and kept(folder) == [step]


def test_it_needs_room_for_a_third_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 25_000_000))
    assert open_run_folder(tmp_path, resume=False, checkpoint_bytes=10_000_000) == (None, [])
    with pytest.raises(
        RunFolderError, match=r"has 25\.0 MB free, but 3 checkpoints of this model need 30\.0 MB"
    ):
        open_run_folder(tmp_path, resume=False, checkpoint_bytes=10_000_000, best=True)

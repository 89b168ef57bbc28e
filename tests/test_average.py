"""A moving average of the weights is torch's own, on any ranks; it is validated, saved, resumed and exported."""

import shutil
from pathlib import Path

import pytest
import torch

from longctx.cli import main
from longctx.training.saved.export import ExportError, export
from tests.average_cases import DECAY, average_of, exported, run
from tests.training_cases import SMALL, train_then_save
from tests.workers import Workers

SPLITS = {
    "alone": (1, []),
    "three ranks": (3, []),
    "two replicas": (2, ["parallel.shard_ranks=1"]),
    "two tensor ranks": (2, ["parallel.tensor_parallel_size=2"]),
    "8-bit": (2, ["optimizer.name=adamw-8bit", "model.hidden_size=256"]),
    "Muon": (2, ["optimizer.name=muon"]),
}


@pytest.mark.parametrize("name", SPLITS)
def test_the_average_is_that_of_torch(workers: Workers, store: Path, tmp_path: Path, name: str) -> None:
    ranks, settings = SPLITS[name]
    for of_rank in workers.run(run, ranks, store, tmp_path, [*settings, "eval.every=100", "data.held_out=0.1"], 4):
        expected = average_of(of_rank["after"])
        assert expected.keys() == of_rank["averages"].keys()
        for key, average in of_rank["averages"].items():
            torch.testing.assert_close(average, expected[key], rtol=1e-6, atol=1e-7)
        last, of_average = of_rank["validated"]
        assert last != of_average


@pytest.mark.parametrize("tied", ["true", "false"])
def test_a_run_resumes_bit_by_bit_and_exports_its_average(workers: Workers, store: Path, tmp_path: Path, tied: str) -> None:
    settings = [f"model.tie_word_embeddings={tied}"]
    whole = workers.run(run, 2, store, tmp_path / "whole", settings, 4)[0]
    workers.run(run, 2, store, tmp_path / "run", settings, 2)
    again = workers.run(run, 2, store, tmp_path / "run", settings, 2, True)[0]
    assert again["losses"] == whole["losses"][2:]
    assert all(torch.equal(again["averages"][name], average) for name, average in whole["averages"].items())
    by_step, averages = (exported(tmp_path / "run", tmp_path / str(last), last) for last in (True, False))
    assert by_step.keys() == averages.keys()
    embedding = "model.embed_tokens.weight"
    assert torch.equal(by_step[embedding], whole["after"][-1]["embed_tokens.weight"])
    assert torch.equal(averages[embedding], whole["averages"]["embed_tokens.weight"])
    assert not any(torch.equal(by_step[name], averages[name]) for name in by_step)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000002")
    other = workers.run(run, 1, store, tmp_path / "run", settings, 1, True)[0]
    for name, average in other["averages"].items():
        expected = whole["averages"][name].lerp(other["after"][-1][name], 1 - DECAY)
        torch.testing.assert_close(average, expected, rtol=1e-6, atol=1e-7)


def test_an_average_that_is_not_there_is_named(
    workers: Workers, store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    workers.run(train_then_save, 1, store, tmp_path / "run", [], 1)
    with pytest.raises(ExportError, match="has no average of the weights: omit --last"):
        export(tmp_path / "run", tmp_path / "out", last=True)
    given = [*SMALL, f"data.store={store}", f"train.run_dir={tmp_path / 'run'}", "optimizer.ema_decay=0.9"]
    assert main(["train", "--resume", *(f"--{one}" for one in given)]) == 2
    assert "optimizer.ema_decay is 0.9, but checkpoints of" in capfd.readouterr().err

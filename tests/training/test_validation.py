"""Validation: the loss of held-out documents, the same on any number of ranks, and without effect
on training."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from longctx.attention import RingAttention
from longctx.cli import main
from longctx.config import load
from longctx.data.pieces import Piece, SamplerError
from longctx.data.sampler import Sampler
from longctx.data.store.held_out import held_out
from longctx.data.store.store import Store
from longctx.planning.layout import Placement
from longctx.training.metrics import MetricsLog, StepMetrics
from longctx.training.validation import Documents, in_steps
from tests.data_cases import placed_plan
from tests.marks import slow_unless
from tests.training_cases import SMALL, start
from tests.workers import Workers

SHARE = 0.15
EVERY_TWO = [
    "eval.every=2",
    f"data.held_out={SHARE}",
    "train.steps=3",
    "checkpoint.every=null",
    "optimizer.warmup_steps=1",
]
SPLITS = {
    "three ranks, gathered all step": (
        3,
        ["batch.tokens_per_rank=250", "parallel.reshard_after=step"],
    ),
    "reduced after each micro-batch": (
        2,
        ["batch.tokens_per_rank=376", "parallel.reduce_after=micro_batch"],
    ),
    "two tensor ranks": (
        4,
        [
            "parallel.tensor_parallel_size=2",
            "batch.tokens_per_rank=376",
            "train.recompute=selective",
        ],
    ),
    "a pipeline": (2, ["parallel.pipeline_parallel_size=2", "batch.tokens_per_rank=750"]),
    "a pipeline in chunks": (
        2,
        ["parallel.pipeline_parallel_size=2", "parallel.pipeline_chunks=2"],
    ),
}
LAYERS = "model.overrides.num_hidden_layers=4"


Rows = list[dict[str, object]]


@pytest.fixture(scope="module")
def alone(workers: Workers, store: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Returns the rows of one process."""
    rows: Rows = workers.run(
        run, 1, store, tmp_path_factory.mktemp("alone"), ["batch.tokens_per_rank=750", LAYERS]
    )[0]
    return rows


def run(store: Path, folder: Path, settings: list[str]) -> Rows:
    """Returns the rows of metrics.jsonl of a whole run."""
    trainer = start(store, folder, [*EVERY_TWO, *settings])
    trainer.train()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "name", slow_unless(lambda name: name == "reduced after each micro-batch", SPLITS)
)
def test_the_loss_is_that_of_one_process_and_training_is_not_affected(
    workers: Workers, store: Path, alone: Rows, tmp_path: Path, name: str
) -> None:
    ranks, settings = SPLITS[name]
    settings = [*settings, LAYERS]
    rows = workers.run(run, ranks, store, tmp_path / "with", settings)[0]
    assert [row["validation_loss"] is None for row in rows] == [True, False, False], (
        "after step 2, and at the end"
    )
    for row, reference in zip(rows[1:], alone[1:], strict=True):
        assert row["validation_loss"] == pytest.approx(reference["validation_loss"], rel=1e-5)
        assert row["validation_tokens"] == reference["validation_tokens"]
    without = workers.run(run, ranks, store, tmp_path / "without", [*settings, "eval.every=null"])[
        0
    ]
    for key in ("loss", "grad_norm", "documents", "degrees"):
        assert [row[key] for row in rows] == [row[key] for row in without], (
            f"{key} is not bit by bit that without validation"
        )
    assert all(row["validation_loss"] is None for row in without)


def forgotten(store: Path, folder: Path, settings: list[str]) -> tuple[float, float, list[str]]:
    """Returns the validation loss, the mean loss by plain steps over each document, and the names
    of the documents."""
    trainer = start(store, folder, [*EVERY_TWO, *settings])
    with trainer.loader:
        found = trainer.validator.validate()
        opened = Store.open(store)
        total, targets = 0.0, 0
        apart = np.flatnonzero(held_out(opened.names, SHARE))
        for document in apart:
            tokens, labels = (
                torch.from_numpy(a) for a in opened.read(document, 0, int(opened.lengths[document]))
            )
            plan = placed_plan([len(tokens)], 1, [[Placement(0, 0, 1)]])
            attention = RingAttention(plan.layout(0, 0))
            with torch.no_grad():
                logits = trainer.model(tokens, torch.arange(len(tokens)), attention, None)
            total += F.cross_entropy(
                logits.double(), labels, ignore_index=-100, reduction="sum"
            ).item()
            targets += int((labels != -100).sum())
        assert targets == found["validation_tokens"]
    return found["validation_loss"], total / targets, [opened.name(document) for document in apart]


def test_the_loss_is_the_mean_over_held_out_documents(
    workers: Workers, store: Path, tmp_path: Path
) -> None:
    found, wanted, names = workers.run(
        forgotten, 1, store, tmp_path, ["batch.tokens_per_rank=750"]
    )[0]
    assert 2 <= len(names) < 26
    assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.slow
def test_another_store_and_the_first_documents(
    workers: Workers, store: Path, tmp_path: Path
) -> None:
    settings = ["data.held_out=0", f"eval.store={store}", "batch.tokens_per_rank=750"]
    whole = workers.run(run, 1, store, tmp_path / "all", settings)[0][-1]
    some = workers.run(run, 1, store, tmp_path / "some", [*settings, "eval.documents=3"])[0][-1]
    assert whole["validation_tokens"] == int(Store.open(store).trained_tokens.sum())
    assert some["validation_tokens"] == int(Store.open(store).trained_tokens[:3].sum())


def test_documents_that_are_held_out_are_never_trained_on(store: Path) -> None:
    opened = Store.open(store)
    apart = held_out(opened.names, SHARE)
    settings = {"global_tokens": 1, "seed": 3, "max_length": 700}
    sampler = Sampler(opened.lengths, left_out=apart.__getitem__, **settings)
    taken = {
        piece.document for cursor in range(2 * sampler.pieces) for piece in sampler.step(cursor)[0]
    }
    assert taken == set(np.flatnonzero(~apart).tolist())
    evaluated = Sampler(opened.lengths, left_out=(~apart).__getitem__, **settings).in_order()
    assert {piece.document for piece in evaluated} == set(np.flatnonzero(apart).tolist())
    assert sum(piece.length for piece in evaluated) == opened.lengths[apart].sum()


def test_the_first_of_the_held_out_documents_are_chosen(store: Path) -> None:
    opened, config = Store.open(store), load(None, ["data.long_documents=split"])
    first = np.flatnonzero(held_out(opened.names, SHARE))[:2]
    chosen = Documents.choose(config, opened, 250, first=2, held_out_share=SHARE)
    assert sorted({piece.document for piece in chosen.pieces}) == first.tolist()
    assert chosen.long == (opened.lengths[first] > 250).sum() > 0


def test_pieces_without_a_target_are_left_out(store: Path) -> None:
    opened, config = Store.open(store), load(None, ["data.long_documents=split"])
    pieces = Documents.choose(config, opened, 250).pieces
    assert all(piece.length > 1 for piece in pieces) and {
        piece.document for piece in pieces
    } == set(range(len(opened)))
    with pytest.raises(SamplerError, match="has a token to train on"):
        Documents.choose(config, opened, 1)


def test_the_held_out_share_goes_by_names_alone() -> None:
    names = [f"document {number}" for number in range(20_000)]
    apart = held_out(names, 0.1)
    assert apart.mean() == pytest.approx(0.1, abs=0.01)
    assert (held_out(names[::-1], 0.1) == apart[::-1]).all()
    assert (apart <= held_out(names, 0.2)).all(), "a greater share keeps those of a smaller one"
    assert not held_out(names, 0.0).any()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["--eval.every=2"], "there are no documents to validate on"),
        (
            ["--eval.store=stores/other", "--data.held_out=0.1"],
            "held-out documents would never be used",
        ),
        (["--eval.every=2", "--data.held_out=0.0001"], "holds out no document of"),
        (["--data.held_out=0.9999"], "there are no documents"),
    ],
)
def test_invalid_settings_are_refused(
    store: Path, tmp_path: Path, settings: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    small = [
        f"--{one}"
        for one in [
            *SMALL,
            f"data.store={store}",
            f"train.run_dir={tmp_path}",
            "batch.tokens_per_rank=750",
        ]
    ]
    assert main(["train", *small, *settings]) == 2
    assert words in capfd.readouterr().err


def test_a_run_resumes_only_with_the_same_share(
    workers: Workers, store: Path, tmp_path: Path
) -> None:
    workers.run(run, 1, store, tmp_path, ["checkpoint.every=1"])
    with pytest.raises(
        AssertionError, match=r"held_out is 0\.0, and was 0\.15: set data\.held_out to the run's"
    ):
        workers.run(resume, 1, store, tmp_path, ["data.held_out=0"])


def resume(store: Path, folder: Path, settings: list[str]) -> None:
    start(store, folder, settings, resume=True)


def test_tensorboard_and_console_show_it(
    workers: Workers,
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    rows = workers.run(run, 1, store, tmp_path, ["batch.tokens_per_rank=750"])[0]
    (tmp_path / "log").mkdir()
    log = MetricsLog(load(None, [f"train.run_dir={tmp_path / 'log'}"]), after_step=0)
    seen: dict[str, float] = {}
    monkeypatch.setattr(
        log.events, "add_scalar", lambda name, value, step: seen.update({name: value})
    )
    log.write(StepMetrics(**rows[-1]))
    log.close()
    assert seen["validation/loss"] == rows[-1]["validation_loss"]
    assert (
        seen["train/loss"] == rows[-1]["loss"]
        and seen["time/attention_s"] == rows[-1]["attention_s"]
    )
    assert seen["plan/documents_at_degree/1"] == rows[-1]["degrees"]["1"]
    assert seen["memory/peak_memory_bytes"] == rows[-1]["peak_memory_bytes"]
    assert f"validation loss {rows[-1]['validation_loss']:.3f} on " in capfd.readouterr().out


@given(lengths=st.lists(st.integers(1, 40), max_size=12), tokens=st.integers(1, 100))
def test_a_pass_takes_all_pieces_in_steps_that_are_just_long_enough(
    lengths: list[int], tokens: int
) -> None:
    pieces = [Piece(document, 0, length) for document, length in enumerate(lengths)]
    steps = list(in_steps(pieces, tokens))
    assert [piece for step in steps for piece in step] == pieces
    for step in steps[:-1]:
        assert (
            sum(piece.length for piece in step) >= tokens > sum(piece.length for piece in step[:-1])
        )
    assert all(sum(piece.length for piece in step[:-1]) < tokens for step in steps[-1:])

"""Evaluation: the same results on any number of ranks, equal to a plain reference."""

import json
import math
import shutil
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from longctx.cli import main
from longctx.commands.eval import _report
from longctx.config import load
from longctx.data.records.tokenizer import Tokenizer
from longctx.data.store.store import Store
from longctx.evaluation.loss import BUCKETS, LossPart, _parts
from longctx.evaluation.target import Target
from tests import launched
from tests.evaluation_cases import (
    FOR_CHECKPOINTS,
    losses,
    plain_losses,
    save_checkpoint,
    train_checkpoint,
)
from tests.marks import slow_unless
from tests.training_cases import make_store, train_then_save
from tests.workers import Workers

LENGTHS = (125, 250, 737, 45, 20, 187)
WHOLE = ["batch.tokens_per_rank=750"]
SPLITS = {
    "three ranks": (3, ["batch.tokens_per_rank=250"]),
    "tensor": (2, ["batch.tokens_per_rank=750", "parallel.tensor_parallel_size=2"]),
    "pipeline": (2, ["batch.tokens_per_rank=750", "parallel.pipeline_parallel_size=2"]),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("store"), LENGTHS)


@pytest.fixture(scope="module")
def run(workers: Workers, store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with a checkpoint, on two ranks."""
    folder = tmp_path_factory.mktemp("run")
    workers.run(train_then_save, 2, store, folder, ["batch.tokens_per_rank=376"], 2)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def alone(workers: Workers, store: Path, run: Path, checkpoint: Path) -> dict[str, dict[str, Any]]:
    of_run = workers.run(losses, 1, str(run), store, WHOLE)[0]
    return {
        "run": of_run,
        "checkpoint": workers.run(losses, 1, str(checkpoint), store, [*FOR_CHECKPOINTS, *WHOLE])[0],
    }


def assert_equal(found: dict[str, Any], reference: dict[str, Any]) -> None:
    for key in ("by_length", "by_position"):
        assert len(found[key]) == len(reference[key]) >= 3
    flat = [
        [report["overall"], *report["by_length"], *report["by_position"]]
        for report in (found, reference)
    ]
    for mine, theirs in zip(*flat, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert {**mine, "loss": 0, "perplexity": 0} == {**theirs, "loss": 0, "perplexity": 0}


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "pipeline", SPLITS))
def test_a_run_is_worth_the_same_on_any_number_of_ranks(
    workers: Workers, store: Path, run: Path, alone: dict[str, dict[str, Any]], name: str
) -> None:
    ranks, settings = SPLITS[name]
    results = workers.run(losses, ranks, str(run), store, settings)
    assert all(result == results[0] for result in results), "every rank has the same result"
    assert_equal(results[0], alone["run"])
    assert max(results[0]["degrees"]) > 1 or name != "three ranks"


def test_a_checkpoint_of_transformers_is_worth_the_same(
    workers: Workers, store: Path, checkpoint: Path, alone: dict[str, dict[str, Any]]
) -> None:
    ranks, settings = SPLITS["three ranks"]
    found = workers.run(losses, ranks, str(checkpoint), store, [*FOR_CHECKPOINTS, *settings])[0]
    assert_equal(found, alone["checkpoint"])
    assert max(found["degrees"]) > 1


def test_the_losses_are_those_of_a_plain_loop(
    store: Path, checkpoint: Path, alone: dict[str, dict[str, Any]]
) -> None:
    """Compared with sums by numpy over the token losses of transformers."""
    plain = plain_losses(checkpoint, store, 750)
    everything = np.concatenate([values for _, values in plain])
    found = alone["checkpoint"]
    assert found["overall"]["loss"] == pytest.approx(everything.mean(), rel=1e-5)
    assert found["overall"]["perplexity"] == pytest.approx(math.exp(everything.mean()), rel=1e-4)
    assert found["overall"]["tokens"] == len(everything)
    for part in found["by_length"]:
        inside = [values for length, values in plain if part["first"] <= length <= part["last"]]
        assert part["documents"] == len(inside)
        assert part["loss"] == pytest.approx(np.concatenate(inside).mean(), rel=1e-5)
    seen = np.concatenate([np.arange(1, length) for length, _ in plain])
    for part in found["by_position"]:
        inside = (part["first"] <= seen) & (seen <= part["last"])
        assert part["tokens"] == inside.sum()
        assert part["loss"] == pytest.approx(everything[inside].mean(), rel=1e-5)
    assert sum(part["tokens"] for part in found["by_length"]) == sum(
        part["tokens"] for part in found["by_position"]
    )


@pytest.mark.slow
def test_long_documents_are_cut_as_in_training(
    workers: Workers, store: Path, checkpoint: Path
) -> None:
    settings = [*FOR_CHECKPOINTS, *WHOLE, "data.max_length=200"]
    plain = np.concatenate([values for _, values in plain_losses(checkpoint, store, 200)])
    split = workers.run(losses, 2, str(checkpoint), store, settings)[0]
    assert split["overall"]["loss"] == pytest.approx(plain.mean(), rel=1e-5)
    assert split["overall"]["documents"] == len(Store.open(store))
    dropped = workers.run(
        losses, 1, str(checkpoint), store, [*settings, "data.long_documents=drop"]
    )[0]
    assert dropped["overall"]["documents"] == int((Store.open(store).lengths <= 200).sum())


def test_ranks_without_a_token(workers: Workers, store: Path, checkpoint: Path, run: Path) -> None:
    """The first document has 125 tokens, too few to be split over a ring."""
    for name, settings in ((str(checkpoint), FOR_CHECKPOINTS), (str(run), [])):
        one = workers.run(losses, 1, name, store, [*settings, *WHOLE], 1)[0]
        three = workers.run(
            losses,
            3,
            name,
            store,
            [*settings, *WHOLE, "context.mode=static", "context.degree=1"],
            1,
        )[0]
        assert three["overall"]["documents"] == 1 and three["degrees"] == [1]
        assert three["overall"]["loss"] == pytest.approx(one["overall"]["loss"], rel=1e-6)


def test_a_scaled_rope_is_another_model_and_is_said(
    workers: Workers, store: Path, run: Path, alone: dict[str, Any]
) -> None:
    scaled = [
        "model.rope_scaling.rope_type=yarn",
        "model.rope_scaling.factor=4",
        "model.rope_scaling.original_max_position_embeddings=64",
    ]
    found = workers.run(losses, 1, str(run), store, [*WHOLE, *scaled])[0]
    # Were it without effect, the same sums would have the same bits.
    assert found["overall"]["loss"] != alone["run"]["overall"]["loss"]
    assert "not as trained: model.rope_scaling is 'yarn', was 'none'" in found["notes"]
    with pytest.raises(AssertionError, match=r"contains another model: hidden_size is 16, was 32"):
        workers.run(losses, 1, str(run), store, [*WHOLE, "model.overrides.hidden_size=16"])


@pytest.mark.slow
def test_a_scaled_rope_in_transformers_own_code(
    workers: Workers, store: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """There the longest length is a setting of the model, which the factor changes."""
    workers.run(train_checkpoint, 1, checkpoint, store, tmp_path)
    scaled = [
        "model.rope_scaling.rope_type=yarn",
        "model.rope_scaling.factor=4",
        "model.rope_scaling.original_max_position_embeddings=4096",
    ]
    found = workers.run(losses, 1, str(tmp_path), store, [*WHOLE, *scaled])[0]
    assert any(
        note.startswith("not as trained: model.rope_parameters is ") for note in found["notes"]
    ), found["notes"]
    assert "not as trained: model.max_position_embeddings is 16384, was 4096" in found["notes"]


def test_the_command_writes_into_the_run(
    store: Path, run: Path, alone: dict[str, dict[str, Any]]
) -> None:
    printed = json.loads(
        launched.run(
            "eval", run, "--store", store, "--json", "--batch.tokens_per_rank=376", ranks=2
        )[0]
    )
    assert json.loads((run / "eval.json").read_text()) == printed
    assert printed["ranks"] == 2 and printed["step"] == 2
    assert_equal(printed, alone["run"])


def test_the_table_of_a_checkpoint(
    store: Path,
    checkpoint: Path,
    alone: dict[str, dict[str, Any]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = sorted(checkpoint.iterdir())
    settings = [f"--{setting}" for setting in [*FOR_CHECKPOINTS, *WHOLE]]
    assert main(["eval", str(checkpoint), "--store", str(store), *settings]) == 0
    printed = capfd.readouterr().out
    overall = alone["checkpoint"]["overall"]
    assert (
        f"loss {overall['loss']:.4f}, perplexity {overall['perplexity']:.3f} over "
        f"{overall['tokens']:,}" in printed
    )
    assert "512 to 1,023" in printed
    assert sorted(checkpoint.iterdir()) == before, "a checkpoint is left as it is"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["{run}"],
            "has no validation documents (neither eval.store nor data.held_out is set): give "
            "--store",
        ),
        (["{checkpoint}"], "has no validation documents"),
        (["{folder}"], "has no config.yaml and no config.json"),
        (["{folder}/none", "--store={store}"], "error: there is no folder"),
        (
            ["{store}", "--store={store}"],
            "is a store of documents: give a run or a checkpoint, and this store as --store",
        ),
        (["{run}", "--store={store}", "--documents=0"], "--documents is 0"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    store: Path,
    run: Path,
    checkpoint: Path,
    tmp_path: Path,
    arguments: list[str],
    words: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    filled = [
        text.format(run=run, store=store, checkpoint=checkpoint, folder=tmp_path)
        for text in arguments
    ]
    assert main(["eval", *filled, "--batch.tokens_per_rank=750"]) == 2
    assert words in capfd.readouterr().err


def test_a_run_without_a_checkpoint_is_refused(
    store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    assert main(["eval", str(tmp_path), "--store", str(store)]) == 2
    assert "has no complete checkpoint: there is nothing to evaluate" in capfd.readouterr().err


def test_damaged_checkpoints_are_told_or_refused(
    store: Path, run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(run, tmp_path / "run", symlinks=True)
    saved = copy / "checkpoints" / "step-000002"
    later = shutil.copytree(saved, copy / "checkpoints" / "step-000003")
    (later / "state.json").unlink()
    (note,) = Target.open(str(copy), WHOLE, 1).notes
    assert note.startswith(f"{later} ") and note.endswith("not used")
    largest = max(saved.iterdir(), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[-1] ^= 1
    largest.write_bytes(content)
    assert main(["eval", str(copy), "--store", str(store), *(f"--{each}" for each in WHOLE)]) == 2
    assert "move it away to evaluate an earlier checkpoint" in capfd.readouterr().err


def test_another_tokenizer_is_told(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The store's may end documents with a token of its own choice."""
    known = Store.open(store).tokenizer
    text = known.text.replace(known.end_of_document_token, "the end")
    (tmp_path / "tokenizer.json").write_text(text, "utf-8")
    target = Target(str(tmp_path), load(None, []), None)
    assert not target.other_tokenizer(Tokenizer(text, "the end"))
    changed = json.loads(text) | {"normalizer": {"type": "Lowercase"}}
    other = Tokenizer(json.dumps(changed), "the end")
    said = target.other_tokenizer(other)
    assert "the store was made with another tokenizer than" in said
    of_store = SimpleNamespace(tokenizer=other, description="a store", fingerprint="0")
    documents: Any = SimpleNamespace(store=of_store, max_length=8)
    report: Any = SimpleNamespace(as_json=dict)
    _report(Namespace(json=True), target, documents, report, ranks=1)
    assert said in capsys.readouterr().err


def test_a_model_has_the_entries_of_its_training(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With new tokens those of its tokenizer."""
    shutil.copy(store / "tokenizer.json", tmp_path)
    saved: Any = SimpleNamespace(state={"model": {"vocab_size": 50}})
    for checkpoint, new_tokens, entries in (
        (saved, None, 50),
        (None, None, None),
        (None, ["<image>"], Store.open(store).tokenizer.vocab_size),
    ):
        settings: Any = SimpleNamespace(new_tokens=new_tokens)
        config: Any = SimpleNamespace(model=settings, model_source=lambda entries: entries)
        assert Target(str(tmp_path), config, checkpoint).source == entries


def test_documents_without_a_prediction_are_counted() -> None:
    """Those of a single token."""
    documents = [3] + [0] * (BUCKETS - 1)
    (part,) = _parts(torch.zeros(BUCKETS), [0] * BUCKETS, documents)
    assert (part.documents, part.tokens) == (3, 0) and math.isnan(part.loss)


def test_perplexity_of_a_hopeless_model_is_no_error() -> None:
    assert LossPart(1, None, None, 3, 1e4).perplexity == math.inf


def test_perplexity_of_a_nan_loss_is_nan() -> None:
    assert math.isnan(LossPart(1, None, None, 3, math.nan).perplexity)

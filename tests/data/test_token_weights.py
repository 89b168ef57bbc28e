"""Weights of messages and tokens: read, stored, and obeyed by the loss exactly, however a step is
split."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import longctx.data.store.writer
from longctx.cli import main
from longctx.data.loader import plan_step, read_step
from longctx.data.pieces import Piece
from longctx.data.records.chat import ChatError
from longctx.data.store.store import IGNORED_LABEL, Store
from longctx.errors import UserError
from longctx.training.checks import check_model
from longctx.training.data import RunData
from longctx.training.objectives.objective import token_mean
from tests.data_cases import byte_store, interrupt, made, random_plan, written
from tests.template_cases import FAMILIES, chat
from tests.training_cases import SMALL, load
from tests.weight_cases import make_store, records, validation
from tests.workers import Workers


@pytest.fixture(scope="module")
def weighted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("weights"), records())


def weights_of(store: Store, document: int = 0) -> list[float]:
    found = store.token_weights(document, 0, int(store.lengths[document]))
    assert found is not None
    return found.tolist()


def by_text(store: Store, document: int = 0) -> list[tuple[float, str]]:
    """Returns the weight and text of runs of tokens."""
    runs: list[tuple[float, list[int]]] = []
    tokens = store.tokens(document, 0, int(store.lengths[document]))[0].tolist()
    for weight, token in zip(weights_of(store, document), tokens, strict=True):
        if not runs or runs[-1][0] != weight:
            runs.append((weight, []))
        runs[-1][1].append(token)
    return [(weight, store.tokenizer.decode(run)) for weight, run in runs]


# --- reading and storing


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_weights_of_messages_are_stored(tmp_path: Path, suffix: str) -> None:
    asked, one, again, two = chat("Q", "one", "Again", "two")
    source = written(
        tmp_path,
        [{"messages": [asked, {**one, "weight": 0.5}, again, {**two, "weight": 1.0}]}],
        suffix,
    )
    store = Store.open(main_prepare(source, tmp_path / "store"))
    assert [(weight, text) for weight, text in by_text(store) if weight] == [
        (0.5, "one<|im_end|>"),
        (1.0, "two<|im_end|>\n" + store.tokenizer.end_of_document_token),
    ]
    assert store.manifest is not None and store.manifest.weighted_documents == 1
    rows = datasets.load_from_disk(str(tmp_path / "store"))
    assert rows[0]["token_weights"] == weights_of(store)


def main_prepare(source: Path, out: Path, *options: str) -> Path:
    assert (
        main(
            [
                "prepare",
                "--source",
                str(source),
                "--tokenizer",
                "bytes",
                "--out",
                str(out),
                *options,
            ]
        )
        == 0
    )
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_templates_give_each_turn_its_weight(
    tmp_path: Path, family: str, checkpoints: dict[str, Path]
) -> None:
    asked, one, again, two = chat("Q", "first", "Again", "second")
    conversation = [asked, {**one, "weight": 0.25}, again, {**two, "weight": 2}]
    store = made(
        tmp_path,
        [{"messages": conversation}, {"messages": [asked, one, again, two]}],
        tokenizer=checkpoints[family],
    )
    (low, first), (high, second) = [(weight, text) for weight, text in by_text(store) if weight]
    assert (low, high) == (0.25, 2.0) and "first" in first and "second" in second
    length = int(store.lengths[0])
    assert (np.array(weights_of(store)) > 0).tolist() == store.tokens(1, 0, length)[1].tolist(), (
        "the tokens with loss are the same"
    )
    assert store.token_weights(1, 0, length) is None


def test_weights_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked, one, again, two = chat("Q", "one", "Again", "two")
    main_prepare(
        written(tmp_path, [{"messages": [asked, {**one, "weight": 0.5}, again, two]}]),
        tmp_path / "store",
    )
    assert "weights    of single messages or tokens in 1 documents" in capsys.readouterr().out


def test_stores_without_them_stay_as_they_are(tmp_path: Path) -> None:
    store = byte_store(tmp_path, [30, 40], conversations=1)
    manifest = json.loads((store.path / "manifest.json").read_text())
    assert (
        not manifest["weighted_documents"]
        and not store.weighted
        and store.token_weights(0, 0, 5) is None
    )
    assert "token_weights" not in datasets.load_from_disk(str(store.path)).column_names


def test_only_files_that_need_the_column_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part without it ends where the first weights come, also if the preparation is interrupted
    there."""
    monkeypatch.setattr(longctx.data.store.writer, "BATCH_DOCUMENTS", 1)
    given = [
        {"input_ids": [1, 2, 3]},
        {"input_ids": [4, 5, 6], "weights": [1, 0.5, 0]},
        {"input_ids": [7, 8, 9]},
    ]
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path, given, progress=interrupt)
    store = made(tmp_path, given)
    assert store.manifest is not None and [
        name for name in store.manifest.files if name.endswith(".arrow")
    ] == [
        "data-00000.arrow",
        "data-00001.arrow",
    ]
    assert [store.token_weights(document, 0, 3) is None for document in range(3)] == [
        True,
        False,
        True,
    ]
    assert weights_of(store, 1) == [1, 0.5, 0] and store.trained_tokens.tolist() == [2, 1, 2]
    rows = datasets.load_from_disk(str(store.path))
    assert [row["token_weights"] for row in rows] == [None, [1, 0.5, 0], None]
    joined = Store.join([byte_store(tmp_path, [30], name="other"), store], [1, 1])
    assert (
        joined.token_weights(0, 0, 5) is None
        and joined.token_weights(2, 1, 3) is not None
        and joined.weighted
    )
    assert joined.token_weights(2, 1, 3).tolist() == [0.5, 0]


@pytest.mark.parametrize(
    ("way", "kept"), [("truncate_left", [0.5, 2.0, 1.0]), ("truncate_right", [0.0, 0.25, 0.5])]
)
def test_cut_documents_keep_the_weights_of_their_tokens(
    tmp_path: Path, way: str, kept: list[float]
) -> None:
    given = [{"input_ids": [1, 2, 3, 4, 5], "weights": [0, 0.25, 0.5, 2, 1]}]
    assert weights_of(made(tmp_path, given, max_length=3, long_documents=way)) == kept


def test_all_tokens_have_no_weights_of_messages(tmp_path: Path) -> None:
    asked, good = chat("Q", "good")
    light = {**good, "weight": 0.5}
    with pytest.raises(
        ChatError, match=r"message 1 has weight 0\.5, but --train-on all trains on every token"
    ):
        made(tmp_path, [{"messages": [asked, light]}], train_on="all")


# --- the loss


@given(seed=st.integers(0, 1000), ranks=st.integers(1, 4), data=st.data())
def test_every_label_has_its_weight_on_some_rank(
    weighted: Path, seed: int, ranks: int, data: Any
) -> None:
    store = Store.open(weighted)
    documents = data.draw(st.lists(st.integers(0, len(store) - 1), min_size=1, max_size=6))
    pieces = [
        Piece(each, 0 if seed % 2 else int(store.lengths[each]) // 3, int(store.lengths[each]))
        for each in documents
    ]
    plan, _ = plan_step(store, pieces, lambda lengths: random_plan(lengths, ranks, seed), None)
    found, divisors = np.zeros((len(pieces), max(plan.lengths))), set()
    for rank in range(ranks):
        batch = read_step(store, pieces, plan, rank)
        weights = token_mean(batch)
        divisors.add(weights.divisor)
        for micro_batch, of_rows in zip(batch.micro_batches, weights.tokens or (), strict=True):
            counted = torch.as_tensor(of_rows).where(micro_batch.labels != IGNORED_LABEL, 0).numpy()
            for shard in micro_batch.layout.shards:
                rows = np.r_[slice(*shard.head), slice(*shard.tail)]
                found[shard.document, rows] += counted[shard.offset : shard.offset + shard.tokens]
    wanted = np.zeros_like(found)
    for number, piece in enumerate(pieces):
        own = store.token_weights(piece.document, piece.start, piece.stop)
        _, labels = store.read(piece.document, piece.start, piece.stop)
        of_labels = np.ones(piece.length) if own is None else np.append(own[1:], 0)
        wanted[number, : piece.length] = (
            store.weights[piece.document] * of_labels * (labels != IGNORED_LABEL)
        )
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert [*divisors] == pytest.approx([wanted.sum() or 1.0])


def test_the_loss_of_validation_is_that_of_one_process_in_float64(
    workers: Workers, weighted: Path, tmp_path: Path
) -> None:
    """`tests.parity` compares losses and gradients of training."""
    for found, expected in workers.run(
        validation, 3, weighted, tmp_path / "run", ["batch.tokens_per_rank=100"]
    ):
        assert found == pytest.approx(expected, rel=1e-6)


def test_what_cannot_be_weighted_is_refused(weighted: Path) -> None:
    config = load(None, [*SMALL, f"data.store={weighted}", "data.merge_prefixes=true"])
    with pytest.raises(
        UserError, match=r"data\.merge_prefixes is true, but data\.store .* has weights of tokens"
    ):
        check_model(config, RunData.open(config), config.model_source(), 1)

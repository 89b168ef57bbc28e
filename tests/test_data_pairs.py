"""Pairs of chosen and rejected completions: read from common formats, kept together from the record to the step."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longctx.cli import main
from longctx.data import writer
from longctx.data.corpus import CorpusError, open_corpus
from longctx.data.formats import Document
from longctx.data.manifest import Manifest
from longctx.data.prepare import prepare
from longctx.data.sampler import Piece, Sampler, SamplerError, held_out
from longctx.data.store import Store
from longctx.training.validation import in_steps
from tests.data_cases import learnt, made, text_of, write_jsonl, written

ASKED, GOOD, BAD = (
    {"role": role, "content": content} for role, content in (("user", "Hello"), ("assistant", "Hi."), ("assistant", "Go."))
)
RECORDS: list[dict[str, Any]] = [
    {"prompt": "Hello", "chosen": "Hi.", "rejected": "Go."},
    {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
    {"prompt": [ASKED], "chosen": "Hi.", "rejected": [BAD]},
    {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    {"prompt": "Hello", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD], "messages": [ASKED, GOOD], "score_chosen": 3.0},
    {"prompt": None, "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD], "text": "Hello"},
]


def documents(source: Path) -> list[Document]:
    return list(open_corpus(str(source)).documents())


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "dataset"])
def test_every_form_is_the_same_pair(tmp_path: Path, record: dict[str, Any], suffix: str) -> None:
    if suffix == "parquet" and not isinstance(record["chosen"], type(record["rejected"])):
        pytest.skip("a column has one type")
    chosen, rejected = documents(written(tmp_path, [record], suffix))
    assert [list(one.messages) for one in (chosen, rejected)] == [[ASKED, GOOD], [ASKED, BAD]]
    assert (chosen.first_trained, rejected.first_trained) == (1, 1)
    assert (chosen.format, rejected.format) == ("chosen-rejected",) * 2
    assert chosen.name == rejected.name.replace("#rejected", "#chosen") and chosen.name.endswith("#chosen")


def test_the_completion_alone_is_learnt(tmp_path: Path) -> None:
    """Also if the prompt has turns of the assistant, and completions have several."""
    before = [{"role": "system", "content": "S"}, ASKED, {"role": "assistant", "content": "shared"}, ASKED]
    records = [
        {"chosen": [*before, GOOD, ASKED, {"role": "assistant", "content": "more"}], "rejected": [*before, BAD], "weight": 2},
        {"prompt": before[1:], "chosen": "Hi.", "rejected": "Go.", "system": "S"},
    ]
    store = made(tmp_path, records)
    end, last = "<|im_end|>", "<|im_end|>\n<|endoftext|>"
    texts = [learnt(store, document) for document in range(len(store))]
    assert texts == [f"Hi.{end}more{last}", f"Go.{last}", f"Hi.{last}", f"Go.{last}"]
    assert store.weights.tolist() == [2, 2, 1, 1]
    assert list(store.names) == [f"s.jsonl:{line}#{side}" for line in (1, 2) for side in ("chosen", "rejected")]
    assert store.pairs and store.manifest.formats == {"chosen-rejected": 4}


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"chosen": "a", "rejected": "b"}, "are texts without a `prompt`"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "both must begin with the same prompt"),
        ({"prompt": "Hello", "chosen": [ASKED, GOOD], "rejected": [BAD]}, "both must begin with the same prompt"),
        ({"prompt": "Other", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, "`prompt` is not among the common first"),
        ({"prompt": "Hello", "chosen": [], "rejected": [BAD]}, "`chosen` must be a list with at least one message"),
        ({"prompt": 3, "chosen": [GOOD], "rejected": [BAD]}, "`prompt` must be a list"),
        ({"chosen": [ASKED, GOOD], "rejected": [ASKED, {"role": ""}]}, "message 1 has role ''"),
        ({"prompt": "x", "chosen": "\ud800", "rejected": "b"}, "unpaired surrogate"),
        ({"text": "no pair"}, "has format text, but the source has chosen-rejected and text"),
    ],
)
def test_what_is_no_pair_is_named(tmp_path: Path, record: dict[str, Any], says: str) -> None:
    source = write_jsonl(tmp_path / "s.jsonl", [RECORDS[0], record])
    with pytest.raises(CorpusError, match=r"s\.jsonl:2") as caught:
        documents(source)
    assert says in str(caught.value)


def test_pairs_with_nothing_to_prefer_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    useless = [
        {"prompt": "Hello", "chosen": "Hi.", "rejected": "Hi."},
        {"prompt": "Hello", "chosen": "Hi.", "rejected": " "},
        {"chosen": [ASKED, GOOD], "rejected": [ASKED]},
    ]
    source = write_jsonl(tmp_path / "s.jsonl", [*useless, RECORDS[0]])
    assert main(["prepare", "--source", str(source), "--tokenizer", "bytes", "--out", str(tmp_path / "store")]) == 0
    told = capsys.readouterr().out
    assert "documents  2, 1 pairs of a chosen and a rejected completion" in told
    assert "1 chosen-rejected" in told and "the assistant's turns after the prompt" in told
    assert "dropped    3 pairs with equal completions or an empty one" in told
    assert "s.jsonl:4#chosen: " in told and "s.jsonl:4#rejected: " in told
    nothing = write_jsonl(tmp_path / "none.jsonl", useless)
    assert main(["prepare", "--source", str(nothing), "--tokenizer", "bytes", "--out", str(tmp_path / "none")]) == 2
    assert "3 pairs have equal or empty completions" in capsys.readouterr().err
    everything = ["--train-on", "all", "--out", str(tmp_path / "all")]
    assert main(["prepare", "--source", str(source), "--tokenizer", "bytes", *everything]) == 2
    assert "would train on the prompt" in capsys.readouterr().err


@pytest.mark.parametrize("batch", [1, 3, 1024])
def test_a_pair_is_dropped_as_a_whole_and_never_separated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], batch: int
) -> None:
    monkeypatch.setattr(writer, "BATCH_DOCUMENTS", batch)
    lengths = [(10, 20), (200, 10), (10, 200), (200, 200), (5, 5)]
    records = [{"prompt": "p", "chosen": text_of(a, 1), "rejected": text_of(b, 2)} for a, b in lengths]
    source, out = write_jsonl(tmp_path / "s.jsonl", records), tmp_path / "store"
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
                "--max-length",
                "150",
                "--long-documents",
                "drop",
            ]
        )
        == 0
    )
    assert "dropped    3 pairs with a conversation of more than 150 tokens" in capsys.readouterr().out
    assert list(Store.open(out).names) == [f"s.jsonl:{line}#{side}" for line in (1, 5) for side in ("chosen", "rejected")]


def test_a_store_of_an_earlier_version_holds_no_pairs(tmp_path: Path) -> None:
    prepare(open_corpus(str(write_jsonl(tmp_path / "s.jsonl", [{"text": "x y z"}]))), tmp_path / "store", tokenizer="bytes")
    manifest = tmp_path / "store" / "manifest.json"
    content = json.loads(manifest.read_text())
    assert content.pop("pairs") is False and content.pop("useless_pairs") == 0
    del content["checksums"], content["checksum"]
    manifest.write_text(json.dumps(content))
    assert not Store.open(tmp_path / "store").pairs and not Manifest.load(tmp_path / "store").pairs


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12).map(lambda half: half + [(7 * n) % 39 + 1 for n in half]),
    global_tokens=st.integers(1, 300),
    max_length=st.integers(20, 45),
    share=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 5),
)
def test_a_step_never_separates_a_pair(
    lengths: list[int], global_tokens: int, max_length: int, share: float, seed: int
) -> None:
    names = [f"{place // 2}#{('chosen', 'rejected')[place % 2]}" for place in range(len(lengths))]
    apart = held_out(names, share)
    assert (apart[::2] == apart[1::2]).all()
    fits = np.array(lengths) <= max_length
    kept = {place for place in range(0, len(lengths), 2) if fits[place : place + 2].all() and not apart[place]}
    try:
        sampler = Sampler(
            np.array(lengths, np.int64),
            global_tokens=global_tokens,
            seed=seed,
            max_length=max_length,
            long_documents="drop",
            left_out=apart,
            pairs=True,
        )
    except SamplerError:
        assert not kept
        return
    cursor, taken = 0, []
    for _ in range(6):
        pieces, following = sampler.step(cursor)
        total = sum(piece.length for piece in pieces)
        assert total - sum(piece.length for piece in pieces[-2:]) < global_tokens <= total
        assert following - cursor == len(pieces)
        cursor = following
        for chosen, rejected in zip(pieces[::2], pieces[1::2], strict=True):
            assert chosen.document in kept and rejected.document == chosen.document + 1
            assert (chosen.length, rejected.length) == (lengths[chosen.document], lengths[rejected.document])
            taken.append(chosen.document)
    epoch = taken[: len(kept)]
    assert len(set(epoch)) == len(epoch), "an epoch holds every pair once"
    assert sampler.step(0)[0] == sampler.step(0)[0] and sampler.pieces == 2 * len(kept)


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8), tokens=st.integers(1, 100))
def test_nor_does_a_pass_in_order(lengths: list[int], tokens: int) -> None:
    pieces = [Piece(place, 0, length) for place, length in enumerate(length for length in lengths for _ in "ab")]
    steps = list(in_steps(pieces, tokens, multiple=2))
    assert [piece for step in steps for piece in step] == pieces and all(len(step) % 2 == 0 for step in steps)
    assert all(sum(piece.length for piece in step) >= tokens for step in steps[:-1])


def test_long_pairs_are_not_split() -> None:
    settings = {"global_tokens": 10, "seed": 0, "max_length": 10, "pairs": True}
    with pytest.raises(
        SamplerError, match=r"1 documents of preference pairs, .* more than the 10 tokens .* set data\.long_documents to drop"
    ):
        Sampler(np.array([3, 4, 11, 2]), long_documents="split", **settings)
    assert {piece.document for piece in Sampler(np.array([3, 4, 10, 2]), **settings).in_order()} == {0, 1, 2, 3}
    dropping = Sampler(np.array([3, 4, 11, 2]), long_documents="drop", **settings)
    assert (dropping.long, dropping.dropped, dropping.dropped_tokens, dropping.pieces) == (1, 2, 13, 2)

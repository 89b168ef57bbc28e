"""Preparing is all or nothing, and a store returns the tokens that were put in."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longctx.cli import main
from longctx.data import pieces
from longctx.data.records.corpus import CorpusError
from longctx.data.records.sources import open_corpus
from longctx.data.records.tokenizer import Tokenizer, TokenizerError
from longctx.data.store import index
from longctx.data.store.manifest import StoreError
from longctx.data.store.prepare import prepare
from longctx.data.store.store import IGNORED_LABEL, Store
from tests.data_cases import CONVERSATION, byte_store, text_of, write_jsonl

LENGTHS = (1 + 1, 17, 300, 2, 64)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Five texts and two conversations, as bytes."""
    return byte_store(tmp_path_factory.mktemp("store"), LENGTHS, conversations=2)


def expected_labels(store: Store, document: int, end: int) -> list[int]:
    """Returns the labels of a document cut at `end`, by definition: the next token if it may be a
    target, else -100."""
    tokens = store.read(document, 0, int(store.lengths[document]))[0]
    if document < len(LENGTHS):
        targets = [True] * len(tokens)
    else:
        targets = []
        for message in CONVERSATION:
            assistant = message["role"] == "assistant"
            targets += [False] * len(f"<|im_start|>{message['role']}\n")
            targets += [assistant] * len(f"{message['content']}<|im_end|>".encode()) + [False]
        # The last line feed, and the end of the document after it: no single token ends a turn.
        targets[-1] = assistant
        targets.append(assistant)
    return [
        int(tokens[i + 1]) if i + 1 < end and targets[i + 1] else IGNORED_LABEL for i in range(end)
    ]


@pytest.mark.parametrize(("group", "block"), [(1, 2), (3, 6), (256, 1 << 20)])
def test_an_index_knows_groups_of_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: int, block: int
) -> None:
    """So that a sampler need not look at all documents."""
    monkeypatch.setattr(index, "GROUP", group)
    monkeypatch.setattr(index, "BLOCK", block)
    monkeypatch.setattr(pieces, "GROUP", group)
    opened = byte_store(tmp_path, (*LENGTHS, 1, 9, 2, 1), conversations=2)
    assert opened.groups(0) is not None
    for max_length in (1, 2, 20, 400):
        known = pieces.Pieces(opened, max_length=max_length, long_documents="split")
        monkeypatch.setattr(opened, "groups", lambda source: None)
        looked_at = pieces.Pieces(opened, max_length=max_length, long_documents="split")
        monkeypatch.undo()
        monkeypatch.setattr(pieces, "GROUP", group)
        assert known.tally == looked_at.tally
        assert list(known.in_order()) == list(looked_at.in_order())


def test_groups_tell_documents_with_a_target_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "GROUP", 3)
    index.write_groups(tmp_path, np.array([5, 9, 3, 1]), np.array([4, 0, 2, 0]))
    found = np.load(tmp_path / index.GROUPS_FILE)
    columns = {name: found[name].tolist() for name in found.dtype.names}
    assert columns == {
        "tokens": [8, 0],
        "longest": [5, 0],
        "learned": [2, 0],
        "longest_of_all": [9, 1],
    }


def test_what_went_in_comes_out(store: Store) -> None:
    assert store.lengths[: len(LENGTHS)].tolist() == list(LENGTHS)
    assert store.lengths.dtype == store.trained_tokens.dtype == np.int64
    for document, length in enumerate(LENGTHS):
        tokens, labels = store.read(document, 0, length)
        assert tokens.dtype == labels.dtype == np.int64
        assert tokens[-1] == store.tokenizer.end_of_document == 256
        assert store.tokenizer.decode(tokens[:-1]) == text_of(length - 1, document)
    assert list(store.names)[:2] == ["store.jsonl:1", "store.jsonl:2"]
    assert store.name(6) == "store.jsonl:7"
    assert len(store) == 7


@given(data=st.data())
def test_any_span_is_that_part_of_the_whole(store: Store, data: st.DataObject) -> None:
    document = data.draw(st.integers(0, len(store) - 1))
    end = data.draw(st.integers(1, int(store.lengths[document])))
    start = data.draw(st.integers(0, end))
    stop = data.draw(st.integers(start, end))
    tokens, labels = store.read(document, start, stop, end=end)
    whole, every_label = store.read(document, 0, int(store.lengths[document]))
    assert tokens.tolist() == whole[start:stop].tolist()
    assert labels.tolist() == expected_labels(store, document, end)[start:stop]
    assert store.trained_tokens[document] == (every_label != IGNORED_LABEL).sum()
    piece = store.read(document, start, end, end=end)[1]
    assert store.target_tokens(document, start, end) == (piece != IGNORED_LABEL).sum()


def test_spans_outside_a_document_are_refused(store: Store) -> None:
    for span in [(-1, 3), (5, 4), (0, 18)]:
        with pytest.raises(IndexError, match="document 1 has 17 tokens"):
            store.read(1, *span)
    with pytest.raises(IndexError):
        store.read(1, 0, 10, end=9)


def test_it_is_a_dataset_of_the_datasets_library(store: Store) -> None:
    import datasets

    dataset = datasets.load_from_disk(str(store.path))
    assert dataset["length"][:] == store.lengths.tolist()
    assert dataset[1]["tokens"] == store.read(1, 0, 17)[0].tolist()
    assert dataset[1]["trained"] is None


def test_reading_a_store_needs_neither_torch_nor_datasets(store: Store) -> None:
    code = (
        "import sys; from longctx.data.store.store import Store; "
        f"Store.open({str(store.path)!r}).read(0, 0, 1)"
    )
    check = "; assert not {'torch', 'datasets', 'pydantic'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code + check], check=True)


def test_second_call_does_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in store.path.iterdir()}
    monkeypatch.setattr(Tokenizer, "encode", None)  # tokenizing would fail
    again = prepare(open_corpus(str(store.path) + ".jsonl"), store.path, tokenizer="bytes")
    assert not again.made
    assert again.manifest == store.manifest
    assert {file.name: file.stat().st_mtime_ns for file in store.path.iterdir()} == before


def test_another_request_is_refused_unless_overwritten(tmp_path: Path) -> None:
    old = byte_store(tmp_path, [20])
    source = open_corpus(str(write_jsonl(tmp_path / "other.jsonl", [{"text": "other " * 50}])))
    for options in ({"tokenizer": "bytes"}, {"tokenizer": "bpe", "vocab_size": 300}):
        with pytest.raises(
            StoreError, match=r"holds a store of another source or other settings .*--overwrite"
        ):
            prepare(source, old.path, **options)
    assert Store.open(old.path).fingerprint == old.fingerprint
    assert prepare(source, old.path, tokenizer="bytes", overwrite=True).made
    new = Store.open(old.path)
    assert new.fingerprint != old.fingerprint
    assert new.lengths.tolist() == [301]
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "other.jsonl",
        "store",
        "store.jsonl",
    ]


def test_other_files_in_a_store_stay_and_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = byte_store(tmp_path, [20, 30])
    source = write_jsonl(tmp_path / "other.jsonl", [{"text": "other " * 50}])
    (old.path / "notes.txt").write_text("mine")
    (old.path / "plots").mkdir()
    (old.path / "plots" / "lengths.png").write_text("mine")
    command = [
        "prepare",
        "--source",
        str(source),
        "--out",
        str(old.path),
        "--tokenizer",
        "bytes",
        "--overwrite",
    ]
    assert main(command) == 0
    assert (
        "notes.txt, plots/lengths.png: not written by longctx, left there"
        in capsys.readouterr().out
    )
    assert Store.open(old.path).lengths.tolist() == [301]
    assert (
        (old.path / "notes.txt").read_text()
        == "mine"
        == (old.path / "plots" / "lengths.png").read_text()
    )
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "other.jsonl",
        "store",
        "store.jsonl",
    ]


@pytest.mark.parametrize(
    "name", ["data-00001.arrow", "request", "journal.jsonl", "tokenizer/tokenizer.json"]
)
def test_a_file_in_a_store_with_a_name_of_its_files_is_not_replaced(
    tmp_path: Path, name: str
) -> None:
    old = byte_store(tmp_path, [20])
    source = open_corpus(str(write_jsonl(tmp_path / "other.jsonl", [{"text": "other " * 50}])))
    mine = old.path / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    with pytest.raises(StoreError, match=r"is not listed in manifest\.json, and is not replaced"):
        prepare(source, old.path, tokenizer="bytes", overwrite=True)
    assert mine.read_text() == "mine"


def test_what_is_not_a_store_is_never_replaced(tmp_path: Path) -> None:
    source = open_corpus(str(write_jsonl(tmp_path / "s.jsonl", [{"text": "text"}])))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "manifest.json").write_text('{"name": "an app"}', "utf-8")
    (tmp_path / "file").write_text("mine", "utf-8")
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial" / "thesis.txt").write_text("mine", "utf-8")
    for name, says in [
        ("mine", "is not a store"),
        ("file", "is not a store"),
        ("new", "was not made by `longctx prepare`"),
    ]:
        with pytest.raises(StoreError, match=says):
            prepare(source, tmp_path / name, tokenizer="bytes", overwrite=True)
    assert (tmp_path / "mine" / "manifest.json").is_file()
    assert (tmp_path / "file").read_text("utf-8") == "mine"
    assert (tmp_path / "new.partial" / "thesis.txt").is_file()
    (tmp_path / "empty").mkdir()
    assert prepare(source, tmp_path / "empty", tokenizer="bytes").made


def test_store_inside_its_source_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "s.jsonl", [{"text": "text"}])
    with pytest.raises(StoreError, match="is inside the source"):
        prepare(open_corpus(str(tmp_path)), tmp_path / "stores" / "s", tokenizer="bytes")


def test_empty_corpus_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "empty.txt").write_bytes(b"")
    (tmp_path / "texts" / "photo.txt").write_bytes(b"\xff\xd8\x00")
    (tmp_path / "texts" / "photo.jpg").write_bytes(b"\xff\xd8\x00")
    for tokenizer in ("bytes", "bpe"):
        with pytest.raises(
            CorpusError,
            match=r"no document with text: 1 is empty, 1 files are not UTF-8 text \(photo.txt\), 1 "
            r"× ending .jpg",
        ):
            prepare(open_corpus(str(tmp_path / "texts")), tmp_path / "out", tokenizer=tokenizer)
    assert [entry.name for entry in tmp_path.iterdir()] == ["texts"]
    (tmp_path / "none.jsonl").write_bytes(b"")
    with pytest.raises(CorpusError, match="no document with text: it is empty"):
        prepare(open_corpus(str(tmp_path / "none.jsonl")), tmp_path / "out", tokenizer="bytes")


@pytest.fixture
def copy(store: Store, tmp_path: Path) -> Path:
    return Path(shutil.copytree(store.path, tmp_path / "copy"))


def changed(manifest: Path, **changes: Any) -> None:
    """Changes values of a manifest; None: omits them."""
    content = {**json.loads(manifest.read_text("utf-8")), **changes}
    manifest.write_text(
        json.dumps({name: value for name, value in content.items() if value is not None}), "utf-8"
    )


PART, MANIFEST = "data-00000.arrow", "manifest.json"


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        (
            PART,
            lambda file: os.truncate(file, file.stat().st_size - 1),
            rf"{PART} has .* bytes, but should have .*--overwrite",
        ),
        (PART, Path.unlink, f"{PART} is missing"),
        (PART, lambda file: file.write_bytes(b"x" * file.stat().st_size), "is damaged"),
        ("tokenizer.json", lambda file: file.write_bytes(b"x" * file.stat().st_size), "is damaged"),
        (
            MANIFEST,
            lambda file: changed(file, version=99),
            "is of format longctx-store 99, but this longctx reads longctx-store 1:",
        ),
        (MANIFEST, lambda file: changed(file, fingerprint=None), "damaged"),
        *(
            (MANIFEST, lambda file, text=text: file.write_text(text), "damaged")
            for text in ("{", "[]", "{}")
        ),
        (MANIFEST, Path.unlink, "is not a store: it has no manifest"),
    ],
    ids=range(10),
)
def test_a_damaged_store_is_refused(
    copy: Path, name: str, damage: Callable[[Path], object], says: str
) -> None:
    damage(copy / name)
    with pytest.raises(StoreError, match=says):
        Store.open(copy)


def test_a_store_that_is_not_there_is_refused_with_the_command_that_makes_it(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        StoreError,
        match=r"there is no store at .*`longctx prepare --source YOUR_DATA --tokenizer CHECKPOINT "
        r"--out",
    ):
        Store.open(tmp_path / "nowhere")
    # Python's own library, the default.
    with pytest.raises(StoreError, match=r"`longctx prepare --out \S*python-stdlib`"):
        Store.open(tmp_path / "python-stdlib")


def test_a_damaged_store_can_be_made_again(copy: Path, store: Store) -> None:
    os.truncate(copy / PART, 10)
    source = open_corpus(str(store.path) + ".jsonl")
    with pytest.raises(StoreError, match="is damaged"):
        prepare(source, copy, tokenizer="bytes")
    assert prepare(source, copy, tokenizer="bytes", overwrite=True).made
    assert Store.open(copy).fingerprint == store.fingerprint


def test_vocabularies_beyond_16_bits(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as TokenizerJson
    from tokenizers import models, pre_tokenizers

    words = {f"w{index}": index for index in range(70_000)}
    inner = TokenizerJson(models.WordLevel({**words, "<eos>": 70_000}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.save(str(tmp_path / "tokenizer.json"))
    source = open_corpus(str(write_jsonl(tmp_path / "s.jsonl", [{"text": "w1 w69999 w65536"}])))
    prepare(source, tmp_path / "out", tokenizer=str(tmp_path / "tokenizer.json"))
    new = Store.open(tmp_path / "out")
    assert new.read(0, 0, 4)[0].tolist() == [1, 69_999, 65_536, 70_000]
    assert new.tokenizer.fingerprint == new.manifest.tokenizer_fingerprint


def letters(folder: Path) -> str:
    """Writes a tokenizer.json that has only the letters a to z."""
    from tokenizers import Tokenizer as TokenizerJson
    from tokenizers import models

    vocabulary = {chr(97 + number): number for number in range(26)} | {"</s>": 26, "<unk>": 27}
    TokenizerJson(models.BPE(vocabulary, [], unk_token="<unk>")).save(str(folder / "letters.json"))
    return str(folder / "letters.json")


def test_lost_text_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["plain words", "Grüße", "日本" * 5 + "more plain words", "the end"]
    source = write_jsonl(tmp_path / "s.jsonl", [{"text": text} for text in texts])
    command = [
        "prepare",
        "--source",
        str(source),
        "--out",
        str(tmp_path / "out"),
        "--tokenizer",
        letters(tmp_path),
    ]
    for made in (True, False):
        assert main([*command, "--json"]) == 0
        printed = capsys.readouterr()
        summary = json.loads(printed.out)
        assert (summary["made"], summary["tokens"], summary["unknown_tokens"]) == (made, 53, 17)
        assert (
            "warning: 17 of 53 tokens are unknown ones, for text that the tokenizer lacks, in 4 of "
            "4" in printed.err
        )
        assert (
            "documents; the first is s.jsonl:1" in printed.err
            and "--tokenizer bpe or bytes" in printed.err
        )
    for tokenizer in ("bpe", "bytes"):
        assert main([*command[:-1], tokenizer, "--overwrite"]) == 0
        assert not capsys.readouterr().err
        assert Store.open(tmp_path / "out").manifest.loss == ""


def test_text_that_is_mostly_lost_is_refused(tmp_path: Path) -> None:
    source = open_corpus(
        str(write_jsonl(tmp_path / "s.jsonl", [{"text": "日" * 980}, {"text": "plain words"}]))
    )
    with pytest.raises(
        TokenizerError,
        match=r"981 of 993 tokens are unknown ones.*more than half of the text must be kept: use a "
        r"tokenizer",
    ):
        prepare(source, tmp_path / "out", tokenizer=letters(tmp_path))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["letters.json", "s.jsonl"]


# --- interruption

KILLED = """
import os, signal, sys
from pathlib import Path
from longctx.data.store import writer
from longctx.data.records.sources import open_corpus
from longctx.data.store.prepare import prepare

writer.BATCH_DOCUMENTS = 2
writer.PART_TOKENS = 50
source, out, stage, share = sys.argv[1:]

def progress(now, done):
    if now == stage and done >= float(share):
        os.kill(os.getpid(), signal.SIGKILL)

prepare(open_corpus(source), Path(out), vocab_size=300, progress=progress)
"""


@pytest.mark.parametrize(
    ("stage", "share", "finished"), [("training the tokenizer", 0.3, 0), ("tokenizing", 0.6, 6)]
)
def test_killed_preparation_leaves_no_store_and_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, share: float, finished: int
) -> None:
    source = write_jsonl(tmp_path / "s.jsonl", [{"text": text_of(100, seed)} for seed in range(12)])
    monkeypatch.setattr("longctx.data.store.writer.BATCH_DOCUMENTS", 2)
    monkeypatch.setattr("longctx.data.store.writer.PART_TOKENS", 50)
    out, whole = tmp_path / "out", tmp_path / "whole"
    command = [sys.executable, "-c", KILLED, str(source), str(out), stage, str(share)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    with pytest.raises(StoreError, match="there is no store"):
        Store.open(out)
    with pytest.raises(StoreError, match="is not a store"):
        Store.open(tmp_path / "out.partial")

    encoded: list[str] = []
    encode = Tokenizer.encode

    def counting(self: Tokenizer, text: str, **options: Any) -> Any:
        encoded.append(text)
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", counting)
    settings: dict[str, Any] = {"vocab_size": 300}
    assert prepare(open_corpus(str(source)), out, **settings).made
    assert 12 - len(encoded) == finished  # documents of finished parts are not tokenized again
    assert not (tmp_path / "out.partial").exists()

    prepare(open_corpus(str(source)), whole, **settings)  # in one go, for comparison
    assert sorted(file.name for file in out.iterdir()) == sorted(
        file.name for file in whole.iterdir()
    )
    assert len(list(out.glob("*.arrow"))) == 6
    for file in whole.iterdir():
        assert (out / file.name).read_bytes() == file.read_bytes(), file.name
    assert len(Store.open(out)) == 12


def test_interrupted_preparation_of_another_source_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longctx.data.store.writer.PART_TOKENS", 1)
    source = write_jsonl(tmp_path / "s.jsonl", [{"text": text_of(100, seed)} for seed in range(4)])

    def stop(stage: str, share: float) -> None:
        if stage == "tokenizing":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(open_corpus(str(source)), tmp_path / "out", vocab_size=300, progress=stop)
    assert (tmp_path / "out.partial" / "tokenizer.json").is_file()
    write_jsonl(source, [{"text": "quite another"}])
    prepare(open_corpus(str(source)), tmp_path / "out", tokenizer="bytes")
    assert Store.open(tmp_path / "out").lengths.tolist() == [14]


def test_two_preparations_of_one_store_do_not_meet(tmp_path: Path) -> None:
    source = open_corpus(str(write_jsonl(tmp_path / "s.jsonl", [{"text": "text"}])))

    def meet(stage: str, share: float) -> None:
        if stage == "tokenizing":
            with pytest.raises(StoreError, match="another process is preparing"):
                prepare(source, tmp_path / "out", tokenizer="bytes")

    assert prepare(source, tmp_path / "out", tokenizer="bytes", progress=meet).made
    assert len(Store.open(tmp_path / "out")) == 1


# --- the command


def test_command_prints_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("twelve bytes", "utf-8")
    (texts / "b.txt").write_bytes(b"\xff")
    (texts / "c.bin").write_bytes(b"\xff")
    command = [
        "prepare",
        "--source",
        str(texts),
        "--out",
        str(tmp_path / "out"),
        "--tokenizer",
        "bytes",
        "--workers",
        "2",
    ]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "written in" in out
    assert "13, of which 12 with loss" in out
    assert "1 files that are not UTF-8 text: b.txt" in out and "not read   1 × ending .bin" in out
    assert main(command) == 0
    assert "up to date, nothing to do" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["made"], summary["documents"], summary["tokens"]) == (False, 1, 13)
    assert (summary["longest_name"], summary["longest_length"], summary["skipped_names"]) == (
        "a.txt",
        13,
        ["b.txt"],
    )

"""Sources become documents in a fixed order, and errors name what cannot be read."""

import json
import os
import sysconfig
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from longctx.data.corpus import CorpusError, Found, open_corpus
from longctx.data.prepare import prepare
from longctx.data.store import Store
from tests.data_cases import CONVERSATION, write_jsonl


def texts(source: Path | str, **options: Any) -> list[tuple[str, str | None]]:
    return [(document.name, document.text) for document in open_corpus(str(source), **options).documents()]


def test_embedded_corpus_is_this_pythons_standard_library() -> None:
    documents = list(open_corpus("python-stdlib").documents())
    names = [document.name for document in documents]
    assert names == sorted(names, key=lambda name: name.split("/"))
    assert all(name.endswith(".py") for name in names)
    assert not any({"site-packages", "dist-packages", "__pycache__"} & set(name.split("/")) for name in names)
    decoder = documents[names.index("json/decoder.py")]
    assert decoder.text == Path(sysconfig.get_path("stdlib"), "json", "decoder.py").read_bytes().decode()


def test_folder_is_read_in_order_without_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "one.md").write_text("one", "utf-8")
    (tmp_path / "b.txt").write_bytes(b"two\r\nlines")
    (tmp_path / ".hidden").write_text("no", "utf-8")
    (tmp_path / ".git" / "config").write_text("no", "utf-8")
    write_jsonl(tmp_path / "a.jsonl", [{"text": "three"}])
    assert texts(tmp_path) == [("a.jsonl:1", "three"), ("b/one.md", "one"), ("b.txt", "two\r\nlines")]


def test_files_that_are_not_text_are_skipped_and_named(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("good", "utf-8")
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (tmp_path / "picture.bin").write_bytes(b"\x01\x00\x02")
    (tmp_path / "nothing.txt").write_bytes(b"")
    found = Found()
    assert [document.name for document in open_corpus(str(tmp_path)).documents(found)] == ["good.txt"]
    assert found == Found(["latin.txt", "picture.bin"], empty=1, formats={"text": 1})


def test_one_text_file(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("call me", "utf-8")
    assert texts(tmp_path / "book.txt") == [("book.txt", "call me")]


def test_jsonl_of_texts_and_conversations(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "mixed.jsonl", [{"text": "é"}, {"messages": CONVERSATION, "id": 3}])
    file.write_text(file.read_text("utf-8") + "\n", "utf-8")  # a blank line at the end does no harm
    first, second = open_corpus(str(file)).documents()
    assert (first.text, first.messages) == ("é", ())
    assert second.text is None
    assert list(second.messages) == CONVERSATION
    assert second.name == "mixed.jsonl:2"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"text": ', "not JSON"),
        ('{"text": "\t"}', "not JSON: Invalid control character at column 11"),
        ("[1]", "must be an object"),
        ('{"body": "x"}', "neither 'text' nor messages, conversations, prompt"),
        ('{"text": 3}', "'text' is of type int"),
        ('{"text": null}', "'text' is of type NoneType"),
        ('{"text": "\\ud800"}', "surrogate"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": [{"role": 3, "content": "x"}]}', "message 0 has role 3"),
        ('{"messages": [{"role": "user"}]}', "message 0 has content of type NoneType"),
    ],
)
def test_bad_jsonl_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"text": "fine"}\n\n' + line + "\n", "utf-8")
    with pytest.raises(CorpusError) as caught:
        texts(file)
    assert f"{file}:3:" in str(caught.value)
    assert says in str(caught.value)


def test_jsonl_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(CorpusError, match=r"bad\.jsonl:1: not UTF-8 at byte 10"):
        texts(file)


def test_parquet(tmp_path: Path) -> None:
    table = pyarrow.table({"number": [1, 2], "text": ["one", "two"], "body": ["eins", "zwei"]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    assert texts(tmp_path / "t.parquet") == [("t.parquet:0", "one"), ("t.parquet:1", "two")]
    assert texts(tmp_path / "t.parquet", text_column="body") == [("t.parquet:0", "eins"), ("t.parquet:1", "zwei")]


def test_parquet_of_conversations(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"messages": [CONVERSATION]}), tmp_path / "chat.parquet")
    (document,) = open_corpus(str(tmp_path)).documents()
    assert [message["content"] for message in document.messages] == [m["content"] for m in CONVERSATION]


def test_parquet_without_the_column_or_damaged(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "t.parquet")
    with pytest.raises(
        CorpusError, match=r"neither 'text' nor messages, .* only body: name the text column with --text-column"
    ):
        texts(tmp_path / "t.parquet")
    (tmp_path / "t.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(CorpusError, match="is not a Parquet file"):
        texts(tmp_path / "t.parquet")


def test_dataset_on_disk(tmp_path: Path) -> None:
    import datasets

    dataset = datasets.Dataset.from_dict({"text": ["one", "two"], "other": [1, 2]})
    dataset.save_to_disk(str(tmp_path / "plain"))
    assert texts(tmp_path / "plain") == [("row:0", "one"), ("row:1", "two")]
    with pytest.raises(CorpusError, match="'other' is of type int"):
        texts(tmp_path / "plain", text_column="other")
    with pytest.raises(CorpusError, match=r"neither 'body' nor messages, .* only text, other"):
        texts(tmp_path / "plain", text_column="body")
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(CorpusError, match=r"several splits: choose one, .*splits/train or .*splits/test"):
        texts(tmp_path / "splits")


def test_missing_and_empty_sources(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="does not exist: give `python-stdlib`, a file"):
        open_corpus(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CorpusError, match="folder without files"):
        open_corpus(str(tmp_path / "empty"))


def test_fingerprint_follows_content_and_names_only(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text("same", "utf-8")
    first = open_corpus(str(tmp_path / "a")).fingerprint()
    assert first == open_corpus(str(tmp_path / "b")).fingerprint()
    assert first != open_corpus(str(tmp_path / "a"), text_column="body").fingerprint()
    (tmp_path / "b" / "x.txt").write_text("Same", "utf-8")
    assert first != open_corpus(str(tmp_path / "b")).fingerprint()
    (tmp_path / "a" / "x.txt").rename(tmp_path / "a" / "y.txt")
    assert first != open_corpus(str(tmp_path / "a")).fingerprint()


def test_shares_of_the_source_add_up(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": "é" * length} for length in range(1, 9)])
    pyarrow.parquet.write_table(pyarrow.table({"text": list("abc")}), tmp_path / "b.parquet")
    corpus = open_corpus(str(tmp_path))
    assert sum(document.source_bytes for document in corpus.documents()) == pytest.approx(corpus.bytes)
    assert json.loads(file.read_text("utf-8").splitlines()[0]) == {"text": "é"}


def test_a_list_of_records_is_not_one_text(tmp_path: Path) -> None:
    """It would otherwise be read as one text, like other files."""
    file = tmp_path / "chats.json"
    file.write_text(json.dumps([{"messages": CONVERSATION}] * 2), "utf-8")
    with pytest.raises(CorpusError, match=r"is a list of 2 records, .*: jq -c '.\[\]' "):
        open_corpus(str(file))
    file.write_text('{"a": 1}', "utf-8")
    assert len(texts(file)) == 1


@pytest.mark.parametrize(
    ("line", "says"),
    [('{"weight": ' + "9" * 5000 + "}", "a number has thousands of digits"), ("[" * 100_000, "it is nested too deeply")],
)
def test_json_that_python_does_not_read_is_named(tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / "s.jsonl").write_text(line, "utf-8")
    with pytest.raises(CorpusError, match=rf"s\.jsonl:1: not JSON that can be read: {says}"):
        list(open_corpus(str(tmp_path / "s.jsonl")).documents())


def test_a_byte_order_mark_is_no_part_of_the_first_record(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
    assert [document.text for document in open_corpus(str(tmp_path / "s.jsonl")).documents()] == ["a"]


def test_parquet_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    column = pyarrow.Array.from_buffers(pyarrow.utf8(), 1, pyarrow.array([b"\xff\xfe"]).buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "s.parquet")
    with pytest.raises(CorpusError, match=r"s\.parquet is not a Parquet file, or damaged: 'utf-8' codec"):
        list(open_corpus(str(tmp_path / "s.parquet")).documents())


def test_a_damaged_dataset_is_named(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "saved" / "state.json").write_text("[]")
    with pytest.raises(CorpusError, match="looks like a saved dataset, but `datasets` cannot read it"):
        list(open_corpus(str(tmp_path / "saved")).documents())


def test_file_names_that_are_not_utf8_can_be_stored(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / os.fsdecode(b"\xff.txt")).write_text("some text")
    prepare(open_corpus(str(source)), tmp_path / "out", tokenizer="bytes")
    assert Store.open(tmp_path / "out").name(0) == "\\xff.txt"

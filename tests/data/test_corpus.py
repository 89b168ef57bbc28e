"""Sources become documents in a fixed order, and errors name what cannot be read."""

import json
import os
import sysconfig
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from longctx.commands.prepare import _particulars
from longctx.data.records.corpus import CorpusError, SourceCounts
from longctx.data.records.sources import open_corpus
from longctx.data.store.prepare import prepare
from longctx.data.store.store import Store
from tests.data_cases import CONVERSATION, write_jsonl


def texts(source: Path | str, **options: Any) -> list[tuple[str, str | None]]:
    return [
        (document.name, document.text)
        for document in open_corpus(str(source), **options).documents()
    ]


def test_embedded_corpus_is_this_pythons_standard_library() -> None:
    documents = list(open_corpus("python-stdlib").documents())
    names = [document.name for document in documents]
    assert names == sorted(names, key=lambda name: name.split("/"))
    assert all(name.endswith(".py") for name in names)
    assert not any(
        {"site-packages", "dist-packages", "__pycache__"} & set(name.split("/")) for name in names
    )
    decoder = documents[names.index("json/decoder.py")]
    assert (
        decoder.text
        == Path(sysconfig.get_path("stdlib"), "json", "decoder.py").read_bytes().decode()
    )


def test_folder_is_read_in_order_without_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "one.md").write_text("one", "utf-8")
    (tmp_path / "b.txt").write_bytes(b"two\r\nlines")
    (tmp_path / ".hidden").write_text("no", "utf-8")
    (tmp_path / ".git" / "config").write_text("no", "utf-8")
    write_jsonl(tmp_path / "a.jsonl", [{"text": "three"}])
    assert texts(tmp_path) == [
        ("a.jsonl:1", "three"),
        ("b/one.md", "one"),
        ("b.txt", "two\r\nlines"),
    ]
    assert texts(tmp_path / "b.txt") == [("b.txt", "two\r\nlines")]


def test_files_that_are_not_text_are_skipped_and_named(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("good", "utf-8")
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (tmp_path / "picture.bin").write_bytes(b"\x01\x00\x02")
    (tmp_path / "binary.txt").write_bytes(b"\x01\x00\x02")
    (tmp_path / "nothing.txt").write_bytes(b"")
    found = SourceCounts()
    assert [document.name for document in open_corpus(str(tmp_path)).documents(found)] == [
        "good.txt"
    ]
    assert found == SourceCounts(
        skipped_files=2,
        skipped_names=["binary.txt", "latin.txt"],
        empty_documents=1,
        formats={"text": 1},
    )
    assert open_corpus(str(tmp_path)).not_read == {"ending .bin": 1}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"text": ', "not JSON"),
        (
            '{"text": "\udcff"}',
            "not UTF-8 at byte 10, which is 0xff: save the file in UTF-8 (iconv -f",
        ),
        ('{"text": "\t"}', "not JSON: Invalid control character at column 11"),
        ("[1]", "must be an object"),
        ('{"text": 3}', "'text' is 3: it must be text"),
        ('{"text": "\\ud800"}', "surrogate"),
    ],
)
def test_bad_jsonl_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"text": "fine"}\n\n' + line + "\n", "utf-8", errors="surrogateescape")
    with pytest.raises(CorpusError) as caught:
        texts(file)
    assert f"{file}:3:" in str(caught.value)
    assert says in str(caught.value)


def test_tables_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "t.parquet")
    with pytest.raises(
        CorpusError,
        match=r"neither 'text' nor messages, .* only body: name the text column with --text-column",
    ):
        texts(tmp_path / "t.parquet")
    (tmp_path / "t.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(CorpusError, match="is not a Parquet file"):
        texts(tmp_path / "t.parquet")
    column = pyarrow.Array.from_buffers(pyarrow.utf8(), 1, pyarrow.array([b"\xff\xfe"]).buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "t.parquet")
    with pytest.raises(
        CorpusError, match=r"t\.parquet is not a Parquet file, or damaged: 'utf-8' codec"
    ):
        texts(tmp_path / "t.parquet")
    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "saved" / "state.json").write_text("[]")
    with pytest.raises(
        CorpusError, match="looks like a saved dataset, but `datasets` cannot read it"
    ):
        texts(tmp_path / "saved")


def test_dataset_on_disk(tmp_path: Path) -> None:
    dataset = datasets.Dataset.from_dict({"text": ["one", "two"], "other": [1, 2]})
    dataset.save_to_disk(str(tmp_path / "plain"))
    assert texts(tmp_path / "plain") == [("row:0", "one"), ("row:1", "two")]
    with pytest.raises(CorpusError, match="'other' is 1: it must be text"):
        texts(tmp_path / "plain", text_column="other")
    with pytest.raises(CorpusError, match=r"neither 'body' nor messages, .* only text, other"):
        texts(tmp_path / "plain", text_column="body")
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(str(tmp_path / "splits"))
    assert texts(tmp_path / "splits") == texts(tmp_path / "plain")
    assert open_corpus(str(tmp_path / "splits")).not_read == {"split test": 1}
    assert texts(tmp_path / "splits", split="test") == texts(tmp_path / "plain")
    with pytest.raises(
        CorpusError, match="no split 'validation': choose one with --split, train or test"
    ):
        texts(tmp_path / "splits", split="val")
    (tmp_path / "splits" / "dataset_dict.json").unlink()
    with pytest.raises(
        CorpusError,
        match=r"folder of saved datasets: give one of them, .*splits/test or .*splits/train",
    ):
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


RECORDS = [{"text": "one"}, {"messages": CONVERSATION}]
LINES = "\n".join(map(json.dumps, RECORDS))


@pytest.mark.parametrize(
    ("name", "content", "read"),
    [
        ("list.json", json.dumps(RECORDS), 2),
        ("list.json", json.dumps(RECORDS, indent=1), 2),
        ("lines.json", LINES, 2),
        ("LINES.JSON", "\n" + LINES, 2),
        ("wrapped.json", json.dumps({"version": 1, "data": RECORDS}), 2),
        ("one.json", json.dumps(RECORDS[1], indent=1), 1),
        ("breaks.json", LINES.replace("one", "a\u2028b\u2029c\u0085d"), 2),
        ("joined.jsonl", LINES.replace("\n", "\n\ufeff"), 2),
        ("joined.json", LINES.replace("\n", "\n\ufeff"), 2),
        ("lines.ndjson", LINES, 2),
        ("lines.JSONL", LINES, 2),
        ("table.csv", 'text,weight\none,2\n"a, ""b""\nc",\n', 2),
        ("table.tsv", "prompt\tcompletion\nQ\tA\n", 1),
    ],
)
def test_records_are_read_by_the_ending(tmp_path: Path, name: str, content: str, read: int) -> None:
    (tmp_path / name).write_text("\ufeff" + content, "utf-8")
    documents = list(open_corpus(str(tmp_path / name)).documents())
    assert len(documents) == read
    assert ("version" in documents[0].unused) == (name == "wrapped.json")
    assert not any("{" in (document.text or "") for document in documents)
    assert sum(document.source_bytes for document in documents) == pytest.approx(
        (tmp_path / name).stat().st_size, rel=0.05
    )
    assert [document.text for document in open_corpus(str(tmp_path), as_text=True).documents()] == [
        content
    ], "as asked for"


def test_cells_and_weights_of_a_table(tmp_path: Path) -> None:
    answer = json.dumps([{"role": "assistant", "content": "good"}]).replace('"', '""')
    (tmp_path / "s.csv").write_text('text,weight\none,2\n"a, ""b""\nc",\n', "utf-8")
    first, second = open_corpus(str(tmp_path / "s.csv")).documents()
    assert (first.text, first.weight, second.text, second.weight) == ("one", 2.0, 'a, "b"\nc', 1.0)
    (tmp_path / "t.csv").write_text(f'prompt,completion\n"[1] Q","{answer}"\n', "utf-8")
    (document,) = open_corpus(str(tmp_path / "t.csv")).documents()
    assert document.texts == ["[1] Q", "good"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("s.json", '["a"]', "record 1: it must be an object"),
        ("s.json", "3", "is a int: it must be a list of records"),
        ("s.json", '[{"text": "a"}', "not JSON"),
        ("s.json", LINES + "\n{", r"s\.json:3: not JSON"),
        (
            "s.json",
            '{"train": [{"text": "a"}], "test": [{"text": "b"}]}',
            "several lists of records, train, test",
        ),
        ("s.csv", 'text\n"a', "line 1: not CSV: unexpected end of data"),
        ("s.csv", "text,weight\na\n", "row 0: it must have 2 cells"),
        ("s.csv", "text,weight\na,b,c\n", "row 0: it must have 2 cells"),
        ("s.csv", "text,weight\na,heavy\n", "`weight` is 'heavy'"),
        (
            "s.csv",
            "prompt,completion,prompt\nQ,A,P\n",
            "has the columns prompt, completion, prompt: columns must have diff",
        ),
        (
            "s.csv",
            "prompt;completion\nQ;A\n",
            "has the columns prompt;completion: .* separated by commas",
        ),
        ("s.log", "text", r"read neither as records .* nor as text .* give --as-text"),
        ("notes", "text", r"read neither as records"),
    ],
)
def test_what_is_no_text_and_no_records_is_refused(
    tmp_path: Path, name: str, content: str, says: str
) -> None:
    (tmp_path / name).write_text(content, "utf-8")
    with pytest.raises(CorpusError, match=says):
        texts(tmp_path / name)


def test_a_folder_lists_what_it_does_not_read(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "data.jsonl", [{"text": "a"}])
    for name in (
        "README.md",
        "data.jsonl.bak",
        "notes",
        "dataset_infos.json",
        "LICENSE",
        "load.py",
        "story.md",
    ):
        (tmp_path / name).write_text("{}", "utf-8")
    corpus = open_corpus(str(tmp_path))
    assert [document.name for document in corpus.documents()] == ["data.jsonl:1", "story.md"]
    beside = {
        f"{name} beside records": 1
        for name in ("README.md", "LICENSE", "notes", ".json", ".py", ".bak")
    }
    assert corpus.not_read == beside
    manifest = prepare(corpus, tmp_path.parent / "out", tokenizer="bytes").manifest
    assert manifest.not_read == corpus.not_read
    assert "1 × LICENSE beside records, 1 × README.md beside records" in "\n".join(
        _particulars(manifest)
    )
    (tmp_path / "data.jsonl").unlink()
    assert [name for name, _ in texts(tmp_path)] == ["README.md", "load.py", "story.md"], (
        "texts alone"
    )
    for file in (*tmp_path.glob("*.md"), tmp_path / "load.py"):
        file.unlink()
    (tmp_path / "dataset_infos.json").unlink()
    with pytest.raises(
        CorpusError, match=r"without files to read; 1 × ending \.bak; 2 × no ending: put text"
    ):
        texts(tmp_path)


@pytest.mark.parametrize(
    ("files", "split", "read"),
    [
        (["data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"], None, [0]),
        (["data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"], "test", [1]),
        (["train/a.jsonl", "validation/a.jsonl", "dev/b.jsonl"], None, [0]),
        (["train/a.jsonl", "dev/b.jsonl", "validation/a.jsonl"], "val", [1, 2]),
        (["chats.jsonl", "chats_test.jsonl"], None, [0]),
        (["chats.jsonl", "contest.jsonl", "trained.jsonl"], None, [0, 1, 2]),
        (["test.jsonl"], None, [0]),
        (["train_data/test.jsonl", "train_data/train.jsonl"], None, [1]),
        (["a_test.jsonl", "b_test2.jsonl"], None, [0, 1]),
        (
            ["data/train_sft-00000-of-00003-a3.parquet", "data/train_gen-00000-of-00001.parquet"],
            "train_sft",
            [0],
        ),
        (["train_gen.jsonl", "train_sft-1.jsonl", "train_sft-2.jsonl"], "train_sft", [1, 2]),
        (
            ["data/test_sft/a.jsonl", "data/train_gen/a.jsonl", "data/train_sft/a.jsonl"],
            "train_sft",
            [2],
        ),
        (
            ["data/test_sft/a.jsonl", "data/train_gen/a.jsonl", "data/train_sft/a.jsonl"],
            "train",
            [1, 2],
        ),
        (["test_v2.jsonl", "train_1.jsonl", "train_2.jsonl"], None, [1, 2]),
        (["data/train-00000-of-00001.parquet", "data/train_sft-00000-of-00001.parquet"], None, [0]),
        (
            ["data/train.gen-00000-of-00001.parquet", "data/train.sft-00000-of-00001.parquet"],
            "train.sft",
            [1],
        ),
        (["data/de-00000-of-00001.parquet", "data/en-00000-of-00001.parquet"], "en", [1]),
        (["de-00000-of-00001.parquet", "en-00000-of-00001.parquet"], None, [0, 1]),
        (["train.jsonl", "holdout.jsonl", "predict-00000-of-00001.parquet"], None, [0]),
        (["holdout.jsonl", "test.jsonl"], "train", [0]),
        (["train.txt", "valid.txt", "test.txt", "my-test-file.txt"], None, [3, 0]),
        (["train.txt", "valid.txt", "dev/a.jsonl"], "validation", [2, 1]),
        (["dev.txt", "a.txt"], None, [1, 0]),
    ],
)
def test_files_of_one_split_are_read(
    tmp_path: Path, files: list[str], split: str | None, read: list[int]
) -> None:
    for number, name in enumerate(files):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True, parents=True)
        if file.suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.table({"text": [str(number)]}), file)
        elif file.suffix == ".txt":
            file.write_text(str(number), "utf-8")
        else:
            write_jsonl(file, [{"text": str(number)}])
    (tmp_path / "zz-test.txt").write_text("text files have no splits", "utf-8")
    corpus = open_corpus(str(tmp_path), split=split)
    assert [document.text for document in corpus.documents()][: len(read)] == [
        str(number) for number in read
    ]
    assert len(corpus.files) == len(read) + 1
    assert sum(corpus.not_read.values()) == len(files) - len(read)


@pytest.mark.parametrize("name", ["train_sft", "train.sft", "en", "valid", "sft_train", "test"])
def test_the_splits_of_shards_are_those_of_the_hub(tmp_path: Path, name: str) -> None:
    from datasets.data_files import DataFilesDict, get_data_patterns

    (tmp_path / "data").mkdir()
    for split in (name, "other"):
        write_jsonl(tmp_path / "data" / f"{split}-00000-of-00002-ab.jsonl", [{"text": split}])
    assert set(DataFilesDict.from_patterns(get_data_patterns(str(tmp_path)), str(tmp_path))) == {
        name,
        "other",
    }
    assert texts(tmp_path, split=name) == [(f"data/{name}-00000-of-00002-ab.jsonl:1", name)]
    assert texts(tmp_path / "data", split=name) == [(f"{name}-00000-of-00002-ab.jsonl:1", name)]


def test_splits_that_cannot_be_chosen_are_named(tmp_path: Path) -> None:
    parts = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "valid")}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    assert texts(tmp_path / "saved", split="valid") == [("row:0", "valid")], "by its own name"
    with pytest.raises(CorpusError, match="is one saved dataset; omit --split"):
        texts(tmp_path / "saved" / "train", split="valid")
    (tmp_path / "files").mkdir()
    for name in ("test.jsonl", "dev.jsonl"):
        write_jsonl(tmp_path / "files" / name, [{"text": "a"}])
    with pytest.raises(
        CorpusError, match="no split 'train': choose one with --split, test or validation"
    ):
        texts(tmp_path / "files")
    for name in ("train_sft-1.jsonl", "train_gen-1.jsonl"):
        write_jsonl(tmp_path / "files" / name, [{"text": "a"}])
    with pytest.raises(
        CorpusError,
        match="has train_gen and train_sft: choose one with --split; --split train reads all",
    ):
        texts(tmp_path / "files")
    with pytest.raises(
        CorpusError,
        match="no split 'sft': choose one with --split, test or train or train_gen or train_sft",
    ):
        texts(tmp_path / "files", split="sft")
    for source, as_text in ((tmp_path / "files" / "test.jsonl", False), (tmp_path / "files", True)):
        with pytest.raises(CorpusError, match=r"split 'test' cannot be chosen: .* omit --split"):
            open_corpus(str(source), split="test", as_text=as_text)


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    source, other = tmp_path / "source", tmp_path / "other"
    (source / "inner").mkdir(parents=True)
    other.mkdir()
    (other / "a.txt").write_text("a", "utf-8")
    (source / "inner" / "b.txt").write_text("b", "utf-8")
    (source / "linked").symlink_to(other)
    (source / "inner" / "up").symlink_to(source)
    (source / "again").symlink_to(source / "inner")
    (source / "c.txt").symlink_to(tmp_path / "nowhere.txt")
    corpus = open_corpus(str(source))
    assert sorted(document.text or "" for document in corpus.documents()) == ["a", "b"]
    assert corpus.not_read == {
        "link to a folder that is read already: again, inner/up": 2,
        "broken link: c.txt": 1,
    }


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    """Nor do stores of the text without it match."""
    (tmp_path / "s.txt").write_bytes(b"a")
    plain = open_corpus(str(tmp_path / "s.txt")).fingerprint()
    (tmp_path / "s.txt").write_bytes(b"\xef\xbb\xbfa")
    assert texts(tmp_path / "s.txt") == [("s.txt", "a")]
    assert open_corpus(str(tmp_path / "s.txt")).fingerprint() != plain


@pytest.mark.parametrize("name", ["s.jsonl", "s.json", "s.csv"])
def test_records_and_one_text_are_other_stores(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"text": "a"}\n' if name != "s.csv" else "text\na\n", "utf-8")
    assert (
        len(
            {
                open_corpus(str(tmp_path / name), as_text=as_text).fingerprint()
                for as_text in (False, True)
            }
        )
        == 2
    )


def test_a_file_named_like_one_of_a_saved_dataset_is_no_dataset(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "state.json").write_text('[{"text": "b"}]', "utf-8")
    assert [text for _, text in texts(tmp_path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"weight": ' + "9" * 5000 + "}", "a number has thousands of digits"),
        ("[" * 100_000, "it is nested too deeply"),
    ],
)
def test_json_that_python_does_not_read_is_named(tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / "s.jsonl").write_text(line, "utf-8")
    with pytest.raises(CorpusError, match=rf"s\.jsonl:1: not JSON that can be read: {says}"):
        list(open_corpus(str(tmp_path / "s.jsonl")).documents())


def test_file_names_that_are_not_utf8_can_be_stored(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / os.fsdecode(b"\xff.txt")).write_text("some text")
    prepare(open_corpus(str(source)), tmp_path / "out", tokenizer="bytes")
    assert Store.open(tmp_path / "out").name(0) == "\\xff.txt"


def test_the_folder_here_can_be_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no name beside which a pointer could lie. No source at all is a mistake."""
    (tmp_path / "a.txt").write_text("text", "utf-8")
    monkeypatch.chdir(tmp_path)
    assert [document.text for document in open_corpus(".").documents()] == ["text"]
    with pytest.raises(CorpusError, match=r"source is '': give `python-stdlib`, a file"):
        open_corpus("")

"""A source is read once, and is what it seems: links, copies, compressed files, leftovers of
writers, and pointers."""

import gzip
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow
import pytest

from longctx.cli import main
from longctx.data.records.corpus import CorpusError, SourceCounts
from longctx.data.records.pretrained import Pretrained
from longctx.data.records.sources import open_corpus
from longctx.data.records.tokenizer import Tokenizer, TokenizerError
from longctx.data.store.manifest import StoreError
from longctx.data.store.prepare import prepare
from longctx.data.store.store import Store
from longctx.errors import UserError
from longctx.model.checkpoint_files import CheckpointFiles
from tests.data.test_wild import IDS, megatron
from tests.data_cases import write_jsonl

POINTERS = {
    "git lfs pull": "version https://git-lfs.github.com/spec/v1\noid sha256:"
    + "a" * 64
    + "\nsize 123\n",
    "dvc pull": "outs:\n- md5: " + "a" * 32 + "\n  size: 123\n  path: a.jsonl\n",
    "git annex get": "/annex/objects/SHA256E-s123--" + "a" * 64 + ".jsonl\n",
    "git xet checkout": "# xet version 0\nfilesize = 123\nhash = '" + "a" * 64 + "'\n",
}


def zst(content: bytes) -> bytes:
    return bytes(pyarrow.Codec("zstd").compress(content, asbytes=True))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with a file of records, `a.jsonl`."""
    folder = tmp_path / "source"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    return folder


def read(source: Path, **options: bool) -> list[str]:
    return [document.text or "" for document in open_corpus(str(source), **options).documents()]


def packed(source: Path) -> None:
    (source / "a.jsonl.gz").write_bytes(gzip.compress((source / "a.jsonl").read_bytes()))
    (source / "a.jsonl.zst").write_bytes(zst((source / "a.jsonl").read_bytes()))


def packed_in_capitals(source: Path) -> None:
    (source / "a.jsonl.GZ").write_bytes(gzip.compress((source / "a.jsonl").read_bytes()))


def packed_elsewhere(source: Path) -> None:
    (source / "gz").mkdir()
    (source / "gz" / "a.jsonl.gz").write_bytes(gzip.compress((source / "a.jsonl").read_bytes()))


def put(name: str, content: bytes | None = None) -> Callable[[Path], None]:
    """Writes a file; without content, with other records than `a.jsonl`."""

    def write(source: Path) -> None:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(
            b'{"text": "of another version"}\n' if content is None else content
        )

    return write


def arrow_cache(source: Path) -> None:
    table = pyarrow.table({"text": ["one", "two"]})
    for name in ("cache-1b2c3d4e5f6a7b8c.arrow", "cache-1b2c3d4e_00000_of_00002.arrow"):
        with pyarrow.ipc.new_stream(str(source / name), table.schema) as writer:
            writer.write_table(table)


AGAIN: list[tuple[Callable[[Path], object], str, int]] = [
    (packed, "the same records, compressed: a.jsonl.gz, a.jsonl.zst", 2),
    (packed_in_capitals, "the same records, compressed: a.jsonl.GZ", 1),
    (
        put("$RECYCLE.BIN/b.jsonl"),
        "in a folder of what is not finished, or deleted: $RECYCLE.BIN/b.jsonl",
        1,
    ),
    (packed_elsewhere, "the same records, compressed: gz/a.jsonl.gz", 1),
    (
        lambda source: (source / "b.jsonl").symlink_to("a.jsonl"),
        "link to a file that is read already: b.jsonl",
        1,
    ),
    (
        lambda source: (source / "0.jsonl").symlink_to(source / "a.jsonl"),
        "link to a file that is read already: 0.jsonl",
        1,
    ),
    (
        lambda source: os.link(source / "a.jsonl", source / "b.jsonl"),
        "link to a file that is read already: b.jsonl",
        1,
    ),
    (
        lambda source: shutil.copy(source / "a.jsonl", source / "a (1).jsonl"),
        "copy of records that are read already: a.jsonl",
        1,
    ),
    (
        lambda source: (source / "0").symlink_to(source),
        "link to a folder that is read already: 0",
        1,
    ),
    (
        put("_temporary/0/task_1/part-0.jsonl"),
        "in a folder of what is not finished, or deleted: _temporary/0/task_1/part-0.jsonl",
        1,
    ),
    (
        put("b.partial/part-0.jsonl"),
        "in a folder of what is not finished, or deleted: b.partial/part-0.jsonl",
        1,
    ),
    (
        put("b.incomplete/part-0.jsonl"),
        "in a folder of what is not finished, or deleted: b.incomplete/part-0.jsonl",
        1,
    ),
    (put("a.tmp.jsonl"), "not finished, by the name: a.tmp.jsonl", 1),
    (put("a.jsonl.incomplete"), "not finished, by the name: a.jsonl.incomplete", 1),
    (put("a.jsonl.crdownload"), "not finished, by the name: a.jsonl.crdownload", 1),
    (put("a.jsonl.lock", b""), "not finished, by the name: a.jsonl.lock", 1),
    (put("_SUCCESS", b""), "no data but a note of a program: _SUCCESS", 1),
    (put("~$a.jsonl"), "no data but a note of a program: ~$a.jsonl", 1),
    (put("a.jsonl~"), "no data but a note of a program: a.jsonl~", 1),
    (
        arrow_cache,
        "cache of `datasets`: cache-1b2c3d4e5f6a7b8c.arrow, cache-1b2c3d4e_00000_of_00002.arrow",
        2,
    ),
    (put("tmpab12_x9z"), "cache of `datasets`: tmpab12_x9z", 1),
]


@pytest.mark.parametrize(
    ("add", "what", "count"), AGAIN, ids=[str(number) for number in range(len(AGAIN))]
)
def test_a_source_is_read_once_and_the_rest_is_told(
    source: Path, add: Callable[[Path], object], what: str, count: int
) -> None:
    alone = open_corpus(str(source)).fingerprint()
    add(source)
    corpus = open_corpus(str(source))
    assert [document.text for document in corpus.documents()] == ["one", "two"]
    assert corpus.not_read == {what: count}
    assert corpus.fingerprint() == alone or "copy" in what, "of what is read"


def test_texts_are_read_once_too(source: Path) -> None:
    """But two texts may be the same: empty ones of code, licences."""
    (source / "a.jsonl").unlink()
    for name in ("a.txt", "b.txt", "c.tmp.txt", "d.txt~"):
        (source / name).write_text("same", "utf-8")
    (source / "l.txt").symlink_to("a.txt")
    for options in ({}, {"as_text": True}):
        corpus, counts = open_corpus(str(source), **options), SourceCounts()
        assert [document.text for document in corpus.documents(counts)] == ["same", "same"]
        assert counts.noted == {"texts that are the same as another file, all read: b.txt": 1}


def test_the_data_set_of_a_folder_with_caches_is_the_same(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["one", "two"]}).save_to_disk(str(tmp_path / "saved"))
    alone = open_corpus(str(tmp_path / "saved")).fingerprint()
    arrow_cache(tmp_path / "saved")
    corpus = open_corpus(str(tmp_path / "saved"))
    assert corpus.fingerprint() == alone and list(corpus.not_read.values()) == [2]


def test_files_of_one_name_and_other_records_are_refused(source: Path) -> None:
    (source / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "older"}\n'))
    with pytest.raises(
        CorpusError,
        match=r"a\.jsonl\.gz and .*a\.jsonl have the same name but for the compression, and differ",
    ):
        read(source)
    (source / "de").mkdir()
    (source / "a.jsonl.gz").rename(source / "de" / "a.jsonl.gz")
    assert read(source) == ["one", "two", "older"], "of another folder"
    (source / "de" / "a.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(CorpusError, match="is damaged, or not compressed as its ending says"):
        read(source)


def test_of_two_formats_both_are_read_and_told(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (source / "a.csv").write_text("text\none\n", "utf-8")
    command = [
        "prepare",
        "--source",
        str(source),
        "--tokenizer",
        "bytes",
        "--out",
        str(source.parent / "store"),
    ]
    assert main(command) == 0
    told = capsys.readouterr().out
    assert (
        "noted      2 files that may hold the same records in two formats, all read: a.csv, a.jsonl"
        in told
    )
    (source / "a.txt").write_text("one\ntwo\n", "utf-8")
    assert list(open_corpus(str(source)).noted.values()) == [3]


def test_documents_of_megatron_are_copies_if_both_files_are(tmp_path: Path) -> None:
    """Others may have the same lengths."""
    for name, ids in (("a", IDS), ("b", IDS), ("c", IDS[::-1])):
        (tmp_path / name).mkdir()
        megatron(tmp_path / name, [[ids]])
    corpus = open_corpus(str(tmp_path))
    assert [
        document.ids.tolist() for document in corpus.documents() if document.ids is not None
    ] == [IDS, IDS[::-1]]
    assert list(corpus.not_read.values()) == [2]


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["_delta_log/00000.json", "part-0.parquet"], "Delta Lake"),
        (["t/_delta_log/00000.json", "t/part-0.parquet"], "Delta Lake"),
        ([".hoodie/hoodie.properties", "part-0.parquet"], "Hudi"),
        (["metadata/v1.metadata.json", "data/part-0.parquet"], "Iceberg"),
    ],
)
def test_tables_of_several_versions_are_refused(source: Path, names: list[str], kind: str) -> None:
    for name in names:
        put(name)(source)
    with pytest.raises(
        CorpusError,
        match=f"is a table of {kind}, of which only its log tells which files are current",
    ):
        read(source)


@pytest.mark.parametrize(
    ("names", "noted"),
    [
        (
            ["p-00000-of-00003.jsonl", "p-00002-of-00003.jsonl"],
            {"shards of p-*-of-00003.jsonl that are not there: 00001": 1},
        ),
        (["p-00001-of-00002.jsonl", "p-00002-of-00002.jsonl"], {}),
        (
            ["p-00000-of-00009.jsonl"],
            {"shards of p-*-of-00009.jsonl that are not there: 00001, 00002, 00003, ..": 8},
        ),
        ([f"a-{i:03d}-of-002-part-{k:03d}-of-002.jsonl" for i in (0, 1) for k in (0, 1)], {}),
        (["p-00000-of-00001_de.jsonl", "p-00000-of-00001_en.jsonl"], {}),
        (["a-00000-of-00001.jsonl", "b-00000-of-00002.jsonl", "b-00001-of-00002.jsonl"], {}),
    ],
)
def test_shards_that_are_missing_are_told(
    tmp_path: Path, names: list[str], noted: dict[str, int]
) -> None:
    for name in names:
        write_jsonl(tmp_path / name, [{"text": name}])
    corpus = open_corpus(str(tmp_path))
    assert len(list(corpus.documents())) == len(names) and corpus.noted == noted


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (
            ["p-00000-of-00001.jsonl", "p-00000-of-00002.jsonl"],
            r"has shards p-\*\.jsonl of 1 \(p-00000-of-00001\.jsonl\) and 2",
        ),
        (
            ["p-00000-of-00001-ab12cd.jsonl", "p-00000-of-00001-0123ef.jsonl"],
            "are the same shard in two versions: remove",
        ),
    ],
)
def test_shards_of_two_versions_are_refused(tmp_path: Path, names: list[str], says: str) -> None:
    for name in names:
        write_jsonl(tmp_path / name, [{"text": name}])
    with pytest.raises(CorpusError, match=says):
        read(tmp_path)


# --- pointers


ENDINGS = ["jsonl", "json", "csv", "parquet", "arrow", "jsonl.gz", "idx", "txt", "md", "py"]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("command", POINTERS)
def test_a_pointer_is_no_document(tmp_path: Path, ending: str, command: str) -> None:
    for number in range(2):
        (tmp_path / f"{number}.{ending}").write_text(POINTERS[command], "utf-8")
    with pytest.raises(
        CorpusError,
        match=rf"2 files are pointers of .*, not the data \(.*0\.{ending}, .*1\.{ending}\): "
        rf".*`{command}`",
    ):
        read(tmp_path)
    for options in ({}, {"as_text": True}):
        with pytest.raises(
            CorpusError, match=f"a file is a pointer of .*: get the data with `{command}`"
        ):
            open_corpus(str(tmp_path / f"0.{ending}"), **options)  # before anything is read


def test_one_pointer_among_data_is_refused(source: Path) -> None:
    (source / "b.jsonl").write_bytes(
        POINTERS["git lfs pull"].replace("\n", "\r\n").encode("utf-8-sig")
    )
    with pytest.raises(
        CorpusError,
        match=r"a file is a pointer of Git LFS, not the data \(.*b\.jsonl\): .*, or remove",
    ):
        read(source)
    (source / "b.jsonl").unlink()
    (source / "about.md").write_text("A pointer begins with\n" + POINTERS["git lfs pull"], "utf-8")
    assert len(read(source)) == 3, "a text on pointers is a text"


def test_a_pointer_beside_an_index_is_refused(source: Path) -> None:
    (source / "c.idx").write_bytes(b"MMIDIDX\x00\x00")
    (source / "c.bin").write_text(POINTERS["git lfs pull"], "utf-8")
    with pytest.raises(CorpusError, match=r"a file is a pointer of Git LFS, .*c\.bin"):
        open_corpus(str(source / "c.idx"))


def test_pointers_beside_their_data_are_no_data(source: Path) -> None:
    (source / "a.jsonl.dvc").write_text(POINTERS["dvc pull"], "utf-8")
    assert read(source) == ["one", "two"] and open_corpus(str(source)).not_read == {
        ".dvc beside records": 1
    }
    (source / "b.dvc").write_text(POINTERS["dvc pull"].replace("a.jsonl", "texts"), "utf-8")
    with pytest.raises(
        CorpusError,
        match=r"b\.dvc is a pointer of DVC, and .*texts is not there: get the data with `dvc pull`",
    ):
        read(source)
    for name in ("texts", "b.dvc"):
        with pytest.raises(CorpusError, match="is a pointer of DVC"):
            open_corpus(str(source / name.replace("texts", "b")))


def test_links_to_nothing_are_told(source: Path) -> None:
    (source / "b.jsonl").symlink_to("nowhere.jsonl")
    assert read(source) == ["one", "two"] and open_corpus(str(source)).not_read == {
        "broken link: b.jsonl": 1
    }
    with pytest.raises(
        CorpusError, match=r"b\.jsonl is a link to nowhere\.jsonl, which does not exist"
    ):
        read(source / "b.jsonl")
    (source / "b.jsonl").unlink()
    (source / "b.jsonl").symlink_to(
        ".git/annex/objects/SHA256E-s123--aa.jsonl/SHA256E-s123--aa.jsonl"
    )
    for place in (source, source / "b.jsonl"):
        with pytest.raises(
            CorpusError, match=r"a file is a pointer of git-annex, .*`git annex get`"
        ):
            read(place)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "model.safetensors", "config.json"]
)
def test_a_checkpoint_of_pointers_is_refused(
    checkpoints: dict[str, Path], tmp_path: Path, name: str
) -> None:
    shutil.copytree(checkpoints["SmolLM2"], tmp_path / "c")
    (tmp_path / "c" / "config.json").write_text("{}", "utf-8")
    (tmp_path / "c" / name).write_text(POINTERS["git lfs pull"], "utf-8")
    says = (
        rf"a file is a pointer of Git LFS, not the data \(.*{name}\): get the data with `git "
        r"lfs pull`"
    )
    with pytest.raises(UserError, match=says):
        CheckpointFiles.open(str(tmp_path / "c"))
    if name.startswith("tokenizer"):
        with pytest.raises(TokenizerError, match=says):
            Pretrained.load(str(tmp_path / "c"))
    if name == "tokenizer.json":
        with pytest.raises(TokenizerError, match=says):
            Tokenizer.load(tmp_path / "c" / name)


@pytest.mark.parametrize("name", ["manifest.json", "data-00000.arrow"])
def test_a_store_of_pointers_is_refused(source: Path, name: str) -> None:
    store = source.parent / "store"
    prepare(source, store, tokenizer="bytes")
    (store / name).write_text(POINTERS["git lfs pull"], "utf-8")
    with pytest.raises(
        StoreError,
        match=rf"store .*: a file is a pointer of Git LFS, not the data \(.*{name}\): get the data "
        r"with",
    ):
        Store.open(store)

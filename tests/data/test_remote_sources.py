"""Sources in object storage: the store is that of the same files on this machine, each byte is
read once, in ranges, and what goes wrong on the way is tried again or named."""

import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from longctx import checksums, remote
from longctx.cli import main
from longctx.config import load
from longctx.config.problems import ConfigError
from longctx.data.records import readers, slices
from longctx.data.records.corpus import CorpusError
from longctx.data.records.sources import open_corpus
from longctx.data.store.prepare import prepare
from longctx.data.store.store import Store
from longctx.paths import PathError, expanded, redacted
from longctx.remote import RemoteError, RemotePath, any_name, any_path
from tests.data.test_shares import written
from tests.marks import slow_unless
from tests.remote_cases import BUCKET, SECRET, Storage, put, s3_server, secrets_in, upload


@pytest.fixture(scope="module")
def server() -> Iterator[Storage]:
    with s3_server() as storage:
        yield storage


@pytest.fixture(autouse=True)
def quick(server: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    server.reset()
    monkeypatch.setattr(slices, "SLICE_BYTES", 2000)
    monkeypatch.setattr(remote, "BLOCK", 512)
    monkeypatch.setattr(readers, "PARQUET_BLOCK", 512)
    monkeypatch.setattr(remote, "WAITS_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)


def contents(store: Path) -> list[tuple[str, list[int], list[int]]]:
    """Returns name, tokens and labels of every document."""
    opened = Store.open(store)
    found = []
    for document, length in enumerate(opened.lengths.tolist()):
        tokens, labels = opened.read(document, 0, length)
        found.append((opened.name(document), tokens.tolist(), labels.tolist()))
    return found


def sources(folder: Path) -> Path:
    """Writes files of every kind that is read."""
    source = written(folder, 0)
    rows = [
        {"text": f"row {number} " * 30, "other": f"{number} x" * 10_000} for number in range(40)
    ]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, source / "e.parquet", compression="none", row_group_size=7)
    with pyarrow.ipc.new_stream(str(source / "f.arrow"), table.schema) as stream:
        stream.write_table(table)
    with pyarrow.CompressedOutputStream(str(source / "g.jsonl.gz"), "gzip") as file:
        file.write(b'{"text": "packed"}\n' * 9)
    (source / ".hidden.jsonl").write_text("not read")
    (source / "_temporary").mkdir()
    (source / "_temporary" / "h.jsonl").write_text("not read")
    return source


@pytest.mark.slow
def test_a_store_is_that_of_the_same_files_here(tmp_path: Path, server: Storage) -> None:
    source = sources(tmp_path / "source")
    upload(source, f"s3://{BUCKET}/all")
    here = prepare(str(source), tmp_path / "here", tokenizer="bytes", workers=1).manifest
    there = prepare(f"s3://{BUCKET}/all/", tmp_path / "there", tokenizer="bytes", workers=1)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    manifest = there.manifest
    assert manifest.source == f"s3://{BUCKET}/all"
    assert (manifest.not_read, manifest.noted) == (here.not_read, here.noted)
    assert not any("hidden" in path or "_temporary" in path for path in server.sent)
    for name in ("a.jsonl", "c.jsonl"):
        size = (source / name).stat().st_size
        spans = max(1, size // 2000)
        assert size <= server.sent[f"all/{name}"] <= size + spans * (512 + 200)
    # Of a table, the column that is not read stays where it is; each span reads the footer, of
    # which pyarrow asks for 64 KiB.
    size = (source / "e.parquet").stat().st_size
    footers = size // 2000 * (64 << 10)
    assert server.sent["all/e.parquet"] - footers < size / 2
    server.reset()
    again = prepare(f"s3://{BUCKET}/all", tmp_path / "there", tokenizer="bytes")
    assert not again.made
    assert not {"all/a.jsonl", "all/e.parquet", "all/f.arrow"} & server.sent.keys()


@pytest.mark.parametrize("what", slow_unless(lambda what: what == "503", ["slow", "503", "cut"]))
def test_faults_that_pass_change_nothing(tmp_path: Path, server: Storage, what: str) -> None:
    source = written(tmp_path / "source", 0, records=20)
    upload(source, f"s3://{BUCKET}/{what}")
    prepare(str(source), tmp_path / "here", tokenizer="bytes", workers=1)
    server.every(7, what)
    prepare(f"s3://{BUCKET}/{what}", tmp_path / "there", tokenizer="bytes", workers=1)
    assert server.faults > 1
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


def test_a_fault_that_stays_is_told(tmp_path: Path, server: Storage) -> None:
    upload(written(tmp_path / "source", 0, records=5), f"s3://{BUCKET}/down")
    corpus = open_corpus(f"s3://{BUCKET}/down")
    server.every(1, "503")
    with pytest.raises(
        RemoteError, match=r"s3://bucket/down/a\.jsonl cannot be read .*Service Unavailable"
    ):
        prepare(corpus, tmp_path / "there", tokenizer="bytes", workers=1)


@pytest.mark.parametrize("keeps_size", [False, True])
def test_an_object_that_changes_is_named(tmp_path: Path, server: Storage, keeps_size: bool) -> None:
    source = written(tmp_path / "source", 0, records=20)
    address = f"s3://{BUCKET}/changed-{keeps_size}"
    upload(source, address)

    def changing(stage: str, done: float) -> None:
        if stage == "tokenizing":
            text = (source / "c.jsonl").read_text("utf-8")
            changed = text.replace("abc", "xyz") if keeps_size else text[: len(text) // 3]
            (tmp_path / "new").mkdir(exist_ok=True)
            (tmp_path / "new" / "c.jsonl").write_text(changed, "utf-8")
            upload(tmp_path / "new", address)

    with pytest.raises(RemoteError, match=r"c\.jsonl changed while it was read: run the command"):
        prepare(address, tmp_path / "there", tokenizer="bytes", workers=1, progress=changing)


@pytest.mark.slow
def test_processes_read_their_own_slices(tmp_path: Path, server: Storage) -> None:
    source = written(tmp_path / "source", 1)
    upload(source, f"s3://{BUCKET}/shared")
    prepare(f"s3://{BUCKET}/shared", tmp_path / "one", tokenizer="bytes", workers=1)
    server.reset()
    prepare(f"s3://{BUCKET}/shared", tmp_path / "two", tokenizer="bytes", workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    first, second = (tmp_path / name / "manifest.json" for name in ("one", "two"))
    assert first.read_bytes() == second.read_bytes()
    heads = [request for request in server.requests if request.startswith("HEAD")]
    assert sum(server.requests[head] for head in heads) < 120


def test_keys_stand_nowhere(
    tmp_path: Path, server: Storage, capsys: pytest.CaptureFixture[str]
) -> None:
    upload(written(tmp_path / "source", 0, records=5), f"s3://{BUCKET}/keys")
    out = tmp_path / "out"
    words = ["prepare", "--source", f"s3://{BUCKET}/keys", "--tokenizer", "bytes"]
    words += ["--workers", "1"]
    assert main([*words, "--out", str(out)]) == 0
    server.every(1, "503")
    assert main([*words, "--out", str(tmp_path / "failed")]) == 2
    said = capsys.readouterr()
    assert SECRET not in said.out + said.err and "s3://bucket/keys" in said.err
    assert secrets_in(tmp_path) == []
    for address in (f"s3://key:{SECRET}@bucket/x", f"s3://bucket/x?token={SECRET}"):
        with pytest.raises(SystemExit):
            main(["prepare", "--source", address])
        said = capsys.readouterr()
        assert SECRET not in said.out + said.err and "***" in said.err
        for call in (any_path, expanded, open_corpus):
            with pytest.raises(PathError) as error:
                call(address)
            assert SECRET not in str(error.value)
        with pytest.raises(ConfigError) as refused:
            load(None, [f"train.run_dir={address}"])
        assert SECRET not in str(refused.value)


def test_what_a_storage_says_has_no_keys(server: Storage) -> None:
    def fails(_: Any) -> None:
        raise OSError(f"no answer from https://me:{SECRET}@host/x?X-Signature={SECRET}")

    with pytest.raises(RemoteError, match=r"no answer from https://\*\*\*@host") as error:
        RemotePath(f"s3://{BUCKET}/x").ask(fails)
    assert SECRET not in str(error.value) and error.value.__cause__ is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("gs://bucket/x", "gs:// needs the package gcsfs, .*pip install gcsfs"),
        ("s3://", "names no bucket"),
        ("https://host/x", "https://"),
        ("ftp://host/x", "ftp://"),
        ("file://host/x", "another machine"),
    ],
)
def test_what_nothing_here_reads_is_refused(given: str, words: str) -> None:
    with pytest.raises(PathError, match=words):
        any_name(given)
    with pytest.raises(PathError):
        open_corpus(given)


def test_addresses_of_files_are_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert any_name("file:///a/b") == expanded("file:///a/b") == expanded("file:/a/b") == "/a/b"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert any_path("~/a") == tmp_path / "a"
    assert redacted("see https://a:b@c/d?e=f, and x@y?") == "see https://***@c/d?*** and x@y?"


def test_what_is_not_there_is_told(tmp_path: Path, server: Storage) -> None:
    with pytest.raises(CorpusError, match="s3://bucket/nothing' does not exist"):
        open_corpus(f"s3://{BUCKET}/nothing")
    upload(written(tmp_path / "source", 0, records=3), f"s3://{BUCKET}/one")
    one = open_corpus(f"s3://{BUCKET}/one/a.jsonl")
    assert [str(file) for file in one.files] == [f"s3://{BUCKET}/one/a.jsonl"]
    (tmp_path / "saved").mkdir()
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / "saved" / name).write_text("{}")
    upload(tmp_path / "saved", f"s3://{BUCKET}/saved")
    with pytest.raises(CorpusError, match="copy it there, or give Parquet files"):
        open_corpus(f"s3://{BUCKET}/saved")


def test_a_remote_path_is_no_path_of_this_machine(server: Storage, tmp_path: Path) -> None:
    path = RemotePath(f"s3://{BUCKET}/x/y.txt")
    assert str(path.parent / "z") == f"s3://{BUCKET}/x/z"
    assert str(path.relative_to(path.parent)) == "y.txt"
    calls: list[Any] = [path.mkdir, path.touch, path.unlink, path.read_bytes, path.rmdir]
    calls += [lambda: os.stat(path), lambda: path.open("w"), lambda: path.write_text("x")]
    calls.append(path.lstat)
    for call in calls:
        with pytest.raises((RemoteError, FileNotFoundError)):
            call()
    assert list(tmp_path.iterdir()) == []
    upload_text(f"{BUCKET}/x/y.txt", "åbc\n" * 400)
    again = pickle.loads(pickle.dumps(path))
    assert again == path and str(again) == str(path)
    with path.open("rb") as stream:
        draw = random.Random(0)
        whole = ("åbc\n" * 400).encode()
        for _ in range(30):
            start = draw.randint(0, len(whole) + 5)
            count = draw.randint(0, 700)
            assert stream.seek(start) == start
            assert stream.read(count) == whole[start : start + count]
    assert path.read_text("utf-8") == "åbc\n" * 400


def upload_text(key: str, text: str) -> None:
    put(f"s3://{key}", text.encode())


def test_keys_with_empty_names_are_refused(server: Storage) -> None:
    upload_text(f"{BUCKET}/odd//a.jsonl", json.dumps({"text": "x"}))
    with pytest.raises(RemoteError, match=r"odd//a\.jsonl has an empty name"):
        open_corpus(f"s3://{BUCKET}/odd")


def test_longctx_runs_without_the_packages(tmp_path: Path) -> None:
    code = """
import sys
for name in ("fsspec", "s3fs", "ray"):
    sys.modules[name] = None
import longctx, longctx.errors, longctx.remote, longctx.data.store.store, longctx.commands.prepare
from longctx.data.records.sources import open_corpus
try:
    open_corpus("s3://bucket/x")
except longctx.errors.UserError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "s3:// needs the package s3fs" in done.stdout


def test_waits_are_those_of_all_reads() -> None:
    assert checksums.WAITS_S[-1] > 1

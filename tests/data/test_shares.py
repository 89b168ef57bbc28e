"""Shares: the store is the same, bit for bit, whoever makes its slices, and however often one is
killed."""

import errno
import fcntl
import io
import itertools
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.cli import main
from longctx.data.records import slices
from longctx.data.records.corpus import CorpusError
from longctx.data.records.readers import READERS, read_span
from longctx.data.records.slices import Slice, joined_digests, lines_in, slices_of
from longctx.data.records.sources import open_corpus
from longctx.data.store import folder, shares, writer
from longctx.data.store.manifest import Manifest, StoreError
from longctx.data.store.prepare import _identity, prepare, prepare_share
from longctx.data.store.request import StoreRequest
from longctx.data.store.shares import Share
from longctx.data.store.store import Store
from tests.data_cases import CONVERSATION
from tests.marks import examples

RUN = """
import sys
from longctx.data.records import slices
slices.SLICE_BYTES = 2000
from longctx.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""The command with small slices."""


def written(source: Path, seed: int, records: int = 60) -> Path:
    """Writes a source of several kinds of files, of which JSON Lines and Parquet are cut."""
    draw = random.Random(seed)
    source.mkdir()
    for name in ("a.jsonl", "c.jsonl"):
        lines = []
        for number in range(records):
            text = "abcdé "[: draw.randint(1, 6)] * draw.randint(0, 40)
            record: dict[str, Any] = {"text": text, "id": number}
            if number % 7 == 3:
                record = {"messages": CONVERSATION}
            lines.append(json.dumps(record, ensure_ascii=number % 2 == 0) + "\n" * (number % 3 > 0))
            if number % 3 == 0:
                lines.append("\n")
        (source / name).write_text("".join(lines), "utf-8")
    for number in range(5):
        (source / f"b{number}.txt").write_text("text " * draw.randint(0, 300), "utf-8")
    rows = pyarrow.table({"text": ["row " * draw.randint(1, 60) for _ in range(80)]})
    pyarrow.parquet.write_table(
        rows, source / "e.parquet", row_group_size=draw.choice([1, 7, 50]), compression="none"
    )
    (source / "bad.md").write_bytes(b"\xff\xfe\x00")
    (source / "d.csv").write_text("text\n" + "row\n" * 20, "utf-8")
    return source


def content(store: Path) -> dict[str, bytes]:
    files = [file for file in store.rglob("*") if file.is_file()]
    return {str(file.relative_to(store)): file.read_bytes() for file in files}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_BYTES", 2000)


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.binary(max_size=6).map(lambda line: line.replace(b"\n", b"x")), max_size=12),
    st.lists(st.integers(0, 90), max_size=6),
    st.booleans(),
)
def test_every_line_is_in_one_span(lines: list[bytes], cuts: list[int], ends: bool) -> None:
    whole = b"\n".join(lines) + b"\n" * ends
    stops = sorted({*(cut for cut in cuts if 0 < cut < len(whole)), len(whole)})
    found = []
    start = 0
    for stop in stops:
        found += lines_in(io.BytesIO(whole), start, stop)
        start = stop
    assert found == list(io.BytesIO(whole))


@settings(max_examples=examples(40), deadline=None)
@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=9),
    cuts=st.lists(st.integers(0, 9000), max_size=6),
    dictionary=st.booleans(),
)
def test_every_row_group_is_in_one_span(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], cuts: list[int], dictionary: bool
) -> None:
    """Rows have the names that they have in the whole file."""
    file = tmp_path_factory.mktemp("groups") / "t.parquet"
    schema = pyarrow.schema({"other": pyarrow.int64(), "text": pyarrow.string()})
    first = 0
    with pyarrow.parquet.ParquetWriter(file, schema, use_dictionary=dictionary) as writer:
        for size in sizes:
            numbers = list(range(first, first + size))
            texts = [f"row {number}" for number in numbers]
            writer.write_table(pyarrow.table({"other": numbers, "text": texts}, schema))
            first += size
    whole = [(record.values, record.name) for record in READERS[".parquet"](file, "t", "text")]
    assert [values["text"] for values, _ in whole] == [f"row {n}" for n in range(first)]
    end = file.stat().st_size
    stops = sorted({*(cut for cut in cuts if 0 < cut < end), end})
    found = []
    for start, stop in itertools.pairwise([0, *stops]):
        part = list(read_span(file, "t", "text", start=start, stop=stop))
        found += [(record.values, record.name) for record in part]
    assert found == whole
    if len(sizes) > 2:
        offset = pyarrow.parquet.ParquetFile(file).metadata.row_group(1).column(0)
        begin = offset.dictionary_page_offset or offset.data_page_offset
        parts = [list(read_span(file, "t", "text", start=0, stop=begin + more)) for more in (0, 1)]
        assert [len(part) for part in parts] == [sizes[0], sizes[0] + sizes[1]]


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9000), st.booleans()), max_size=8), st.booleans())
def test_slices_hold_every_byte_once(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[tuple[int, bool]], cut: bool
) -> None:
    folder = tmp_path_factory.mktemp("files")
    files = []
    for number, (size, is_lines) in enumerate(sizes):
        file = folder / f"{number}.{'jsonl' if is_lines else 'txt'}"
        file.write_bytes(bytes(size))
        files.append(file)
    found = slices_of(files, cut=cut)
    spans: dict[Path, list[tuple[int, int]]] = {}
    for part in found:
        assert part.bytes < 2 * 2000 or not part.is_span
        for file in part.files:
            whole = (0, file.stat().st_size)
            spans.setdefault(file, []).append((part.start, part.stop) if part.is_span else whole)
    assert list(spans) == files
    for file, its in spans.items():
        assert [start for start, _ in its] == [0, *(stop for _, stop in its[:-1])]
        assert its[-1][1] == file.stat().st_size
        assert len(its) == 1 or (cut and file.suffix == ".jsonl")


@pytest.mark.parametrize("seed", range(3))
def test_a_store_of_slices_is_that_of_one_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """But for names of documents after a cut, and the ends of parts."""
    source = written(tmp_path / "source", seed)
    made = prepare(str(source), tmp_path / "slices", tokenizer="bytes").manifest
    monkeypatch.setattr(slices, "SLICE_BYTES", 1 << 30)
    whole = prepare(str(source), tmp_path / "whole", tokenizer="bytes").manifest
    assert len(open_corpus(str(source)).slices) == 1
    store = Store.open(tmp_path / "slices")
    expected = Store.open(tmp_path / "whole")
    assert len([name for name in made.files if name.endswith(".arrow")]) >= 8
    assert store.lengths.tolist() == expected.lengths.tolist()
    assert store.trained_tokens.tolist() == expected.trained_tokens.tolist()
    for document, length in enumerate(expected.lengths.tolist()):
        tokens, labels = store.read(document, 0, length)
        same_tokens, same_labels = expected.read(document, 0, length)
        assert np.array_equal(tokens, same_tokens) and np.array_equal(labels, same_labels)
    other = ("files", "checksums", "fingerprint", "request", "longest_name")
    for name, value in vars(whole).items():
        assert name in other or getattr(made, name) == value, name
    plain = [name.partition(":")[0].partition("@")[0] for name in store.names]
    assert plain == [name.partition(":")[0] for name in expected.names]


@pytest.mark.parametrize("seed", range(4))
def test_shares_make_the_same_store(tmp_path: Path, seed: int) -> None:
    source = written(tmp_path / "source", seed)
    prepare(str(source), tmp_path / "expected", tokenizer="bytes")
    count = 1 + seed
    joined = []
    for number in random.Random(seed).sample(range(1, count + 1), count):
        made = prepare_share(
            str(source), tmp_path / "out", Share(number, count), tokenizer="bytes", workers=1
        )
        joined.append(made is not None and made.made)
    assert joined == [True] + [False] * (count - 1), "the first one makes what nobody has begun"
    assert content(tmp_path / "out") == content(tmp_path / "expected")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["expected", "out", "source"]


def test_a_share_leaves_what_another_one_is_making(tmp_path: Path) -> None:
    source = written(tmp_path / "source", 0)
    prepare(str(source), tmp_path / "expected", tokenizer="bytes")
    out = tmp_path / "out"
    partial = tmp_path / "out.partial"
    count = len(open_corpus(str(source)).slices)
    made = None

    def begun(stage: str, done: float) -> None:
        nonlocal made
        if stage == "tokenizing" and made is None:
            made = (partial / "slice-00002.lock").open("wb")
            fcntl.flock(made, fcntl.LOCK_EX)

    assert (
        prepare_share(str(source), out, Share(1, 2), tokenizer="bytes", workers=1, progress=begun)
        is None
    )
    notes = sorted(file.name for file in partial.glob("slice-*.json"))
    assert notes == [f"slice-{each:05d}.json" for each in range(count) if each != 2]
    assert made is not None
    made.close()
    last = prepare_share(str(source), out, Share(2, 2), tokenizer="bytes", workers=1)
    assert last is not None and last.made
    assert content(out) == content(tmp_path / "expected")


def test_parts_of_an_interrupted_slice_are_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PART_TOKENS", 200)
    monkeypatch.setattr(writer, "BATCH_DOCUMENTS", 2)
    source = written(tmp_path / "source", 0)
    prepare(str(source), tmp_path / "expected", tokenizer="bytes", workers=1)
    partial = tmp_path / "out.partial"

    def stopped(stage: str, done: float) -> None:
        if (partial / "data-00001-00001.arrow").is_file():
            raise KeyboardInterrupt

    share = Share(1, 1)
    with pytest.raises(KeyboardInterrupt):
        prepare_share(
            str(source), tmp_path / "out", share, tokenizer="bytes", workers=1, progress=stopped
        )
    kept = (partial / "data-00001-00000.arrow").stat()
    again = prepare_share(str(source), tmp_path / "out", share, tokenizer="bytes", workers=1)
    assert again is not None
    after = (tmp_path / "out" / "data-00001-00000.arrow").stat()
    assert (kept.st_ino, kept.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert content(tmp_path / "out") == content(tmp_path / "expected")


def killed_shares(tmp_path: Path, seed: int) -> None:
    """Starts shares of a trained tokenizer's store, kills some, and compares what comes of it."""
    draw = random.Random(seed)
    source = written(tmp_path / "source", seed, records=200)
    arguments = [sys.executable, "-c", RUN, "prepare", "--source", str(source)]
    arguments += ["--tokenizer", "bpe", "--vocab-size", "300"]
    expected = [*arguments, "--out", str(tmp_path / "expected")]
    subprocess.run(expected, check=True, stdout=subprocess.DEVNULL, timeout=120)
    out = tmp_path / "out"
    count = draw.randint(2, 3)
    workers = str(draw.randint(1, 2))
    for attempt in range(20):
        running = []
        for number in range(1, count + 1):
            share = ["--out", str(out), "--share", f"{number}/{count}", "--workers", workers]
            running.append(subprocess.Popen([*arguments, *share], stdout=subprocess.DEVNULL))
        time.sleep(draw.uniform(0.5, 4.0))
        victims = [] if attempt > 3 else draw.sample(running, draw.randint(1, count))
        for process in victims:
            process.kill()
        codes = [process.wait(timeout=120) for process in running]
        assert all(
            code == 0 or process in victims for code, process in zip(codes, running, strict=True)
        )
        if (out / "manifest.json").is_file():
            break
    assert content(out) == content(tmp_path / "expected")


def test_killed_shares_lose_and_double_nothing(tmp_path: Path) -> None:
    killed_shares(tmp_path, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 24))
def test_many_killed_shares_lose_and_double_nothing(tmp_path: Path, seed: int) -> None:
    killed_shares(tmp_path, seed)


def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    source = written(tmp_path / "source", 0, records=20_000)
    arguments = ["prepare", "--source", str(source), "--tokenizer", "bytes", "--workers", "2"]
    command = [sys.executable, "-c", RUN, *arguments, "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def children() -> set[int]:
        listed = subprocess.run(
            ["pgrep", "-f", "longctx.data.store.shares", "-P", str(process.pid)],
            capture_output=True,
            text=True,
        )
        return set(map(int, listed.stdout.split()))

    began = time.monotonic()
    while len(found := children()) < 2:
        assert time.monotonic() - began < 60
        time.sleep(0.05)
    process.kill()
    process.wait()
    while any(Path(f"/proc/{child}/stat").is_file() for child in found):
        assert time.monotonic() - began < 60
        time.sleep(0.05)


def test_an_error_in_a_process_is_said_as_ever(tmp_path: Path) -> None:
    source = written(tmp_path / "source", 0)
    with (source / "c.jsonl").open("a", encoding="utf-8") as stream:
        stream.write('{"text": 3}\n')
    with pytest.raises(CorpusError, match=r"c\.jsonl@\d+:\d+: .*text"):
        prepare(str(source), tmp_path / "out", tokenizer="bytes", workers=2)
    assert not (tmp_path / "out.partial").exists()


def test_a_process_that_is_killed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = written(tmp_path / "source", 0)
    started = []
    popen = subprocess.Popen

    def killed(*arguments: Any, **options: Any) -> Any:
        process = popen(*arguments, **options)
        started.append(process)
        if len(started) == 1:
            process.send_signal(signal.SIGSTOP)
            process.kill()
        return process

    monkeypatch.setattr(shares.subprocess, "Popen", killed)
    monkeypatch.setattr(shares.pickle, "dump", lambda *_: None)
    with pytest.raises(StoreError, match=r"ended with status -9: run the command again"):
        prepare(str(source), tmp_path / "out", tokenizer="bytes", workers=2)
    assert all(process.poll() is not None for process in started)


def test_a_file_that_changes_while_it_is_read_is_told(tmp_path: Path) -> None:
    source = written(tmp_path / "source", 0)

    def changing(stage: str, done: float) -> None:
        os.utime(source / "a.jsonl", (1, 1))

    with pytest.raises(CorpusError, match=r"a\.jsonl changed while it was read: run the command"):
        prepare(str(source), tmp_path / "out", tokenizer="bytes", workers=1, progress=changing)


def test_what_was_made_of_a_file_that_has_changed_is_made_again(tmp_path: Path) -> None:
    source = written(tmp_path / "source", 0)
    out = tmp_path / "out"

    def stopped(stage: str, done: float) -> None:
        if (tmp_path / "out.partial" / "slice-00003.json").is_file():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(str(source), out, tokenizer="bytes", workers=1, progress=stopped)
    text = (source / "a.jsonl").read_text("utf-8")
    (source / "a.jsonl").write_text(text.replace("abc", "xyz"), "utf-8")
    os.utime(source / "a.jsonl", (1, 1))
    held = os.open(tmp_path / "out.partial", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_SH)  # another share is at work there
    with pytest.raises(StoreError, match="of another source or other settings than this share's"):
        prepare_share(str(source), out, Share(1, 2), tokenizer="bytes", workers=1)
    os.close(held)
    prepare(str(source), out, tokenizer="bytes", workers=1)
    prepare(str(source), tmp_path / "expected", tokenizer="bytes", workers=1)
    assert content(out) == content(tmp_path / "expected")


def test_a_share_waits_for_no_other_kind_of_preparation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "WAIT_S", 0.0)
    source = written(tmp_path / "source", 0)
    (tmp_path / "out.partial").mkdir()
    held = os.open(tmp_path / "out.partial", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(StoreError, match=r"another process is preparing .*, and not as a share"):
        prepare_share(str(source), tmp_path / "out", Share(1, 2), tokenizer="bytes")
    with pytest.raises(StoreError, match="another process is preparing"):
        prepare(str(source), tmp_path / "out", tokenizer="bytes")
    os.close(held)


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(StoreError, match=r"has no locks .*: choose an --out on another one"):
        prepare(str(written(tmp_path / "source", 0)), tmp_path / "out", tokenizer="bytes")


def test_a_late_share_reads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = written(tmp_path / "source", 0)
    made = prepare(str(source), tmp_path / "out", tokenizer="bytes").manifest
    monkeypatch.setattr(Slice, "digest", None)  # reading would fail
    command = ["prepare", "--source", str(source), "--tokenizer", "bytes"]
    command += ["--out", str(tmp_path / "out"), "--share", "2/3"]
    assert main(command) == 0
    assert "up to date" in capsys.readouterr().out
    assert Manifest.load(tmp_path / "out") == made
    with pytest.raises(StoreError, match="holds a store of another source or other settings"):
        prepare_share(str(source), tmp_path / "out", Share(1, 1), tokenizer="bpe")
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("share", ["0/3", "4/3", "3", "a/b", "1/0", "-1/2", "1 /2", ""])
def test_what_is_no_share_is_refused(share: str) -> None:
    with pytest.raises(StoreError, match=r"share is .*: must be K/N, share K of N"):
        Share.parse(share)


def test_all_shares_together_begin_everywhere() -> None:
    assert Share.parse("3/64") == Share(3, 64)
    for count in (1, 2, 3, 7):
        firsts = [Share(number, count).order(7)[0] for number in range(1, count + 1)]
        assert firsts == list(range(count))
        for number in range(1, count + 1):
            assert sorted(Share(number, count).order(7)) == list(range(7))
    assert Share(9, 9).order(3)[0] == 0


def test_digests_of_spans_are_of_their_bytes(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(bytes(range(256)) * 20)
    spans = slices_of([file], cut=True)
    first = [{"a": part.digest(file)} for part in spans]
    whole = joined_digests(first)
    for place in (0, 1999, 2000, 5119):
        changed = bytearray(bytes(range(256)) * 20)
        changed[place] ^= 1
        file.write_bytes(changed)
        assert joined_digests([{"a": part.digest(file)} for part in spans]) != whole
    file.write_bytes(bytes(range(256)) * 20)
    assert joined_digests([{"a": part.digest(file)} for part in spans]) == whole


def test_files_that_look_like_notes_stay(tmp_path: Path) -> None:
    """Only those that were made with the store are removed."""
    source = written(tmp_path / "source", 0)
    out = tmp_path / "out"
    prepare(str(source), out, tokenizer="bytes")
    (out / "uv.lock").write_text("mine", "utf-8")
    made = prepare_share(
        str(source), out, Share(1, 1), tokenizer="bpe", vocab_size=300, overwrite=True
    )
    assert made is not None and made.made and made.stays == ("uv.lock",)
    assert (out / "uv.lock").read_text("utf-8") == "mine"
    (out / "slice-00000.json").write_text("mine", "utf-8")
    with pytest.raises(StoreError, match=r"slice-00000\.json is not listed in manifest\.json"):
        prepare_share(str(source), out, Share(1, 1), tokenizer="bytes", overwrite=True)


def test_a_share_whose_folder_is_gone_is_done(tmp_path: Path) -> None:
    """Others put the store in place as soon as the last slice is finished."""
    with shares.lock(tmp_path / "out.partial" / "join.lock") as is_held:
        assert not is_held


def test_an_unfinished_share_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = written(tmp_path / "source", 0)
    monkeypatch.setattr(shares.Preparation, "finished", lambda _: None)
    command = ["prepare", "--source", str(source), "--tokenizer", "bytes"]
    command += ["--out", str(tmp_path / "out"), "--share", "2/3"]
    assert main(command) == 0
    assert "share 2/3 is finished, and others are not yet" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["made"] is False


def test_a_request_travels_without_what_it_has_loaded(tmp_path: Path) -> None:
    """Tokenizers and templates may not be pickled, and are loaded where they are needed."""
    source = open_corpus(str(written(tmp_path / "source", 0)))
    request = StoreRequest(source, tokenizer="bytes", train_on="last")
    assert request.given is not None and "given" in vars(request)
    again = pickle.loads(pickle.dumps(request))
    assert again == request and "given" not in vars(again)
    assert again.digest("source") == request.digest("source")


def test_a_store_has_the_files_that_it_lists(tmp_path: Path) -> None:
    """No note of how it was made stays, whoever made it."""
    source = written(tmp_path / "source", 0)
    prepare(str(source), tmp_path / "one", tokenizer="bytes", workers=1)
    prepare_share(str(source), tmp_path / "two", Share(1, 1), tokenizer="bytes", workers=1)
    for out in (tmp_path / "one", tmp_path / "two"):
        assert set(content(out)) == {"manifest.json", *Manifest.load(out).files}


def test_one_share_makes_the_tokenizer(tmp_path: Path) -> None:
    """The others wait for it, and go on once it is there or its maker is gone."""
    source = written(tmp_path / "source", 0)
    out = tmp_path / "out"
    partial = tmp_path / "out.partial"
    partial.mkdir()
    request = StoreRequest(open_corpus(str(source)), tokenizer="bpe", vocab_size=300)
    (partial / "request").write_text(folder._noted(_identity(request)), "utf-8")
    other = os.open(partial, os.O_RDONLY)  # another share, which makes the tokenizer
    fcntl.flock(other, fcntl.LOCK_SH)
    held = (partial / "tokenizer.json.lock").open("wb")
    fcntl.flock(held, fcntl.LOCK_EX)
    made: list[Any] = []

    def share() -> None:
        made.append(
            prepare_share(str(source), out, Share(1, 1), tokenizer="bpe", vocab_size=300, workers=1)
        )

    beside = threading.Thread(target=share)
    beside.start()
    beside.join(1.0)
    names = {file.name for file in partial.iterdir()}
    assert beside.is_alive() and not {"tokenizer.json", "tokenizer.json.unfinished"} & names
    held.close()
    beside.join(60)
    os.close(other)
    assert made[0] is not None and made[0].made

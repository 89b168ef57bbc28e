"""Stores in object storage: read through a cache, they are those on this machine, also with faults,
and the cache stays within its bound."""

import json
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longctx import checksums, remote
from longctx.checksums import sealed
from longctx.cli import main
from longctx.config import load
from longctx.data.loader import read_step
from longctx.data.mixture import make_steps
from longctx.data.pieces import Piece
from longctx.data.store import cache as caches
from longctx.data.store import index, mapped, writer
from longctx.data.store.cache import Cache
from longctx.data.store.held_out import held_out
from longctx.data.store.manifest import Manifest, StoreError
from longctx.data.store.prepare import prepare
from longctx.data.store.store import Store
from longctx.data.store.upload import UNFINISHED, upload
from longctx.planning.planners.planner import make_plan
from longctx.remote import RemoteError, any_path
from longctx.training.data import RunData
from tests.data.test_shares import written
from tests.data_cases import PROFILE
from tests.remote_cases import BUCKET, Storage, put, s3_server
from tests.remote_cases import upload as put_all

CHUNK = 2048


@pytest.fixture(scope="module")
def server() -> Iterator[Storage]:
    with s3_server() as storage:
        yield storage


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (checksums, mapped, caches):
            patch.setattr(module, "CHUNK", CHUNK)
        patch.setattr(writer, "BATCH_DOCUMENTS", 7)
        patch.setattr(writer, "PART_TOKENS", 3000)
        patch.setattr(remote, "WAITS_S", (0.0, 0.0, 0.0))
        patch.setattr("s3fs.S3FileSystem.retries", 1)
        yield


@pytest.fixture(autouse=True)
def sound(server: Storage) -> None:
    server.reset()


@pytest.fixture(scope="module")
def made(small: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of texts and conversations, some with weights."""
    tmp_path = tmp_path_factory.mktemp("made")
    source = written(tmp_path / "source", 0, records=30)
    lines = [json.dumps({"text": "abc " * 50, "weight": 0.5 + n}) + "\n" for n in range(9)]
    (source / "w.jsonl").write_text("".join(lines), "utf-8")
    ids = {"input_ids": [1, 2, 3, 4, 5], "weights": [0, 1, 0.5, 2, 1]}
    (source / "x.jsonl").write_text(f"{json.dumps(ids)}\n" * 12, "utf-8")
    prepare(str(source), tmp_path / "here", tokenizer="bytes", workers=1)
    return tmp_path / "here"


@pytest.fixture
def here(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "here"))


def assert_same(store: Store, expected: Store, step: int = 1) -> None:
    assert store.lengths.tolist() == expected.lengths.tolist()
    assert store.trained_tokens.tolist() == expected.trained_tokens.tolist()
    assert store.weights.tolist() == expected.weights.tolist()
    assert (store.weighted, store.fingerprint) == (expected.weighted, expected.fingerprint)
    for document in range(0, len(expected), step):
        length = int(expected.lengths[document])
        assert store.name(document) == expected.name(document)
        for got, wanted in zip(
            store.read(document, 0, length), expected.read(document, 0, length), strict=True
        ):
            assert got.tolist() == wanted.tolist()
        weights, same = (each.token_weights(document, 0, length) for each in (store, expected))
        assert (weights is None) == (same is None)
        assert weights is None or weights.tolist() == same.tolist()


def test_a_store_is_the_same_far_away(tmp_path: Path, here: Path, server: Storage) -> None:
    expected = Store.open(here)
    parts = len(expected.manifest.checksums_of_parts)
    assert parts > 3 and expected.weighted and len(set(expected.weights.tolist())) > 3
    address = f"s3://{BUCKET}/store"
    put_all(here, address)
    server.reset()
    cache = Cache(tmp_path / "cache", 1.0)
    store = Store.open(address, cache=cache)
    assert not any(path.endswith(".arrow") for path in server.sent)
    assert_same(store, expected)
    arrows = sum(its for path, its in server.sent.items() if path.endswith(".arrow"))
    size = sum(expected.manifest.files[name] for name in expected.manifest.checksums_of_parts)
    assert (
        arrows == size == sum(file.stat().st_size for file in (tmp_path / "cache/pieces").iterdir())
    )
    assert cache.fetched_bytes >= size and cache.used_bytes >= size
    server.reset()
    again = Store.open(address, cache=Cache(tmp_path / "cache", 1.0))
    assert_same(again, expected, step=3)
    assert not any(path.endswith((".arrow", ".npy")) for path in server.sent)


def test_documents_are_held_out_far_away(tmp_path: Path, here: Path, server: Storage) -> None:
    """By the index alone; that of an earlier store lacks the hashes of names."""
    expected = held_out(Store.open(here).names, 0.3)
    assert 0 < expected.sum() < len(expected)
    put_all(here, f"s3://{BUCKET}/apart")
    cache = Cache(tmp_path / "cache", 1.0)
    server.reset()
    store = Store.open(f"s3://{BUCKET}/apart", cache=cache)
    assert store.held_out(0, 0.3)(slice(None)).tolist() == expected.tolist()
    settings = {"global_tokens": 1, "seed": 0, "max_length": 1 << 20, "held_out_share": 0.3}
    steps = make_steps(store, **settings)
    taken = {steps.step(cursor)[0][0].document for cursor in range(steps.pieces)}
    assert taken == set(np.flatnonzero(~expected).tolist())
    assert not any(path.endswith(".arrow") for path in server.sent)
    old = tmp_path / "old"
    shutil.copytree(here, old)
    without(old, [index.NAMES, index.GROUPS_FILE])
    assert Store.open(old).held_out(0, 0.3)(slice(None)).tolist() == expected.tolist()
    put_all(old, f"s3://{BUCKET}/before")
    earlier = Store.open(f"s3://{BUCKET}/before", cache=cache)
    with pytest.raises(StoreError, match=r"set eval\.store and data\.held_out 0, or copy it"):
        make_steps(earlier, **settings)


def test_a_bounded_cache_gives_the_same(tmp_path: Path, here: Path, server: Storage) -> None:
    expected = Store.open(here)
    put_all(here, f"s3://{BUCKET}/bounded")
    most = 5 * CHUNK
    cache = Cache(tmp_path / "cache", most / 2**30)
    store = Store.open(f"s3://{BUCKET}/bounded", cache=cache)
    for _ in range(2):
        for document in range(0, len(expected), 5):
            length = int(expected.lengths[document])
            assert store.read(document, 0, length)[0].tolist() == (
                expected.read(document, 0, length)[0].tolist()
            )
            pieces = list((tmp_path / "cache/pieces").iterdir())
            assert sum(file.stat().st_size for file in pieces) <= most
    assert cache.fetched_bytes > most


def test_what_was_used_last_stays(tmp_path: Path, server: Storage) -> None:
    content = bytes(range(256)) * (4 * CHUNK // 256)
    parts = [bytes([number]) * CHUNK for number in range(6)]
    whole = b"".join(parts)
    path: Any = any_path(f"s3://{BUCKET}/pieces")
    put(str(path), whole)
    sums = checksums.checksums_of(whole)
    cache = Cache(tmp_path / "cache", 4 * CHUNK / 2**30)
    cache.make()

    def get(number: int) -> int:
        before = cache.fetched_bytes
        checksum = sums[number * 32 : (number + 1) * 32]
        piece = cache.piece(path, number, size=len(whole), checksum=checksum)
        assert piece == parts[number]
        return cache.fetched_bytes - before

    assert [get(number) for number in (0, 1, 2, 3)] == [CHUNK] * 4
    assert get(0) == 0
    assert get(4) == CHUNK
    assert get(0) == 0, "it was used lately"
    assert get(1) == CHUNK, "it was not"
    place = tmp_path / "cache/pieces" / sums[:32]
    place.write_bytes(content[:CHUNK])
    assert get(0) == CHUNK and place.read_bytes() == parts[0], "damage on the disk is mended"


@pytest.mark.parametrize("what", ["slow", "503", "cut"])
def test_faults_that_pass_change_nothing(
    tmp_path: Path, here: Path, server: Storage, what: str
) -> None:
    address = f"s3://{BUCKET}/{what}"
    put_all(here, address)
    server.every(5, what)
    store = Store.open(address, cache=Cache(tmp_path / "cache", 1.0))
    store.fetch(range(len(store)))
    assert_same(store, Store.open(here), step=4)
    assert server.faults > 1


def test_damage_far_away_is_told(tmp_path: Path, here: Path, server: Storage) -> None:
    address = f"s3://{BUCKET}/damaged"
    put_all(here, address)
    store = Store.open(address, cache=Cache(tmp_path / "cache", 1.0))
    part = sorted(store.manifest.checksums_of_parts)[1]
    content = bytearray((here / part).read_bytes())
    content[-CHUNK // 2] ^= 1
    target: Any = any_path(address) / part
    put(str(target), bytes(content))
    wrong = f"{part} does not match its checksums between bytes"
    with pytest.raises(StoreError, match=wrong):
        store.fetch(range(len(store)))
    put(str(target), bytes(content[:-CHUNK]))
    with pytest.raises(StoreError, match=f"{part} has .* bytes, but should have"):
        Store.open(address, cache=Cache(tmp_path / "cache", 1.0))
    target.remove()
    with pytest.raises(RemoteError, match="changed while it was read"):
        store.fetch(range(len(store)))


def test_few_parts_are_mapped_at_a_time(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "MOST_MAPS", 2)
    store = Store.open(here)
    assert_same(store, Store.open(here), step=3)
    parts: Any = store._documents[0]._parts
    assert len(parts.names) > 2 >= len(parts._open)


def test_threads_fetch_a_piece_once(tmp_path: Path, here: Path, server: Storage) -> None:
    address = f"s3://{BUCKET}/threads"
    put_all(here, address)
    server.reset()
    server.fault = lambda path: "slow" if "data-00000" in path else ""
    stores = [Store.open(address, cache=Cache(tmp_path / "cache", 1.0)) for _ in range(4)]
    threads = [threading.Thread(target=store.fetch, args=(range(25),)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    part = sorted(stores[0].manifest.checksums_of_parts)[0]
    assert server.sent[f"threads/{part}"] <= (here / part).stat().st_size


def test_a_rank_fetches_what_it_holds(tmp_path: Path, server: Storage) -> None:
    address = f"s3://{BUCKET}/ranks"
    source = written(tmp_path / "source", 0, records=10)
    prepare(str(source), tmp_path / "plain", tokenizer="bytes", workers=1)
    put_all(tmp_path / "plain", address)
    expected = Store.open(tmp_path / "plain")
    numbers = (0, len(expected) - 1)
    chosen = [Piece(number, 0, int(expected.lengths[number])) for number in numbers]
    lengths = [piece.length for piece in chosen]
    plan = make_plan(
        lengths, ranks=2, tokens_per_rank=max(lengths), profile=PROFILE, degree=1, mode="static"
    )
    sent = []
    for rank in range(2):
        server.reset()
        store = Store.open(address, cache=Cache(tmp_path / f"cache-{rank}", 1.0))
        batch = read_step(store, chosen, plan, rank)
        sent.append({path for path in server.sent if path.endswith(".arrow")})
        assert len(sent[-1]) == 1
        assert list(batch.documents) == list(map(expected.name, numbers))
    assert sent[0] != sent[1]


def test_an_upload_goes_on(tmp_path: Path, here: Path, server: Storage) -> None:
    address = f"s3://{BUCKET}/again"
    there: Any = any_path(address)
    manifest = Manifest.load(here)
    names = sorted(manifest.files)
    put(str(there / UNFINISHED), (here / "manifest.json").read_bytes())
    put(str(there / names[0]), (here / names[0]).read_bytes())
    server.reset()
    with pytest.raises(StoreError, match=r"there is no store|has no manifest"):
        Store.open(address, cache=Cache(tmp_path / "cache", 1.0))
    assert upload(here, address)
    assert server.requests[f"PUT again/{names[0]}"] == 0
    assert all(server.requests[f"PUT again/{name}"] == 1 for name in names[1:])
    assert not (there / UNFINISHED).exists()
    put(f"s3://{BUCKET}/stale/{names[0]}", bytes(manifest.files[names[0]]))
    assert upload(here, f"s3://{BUCKET}/stale")
    assert_same(
        Store.open(f"s3://{BUCKET}/stale", cache=Cache(tmp_path / "c", 1.0)), Store.open(here)
    )
    shutil.copytree(here, tmp_path / "other")
    content = json.loads((here / "manifest.json").read_text())
    del content["checksum"]
    (tmp_path / "other/manifest.json").write_text(json.dumps(sealed({**content, "source": "z"})))
    with pytest.raises(StoreError, match="holds another store: choose another address"):
        upload(tmp_path / "other", address)
    assert upload(tmp_path / "other", address, overwrite=True)
    assert Store.open(address, cache=Cache(tmp_path / "cache", 1.0)).manifest.source == "z"
    with pytest.raises(StoreError, match="is a path of this machine"):
        upload(here, tmp_path / "folder")


def test_files_of_the_same_size_are_not_those_of_another_store(
    tmp_path: Path, here: Path, server: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload over another store is interrupted, and goes on: what lies there of the other one
    has the same names and sizes."""
    address = f"s3://{BUCKET}/over"
    there: Any = any_path(address)
    names = sorted(Manifest.load(here).files)
    for name in (*names, "manifest.json"):
        content = (here / name).read_bytes()
        if name != "manifest.json":
            content = content[::-1]
        put(str(there / name), content)
    put(str(there / "manifest.json"), b"{}")
    own = remote.RemotePath.put

    def ends(path: remote.RemotePath, file: Path) -> None:
        if file.name == names[1]:
            raise KeyboardInterrupt
        own(path, file)

    with monkeypatch.context() as patch:
        patch.setattr(remote.RemotePath, "put", ends)
        with pytest.raises(KeyboardInterrupt):
            upload(here, address, overwrite=True)
    assert upload(here, address)
    assert_same(Store.open(address, cache=Cache(tmp_path / "c", 1.0)), Store.open(here))
    for name in names:
        assert (there / name).read_bytes() == (here / name).read_bytes(), name


def test_a_cached_index_that_is_damaged_is_fetched_again(
    tmp_path: Path, here: Path, server: Storage
) -> None:
    """It has the same size."""
    address = f"s3://{BUCKET}/index"
    upload(here, address)
    cache = Cache(tmp_path / "cache", 1.0)
    expected = Store.open(address, cache=cache).lengths.tolist()
    (copy,) = (tmp_path / "cache" / "files").glob("*lengths.npy")
    content = copy.read_bytes()
    copy.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert Store.open(address, cache=cache).lengths.tolist() == expected
    assert copy.read_bytes() == content


def test_prepare_uploads(
    tmp_path: Path, server: Storage, capsys: pytest.CaptureFixture[str]
) -> None:
    source = written(tmp_path / "source", 0, records=5)
    out = str(tmp_path / "out")
    words = ["prepare", "--source", str(source), "--tokenizer", "bytes", "--out", out]
    assert main([*words, "--upload", str(tmp_path)]) == 2
    assert not Path(out).exists()
    assert main([*words, "--upload", f"s3://{BUCKET}/cli"]) == 0
    assert f"s3://{BUCKET}/cli: uploaded" in capsys.readouterr().out
    assert main([*words, "--upload", f"s3://{BUCKET}/cli"]) == 0
    assert f"s3://{BUCKET}/cli: up to date" in capsys.readouterr().out
    config = load(None, [f"data.store=s3://{BUCKET}/cli", f"data.cache_dir={tmp_path / 'c'}"])
    assert str(config.data.paths[0]) == f"s3://{BUCKET}/cli"
    assert_same(RunData.open(config).store, Store.open(out))


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match=r"cache .* cannot be written .*data\.cache_dir"):
        Cache(tmp_path / "file", 1.0).make()


def without(store: Path, names: Sequence[str]) -> None:
    """Removes files of a store, as if it had been made before there were any."""
    content = json.loads((store / "manifest.json").read_text())
    del content["checksum"]
    for name in names:
        (store / name).unlink(missing_ok=True)
        content["files"].pop(name, None)
        content["checksums"].pop(name, None)
    (store / "manifest.json").write_text(json.dumps(sealed(content)))


def test_a_store_without_index_is_read_here_only(
    tmp_path: Path, here: Path, server: Storage
) -> None:
    expected = Store.open(here)
    old = tmp_path / "old"
    shutil.copytree(here, old)
    without(old, index.INDEX)
    assert_same(Store.open(old), expected)
    put_all(old, f"s3://{BUCKET}/old")
    with pytest.raises(StoreError, match="prepare it again, or copy it to a folder"):
        Store.open(f"s3://{BUCKET}/old", cache=Cache(tmp_path / "cache", 1.0))


def test_an_index_of_other_documents_is_told(here: Path) -> None:
    lengths = np.load(here / index.LENGTHS)
    lengths[[0, 1]] = lengths[[1, 0]]
    assert lengths[0] != lengths[1]
    np.save(here / index.LENGTHS, lengths)
    content = json.loads((here / "manifest.json").read_text())
    del content["checksum"]
    content["checksums"][index.LENGTHS] = checksums.checksums(here / index.LENGTHS)
    (here / "manifest.json").write_text(json.dumps(sealed(content)))
    with pytest.raises(StoreError, match="is not as long as its index says"):
        Store.open(here).read(0, 0, 1)

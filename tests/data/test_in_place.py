"""Files of tokens that Megatron or datatrove wrote are stores where they are."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longctx import checksums
from longctx.cli import main
from longctx.data.mixture import make_steps
from longctx.data.records.readers import CorpusError
from longctx.data.store import cache, in_place, mapped
from longctx.data.store.cache import Cache
from longctx.data.store.in_place import prepare_in_place
from longctx.data.store.manifest import StoreError
from longctx.data.store.prepare import prepare
from longctx.data.store.store import Store
from longctx.data.store.upload import upload
from tests.data.test_wild import megatron
from tests.remote_cases import BUCKET, s3_server

CHUNK = 64
LENGTHS = (5, 0, 1, 130, 17, 64, 3, 2, 90, 7)


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (checksums, mapped, cache, in_place):
            patch.setattr(module, "CHUNK", CHUNK)
        patch.setattr(in_place, "BLOCK", 50)
        yield


def documents(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 257, length).tolist() for length in lengths]


def by_megatron(
    folder: Path, given: Sequence[Sequence[int]], name: str = "a", width: int = 2
) -> Path:
    """Writes documents, every third of which has two sequences."""
    folder.mkdir(exist_ok=True)
    kind, code = {2: ("<u2", 8), 4: ("<i4", 4), 8: ("<i8", 5)}[width]
    sequences = [
        [tokens[:2], tokens[2:]] if number % 3 == 2 else [tokens]
        for number, tokens in enumerate(given)
    ]
    index = megatron(folder, sequences, kind, code)
    for ending in (".idx", ".bin"):
        index.with_suffix(ending).rename(folder / f"{name}{ending}")
    return folder / f"{name}.bin"


def by_datatrove(
    folder: Path, given: Sequence[Sequence[int]], name: str = "b", width: int = 2
) -> Path:
    folder.mkdir(exist_ok=True)
    kind = {2: "<u2", 4: "<u4"}[width]
    file = folder / f"{name}.ds"
    file.write_bytes(b"".join(np.array(tokens, kind).tobytes() for tokens in given))
    ends = np.cumsum([len(tokens) for tokens in given], dtype="<u8")
    (folder / f"{name}.ds.index").write_bytes(ends.tobytes())
    (folder / f"{name}.ds.metadata").write_text("gpt2|2\n1\n1 T")
    return file


def assert_reads(store: Store, wanted: Sequence[Sequence[int]]) -> None:
    assert store.lengths.tolist() == [len(tokens) for tokens in wanted]
    assert store.trained_tokens.tolist() == [len(tokens) - 1 for tokens in wanted]
    assert store.weights.tolist() == [1.0] * len(wanted)
    for document, tokens in enumerate(wanted):
        read, labels = store.read(document, 0, len(tokens))
        assert read.tolist() == tokens
        assert labels.tolist() == [*tokens[1:], -100]
        middle = len(tokens) // 2
        assert store.tokens(document, middle, len(tokens))[0].tolist() == tokens[middle:]
    assert len(set(store.names)) == len(wanted)
    assert [store.name(number) for number in range(len(wanted))] == list(store.names)


@pytest.mark.parametrize("width", [2, 4])
def test_files_of_both_are_read_where_they_are(tmp_path: Path, width: int) -> None:
    folder = tmp_path / "tokens"
    first, second, third = documents(LENGTHS), documents((3, 200), 1), documents((9,), 2)
    files = [
        by_megatron(folder, first, width=width),
        by_datatrove(folder, second, width=width),
        by_megatron(folder, third, "c"),
    ]
    before = [(file.read_bytes(), file.stat().st_mtime_ns) for file in files]
    prepared = prepare_in_place(folder, "bytes")
    assert prepared.made and prepared.manifest.documents == 12
    assert prepared.manifest.empty_documents == 1
    store = Store.open(folder)
    assert_reads(store, [tokens for tokens in (*first, *second, *third) if tokens])
    assert list(store.names)[8:] == ["a.bin:8", "b.ds:0", "b.ds:1", "c.bin:0"]
    assert [(file.read_bytes(), file.stat().st_mtime_ns) for file in files] == before
    assert not prepare_in_place(folder, "bytes").made
    assert main(["prepare", "--source", str(folder), "--tokenizer", "bytes", "--in-place"]) == 0
    half = store.held_out(0, 0.5)
    wanted = [half(np.array([number]))[0] for number in range(len(store))]
    assert 0 < sum(wanted) < len(store)


@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=12).filter(any),
    width=st.sampled_from([2, 4]),
    is_megatron=st.booleans(),
)
def test_any_lengths_are_read(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], width: int, is_megatron: bool
) -> None:
    folder = tmp_path_factory.mktemp("tokens")
    wanted = documents(lengths)
    write = by_megatron if is_megatron else by_datatrove
    file = write(folder, wanted, width=width)
    prepare_in_place(file, "bytes")
    assert_reads(Store.open(folder), [tokens for tokens in wanted if tokens])


def test_a_step_is_that_of_a_copy(tmp_path: Path) -> None:
    file = by_megatron(tmp_path / "tokens", documents(LENGTHS))
    copied = prepare(file.with_suffix(".idx"), tmp_path / "copy", tokenizer="bytes").manifest
    manifest = prepare_in_place(file, "bytes").manifest
    assert (manifest.documents, manifest.tokens) == (copied.documents, copied.tokens)
    assert manifest.trained_tokens == copied.trained_tokens
    steps = []
    for folder in (file.parent, tmp_path / "copy"):
        store = Store.open(folder)
        sampler = make_steps(store, global_tokens=100, seed=3, max_length=64)
        steps.append([sampler.step(0)[0], sampler.step(2)[0]])
    assert steps[0] == steps[1]


def test_damage_is_found(tmp_path: Path) -> None:
    file = by_datatrove(tmp_path, documents(LENGTHS))
    prepare_in_place(tmp_path, "bytes")
    content = bytearray(file.read_bytes())
    content[300] ^= 1
    file.write_bytes(content)
    with pytest.raises(StoreError, match=r"b\.ds does not match its checksums"):
        Store.open(tmp_path)
    file.write_bytes(content[:-2])
    with pytest.raises(StoreError, match=r"b\.ds has 636 bytes, but should have 638"):
        Store.open(tmp_path)


def test_files_of_others_stay(tmp_path: Path) -> None:
    file = by_datatrove(tmp_path, documents(LENGTHS))
    (tmp_path / "tokenizer.json").write_text("mine")
    with pytest.raises(StoreError, match=r"tokenizer\.json is not of a store"):
        prepare_in_place(tmp_path, "bytes")
    assert (tmp_path / "tokenizer.json").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "b.ds",
        "b.ds.index",
        "b.ds.metadata",
        "tokenizer.json",
    ]
    (tmp_path / "tokenizer.json").unlink()
    prepare_in_place(tmp_path, "bytes")
    by_datatrove(tmp_path, documents((4, 5)), name="c")
    with pytest.raises(StoreError, match="holds a store of another source"):
        prepare_in_place(tmp_path, "bytes")
    assert prepare_in_place(tmp_path, "bytes", overwrite=True).manifest.documents == 11
    assert len(Store.open(tmp_path)) == 11
    source = tmp_path.with_name(f"{tmp_path.name}.txt")
    source.write_text("other")
    prepare(source, tmp_path, tokenizer="bytes", overwrite=True)
    assert file.exists() and len(Store.open(tmp_path)) == 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: (folder / "b.ds.index").unlink(), "cannot be read in place"),
        (lambda folder: (folder / "b.ds").write_bytes(bytes(7)), "index is of 319 tokens, but it"),
        (lambda folder: (folder / "b.ds.loss").write_bytes(b"\1" * 319), "mask of the loss"),
        (lambda folder: (folder / "b.ds").write_bytes(b"\xff" * 638), "b.ds has token 65535, but"),
        (lambda folder: by_megatron(folder, documents((5,)), width=8), "its tokens are int64"),
        (lambda folder: by_megatron(folder, [[1] * 4]).write_bytes(bytes(6)), "end after the 6"),
        (lambda folder: by_megatron(folder, [[1] * 4]).write_bytes(bytes(9)), "end at byte 8 of 9"),
        (
            lambda folder: (folder / "b.ds.index").write_bytes(
                np.array([9, 5, 319], "<u8").tobytes()
            ),
            "its documents are not in order",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, change: object, says: str) -> None:
    by_datatrove(tmp_path, documents(LENGTHS))
    change(tmp_path)
    with pytest.raises(CorpusError, match=says):
        prepare_in_place(tmp_path, "bytes")
    assert not (tmp_path / "manifest.json").exists()


def test_no_token_is_above_the_vocabulary(tmp_path: Path) -> None:
    by_datatrove(tmp_path, [[0, 256, 1]])
    assert prepare_in_place(tmp_path, "bytes").manifest.vocab_size == 257
    by_datatrove(tmp_path, [[0, 257, 1]])
    with pytest.raises(CorpusError, match=r"has token 257, but its tokenizer has 257 tokens"):
        prepare_in_place(tmp_path, "bytes", overwrite=True)


def test_documents_apart_are_refused(tmp_path: Path) -> None:
    file = by_megatron(tmp_path, documents((4, 6)))
    index = bytearray(file.with_suffix(".idx").read_bytes())
    starts = 34 + 2 * 4
    index[starts : starts + 16] = np.array([0, 0], "<i8").tobytes()
    file.with_suffix(".idx").write_bytes(index)
    with pytest.raises(CorpusError, match="do not lie one behind the other"):
        prepare_in_place(file, "bytes")


def test_other_boundaries_are_another_store(tmp_path: Path) -> None:
    by_datatrove(tmp_path, documents((4, 6)))
    first = prepare_in_place(tmp_path, "bytes").manifest
    np.array([5, 10], "<u8").tofile(tmp_path / "b.ds.index")
    with pytest.raises(StoreError, match="holds a store of another source"):
        prepare_in_place(tmp_path, "bytes")
    second = prepare_in_place(tmp_path, "bytes", overwrite=True).manifest
    assert Store.open(tmp_path).lengths.tolist() == [5, 5]
    assert first.fingerprint != second.fingerprint, "a run must not resume on it"


@pytest.mark.parametrize("moved", [0, 3])
def test_an_interrupted_call_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: int
) -> None:
    by_datatrove(tmp_path, documents(LENGTHS))
    move = Path.rename
    names = []

    def stop(self: Path, target: Path) -> Path:
        if len(names) == moved:
            raise KeyboardInterrupt
        names.append(target.name)
        return move(self, target)

    monkeypatch.setattr(Path, "rename", stop)
    with pytest.raises(KeyboardInterrupt):
        prepare_in_place(tmp_path, "bytes")
    monkeypatch.undo()
    with pytest.raises(StoreError, match=r"is damaged.* --overwrite"):
        prepare_in_place(tmp_path, "bytes")
    prepare_in_place(tmp_path, "bytes", overwrite=True)
    assert_reads(Store.open(tmp_path), [tokens for tokens in documents(LENGTHS) if tokens])


def test_a_folder_without_tokens_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"abc")
    with pytest.raises(CorpusError, match=r"has no document in NAME\.bin with NAME\.idx"):
        prepare_in_place(tmp_path, "bytes")


def test_options_that_do_not_go_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by_datatrove(tmp_path, documents(LENGTHS))
    command = ["prepare", "--source", str(tmp_path), "--in-place"]
    assert main([*command, "--out", str(tmp_path / "out")]) != 0
    assert "--in-place makes the store in the source's folder" in capsys.readouterr().err
    bytes_too = [*command, "--tokenizer", "bytes"]
    assert main([*bytes_too, "--max-documents", "1", "--split=test", "--workers=2"]) != 0
    assert "as they are: omit --split, --max-documents\n" in capsys.readouterr().err
    assert main([*bytes_too, "--upload", str(tmp_path / "out")]) != 0
    assert "is a path of this machine" in capsys.readouterr().err
    assert not (tmp_path / "manifest.json").exists(), "refused before anything is made"
    assert main(command) != 0
    assert "name the tokenizer" in capsys.readouterr().err


def test_it_is_the_same_in_object_storage(tmp_path: Path) -> None:
    by_datatrove(tmp_path / "tokens", documents(LENGTHS))
    prepare_in_place(tmp_path / "tokens", "bytes")
    with s3_server():
        upload(tmp_path / "tokens", f"s3://{BUCKET}/in-place")
        store = Store.open(f"s3://{BUCKET}/in-place", cache=Cache(tmp_path / "cache", 1.0))
        assert_reads(store, [tokens for tokens in documents(LENGTHS) if tokens])

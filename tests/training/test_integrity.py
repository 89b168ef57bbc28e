"""Nothing damaged is used, and nothing is executed: checksums of stores and checkpoints, and what
is read without them."""

import errno
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from longctx import checksums
from longctx.checksums import SummedFile
from longctx.cli import main
from longctx.config import load
from longctx.data.store import mapped
from longctx.data.store.manifest import Manifest, StoreError
from longctx.data.store.store import Store
from longctx.training.metrics import MetricsLog, mean_speed
from longctx.training.saved import checkpoint, saving
from longctx.training.saved.checkpoint import NoCheckpoint, SavedWeights
from longctx.training.saved.checkpoint_io import CheckpointError
from longctx.training.saved.run_folder import RunFolderError, open_run_folder
from tests.data_cases import byte_store
from tests.faults import evidence as faults
from tests.training_cases import SMALL, make_store, pretend_checkpoints, train_and_save
from tests.workers import Workers

ONE_RANK = "batch.tokens_per_rank=750"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return byte_store(tmp_path, [20, 300, 1000, 5], conversations=2).path


@pytest.fixture(scope="module")
def trained(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A store, and a run of three checkpoints; tests that change one put it back."""
    folder = tmp_path_factory.mktemp("trained")
    store = make_store(folder)
    workers.run(
        train_and_save, 1, store, folder / "run", ["train.steps=3", "checkpoint.every=1", ONE_RANK]
    )
    return store, folder / "run"


def folder_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:06d}"


@pytest.fixture
def changed() -> Any:
    """`changed(file, content)` writes a file; afterwards it has its old content again."""
    before: dict[Path, bytes] = {}

    def write(file: Path, content: bytes) -> None:
        before.setdefault(file, file.read_bytes())
        file.write_bytes(content)

    yield write
    for file, content in before.items():
        file.write_bytes(content)


Changed = Callable[[Path, bytes], None]


def flip(file: Path) -> bytes:
    """The content of a file with one bit changed, in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    return bytes(content)


def resealed(folder: Path, **changes: Any) -> bytes:
    """The `state.json` with `changes`, which its own checksum does not show."""
    state = checksums.unsealed(json.loads((folder / "state.json").read_text()))
    return json.dumps(checksums.sealed({**state, **changes})).encode()


def reseal(store: Path, arrow: Path) -> None:
    """Makes the manifest fit a changed file."""
    manifest = Manifest.load(store)
    manifest.checksums[arrow.name] = checksums.checksums(arrow)
    manifest.save(store)


# --- single bits


@pytest.mark.parametrize("count", [20, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("small", [mapped.SMALL, 0])
def test_every_bit_that_flips_in_a_store_is_noticed(
    store: Path, monkeypatch: pytest.MonkeyPatch, count: int, small: int
) -> None:
    """Also where files are verified only in the parts that are read."""
    monkeypatch.setattr(mapped, "SMALL", small)
    seen = faults.flips(faults.read_store, store, store, count)
    assert {outcome for _, outcome in seen} == {faults.NOTICED}, seen


@pytest.mark.parametrize("key", ["format", "version"])
def test_every_bit_that_flips_where_a_store_says_what_it_is_is_noticed(
    store: Path, key: str
) -> None:
    expected, file = faults.read_store(store), store / "manifest.json"
    content = file.read_bytes()
    start = content.index(f'"{key}"'.encode())
    for bit in range(8 * start, 8 * content.index(b"\n", start)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        assert faults.outcome(faults.read_store, store, file, expected) == faults.NOTICED, bytes(
            flipped[start : start + 30]
        )


@pytest.mark.parametrize("count", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_every_bit_that_flips_in_a_checkpoint_is_noticed(
    trained: tuple[Path, Path], count: int
) -> None:
    _, run = trained
    seen = faults.flips(faults.read_checkpoint, run, folder_of(run, 3), count)
    assert {outcome for _, outcome in seen} == {faults.NOTICED}, seen


def test_the_fuzzer_sees_what_nobody_notices(store: Path) -> None:
    """A bit that its checksum follows changes tokens."""
    expected = faults.read_store(store)
    arrow = next(store.glob("*.arrow"))
    tokens = Store.open(store)._row(0)[0].column("tokens").values.to_numpy()
    content = bytearray(arrow.read_bytes())
    content[content.index(tokens.tobytes())] ^= 1
    arrow.write_bytes(content)
    reseal(store, arrow)
    assert faults.outcome(faults.read_store, store, arrow, expected) == faults.WRONG


@given(sizes=st.lists(st.integers(0, 300), max_size=12))
def test_checksums_do_not_depend_on_how_a_file_was_written(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    path = tmp_path_factory.getbasetemp() / "summed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "CHUNK", 100)
        content = Random(0).randbytes(sum(sizes))
        with SummedFile(path) as file:
            start = 0
            for size in sizes:
                file.write(content[start : start + size])
                start += size
        assert path.read_bytes() == content
        assert file.checksums == checksums.checksums(path) == checksums.checksums_of(content)
        assert len(file.checksums) == -(-len(content) // 100) * checksums.DIGITS
        assert not checksums.damage(path, file.checksums)
        if content:
            at = len(content) - 1
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]))
            first = at // 100 * 100
            assert f"between bytes {first:,} and {len(content):,}" in checksums.damage(
                path, file.checksums
            )


# --- stores


def test_only_the_parts_that_are_read_are_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longctx.data.store.writer.BATCH_DOCUMENTS", 1)
    for module in (mapped, checksums):
        monkeypatch.setattr(module, "CHUNK", 256)
    monkeypatch.setattr(mapped, "SMALL", 0)
    monkeypatch.setattr("longctx.data.store.store.SMALL", 0)
    path = byte_store(tmp_path, [2000, 2000, 2000]).path
    store = Store.open(path)
    arrow = next(path.glob("*.arrow"))
    tokens = store._row(1)[0].column("tokens").values.to_numpy()
    content = bytearray(arrow.read_bytes())
    at = content.index(tokens[1000:1010].tobytes())
    content[at] ^= 1
    arrow.write_bytes(content)
    store = Store.open(path)
    for document in (0, 2):
        store.read(document, 0, 2000)
    for read in (store.read, store.tokens):
        with pytest.raises(
            StoreError, match=rf"{arrow.name} does not match its checksums between bytes"
        ):
            read(1, 0, 10)


@pytest.mark.parametrize("value", [257, 65535])
def test_tokens_outside_the_vocabulary_are_refused(store: Path, value: int) -> None:
    """Though checksums are right: the program that wrote them was wrong."""
    arrow = next(store.glob("*.arrow"))
    tokens = Store.open(store)._row(0)[0].column("tokens").values.to_numpy()
    content = arrow.read_bytes()
    changed = tokens.copy()
    changed[20 + 7] = value
    arrow.write_bytes(content.replace(tokens.tobytes(), changed.tobytes()))
    reseal(store, arrow)
    damaged = Store.open(store)
    damaged.read(0, 0, 20), damaged.read(1, 0, 6)
    said = (
        rf"document store.jsonl:2 has token {value} at position 7, but its tokenizer has 257 tokens"
    )
    for read in (damaged.read, damaged.tokens):
        with pytest.raises(StoreError, match=said):
            read(1, 2, 300)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "link", "deep/../../outside", ""])
def test_names_that_lead_out_of_a_store_are_refused(store: Path, name: str) -> None:
    (store.parent / "outside").write_text("x")
    (store / "link").symlink_to(store.parent / "outside")
    manifest = Manifest.load(store)
    manifest.files[name], manifest.checksums[name] = 1, "0" * 32
    manifest.save(store)
    with pytest.raises(StoreError, match="leads out of it"):
        Store.open(store)


def test_a_damaged_journal_does_not_stop_preparing(tmp_path: Path) -> None:
    from longctx.data.store.writer import JOURNAL, finished_parts

    arrow = tmp_path / "data-00000.arrow"
    arrow.write_bytes(b"x" * 10)
    line = checksums.sealed(
        {
            "file": arrow.name,
            "source_bytes": 10,
            "weighted": False,
            "checksums": checksums.checksums(arrow),
        }
    )
    good = json.dumps(line).encode() + b"\n"
    for damage in (b"{", b"[]\n", b"\xff\n", good.replace(b"10", b"11"), b'{"file": "a"}\n'):
        (tmp_path / JOURNAL).write_bytes(good + damage)
        assert [part.file for part in finished_parts(tmp_path)] == [arrow.name]
    arrow.write_bytes(b"x" * 9 + b"y")
    assert finished_parts(tmp_path) == []


# --- checkpoints


def resumed_from(run: Path) -> tuple[int, list[str]] | str:
    """On each rank: the step that a run resumes from, and what is said of later ones."""
    group = dist.new_group(backend="gloo")
    try:
        found, said = checkpoint.verified(checkpoint.newest(run)[0], group)
    except NoCheckpoint as error:
        return str(error)
    assert found is not None
    return found.step, said


def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    workers: Workers, trained: tuple[Path, Path], changed: Changed
) -> None:
    _, run = trained
    assert workers.run(resumed_from, 2, run) == [(3, [])] * 2
    shards = [next(folder_of(run, step).glob("*.distcp")) for step in (3, 2, 1)]
    for file, step in zip(shards, (2, 1), strict=False):
        changed(file, flip(file))
        (answer, other) = workers.run(resumed_from, 2, run)
        assert answer == other and answer[0] == step
        assert (
            f"{file.parent} is damaged ({file.name} does not match its checksums" in answer[1][-1]
        )
    changed(shards[2], flip(shards[2]))
    (answer, other) = workers.run(resumed_from, 2, run)
    assert (
        answer == other
        and "no checkpoint of" in answer
        and all(str(file.parent) in answer for file in shards)
    )


def test_training_resumes_before_a_damaged_checkpoint(
    trained: tuple[Path, Path], changed: Changed, capfd: pytest.CaptureFixture[str]
) -> None:
    store, run = trained
    shard = next(folder_of(run, 3).glob("*.distcp"))
    changed(shard, flip(shard))
    changed(run / "metrics.jsonl", (run / "metrics.jsonl").read_bytes())
    given = [
        f"--{setting}" for setting in [*SMALL, ONE_RANK, "train.steps=3", "checkpoint.every=null"]
    ]
    assert (
        main(
            ["train", *given, f"--data.store={store}", f"--train.run_dir={run}", "--resume-if-any"]
        )
        == 0
    )
    printed = capfd.readouterr()
    assert (
        f"{folder_of(run, 3)} is damaged ({shard.name} does not match its checksums" in printed.err
    )
    assert "from step 2;" in printed.out and "step 3/3 loss" in printed.out


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"step": 10**9}, "it has step 1000000000"),
        ({"files": []}, "has no attribute"),
        (
            {"files": {"../../config.yaml": 1}, "checksums": {"../../config.yaml": ""}},
            "leads out of it",
        ),
        ({"data": 5}, "data and model must be objects"),
        ({"checksums": {".metadata": "0"}}, "checksums are missing"),
    ],
)
def test_a_wrong_state_is_not_used(
    trained: tuple[Path, Path], changed: Changed, changes: dict[str, Any], says: str
) -> None:
    """Though its own checksum is right."""
    _, run = trained
    changed(folder_of(run, 3) / "state.json", resealed(folder_of(run, 3), **changes))
    for options in ({"resume": True}, {"resume": True, "or_begin": True}):
        found, said = open_run_folder(run, checkpoint_bytes=0, **options)
        assert found is not None and found.step == 2
        assert says in said[0] and "state.json" in said[0]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 5)
    folder.with_suffix(".partial").mkdir(parents=True)
    assert open_run_folder(tmp_path, resume=True, or_begin=True, checkpoint_bytes=0)[0] is None, (
        "none was ever completed"
    )
    folder.mkdir()
    (folder / "state.json").write_text("{")
    with pytest.raises(
        RunFolderError, match=r"no checkpoint of .* can be used .*state\.json.*move the folder away"
    ):
        open_run_folder(tmp_path, resume=True, or_begin=True, checkpoint_bytes=0)
    (tmp_path / "latest").symlink_to("checkpoints/step-000005")
    (folder / "state.json").unlink()
    folder.rmdir()
    with pytest.raises(RunFolderError, match="can be used"):
        open_run_folder(tmp_path, resume=True, or_begin=True, checkpoint_bytes=0)


def test_an_error_that_passes_is_not_a_missing_checkpoint(
    trained: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one that stays."""
    _, run = trained
    monkeypatch.setattr(checksums, "WAITS_S", (0.0, 0.0))
    listdir, failures = os.listdir, [0]

    def fail(path: Any) -> list[str]:
        failures[0] -= 1
        if failures[0] >= 0:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return listdir(path)

    monkeypatch.setattr(checkpoint.os, "listdir", fail)
    for count in (1, 2):
        failures[0] = count
        found, _ = open_run_folder(run, resume=True, or_begin=True, checkpoint_bytes=0)
        assert found is not None and found.step == 3
    failures[0] = 100
    with pytest.raises(OSError, match="Stale"):
        open_run_folder(run, resume=True, or_begin=True, checkpoint_bytes=0)


def whole_while_saving(store: Path, run: Path, settings: list[str]) -> list[list[int]]:
    """The steps whose checkpoints are whole each time that another one has been written, but not
    yet published."""
    found, publish = [], saving.publish

    def watched(*arguments: Any) -> None:
        found.append(
            [
                step
                for step in checkpoint.steps(run)
                if not checkpoint.of_step(run, step)[0].damage()
            ]
        )
        publish(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "publish", watched)
        train_and_save(store, run, settings)
    return found


def test_two_checkpoints_are_whole_while_another_is_written(
    workers: Workers, tmp_path: Path
) -> None:
    store, settings = (
        make_store(tmp_path),
        ["train.steps=4", "checkpoint.every=1", "checkpoint.keep=2", ONE_RANK],
    )
    assert workers.run(whole_while_saving, 1, store, tmp_path / "run", settings) == [
        [[], [1], [1, 2], [2, 3]]
    ]


def test_later_checkpoints_do_not_displace_those_that_a_run_resumed_from(tmp_path: Path) -> None:
    """They are damaged, though their sizes are right: otherwise the run would not have resumed
    before them."""
    pretend_checkpoints(tmp_path, 10, 20, 30, 40)
    saving.prune(tmp_path, 2, folder_of(tmp_path, 30))
    assert checkpoint.steps(tmp_path) == [20, 30, 40]


def test_a_checkpoint_is_replaced_whole(
    trained: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between the two renames leaves the old one aside, and the next write removes it."""
    final = folder_of(tmp_path, 1)

    def publish() -> None:
        partial = final.with_suffix(".partial")
        partial.mkdir(parents=True)
        saving.publish(tmp_path, final, {"step": 1}, {})

    publish()
    rename = Path.rename

    def killed(self: Path, target: Path) -> Path:
        if self.suffix == ".partial":
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            publish()
    assert {path.name for path in final.parent.iterdir()} == {
        "step-000001.partial",
        "step-000001.replaced",
    }
    (final.with_suffix(".partial") / "state.json").unlink()
    final.with_suffix(".partial").rmdir()
    publish()
    assert {path.name for path in final.parent.iterdir()} == {"step-000001"}


def test_damaged_lines_of_the_metrics_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [
        {"step": step, "tokens": 10, "step_time_s": 2.0, "tokens_per_s_per_rank": 5.0}
        for step in range(1, 7)
    ]
    lines = [json.dumps(step).encode() for step in steps]
    lines[1] = lines[1].replace(b"step", b"st\xe5p", 1)
    lines[2] = b"[]"
    lines[4] = lines[4].replace(b"tokens", b"tokenz", 1)
    lines[5] = lines[5][:9]
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(b"\n".join(lines))
    assert mean_speed(tmp_path).startswith("5 tokens/s, 5 per rank, 2.00 s")
    MetricsLog(
        load(None, [f"train.run_dir={tmp_path}", "log.tensorboard=false"]), after_step=5
    ).close()
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 4, 5]
    assert f"2 damaged lines of {log} are left out" in capsys.readouterr().err


# --- nothing executes


class Evil:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def test_a_crafted_description_runs_no_code(
    trained: tuple[Path, Path], changed: Changed, tmp_path: Path
) -> None:
    _, run = trained
    folder, file = folder_of(run, 3), tmp_path / "touched"
    crafted = pickle.dumps(Evil(file))
    sizes = json.loads((folder / "state.json").read_text())["files"]
    changed(folder / "state.json", resealed(folder, files={**sizes, ".metadata": len(crafted)}))
    changed(folder / ".metadata", crafted)
    with pytest.raises(
        CheckpointError,
        match=rf"{folder} is damaged: .*names pathlib.Path.touch|names pathlib\.\w+",
    ):
        SavedWeights(folder)
    assert not file.exists()


def test_what_is_not_a_tensor_is_not_unpickled(
    trained: tuple[Path, Path], changed: Changed, tmp_path: Path
) -> None:
    """torch would load it without limits."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    _, run = trained
    folder, file = folder_of(run, 3), tmp_path / "touched"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    name = "model.norm.weight"
    shard = next(folder.glob("*.distcp"))
    crafted = tmp_path / "crafted"
    torch.save(Evil(file), crafted)
    stored = next(value for key, value in metadata.storage_data.items() if key.fqn == name)
    saved = SavedWeights(folder)
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    stored.offset, stored.length = shard.stat().st_size, crafted.stat().st_size
    metadata.storage_data[MetadataIndex(name)] = stored
    changed(shard, shard.read_bytes() + crafted.read_bytes())
    changed(folder / ".metadata", pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=f"{name} is not a tensor"):
        saved.read(["norm.weight"])
    assert not file.exists()


def test_a_description_cannot_name_files_elsewhere(
    trained: tuple[Path, Path], changed: Changed
) -> None:
    _, run = trained
    folder = folder_of(run, 3)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = "../step-000002/__0_0.distcp"
    changed(folder / ".metadata", pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="leads out of it"):
        SavedWeights(folder)


@pytest.mark.parametrize("name", ["config.yaml", "model/network.py", "model", "best/picture.png"])
def test_a_run_replaces_nothing_that_no_run_wrote(
    tmp_path: Path, store: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """`--train.run_dir .` in the folder of a project: its model/ was deleted, its config.yaml
    overwritten."""
    run = tmp_path / "project"
    mine = run / name
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    settings = [*SMALL, f"data.store={store}", f"train.run_dir={run}", "train.steps=1"]
    assert main(["train", *(f"--{setting}" for setting in settings)]) == 2
    assert "was not written by a run, which would replace it" in capfd.readouterr().err
    assert mine.read_text() == "mine"


def test_a_run_that_ended_before_its_first_step_starts_again_in_its_folder(
    tmp_path: Path, store: Path
) -> None:
    run = tmp_path / "run"
    settings = [*SMALL, f"data.store={store}", f"train.run_dir={run}", "train.steps=1"]
    command = ["train", *(f"--{setting}" for setting in settings)]
    assert main(command) == 0
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").unlink()
    (run / "latest").unlink()
    assert main(command) == 0

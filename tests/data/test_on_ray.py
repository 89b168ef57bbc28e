"""Ray: a store that the machines of a cluster make is the same, bit for bit, also if one dies or is
slow."""

import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from longctx.cli import main
from longctx.data.records import slices
from longctx.data.records.readers import CorpusError
from longctx.data.records.slices import Slice
from longctx.data.records.sources import open_corpus
from longctx.data.store import on_ray
from longctx.data.store.manifest import StoreError
from longctx.data.store.prepare import prepare
from longctx.data.store.request import StoreRequest
from longctx.data.store.shares import Preparation
from tests.data.test_shares import content, written

SLOW_S = 60.0


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_BYTES", 2000)


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A Ray cluster of two machines, which are processes here."""
    pytest.importorskip("ray")
    import ray
    from ray.cluster_utils import Cluster

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    made = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 1,
            "object_store_memory": 100 << 20,
            "include_dashboard": False,
        },
    )
    yield made
    made.shutdown()


def another(cluster: Any) -> Any:
    """Adds a machine."""
    node = cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
    cluster.wait_for_nodes()
    return node


@dataclass(frozen=True)
class SlowOnce(Slice):
    """A slice that whoever comes first reads for long."""

    mark: Path = Path()

    def digest(self, file: Path) -> str:
        try:
            self.mark.touch(exist_ok=False)
        except FileExistsError:
            return super().digest(file)
        time.sleep(SLOW_S)
        return super().digest(file)


@pytest.mark.slow
def test_a_machine_that_dies_changes_nothing(tmp_path: Path, cluster: Any) -> None:
    source = written(tmp_path / "source", 0, records=600)
    arguments = {"tokenizer": "bpe", "vocab_size": 300}
    prepare(str(source), tmp_path / "expected", workers=1, **arguments)
    node = another(cluster)
    killed = []

    def kill() -> None:
        cluster.remove_node(node, allow_graceful=False)

    def progress(stage: str, share: float) -> None:
        if stage == "tokenizing" and 0.2 < share < 0.9 and not killed:
            killed.append(threading.Thread(target=kill))
            killed[0].start()

    out = tmp_path / "out"
    made = prepare(str(source), out, ray=cluster.address, progress=progress, **arguments)
    assert killed and made.made
    killed[0].join()
    assert content(out) == content(tmp_path / "expected")
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.slow
def test_a_slow_machine_is_not_waited_for(tmp_path: Path, cluster: Any) -> None:
    another(cluster)
    source = written(tmp_path / "source", 0, records=60)
    prepare(str(source), tmp_path / "expected", tokenizer="bytes", workers=1)
    corpus = open_corpus(str(source))
    its = list(corpus.slices)
    its[2] = SlowOnce(its[2].files, its[2].start, stop=its[2].stop, mark=tmp_path / "mark")
    request = StoreRequest(corpus, tokenizer="bytes")
    work = Preparation(tmp_path / "work", request, its)
    work.folder.mkdir()
    began = time.monotonic()
    on_ray.make_on_ray(work, cluster.address, workers=None, progress=lambda *_: None)
    assert time.monotonic() - began < SLOW_S - 10
    finished = work.finished()
    assert finished is not None
    expected = content(tmp_path / "expected")
    for each in finished:
        for part in each.parts:
            assert (work.folder / part.file).read_bytes() == expected[part.file]
    assert not list(work.folder.glob("attempt-*"))


@pytest.mark.slow
def test_an_error_is_said_as_ever(tmp_path: Path, cluster: Any) -> None:
    source = written(tmp_path / "source", 0)
    with (source / "c.jsonl").open("a", encoding="utf-8") as stream:
        stream.write('{"text": 3}\n')
    with pytest.raises(CorpusError, match=r"c\.jsonl@\d+:\d+: .*text"):
        prepare(str(source), tmp_path / "out", tokenizer="bytes", ray=cluster.address)


def test_an_attempt_is_put_in_place_whole(tmp_path: Path) -> None:
    """Twice the same, at any time, and without what an earlier attempt has left."""
    source = written(tmp_path / "source", 0)
    prepare(str(source), tmp_path / "expected", tokenizer="bytes", workers=1)
    corpus = open_corpus(str(source))
    work = Preparation(tmp_path / "work", StoreRequest(corpus, tokenizer="bytes"), corpus.slices)
    work.folder.mkdir()
    (work.folder / "attempt-1-old").mkdir()
    (work.folder / "attempt-1-old" / "data-00001-00000.arrow").write_text("unfinished")
    for number in (*range(len(work.slices)), 1):
        on_ray._make_attempt(work, number, threads=1)
    (work.folder / work.files(2).note).unlink()
    on_ray._make_attempt(work, 2, threads=1)
    assert work.finished() is not None
    expected = content(tmp_path / "expected")
    parts = sorted(file.name for file in work.folder.glob("*.arrow"))
    assert parts == sorted(name for name in expected if name.endswith(".arrow"))
    for name in parts:
        assert (work.folder / name).read_bytes() == expected[name]


def test_an_attempt_that_dies_is_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = open_corpus(str(written(tmp_path / "source", 0)))
    work = Preparation(tmp_path / "work", StoreRequest(corpus, tokenizer="bytes"), corpus.slices)
    work.folder.mkdir()
    moves: list[Any] = []

    def replace(source: Path, target: Path) -> None:
        if moves:
            raise KeyboardInterrupt
        moves.append(source.rename(target))

    monkeypatch.setattr(on_ray.os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        on_ray._make_attempt(work, 0, threads=1)
    assert moves and not work.is_finished(0)


def test_what_cannot_be_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = str(written(tmp_path / "source", 0))
    words = ["prepare", "--source", source, "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]
    assert main([*words, "--ray", "auto", "--share", "1/2"]) == 2
    assert "omit one of the two" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(StoreError, match=r"needs the package ray: pip install"):
        prepare(source, tmp_path / "out", tokenizer="bytes", ray="auto")
    assert not (tmp_path / "out").exists()

"""A store may be larger than memory: its tokens stay in the file, whether it is read alone or with
others."""

import gc
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pytest

from longctx.checksums import checksums
from longctx.data.mixture import make_steps
from longctx.data.store.documents import Documents
from longctx.data.store.held_out import held_out
from longctx.data.store.index import INDEX
from longctx.data.store.store import Store, store_schema
from tests.data_cases import byte_store

pytestmark = pytest.mark.slow

MIB = 1 << 20


def anonymous_memory() -> int:
    """Bytes that this process holds and no file has."""
    gc.collect()
    pyarrow.default_memory_pool().release_unused()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024


def large_store(folder: Path, documents: int, length: int, seed: int) -> Path:
    """A store of documents of random bytes, written without preparing them."""
    small, out = byte_store(folder, [10], name=f"small-{seed}"), folder / f"large-{seed}"
    shutil.copytree(small.path, out)
    (part,) = (name for name in small.manifest.files if name.endswith(".arrow"))
    schema, random = store_schema(small.tokenizer), np.random.default_rng(seed)
    with (
        pyarrow.OSFile(str(out / part), "wb") as file,
        pyarrow.ipc.new_stream(file, schema) as stream,
    ):
        for number in range(documents):
            columns = [
                [f"document {number}"],
                pyarrow.ListArray.from_arrays(
                    [0, length], random.integers(0, 256, length, np.uint16)
                ),
                [length],
                [length - 1],
                [None],
                [1.0],
            ]
            arrays = [
                pyarrow.array(column, kind.type)
                for column, kind in zip(columns, schema, strict=True)
            ]
            stream.write_batch(pyarrow.record_batch(arrays, schema=schema))
    files, sums = dict(small.manifest.files), dict(small.manifest.checksums)
    for name in INDEX:
        files.pop(name, None), sums.pop(name, None)
        (out / name).unlink(missing_ok=True)
    replace(
        small.manifest,
        documents=documents,
        longest_length=length,
        tokens=documents * length,
        trained_tokens=documents * (length - 1),
        fingerprint=f"{seed:064x}",
        files={**files, part: (out / part).stat().st_size},
        checksums={**sums, part: checksums(out / part)},
    ).save(out)
    return out


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads Linux's account of memory"
)
def test_reading_every_token_holds_none_of_them(tmp_path: Path) -> None:
    paths = [
        large_store(tmp_path, documents, 1 << 19, seed) for seed, documents in enumerate((40, 24))
    ]
    assert sum(file.stat().st_size for path in paths for file in path.glob("*.arrow")) > 64 * MIB
    for chosen in (paths[:1], paths):
        before = anonymous_memory()
        opened = [Store.open(path) for path in chosen]
        store = opened[0] if len(opened) == 1 else Store.join(opened, [2, 1])
        steps = make_steps(
            store,
            global_tokens=1 << 20,
            seed=0,
            max_length=1 << 17,
            long_documents="split",
            held_out_share=0.01,
        )
        cursor, read = steps.start, 0
        while read < store.lengths.sum():
            pieces, cursor = steps.step(cursor)
            for piece in pieces:
                tokens, _ = store.read(piece.document, piece.start, piece.stop)
                read += len(tokens)
        assert anonymous_memory() - before < 12 * MIB


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads Linux's account of memory"
)
def test_names_are_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's strings of 300,000 names take 20 MB."""
    path = large_store(tmp_path, 1, 10, 0)
    store = Store.open(path)
    batches = []
    for k in range(300):
        names = [f"some/folder/file.jsonl:{k * 1000 + n}" for n in range(1000)]
        batches.append(pyarrow.RecordBatch.from_pydict({"name": names}))
    monkeypatch.setattr(Documents, "batches", lambda _: iter(batches))
    before = peak = anonymous_memory()
    for number, _ in enumerate(store.names):
        if number % 100_000 == 99_999:
            peak = max(peak, anonymous_memory())
    assert peak - before < 4 * MIB
    assert len(held_out(store.names, 0.5)) == 300_000

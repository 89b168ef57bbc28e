"""Memory and time to open and sample a store of very many documents, by an index that is written
without tokens.

    python bench/data_size.py                  # 1G documents, 8 GB of disk; about 3 minutes
    python bench/data_size.py --documents 1e7

Measured, in a new process each: seconds until a store is open, until its sampler is ready and until
two steps of 4M tokens are drawn; the memory of NumPy and Python (tracemalloc), held and at its
peak, and anonymous memory. Documents have log-normal lengths of 1,960 tokens in the mean; parts are
sparse files of 128 MiB. Rows: the sampler of training, with held-out documents, two stores as a
mix, and the order of earlier runs. Not measured: reading tokens, and disks, as the index is in the
page cache. Writes results/data-size.csv.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np

from harness import Table, facts, options
from longctx.checksums import CHUNK, DIGITS, checksums
from longctx.data.mixture import make_steps
from longctx.data.store.index import BATCH, BATCHES, INDEX, LENGTHS, NAMES, write_groups
from longctx.data.store.mapped import SMALL
from longctx.data.store.prepare import prepare
from longctx.data.store.store import Store

COLUMNS = (
    *("what", "documents", "parts", "index_bytes_per_document", "opened_s", "ready_s", "steps_s"),
    *("held_bytes_per_document", "peak_bytes_per_document", "anonymous_mib"),
)
BLOCK = 1 << 20
MEAN_LOG = 6.8
DEVIATION_LOG = 1.25
LONGEST = 2_000_000
BATCH_DOCUMENTS = 512
"""Documents in a record batch: 4M characters of documents of 1,960 tokens."""
PART_BYTES = 128 << 20
PART_TOKENS = 1 << 25
STEP_TOKENS = 4 << 20
KINDS = {
    "one store": {},
    "held out": {"held_out_share": 0.001},
    "mix of two": {},
    "earlier order": {"order": "permutation"},
}


def written(folder: Path, documents: int, seed: int) -> Path:
    """Writes a store of documents without tokens."""
    (folder / "source.txt").write_text("abc")
    small = prepare(folder / "source.txt", folder / f"small-{seed}", tokenizer="bytes").manifest
    out = folder / f"large-{seed}"
    shutil.copytree(folder / f"small-{seed}", out)
    random = np.random.default_rng(seed)
    lengths = np.lib.format.open_memmap(out / LENGTHS, "w+", "<i4", (documents,))
    hashes = np.lib.format.open_memmap(out / NAMES, "w+", "<u4", (documents,))
    tokens = 0
    longest = 0
    for start in range(0, documents, BLOCK):
        count = min(documents - start, BLOCK)
        drawn = np.minimum(random.lognormal(MEAN_LOG, DEVIATION_LOG, count) + 2, LONGEST)
        drawn = drawn.astype(np.int32)
        lengths[start : start + count] = drawn
        hashes[start : start + count] = random.integers(0, 1 << 32, count, np.uint32)
        tokens += int(drawn.sum(dtype=np.int64))
        longest = max(longest, int(drawn.max()))
    write_groups(out, lengths)
    batches = np.zeros(-(-documents // BATCH_DOCUMENTS), BATCH)
    batches["document"] = np.arange(len(batches)) * BATCH_DOCUMENTS
    np.save(out / BATCHES, batches)
    files = {name: size for name, size in small.files.items() if not name.endswith(".arrow")}
    sums = {name: small.checksums[name] for name in files}
    for name in small.files.keys() - files.keys():
        (out / name).unlink()
    for number in range(max(1, tokens // PART_TOKENS)):
        part = f"data-{number // 2:05d}-{number % 2:05d}.arrow"
        with (out / part).open("wb") as file:
            file.truncate(PART_BYTES)
        files[part] = PART_BYTES
        sums[part] = "0" * DIGITS * (PART_BYTES // CHUNK)
    for name in INDEX:
        if (out / name).is_file():
            files[name] = (out / name).stat().st_size
            sums[name] = "0" * DIGITS
            if files[name] <= SMALL:
                sums[name] = checksums(out / name)
    manifest = replace(
        small,
        documents=documents,
        tokens=tokens,
        trained_tokens=tokens - documents,
        longest_length=longest,
        fingerprint=f"{seed:064x}",
        files=files,
        checksums=sums,
    )
    manifest.save(out)
    return out


def anonymous_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024


def measured(what: str, paths: list[Path]) -> dict[str, float]:
    """Opens and samples stores in this process."""
    before = anonymous_mib()
    tracemalloc.start()
    began = time.perf_counter()
    stores = [Store.open(path) for path in paths]
    store = stores[0]
    if len(stores) > 1:
        store = Store.join(stores, [1.0] * len(stores))
    opened = time.perf_counter()
    options = {"global_tokens": STEP_TOKENS, "seed": 0, "max_length": 1 << 17, **KINDS[what]}
    steps = make_steps(store, **options)
    ready = time.perf_counter()
    cursor = steps.start
    for _ in range(2):
        cursor = steps.step(cursor)[1]
    drawn = time.perf_counter()
    held, peak = tracemalloc.get_traced_memory()
    return {
        "documents": len(store),
        "opened_s": opened - began,
        "ready_s": ready - opened,
        "steps_s": drawn - ready,
        "held_bytes_per_document": held / len(store),
        "peak_bytes_per_document": peak / len(store),
        "anonymous_mib": anonymous_mib() - before,
    }


def run(what: str, paths: list[Path]) -> dict[str, object]:
    """Returns a row, measured in a new process."""
    command = [sys.executable, __file__, "--measure", what, *map(str, paths)]
    found = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    index = [path / name for path in paths for name in INDEX if (path / name).is_file()]
    size = sum(file.stat().st_size for file in index)
    parts = sum(len(list(path.glob("*.arrow"))) for path in paths)
    return {
        "what": what,
        "parts": parts,
        "index_bytes_per_document": size / found["documents"],
        **found,
    }


def main() -> None:
    parser = options(__doc__ or "", "data-size")
    parser.add_argument("--documents", type=float, default=1e9)
    parser.add_argument("--folder", type=Path, help="where the index is written")
    parser.add_argument("--measure", nargs="+", help="a row and its stores, in this process alone")
    arguments = parser.parse_args()
    if arguments.measure:
        what, *paths = arguments.measure
        print(json.dumps(measured(what, [Path(path) for path in paths])))
        return
    documents = int(arguments.documents)
    table = Table(
        arguments.out.with_suffix(".csv"), COLUMNS, facts("longctx", "numpy"), overwrite=True
    )
    for kinds, sizes in (
        (("one store", "held out"), [documents]),
        (("mix of two",), [documents // 20] * 2),
        (("earlier order",), [documents // 50]),
    ):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as made:
            paths = [written(Path(made), size, seed) for seed, size in enumerate(sizes)]
            for what in kinds:
                table.append(run(what, paths))
                print(table.rows[-1], flush=True)


if __name__ == "__main__":
    main()

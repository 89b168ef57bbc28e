"""CPU seconds of `longctx prepare` per GB of JSON Lines, and seconds to open a large index.

    python bench/prepare_rate.py                 # about 2 minutes on one core
    python bench/prepare_rate.py --price 0.03    # hours and cost by what was measured before

Measured: CPU time of this process (other work on the machine changes it little) with one tokenizer
thread on the standard library of this Python as JSON Lines, read often enough for 30 MB, by a BPE
of 4,096 entries that is trained before; then the time to map an index of 100M documents that were
never written (a sparse file), and the anonymous memory that it takes. Not measured: networks,
object storage, and other tokenizers. Writes results/prepare-rate.csv.
"""

import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from figures_of_pages import prepare_rate
from harness import Table, facts, options
from longctx.data.records.sources import open_corpus
from longctx.data.store.index import BATCH, BATCHES, LENGTHS, Index
from longctx.data.store.prepare import prepare

BYTES = 30 << 20
DOCUMENTS = 100_000_000
COLUMNS = ("what", "amount", "seconds", "anonymous_mib")


def written(file: Path) -> int:
    """Writes documents of the standard library as JSON Lines. Returns their bytes."""
    texts = [document.texts[0] for document in open_corpus("python-stdlib").documents()]
    with file.open("w", encoding="utf-8") as stream:
        while stream.tell() < BYTES:
            stream.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return file.stat().st_size


def cpu_s() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime


def anonymous_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024


def main() -> None:
    parser = options(__doc__ or "", "prepare-rate")
    parser.add_argument("--price", type=float, help="dollars of an hour of one core")
    arguments = parser.parse_args()
    if arguments.price is not None:
        print("\n".join(prepare_rate(arguments.price)))
        return
    table = Table(
        arguments.out.with_suffix(".csv"), COLUMNS, facts("longctx", "tokenizers"), overwrite=True
    )
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        prepare("python-stdlib", folder / "tokenizer", workers=1)
        size = written(folder / "texts.jsonl")
        began = cpu_s()
        prepare(
            str(folder / "texts.jsonl"),
            folder / "store",
            tokenizer=str(folder / "tokenizer" / "tokenizer.json"),
            workers=1,
        )
        table.append({"what": "prepare", "amount": size, "seconds": cpu_s() - began})
        for name, kind, count in ((LENGTHS, "<i8", DOCUMENTS), (BATCHES, BATCH, DOCUMENTS // 1000)):
            np.lib.format.open_memmap(folder / name, "w+", kind, (count,)).flush()
        before = anonymous_mib()
        clock = time.perf_counter()
        index = Index.load({name: folder / name for name in (LENGTHS, BATCHES)})
        seconds = time.perf_counter() - clock
        row = {"what": "open an index", "amount": len(index.lengths), "seconds": seconds}
        table.append({**row, "anonymous_mib": anonymous_mib() - before})
    for row in table.rows:
        print(row)


if __name__ == "__main__":
    main()

"""Shared parts of the benchmarks: options, facts of the machine, an append-only CSV table,
Markdown, timing, and a store."""

import argparse
import csv
import json
import os
import platform
import shlex
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import longctx
from longctx.data.records.sources import open_corpus
from longctx.data.store.prepare import prepare
from longctx.parallel.timing import now, seconds

RESULTS = Path(__file__).parent / "results"


def options(
    text: str, out: str | None = None, minutes: float | None = None
) -> argparse.ArgumentParser:
    """Makes a parser with a script's docstring as its help, and with --out and --minutes if
    defaults for them are given."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if out:
        parser.add_argument(
            "--out", type=Path, default=RESULTS / out, help="output files, without suffix"
        )
    if minutes:
        parser.add_argument(
            "--minutes",
            type=float,
            default=minutes,
            help="time for all rows; the remaining rows are skipped",
        )
    return parser


def command(out: Path | None = None) -> str:
    """Returns the current command line, with only the file name of --out."""
    words = [out.name if out and word == str(out) else word for word in sys.argv[1:]]
    return shlex.join(["python", f"bench/{Path(sys.argv[0]).name}", *words])


def facts(*packages: str) -> dict[str, str]:
    """Returns date, machine, and versions of Python and of the packages."""
    found = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            found["machine"] = line.partition(":")[2].strip()
    found["machine"] += f", {os.cpu_count()} cores"
    for package in packages:
        try:
            found[package] = longctx.__version__ if package == "longctx" else version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def device_facts() -> dict[str, str]:
    """Returns the name of the GPU and torch's CUDA version, or the CPU if no GPU is available."""
    if not torch.cuda.is_available():
        return {"device": f"CPU, {platform.machine()}, {os.cpu_count()} cores", "cuda": ""}
    return {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda or ""}


class Table:
    """A CSV file to which rows are appended, each with the facts of this run, whose columns may be
    listed in `columns`.

    `rows` has all rows of the file as text. Without `overwrite` rows of earlier runs are kept, and
    this run continues.
    """

    def __init__(
        self, path: Path, columns: Sequence[str], facts: dict[str, str], *, overwrite: bool = False
    ) -> None:
        self.path, self.facts = path, facts
        self.columns = [*columns, *(name for name in facts if name not in columns)]
        self.rows: list[dict[str, str]] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        if overwrite or not path.exists():
            self.write()
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            self.rows = list(reader)
        if reader.fieldnames != self.columns:
            sys.exit(
                f"{path} has other columns than this benchmark: move it away, or give another --out"
            )

    def find(self, **values: object) -> list[dict[str, str]]:
        """Returns the rows with these values."""
        return [
            row
            for row in self.rows
            if all(row[name] == _text(value) for name, value in values.items())
        ]

    def missing(
        self,
        wanted: Iterable[dict[str, Any]],
        deadline: float,
        needed_s: Callable[[dict[str, Any]], float] = lambda values: 0.0,
    ) -> Iterator[dict[str, Any]]:
        """Yields the wanted rows that the file does not have and that end before `time.monotonic()`
        reaches the deadline.

        `needed_s` returns the seconds that a row is expected to take.
        """
        for values in wanted:
            if self.find(**values):
                continue
            if time.monotonic() + needed_s(values) < deadline:
                yield values
            else:
                print(
                    "skipped, out of time: "
                    f"{', '.join(f'{name} {value}' for name, value in values.items())}"
                )

    def append(self, row: dict[str, Any]) -> None:
        """Appends a row; missing columns stay empty."""
        values = {**row, **self.facts}
        self.rows.append({name: _text(values.get(name)) for name in self.columns})
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self.columns, lineterminator="\n").writerow(self.rows[-1])

    def write(self) -> None:
        """Rewrites the whole file."""
        with self.path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)


def _text(value: object) -> str:
    if value is None:
        return ""
    return str(float(f"{value:.6g}") if isinstance(value, float) else value)


def markdown(
    head: Sequence[str], rows: Iterable[Sequence[str]], numbers_from: int | None = None
) -> list[str]:
    """Returns the lines of a Markdown table; columns from `numbers_from` on are right-aligned."""
    left = len(head) if numbers_from is None else numbers_from
    rule = "|" + "---|" * left + "---:|" * (len(head) - left)
    return [f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)]


def speedups(slow: dict[str, Any], fast: dict[str, Any], mark: str = "") -> list[str]:
    """Returns the median speedup over steps, with `mark` around it, and that of total times; each
    measured (predicted)."""
    steps = list(zip(slow["steps"], fast["steps"], strict=True))
    medians = [
        statistics.median(a[key] / b[key] for a, b in steps) for key in ("seconds", "predicted_s")
    ]
    total_s, total_predicted_s = (slow[key] / fast[key] for key in ("total_s", "predicted_s"))
    return [
        f"{mark}{medians[0]:.2f}×{mark} ({medians[1]:.2f}×)",
        f"{total_s:.2f}× ({total_predicted_s:.2f}×)",
    ]


def median_s(run: Callable[[], object], device: torch.device, longest_s: float) -> float:
    """Returns the median seconds of `run` over as many calls as fit in `longest_s`, 3 to 50, after
    two warm-up calls.

    On a GPU, measured by events in its stream.
    """

    def timed_s() -> float:
        began = now(device)
        run()
        ended = now(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return seconds(began, ended)

    timed_s()
    return statistics.median(timed_s() for _ in range(repeats(timed_s(), longest_s)))


def repeats(once_s: float, longest_s: float) -> int:
    """Returns the number of calls that `median_s` times."""
    return min(50, max(3, int(longest_s / once_s)))


def make_store(lengths: Sequence[int], folder: Path) -> Path:
    """Makes a store of documents of exactly these lengths: bytes of the source code of this
    Python's standard library."""
    library, text = Path(sysconfig.get_path("stdlib")), ""
    for path in sorted(library.rglob("*.py")):
        if len(text) >= sum(lengths):
            break
        text += path.read_bytes().decode("ascii", "ignore")
    source, start = folder / "documents.jsonl", 0
    with source.open("w", encoding="ascii") as file:
        for length in lengths:  # one token is the end of the document
            file.write(json.dumps({"text": text[start : start + length - 1]}) + "\n")
            start += length - 1
    prepare(open_corpus(str(source)), folder / "store", tokenizer="bytes")
    return folder / "store"

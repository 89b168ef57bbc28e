"""What all benchmarks share: options, facts of the machine, a CSV table that grows by rows, Markdown, timing, and a store."""

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

from longctx.data.corpus import open_corpus
from longctx.data.prepare import prepare
from longctx.parallel.timing import now, seconds

RESULTS = Path(__file__).parent / "results"


def options(text: str, out: str | None = None, minutes: float | None = None) -> argparse.ArgumentParser:
    """A parser with a script's docstring as its help; --out and --minutes where a default is given for them."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    if out:
        parser.add_argument("--out", type=Path, default=RESULTS / out, help="without a suffix")
    if minutes:
        parser.add_argument("--minutes", type=float, default=minutes, help="for all rows; what does not fit in is left out")
    return parser


def command(out: Path | None = None) -> str:
    """The command that runs, with the name of --out alone."""
    words = [out.name if out and word == str(out) else word for word in sys.argv[1:]]
    return shlex.join(["python", f"bench/{Path(sys.argv[0]).name}", *words])


def facts(*packages: str) -> dict[str, str]:
    """Date, machine, and the versions of Python and of these packages."""
    found = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "machine": platform.machine(), "python": platform.python_version()}
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            found["machine"] = line.partition(":")[2].strip()
    found["machine"] += f", {os.cpu_count()} cores"
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def device_facts() -> dict[str, str]:
    """The GPU and the CUDA of torch; or that there is none."""
    if not torch.cuda.is_available():
        return {"device": f"CPU, {platform.machine()}, {os.cpu_count()} cores", "cuda": ""}
    return {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda or ""}


class Table:
    """A CSV file that grows by rows as they come, each with the facts of this run; a fact may have its place in `columns`.

    `rows` are all that the file has, as texts: with `anew` none of an earlier run, else those too, so that this one goes on.
    """

    def __init__(self, path: Path, columns: Sequence[str], facts: dict[str, str], *, anew: bool = False) -> None:
        self.path, self.facts = path, facts
        self.columns = [*columns, *(name for name in facts if name not in columns)]
        self.rows: list[dict[str, str]] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        if anew or not path.exists():
            self.write()
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            self.rows = list(reader)
        if reader.fieldnames != self.columns:
            sys.exit(f"{path} has other columns than these rows: move it away, or give another --out")

    def find(self, **values: object) -> list[dict[str, str]]:
        """The rows with these values."""
        return [row for row in self.rows if all(row[name] == _text(value) for name, value in values.items())]

    def missing(self, wanted: Iterable[dict[str, Any]], deadline: float) -> Iterator[dict[str, Any]]:
        """Values of rows that the file does not have, as long as `time.monotonic()` is below the deadline."""
        for values in wanted:
            if self.find(**values):
                continue
            if time.monotonic() < deadline:
                yield values
            else:
                print(f"no time is left: {', '.join(f'{name} {value}' for name, value in values.items())}")

    def append(self, row: dict[str, Any]) -> None:
        """Adds a row; what it does not have stays empty."""
        values = {**row, **self.facts}
        self.rows.append({name: _text(values.get(name)) for name in self.columns})
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self.columns, lineterminator="\n").writerow(self.rows[-1])

    def write(self) -> None:
        """Writes the whole file anew."""
        with self.path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)


def _text(value: object) -> str:
    if value is None:
        return ""
    return str(float(f"{value:.6g}") if isinstance(value, float) else value)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], numbers_from: int | None = None) -> list[str]:
    """The lines of a table; columns from `numbers_from` on are aligned to the right."""
    left = len(head) if numbers_from is None else numbers_from
    rule = "|" + "---|" * left + "---:|" * (len(head) - left)
    return [f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)]


def median_s(run: Callable[[], object], device: torch.device, longest_s: float) -> float:
    """Median seconds of a run, over as many as fit in `longest_s`, 3 at least and 50 at most, after two to warm up.

    On a GPU they are those between two events in its stream.
    """

    def timed_s() -> float:
        began = now(device)
        run()
        ended = now(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return seconds(began, ended)

    timed_s()
    count = min(50, max(3, int(longest_s / timed_s())))
    return statistics.median(timed_s() for _ in range(count))


def make_store(lengths: Sequence[int], folder: Path) -> Path:
    """A store of documents of exactly so many tokens: bytes from the source of this Python's standard library."""
    library, text = Path(sysconfig.get_path("stdlib")), ""
    for path in sorted(library.rglob("*.py")):
        if len(text) >= sum(lengths):
            break
        text += path.read_bytes().decode("ascii", "ignore")
    source, start = folder / "documents.jsonl", 0
    with source.open("w", encoding="ascii") as file:
        for length in lengths:  # the end of a document is a token as well
            file.write(json.dumps({"text": text[start : start + length - 1]}) + "\n")
            start += length - 1
    prepare(open_corpus(str(source)), folder / "store", tokenizer="bytes")
    return folder / "store"

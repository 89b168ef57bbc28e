"""The table that `pytest -m slow tests/test_every_split.py` writes: the errors of every split of a run over processes.

An environment variable names it, as .csv and .md. Rows of an earlier run stay until their split runs again.
"""

import csv
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

LOSS, GRADIENT_NORM = 1e-5, 1e-4
"""Greatest relative errors that are allowed."""


@dataclass(frozen=True)
class Table:
    """The table of all splits that ran, in the order of `every`, of which `covering` are a subset."""

    variable: str
    every: Sequence[Any]
    covering: Sequence[Any]
    model: str
    file: str

    @property
    def columns(self) -> list[str]:
        return list(type(self.every[0]).__dataclass_fields__)

    def measure(self, split: Any, run: Callable[[], tuple[float, float]]) -> None:
        """Writes the row of a split whose errors are measured now, also if that fails."""
        began, errors = time.perf_counter(), ("failed", "failed")
        try:
            errors = tuple(f"{error:.1e}" for error in run())
        finally:
            self.write(split, *errors, seconds=time.perf_counter() - began)

    def write(self, split: Any, loss_error: str, gradient_norm_error: str, seconds: float) -> None:
        """Puts a row into the table that the environment names, if it does."""
        if not (table := os.environ.get(self.variable)):
            return
        errors = {"loss_error": loss_error, "gradient_norm_error": gradient_norm_error, "seconds": f"{seconds:.1f}"}
        texts = {name: str(value) for name, value in asdict(split).items()} | {"world": str(split.world)} | errors
        lines = Path(f"{table}.csv")
        rows: dict[tuple[str, ...], dict[str, str]] = {}
        if lines.exists():
            with lines.open() as file:
                rows = {tuple(old[name] for name in self.columns): old for old in csv.DictReader(file)}
        rows[tuple(texts[name] for name in self.columns)] = texts
        order = {tuple(str(option) for option in astuple(split)): number for number, split in enumerate(self.every)}
        rows = {key: rows[key] for key in sorted(rows.keys() & order.keys(), key=order.__getitem__)}
        with lines.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(texts), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows.values())
        Path(f"{table}.md").write_text("\n".join(self.report(list(rows.values()))) + "\n")

    def report(self, rows: list[dict[str, str]]) -> list[str]:
        """The table in Markdown, and what it holds."""
        errors = [
            (float(row["loss_error"]), float(row["gradient_norm_error"])) for row in rows if row["loss_error"] != "failed"
        ]
        failed = len(rows) - sum(loss <= LOSS and norm <= GRADIENT_NORM for loss, norm in errors)
        loss, norm = (max(column) for column in zip(*errors, (0.0, 0.0), strict=True))
        ran = {tuple(row[name] for name in self.columns) for row in rows}
        covered = sum(tuple(str(option) for option in astuple(split)) in ran for split in self.covering)
        return [
            f"Ten float32 steps of a tiny model ({self.model}) on the embedded corpus, split over processes, against "
            f"one process: {len(rows)} of the {len(self.every)} combinations of the options below that eight processes can "
            f"run, among them {covered} of a subset of {len(self.covering)} that has every pair of options. Errors are "
            "relative, the greatest of ten steps.",
            "",
            f"Failed: {failed}. Greatest error of the loss: {loss:.1e} ({LOSS:.0e} is allowed), of the gradient "
            f"norm: {norm:.1e} ({GRADIENT_NORM:.0e}). Seconds say little: more processes than cores, beside other work.",
            "",
            f"`{self.variable}=bench/results/{self.file} -m slow -k covering` runs the subset, "
            "the same without `-k covering` every combination. Each run replaces its rows and keeps the others. "
            f"Last run: {date.today()}, torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores.",
            "",
            "| " + " | ".join(name.replace("_", " ") for name in rows[0]) + " |",
            "|" + "---|" * len(rows[0]),
            *("| " + " | ".join(row.values()) + " |" for row in rows),
        ]

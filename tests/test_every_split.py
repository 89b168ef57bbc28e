"""Every combination of tensor ranks, pipeline, domain, planning mode, recomputation and resharding that eight processes can
run: ten float32 steps as one process makes them, losses to 1e-5 relative and gradient norms to 1e-4.

`make test` runs a subset that has every pair of options, and what the options lack, for two steps. Ten steps are slow:

    SPLITS_TABLE=bench/results/splits python -m pytest tests/test_every_split.py -m slow -k covering    # every pair of options
    SPLITS_TABLE=bench/results/splits python -m pytest tests/test_every_split.py -m slow                # every combination

SPLITS_TABLE names a table to write, as .csv and .md. Rows of an earlier run stay until their combination runs again.
"""

import csv
import itertools
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, astuple, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

from longctx.training.metrics import StepMetrics
from tests.training_cases import make_store, train, zero_bubble
from tests.workers import Workers

LOSS, GRADIENT_NORM = 1e-5, 1e-4
"""Greatest relative errors."""

PIPELINES = {
    "none": (1, "1f1b", 1),
    "1f1b": (2, "1f1b", 1),
    "interleaved": (2, "interleaved", 2),
    "zero-bubble": (2, "zero-bubble", 1),
}
"""Ranks, schedule, and stages on every rank."""

TINY = ["model.num_hidden_layers=4", "data.max_length=600", "batch.global_tokens=2000"]
TOKENS_PER_RANK = {1: 600, 2: 400, 3: 300, 4: 200}
BINS = {1: {600: 1}, 2: {300: 1, 600: 2}, 3: {200: 1, 400: 2, 600: 3}, 4: {200: 1, 400: 2, 600: 4}}
"""By domain: the longest documents need all its ranks, and a step has several micro-batches."""


Pair = tuple[tuple[int, object], ...]
"""Two options, each with its place among them."""


@dataclass(frozen=True)
class Split:
    tp: int
    pipeline: str
    domain: int
    mode: str
    recompute: str
    reshard_after: str

    @property
    def world(self) -> int:
        return self.tp * PIPELINES[self.pipeline][0] * self.domain

    @property
    def valid(self) -> bool:
        """Zero-bubble goes through a block's backward twice: nothing may be recomputed or gathered in between."""
        twice = self.pipeline == "zero-bubble"
        return self.world <= 8 and not (twice and (self.recompute != "none" or self.reshard_after == "block"))

    @property
    def marks(self) -> Any:
        return zero_bubble if self.pipeline == "zero-bubble" else ()

    @property
    def settings(self) -> list[str]:
        ranks, schedule, chunks = PIPELINES[self.pipeline]
        settings = [
            *TINY,
            f"parallel.tensor_parallel_size={self.tp}",
            f"parallel.pipeline_parallel_size={ranks}",
            f"parallel.pipeline_schedule={schedule}",
            f"parallel.pipeline_chunks={chunks}",
            f"parallel.reshard_after={self.reshard_after}",
            f"train.recompute={self.recompute}",
            f"batch.tokens_per_rank={TOKENS_PER_RANK[self.domain]}",
            f"context.mode={self.mode}",
        ]
        if self.mode == "static":
            settings.append(f"context.degree={self.domain}")
        return [*settings, f"context.bins={BINS[self.domain]}"] if self.mode == "bins" else settings

    @property
    def pairs(self) -> set[Pair]:
        """Every two of its options."""
        return set(itertools.combinations(enumerate(astuple(self)), 2))


OPTIONS = (
    (1, 2),
    tuple(PIPELINES),
    (1, 2, 3),
    ("static", "bins", "auto"),
    ("none", "selective", "full"),
    ("block", "micro_batch", "step"),
)
ALL = [split for options in itertools.product(*OPTIONS) if (split := Split(*options)).valid]


def covering(left: set[Pair], every: Sequence[Split] = ALL) -> list[Split]:
    """Splits that together have all pairs in `left`: each time the one with the most, then with fewest processes."""
    splits: list[Split] = []
    while left:
        splits.append(max(every, key=lambda split: (len(split.pairs & left), -split.world)))
        left = left - splits[-1].pairs
    return splits


PAIRS = set[Pair]().union(*(split.pairs for split in ALL))
COVERING = covering(PAIRS)

DOMAIN_OF_4 = Split(1, "none", 4, "auto", "selective", "block")
LACKING = {
    "gpipe, recompute mlp": (Split(1, "1f1b", 2, "auto", "mlp", "block"), ["parallel.pipeline_schedule=gpipe"]),
    "three stages, recompute norms": (Split(1, "1f1b", 1, "auto", "norms", "step"), ["parallel.pipeline_parallel_size=3"]),
    "zero-bubble, two chunks": (Split(1, "zero-bubble", 1, "auto", "none", "step"), ["parallel.pipeline_chunks=2"]),
    "padded, in rounds": (
        Split(1, "none", 3, "auto", "norms", "block"),
        ["batch.pad_to_multiple_of=64", "context.max_remote_tokens=150", "batch.tokens_per_rank=320"],
    ),
    "replicated, MLP in tiles": (
        Split(1, "none", 3, "bins", "none", "block"),
        ["parallel.shard_ranks=1", "train.mlp_tile_tokens=100"],
    ),
    "sharded inside pairs, reduced after each micro-batch, MLP in tiles": (
        DOMAIN_OF_4,
        ["parallel.shard_ranks=2", "parallel.reduce_after=micro_batch", "train.mlp_tile_tokens=100"],
    ),
    "Ulysses, received keys kept": (DOMAIN_OF_4, ["context.ulysses_degree=2", "context.keep_kv=true"]),
    "tensor parallel, replicated": (
        Split(2, "none", 2, "auto", "mlp", "micro_batch"),
        ["parallel.shard_ranks=1", "parallel.reduce_after=micro_batch"],
    ),
}
"""Settings that are no options above, each with a split of them."""


def name(split: Split) -> str:
    """With the word by which pytest's -k finds the subset."""
    return "-".join(["covering"] * (split in COVERING) + [str(option) for option in astuple(split)])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("store"), (100, 200, 590, 150))


@pytest.fixture(scope="module")
def alone(workers: Workers, store: Path, tmp_path_factory: pytest.TempPathFactory) -> list[StepMetrics]:
    """Ten steps of one process, which holds the longest document whole."""
    settings = [*TINY, "batch.tokens_per_rank=600", "context.mode=static"]
    return workers.run(train, 1, store, tmp_path_factory.mktemp("alone"), settings)[0]


def error(found: Iterable[float], wanted: Iterable[float]) -> float:
    """The greatest, relative."""
    return max(abs(mine / right - 1) for mine, right in zip(found, wanted, strict=True))


def assert_exact(split: Split, steps: list[StepMetrics], alone: list[StepMetrics]) -> tuple[float, float]:
    """Returns the greatest errors of loss and gradient norm."""
    assert [(m.tokens, m.target_tokens) for m in steps] == [(m.tokens, m.target_tokens) for m in alone]
    assert any(int(degree) == split.domain for m in steps for degree in m.degrees)
    if split.mode == "bins" and split.domain > 1:
        assert all(len(m.degrees) > 1 for m in steps), "degrees change by the document"
    losses = error((m.loss for m in steps), (m.loss for m in alone))
    norms = error((m.grad_norm for m in steps), (m.grad_norm for m in alone))
    assert losses <= LOSS
    assert norms <= GRADIENT_NORM
    return losses, norms


@pytest.mark.slow
@pytest.mark.parametrize("split", [pytest.param(split, marks=split.marks) for split in ALL], ids=name)
def test_every_split(workers: Workers, store: Path, alone: list[StepMetrics], tmp_path: Path, split: Split) -> None:
    TABLE.assert_exact(split, lambda: workers.run(train, split.world, store, tmp_path, split.settings)[0], alone)


@pytest.mark.parametrize("split", [pytest.param(split, marks=split.marks) for split in COVERING], ids=name)
def test_every_pair(workers: Workers, store: Path, alone: list[StepMetrics], tmp_path: Path, split: Split) -> None:
    """All ranks say the same, bit by bit."""
    everyones = workers.run(train, split.world, store, tmp_path, split.settings, 2)
    assert_exact(split, everyones[0], alone[:2])
    assert all([(m.loss, m.grad_norm) for m in steps] == [(m.loss, m.grad_norm) for m in everyones[0]] for steps in everyones)
    if split.pipeline != "none":
        assert all(0 < m.predicted_bubble_share < 1 and 0 < m.bubble_share < 1 for m in everyones[0])


@pytest.mark.parametrize("steps", [2, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [pytest.param(name, marks=split.marks) for name, (split, _) in LACKING.items()])
def test_what_the_options_lack(
    workers: Workers, store: Path, alone: list[StepMetrics], tmp_path: Path, name: str, steps: int
) -> None:
    split, more = LACKING[name]
    ranks = 3 if name.startswith("three stages") else split.world
    assert_exact(split, workers.run(train, ranks, store, tmp_path, [*split.settings, *more], steps)[0], alone[:steps])


def test_the_subset_has_every_pair() -> None:
    assert set().union(*(split.pairs for split in COVERING)) == PAIRS
    assert len(COVERING) < len(ALL) / 10
    assert len(ALL) == len(set(ALL)) == 462


@dataclass(frozen=True)
class Table:
    """The table of all splits that ran, in the order of `every`, of which `covering` are a subset."""

    variable: str
    every: Sequence[Split]
    covering: Sequence[Split]
    model: str
    file: str

    @property
    def columns(self) -> list[str]:
        return list(type(self.every[0]).__dataclass_fields__)

    def assert_exact(self, split: Split, run: Callable[[], list[StepMetrics]], alone: list[StepMetrics]) -> None:
        """Writes the row of a split that runs now, also if it fails."""
        began, errors = time.perf_counter(), ("failed", "failed")
        try:
            losses, norms = assert_exact(split, run(), alone)
            errors = (f"{losses:.1e}", f"{norms:.1e}")
        finally:
            self.write(split, *errors, time.perf_counter() - began)

    def write(self, split: Split, loss_error: str, gradient_norm_error: str, seconds: float) -> None:
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


TABLE = Table("SPLITS_TABLE", ALL, COVERING, "4 layers, hidden size 32", "splits python -m pytest tests/test_every_split.py")

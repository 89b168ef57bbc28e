"""Every combination of tensor ranks, pipeline, domain, planning mode, recomputation and resharding that eight processes can
run: ten float32 steps as one process makes them, losses to 1e-5 relative and gradient norms to 1e-4.

`make test` has the same options in `tests.parity`, beside models and data. These are slow, those of two smaller steps less:

    SPLITS_TABLE=bench/results/splits python -m pytest tests/test_every_split.py -m slow -k covering    # every pair of options
    SPLITS_TABLE=bench/results/splits python -m pytest tests/test_every_split.py -m slow                # every combination

SPLITS_TABLE names a table to write, as .csv and .md. Rows of an earlier run stay until their combination runs again.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import pytest

from longctx.training.metrics import StepMetrics
from tests.split_table import GRADIENT_NORM, LOSS, Table
from tests.training_cases import make_store, train
from tests.workers import Workers

PIPELINES = {
    "none": (1, 1),
    "1f1b": (2, 1),
    "interleaved": (2, 2),
}
"""Ranks, and stages on every rank."""

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
        return self.world <= 8

    @property
    def settings(self) -> list[str]:
        ranks, chunks = PIPELINES[self.pipeline]
        settings = [
            *TINY,
            f"parallel.tensor_parallel_size={self.tp}",
            f"parallel.pipeline_parallel_size={ranks}",
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


def pairs_of(splits: Iterable[Split]) -> set[Pair]:
    return set[Pair]().union(*(split.pairs for split in splits))


COVERING = covering(pairs_of(ALL))
FEW = [split for split in ALL if split.world <= 4]
QUICK = covering(pairs_of(FEW), FEW)
SMALLER = "batch.global_tokens=1200"

DOMAIN_OF_4 = Split(1, "none", 4, "auto", "selective", "block")
LACKING = {
    "1f1b, recompute mlp": (Split(1, "1f1b", 2, "auto", "mlp", "block"), []),
    "three stages, recompute norms": (Split(1, "1f1b", 1, "auto", "norms", "step"), ["parallel.pipeline_parallel_size=3"]),
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


@pytest.fixture(scope="module")
def alone_smaller(workers: Workers, store: Path, tmp_path_factory: pytest.TempPathFactory) -> list[StepMetrics]:
    settings = [*TINY, "batch.tokens_per_rank=600", "context.mode=static", SMALLER]
    return workers.run(train, 1, store, tmp_path_factory.mktemp("smaller"), settings, 2)[0]


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
@pytest.mark.parametrize("split", ALL, ids=name)
def test_every_split(workers: Workers, store: Path, alone: list[StepMetrics], tmp_path: Path, split: Split) -> None:
    def run() -> tuple[float, float]:
        return assert_exact(split, workers.run(train, split.world, store, tmp_path, split.settings)[0], alone)

    TABLE.measure(split, run)


@pytest.mark.slow
@pytest.mark.parametrize("split", QUICK, ids=name)
def test_every_pair(workers: Workers, store: Path, alone_smaller: list[StepMetrics], tmp_path: Path, split: Split) -> None:
    """All ranks say the same, bit by bit."""
    everyones = workers.run(train, split.world, store, tmp_path, [*split.settings, SMALLER], 2)
    assert_exact(split, everyones[0], alone_smaller)
    assert all([(m.loss, m.grad_norm) for m in steps] == [(m.loss, m.grad_norm) for m in everyones[0]] for steps in everyones)
    if split.pipeline != "none":
        assert all(0 < m.predicted_bubble_share < 1 and 0 < m.bubble_share < 1 for m in everyones[0])


@pytest.mark.slow
@pytest.mark.parametrize("smaller", [True, False])
@pytest.mark.parametrize("name", LACKING)
def test_what_the_options_lack(
    request: pytest.FixtureRequest, workers: Workers, store: Path, tmp_path: Path, name: str, smaller: bool
) -> None:
    split, more = LACKING[name]
    alone = request.getfixturevalue("alone_smaller" if smaller else "alone")
    ranks = 3 if name.startswith("three stages") else split.world
    settings = [*split.settings, *more, *[SMALLER] * smaller]
    assert_exact(split, workers.run(train, ranks, store, tmp_path, settings, len(alone))[0], alone)


def test_the_subsets_have_every_pair() -> None:
    assert pairs_of(COVERING) == pairs_of(ALL) and pairs_of(QUICK) == pairs_of(FEW)
    assert len(pairs_of(ALL) - pairs_of(FEW)) == 3, "three ranks of a domain beside tensor parallelism or a pipeline"
    assert len(COVERING) < len(ALL) / 10
    assert len(ALL) == len(set(ALL)) == 432


TABLE = Table("SPLITS_TABLE", ALL, COVERING, "4 layers, hidden size 32", "splits python -m pytest tests/test_every_split.py")

"""Mixtures of experts in every combination of expert and tensor ranks, pipeline, domain, mode and recomputation that eight
processes can run: float32 steps as one process makes them, losses to 1e-5 relative and gradient norms to 1e-4.

`make test` has expert ranks in `tests.parity`, and losses of balance in `test_experts`. These are slow:

    EXPERT_SPLITS_TABLE=bench/results/expert-splits python -m pytest tests/test_every_expert_split.py -m slow -k covering
    EXPERT_SPLITS_TABLE=bench/results/expert-splits python -m pytest tests/test_every_expert_split.py -m slow

EXPERT_SPLITS_TABLE names a table to write, as .csv and .md.
"""

import itertools
from dataclasses import astuple, dataclass
from pathlib import Path

import pytest

from longctx.training.metrics import StepMetrics
from tests.expert_cases import TINY_MOE
from tests.split_table import Table
from tests.test_every_split import SMALLER, Split, assert_exact, covering, pairs_of
from tests.training_cases import make_store, train
from tests.workers import Workers


@dataclass(frozen=True)
class ExpertSplit(Split):
    ep: int = 1

    @property
    def valid(self) -> bool:
        return super().valid and self.domain % self.ep == 0

    @property
    def settings(self) -> list[str]:
        return [*super().settings, *TINY_MOE, f"parallel.expert_parallel_size={self.ep}"]


OPTIONS = (
    (1, 2),
    ("none", "1f1b"),
    (1, 2, 4),
    ("static", "bins", "auto"),
    ("none", "norms", "selective", "full"),
    ("block", "step"),
    (1, 2, 4),
)
ALL = [split for options in itertools.product(*OPTIONS) if (split := ExpertSplit(*options)).valid]
COVERING = covering(pairs_of(ALL), ALL)
FEW = [split for split in ALL if split.world <= 4]
EXPERT_RANKS = len(OPTIONS) - 1
QUICK = covering(
    {pair for pair in pairs_of(FEW) if pair[1] == (EXPERT_RANKS, 2) or (pair[1][0] == EXPERT_RANKS and pair[0][0] < 3)}, FEW
)
"""Every option with two expert ranks, and every split of the ranks with every number of expert ranks, of those that four
processes can run; `test_every_split` has the other pairs, of models without experts."""
TABLE = Table(
    "EXPERT_SPLITS_TABLE",
    ALL,
    COVERING,
    "4 layers, 8 experts in 3 of them",
    "expert-splits python -m pytest tests/test_every_expert_split.py",
)


def name(split: Split) -> str:
    """With the word by which pytest's -k finds the subset."""
    return "-".join(["covering"] * (split in COVERING) + [str(option) for option in astuple(split)])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("store"), (100, 200, 590, 150))


@pytest.fixture(scope="module")
def alone(workers: Workers, store: Path, tmp_path_factory: pytest.TempPathFactory) -> list[StepMetrics]:
    settings = [*TINY_MOE, "batch.tokens_per_rank=600", "context.mode=static"]
    return workers.run(train, 1, store, tmp_path_factory.mktemp("alone"), settings)[0]


@pytest.mark.slow
@pytest.mark.parametrize("split", ALL, ids=name)
def test_every_split(workers: Workers, store: Path, alone: list[StepMetrics], tmp_path: Path, split: Split) -> None:
    def run() -> tuple[float, float]:
        return assert_exact(split, workers.run(train, split.world, store, tmp_path, split.settings)[0], alone)

    TABLE.measure(split, run)


@pytest.fixture(scope="module")
def alone_smaller(workers: Workers, store: Path, tmp_path_factory: pytest.TempPathFactory) -> list[StepMetrics]:
    settings = [*TINY_MOE, "batch.tokens_per_rank=600", "context.mode=static", SMALLER]
    return workers.run(train, 1, store, tmp_path_factory.mktemp("smaller"), settings, 2)[0]


@pytest.mark.slow
@pytest.mark.parametrize("split", QUICK, ids=name)
def test_every_option(workers: Workers, store: Path, alone_smaller: list[StepMetrics], tmp_path: Path, split: Split) -> None:
    assert_exact(split, workers.run(train, split.world, store, tmp_path, [*split.settings, SMALLER], 2)[0], alone_smaller)

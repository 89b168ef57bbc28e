"""Nothing is lost, and nothing hangs, when ranks are killed or the machine fails; the long form has
hundreds of faults."""

from pathlib import Path

import pytest

from tests.faults import evidence as faults
from tests.faults.kills import Killer, Soak
from tests.faults.machine import FAULTS, Machine

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faults.short_documents(tmp_path_factory.mktemp("short"))


def check(killer: Killer, tried: int) -> None:
    assert not killer.failures, "\n".join(killer.failures)
    assert killer.tried >= tried
    assert not any(row.lost or row.hangs for row in killer.rows.values())


def kill(killer: Killer, ranks: list[int], count: int) -> None:
    while killer.tried < count and not killer.failures:
        killer.run(ranks, count - killer.tried)
    check(killer, count)


def test_killed_runs_end_as_if_nobody_had_disturbed_them(tmp_path: Path, store: Path) -> None:
    kill(Killer(tmp_path, store, seed=5, steps=8), [2], 2)


def test_a_result_that_differs_counts_as_lost(tmp_path: Path, store: Path) -> None:
    killer = Killer(tmp_path, store, seed=5, steps=4)
    lines, sums, state = killer.reference(1)
    (step, loss, norm), *others = lines
    killer.whole[1] = [(step, loss + 1e-9, norm), *others], sums, state
    killer.run([1], 1)
    assert [(row.tried, row.lost) for row in killer.rows.values()] == [(1, 1)]
    assert "is not the run that nobody disturbed" in killer.failures[0]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [[2], [3], [1, 2, 3]])
def test_many_kills(tmp_path: Path, store: Path, ranks: list[int]) -> None:
    kill(Killer(tmp_path, store, seed=len(ranks)), ranks, 30)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_runs_go_on_after_other_faults(tmp_path: Path, store: Path, fault: str) -> None:
    why_not, _ = FAULTS[fault]
    if reason := why_not():
        pytest.skip(reason)
    machine = Machine(tmp_path, store, seed=1)
    for _ in range(3):
        getattr(machine, fault)()
    check(machine, 3)


@pytest.mark.slow
def test_a_long_run_with_kills(tmp_path: Path, store: Path) -> None:
    soak = Soak(tmp_path, store, seed=2, steps=300, between=30)
    soak.both()
    check(soak, 5)


def test_parts_of_the_results_are_replaced_one_by_one() -> None:
    page = faults.replaced("", {"Kills": "a\n\n### more\n", "Single bits": "b"})
    assert page == f"{faults.HEAD}\n## Single bits\n\nb\n\n## Kills\n\na\n\n### more\n"
    assert faults.replaced(page, {}) == page
    assert (
        faults.replaced(page, {"Kills": "c"})
        == f"{faults.HEAD}\n## Single bits\n\nb\n\n## Kills\n\nc\n"
    )

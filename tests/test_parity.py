"""Runs are those of one plain process, whatever is trained and however it is split: see `tests.parity`.

PARITY_TABLE=bench/results/parity.csv python -m pytest -n 3 tests/test_parity.py -m "not gpu"

writes the largest relative errors of each case.
"""

import os
from pathlib import Path

import pytest

from tests.parity import Case, Parity, assert_same, covering, found, steps_of
from tests.workers import Workers


@pytest.fixture(scope="session")
def parity(tmp_path_factory: pytest.TempPathFactory) -> Parity:
    base = tmp_path_factory.getbasetemp()
    return Parity((base.parent if "popen" in base.name else base) / "parity")


MORE = [pytest.param(case, marks=pytest.mark.slow) for case in covering(8, tries=3) if case not in covering()]


@pytest.mark.parametrize("case", [*covering(), *MORE], ids=str)
def test_same_as_one_plain_process(workers: Workers, parity: Parity, tmp_path: Path, case: Case) -> None:
    """Every pair of options on up to four ranks; slow: on up to eight."""
    ours = found(workers, case, parity.checkpoint(case.model), parity.store(case.data), tmp_path)
    errors = assert_same(case, ours, parity.expected(case))
    if table := os.environ.get("PARITY_TABLE"):
        with Path(table).open("a") as file:
            file.write(",".join([f'"{case}"', str(case.world), *map("{:.1e}".format, errors)]) + "\n")


def test_tiles_of_what_is_no_tensor_are_refused(workers: Workers, parity: Parity, tmp_path: Path) -> None:
    case = Case("gpt_oss", domain=1, mode="static", more="replicated, in tiles")
    settings = case.settings(parity.checkpoint(case.model), parity.store(case.data), tmp_path)
    with pytest.raises(AssertionError, match="mlp_tile_tokens is 10, but MLPs of this model return more than"):
        workers.run(steps_of, case.world, settings, tmp_path, 1)

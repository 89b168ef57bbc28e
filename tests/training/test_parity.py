"""Runs are those of one plain process, whatever is trained and however it is split: see
`tests.parity`.

PARITY_TABLE=bench/results/parity.csv python -m pytest -n 3 tests/training/test_parity.py -m "not gpu"

writes the largest relative errors of each case.
"""

import os
from pathlib import Path

import pytest

from tests.marks import slow_unless
from tests.parity import (
    OPTIONS,
    Case,
    Parity,
    assert_same,
    chosen,
    covering,
    found,
    options_of,
    steps_of,
)
from tests.workers import Workers


@pytest.fixture(scope="session")
def parity(tmp_path_factory: pytest.TempPathFactory) -> Parity:
    base = tmp_path_factory.getbasetemp()
    return Parity((base.parent if "popen" in base.name else base) / "parity")


QUICK = chosen(covering(), 18)
CASES = [*covering(), *(case for case in covering(8, tries=3) if case not in covering())]


def test_every_option_is_tried() -> None:
    tried = set().union(*map(options_of, QUICK))
    assert tried >= {(name, option) for name, options in OPTIONS.items() for option in options}
    assert tried >= {
        ("tied", True),
        ("experts", True),
        *((model, True) for model in OPTIONS["model"]),
    }


@pytest.mark.parametrize("case", slow_unless(lambda case: case in QUICK, CASES), ids=str)
def test_same_as_one_plain_process(
    workers: Workers, parity: Parity, tmp_path: Path, case: Case
) -> None:
    """Every option; slow: every pair of options on up to four ranks, and on up to eight."""
    ours = found(workers, case, parity.checkpoint(case.model), parity.store(case.data), tmp_path)
    errors = assert_same(case, ours, parity.expected(case))
    if table := os.environ.get("PARITY_TABLE"):
        with Path(table).open("a") as file:
            file.write(
                ",".join([f'"{case}"', str(case.world), *map("{:.1e}".format, errors)]) + "\n"
            )


def test_tiles_of_what_is_no_tensor_are_refused(
    workers: Workers, parity: Parity, tmp_path: Path
) -> None:
    case = Case("gpt_oss", domain=1, mode="static", more="replicated, in tiles")
    settings = case.settings(parity.checkpoint(case.model), parity.store(case.data), tmp_path)
    with pytest.raises(
        AssertionError, match="mlp_tile_tokens is 10, but MLPs of this model return more than"
    ):
        workers.run(steps_of, case.world, settings, tmp_path, 1)

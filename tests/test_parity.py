"""Runs are those of one plain process, whatever is trained and however it is split: see `tests.parity`."""

from pathlib import Path

import pytest

from tests.parity import Case, Parity, assert_same, covering, found, steps_of
from tests.workers import Workers

CASES = covering()


@pytest.fixture(scope="session")
def parity(tmp_path_factory: pytest.TempPathFactory) -> Parity:
    base = tmp_path_factory.getbasetemp()
    return Parity((base.parent if "popen" in base.name else base) / "parity")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_as_one_plain_process(workers: Workers, parity: Parity, tmp_path: Path, case: Case) -> None:
    ours = found(workers, case, parity.checkpoint(case.model), parity.store(case.data), tmp_path)
    assert_same(case, ours, parity.expected(case))


def test_tiles_of_what_is_no_tensor_are_refused(workers: Workers, parity: Parity, tmp_path: Path) -> None:
    case = Case("gpt_oss", domain=1, mode="static", more="replicated, in tiles")
    settings = case.settings(parity.checkpoint(case.model), parity.store(case.data), tmp_path)
    with pytest.raises(AssertionError, match="mlp_tile_tokens is 10, but MLPs of this model return more than"):
        workers.run(steps_of, case.world, settings, tmp_path, 1)

"""Encoder-decoders of transformers in the commands: packed, split over ranks and sharded, against transformers alone."""

from itertools import product
from pathlib import Path

import pytest

from tests.marks import slow_unless
from tests.pretrained_cases import assert_step
from tests.seq2seq_cases import SETTINGS, build_seq2seq
from tests.seq2seq_training_cases import reference, save_checkpoint, step
from tests.workers import Workers


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("seq2seq")
    for kind in SETTINGS:
        build_seq2seq(kind).save_pretrained(folder / kind)
    return {kind: folder / kind for kind in SETTINGS}


STEPS = slow_unless(lambda kind, ranks: ranks == (4 if kind == "t5gemma" else 3), product(SETTINGS, (1, 2, 3, 4)))


@pytest.mark.parametrize(("kind", "ranks"), STEPS)
def test_a_step_is_that_of_transformers(workers: Workers, checkpoints: dict[str, Path], kind: str, ranks: int) -> None:
    """Degrees 1 to 4, sources and targets from 1 token, ranks without tokens of one of them or of both."""
    assert_step(workers.run(step, ranks, checkpoints[kind], []), reference(checkpoints[kind]))

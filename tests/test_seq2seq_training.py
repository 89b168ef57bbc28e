"""Encoder-decoders of transformers in the commands: packed, split over ranks and sharded, against transformers alone."""

from itertools import product
from pathlib import Path

import pytest

from longctx.data.prepare import prepare
from longctx.data.store import Store
from tests.marks import slow_unless
from tests.pretrained_cases import assert_step, largest_error
from tests.seq2seq_cases import SETTINGS, build_seq2seq
from tests.seq2seq_training_cases import BOS, first_step, pairs_of, records, reference, save_checkpoint, step, write_records
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


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer."""
    return save_checkpoint(tmp_path_factory.mktemp("base") / "checkpoint")


@pytest.fixture(scope="module")
def store(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("store")
    prepare(write_records(folder / "records.jsonl"), folder / "store", tokenizer=str(base))
    return Store.open(folder / "store")


def test_a_record_is_a_source_and_a_target_that_begins_with_the_start_token(store: Store) -> None:
    assert store.source_lengths is not None and store.start_token == BOS
    for document, (source, target) in enumerate(zip(*pairs_of(records()), strict=True)):
        tokens, trained = store.tokens(document, 0, store.lengths[document])
        assert tokens.tolist() == [*source, BOS, *target]
        assert store.source_lengths[document] == len(source)
        assert trained.tolist() == [False] * (len(source) + 1) + [True] * len(target)
        assert store.trained_tokens[document] == len(target)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_step_of_a_run_is_that_of_transformers(workers: Workers, base: Path, store: Store, ranks: int, tmp_path: Path) -> None:
    """All records in one step, by the plan of the run; validation has the same loss."""
    sources, targets = pairs_of(records())
    expected = reference(base, sources, targets, targets, start=BOS)
    found = workers.run(first_step, ranks, base, store.path, tmp_path)
    for loss, gradients, degrees, validation in found:
        assert loss == pytest.approx(expected[0], rel=1e-5)
        assert validation == pytest.approx(expected[0], rel=1e-5)
        assert largest_error(gradients, expected[1]) < 1e-4
        assert (max(degrees) > 1) == (ranks > 1)

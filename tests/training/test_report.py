"""What rank 0 says at the start of a run on documents that are too long."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from longctx.config import load
from longctx.data.store.store import Lengths
from longctx.hf.source import lines_on
from longctx.report import _dropped

LENGTHS = np.array([5, 10, 11, 30])


@pytest.mark.parametrize(
    ("treatment", "max_length", "words"),
    [
        ("drop", 10, "2 of 4 documents are dropped: longer than 10 tokens"),
        ("truncate_left", 11, "1 of 4 documents are cut at their beginning: longer than 11"),
        ("truncate_right", 29, "1 of 4 documents are cut at their end"),
        ("drop", 30, ""),
        ("split", 10, ""),
        ("null", 10, ""),
    ],
)
def test_documents_that_are_dropped_or_cut_are_counted(
    treatment: str, max_length: int, words: str
) -> None:
    store = Lengths(LENGTHS.tolist(), "lengths", vocab_size=9)
    config = load(None, [f"data.long_documents={treatment}"])
    run: Any = SimpleNamespace(config=config, data=SimpleNamespace(store=store))
    said = _dropped(run, max_length)
    assert words in said and bool(said) == bool(words)


@pytest.mark.parametrize(("longest", "told"), [(300, False), (301, True)])
def test_documents_beyond_the_models_length_are_told(longest: int, told: bool) -> None:
    config = SimpleNamespace(max_position_embeddings=300)
    text_config = SimpleNamespace(get_text_config=lambda: config)
    files = SimpleNamespace(added=0, rope=(), config=text_config, remark="")
    source: Any = SimpleNamespace(description="", unused=[], files=files)
    lines = lines_on(source, "mine", longest)
    assert bool(lines) == told and all("is made for 300" in line for line in lines)


def test_where_a_config_comes_from_is_told() -> None:
    """If not from the checkpoint, as when only its sizes are known."""
    text_config = SimpleNamespace(get_text_config=lambda: None)
    said = "its sizes are those that were published"
    files = SimpleNamespace(added=0, rope=(), config=text_config, remark=said)
    source: Any = SimpleNamespace(description="", unused=[], files=files)
    assert lines_on(source, "mine", 0) == [f"mine: {said}"]

"""Length mixes: drawn steps follow the published histogram, are the same for the same seed, and bad
requests are named."""

import csv

import numpy as np
import pytest

from longctx.comparison.mixes import FOLDER, load_mix, mix_names
from longctx.errors import UserError

NAMES = ("magi_192k", "wikipedia", "wlb_128k")


@pytest.mark.parametrize(
    ("name", "documents", "longest"),
    [
        ("wikipedia", 1_000_000, 2_097_151),
        ("wlb_128k", 99_519, 131_071),
        ("magi_192k", 13_523_433, 196_608),
    ],
)
def test_histograms_are_those_published(name: str, documents: int, longest: int) -> None:
    mix = load_mix(name)
    assert sum(mix.documents) == pytest.approx(documents, rel=0.005)
    assert mix.longest == longest
    assert all(low < high for low, high in zip(mix.low, mix.high, strict=True))
    assert all(high <= low for high, low in zip(mix.high, mix.low[1:], strict=False))


@pytest.mark.parametrize("name", NAMES)
def test_drawn_lengths_follow_the_histogram(name: str) -> None:
    mix = load_mix(name)
    lengths = np.array(mix.draw(40_000, seed=3))
    index = np.searchsorted(mix.low, lengths, side="right") - 1
    assert (lengths >= 1).all()
    assert (lengths < np.array(mix.high)[index]).all()
    drawn = np.bincount(index, minlength=len(mix.low)) / len(lengths)
    expected = np.array(mix.documents) / sum(mix.documents)
    assert np.abs(drawn - expected).max() < 0.01


@pytest.mark.parametrize("name", ["wikipedia", "wlb_128k"])
def test_mean_length_is_that_of_the_corpus(name: str) -> None:
    """Log-uniform lengths inside a bin are an assumption; the tokens published with each bin say
    whether it is a good one."""
    with (FOLDER / f"{name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    published = sum(int(row["tokens"]) for row in rows) / sum(int(row["documents"]) for row in rows)
    assert np.mean(load_mix(name).draw(100_000, seed=0)) == pytest.approx(published, rel=0.03)


def test_names_seeds_and_bad_requests() -> None:
    assert mix_names() == NAMES
    mix = load_mix("wlb_128k")
    assert mix.draw(50, seed=1) == mix.draw(50, seed=1) != mix.draw(50, seed=2)
    with pytest.raises(UserError, match="unknown length mix 'wikipaedia': choose one of magi_192k"):
        load_mix("wikipaedia")
    with pytest.raises(UserError, match="documents is 0"):
        mix.draw(0, seed=0)
    with pytest.raises(UserError, match="seed is -1"):
        mix.draw(1, seed=-1)

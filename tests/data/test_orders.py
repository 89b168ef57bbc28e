"""The order of an epoch has every piece once, takes no memory, and stays that of a run's beginning;
pieces are those of a plain list."""

import tracemalloc
from collections import Counter
from dataclasses import dataclass
from math import factorial, isqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.data import pieces as pieces_module
from longctx.data.orders import ORDERS, Bijection
from longctx.data.pieces import LengthsAlone, Pieces, SamplerError
from longctx.data.sampler import Sampler
from longctx.data.store.groups import GROUPS
from longctx.data.store.held_out import HeldOut, halves, held_out, name_hash
from tests.marks import examples

SIZES = (
    *range(1, 20),
    *(2**k + more for k in (5, 10, 16) for more in (-1, 0, 1)),
    *(97, 101, 9_973, 99_991),
    *(10_000 - 1, 10_000, 10_000 + 1),
)


def whole(size: int, seed: int = 0, epoch: int = 0, stream: tuple[int, ...] = ()) -> list[int]:
    found: list[int] = Bijection(size, seed, stream).numbers(epoch, np.arange(size)).tolist()
    return found


@pytest.mark.parametrize("size", SIZES)
def test_an_epoch_is_a_permutation(size: int) -> None:
    assert sorted(whole(size, seed=size)) == list(range(size))


@given(size=st.integers(1, 1_000_000), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 2**20))
@settings(max_examples=examples(10))
def test_an_epoch_of_any_size_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    order = Bijection(size, seed, ())
    found = order.numbers(epoch, np.arange(size))
    assert (np.bincount(found, minlength=size) == 1).all()
    places = np.array([0, size // 3, size - 1])
    assert (order.numbers(epoch, places) == found[places]).all(), "a place does not need the others"


def test_there_is_an_order_of_no_pieces_and_of_more_than_memory_holds() -> None:
    assert whole(0) == []
    for size in (10**10, 2**40 + 1, 10**15):
        tracemalloc.start()
        found = Bijection(size, 3, ()).numbers(5, np.arange(size - 5000, size))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()
        assert len(set(found.tolist())) == 5000 and found.min() >= 0 and found.max() < size
        assert np.corrcoef(found, np.arange(5000))[0, 1] == pytest.approx(0, abs=0.05)


def test_seeds_epochs_and_stores_have_orders_of_their_own() -> None:
    orders = [
        tuple(whole(60, seed, epoch, stream))
        for seed in (0, 1, 2**32 - 1)
        for epoch in (0, 1, 2**31)
        for stream in ((), (0,), (5, 6))
    ]
    assert len(set(orders)) == 27


def excess(counts: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square less what is expected, in its standard deviations."""
    freedom = len(expected) - 1
    square = ((counts - expected) ** 2 / expected).sum()
    return float((square - freedom) / (2 * freedom) ** 0.5)


@pytest.mark.parametrize("size", [2, 3, 10, 97, 1_000, 65_537])
def test_first_places_are_uniform(size: int) -> None:
    """Over 2,000 seeds; and pairs of neighbours over one epoch."""
    bins = min(size, 20)
    expected = np.bincount(np.arange(size) * bins // size) * 2_000 / size
    for place in {0, 1, size - 1}:
        at = np.array([place])
        found = [int(Bijection(size, seed, ()).numbers(0, at)[0]) for seed in range(2_000)]
        counts = np.bincount(np.array(found) * bins // size, minlength=bins)
        assert abs(excess(counts, expected)) < 4
    if size < 1_000:
        return
    order = np.array(whole(size))
    for lag in (1, 2, isqrt(size), isqrt(size) + 1):
        distance = (order[lag:] - order[:-lag]) % size
        counts = np.bincount(distance * 20 // size, minlength=20)
        assert abs(excess(counts, np.full(20, len(distance) / 20))) < 4


@pytest.mark.parametrize("size", [3, 4, 5])
def test_all_orders_of_a_few_pieces_are_equally_likely(size: int) -> None:
    times = 40
    drawn = Counter(tuple(whole(size, seed)) for seed in range(times * factorial(size)))
    counts = np.array([*drawn.values()] + [0] * (factorial(size) - len(drawn)))
    assert abs(excess(counts, np.full(factorial(size), times))) < 4


def test_the_orders_are_those_of_earlier_versions() -> None:
    # A run goes on with the documents that it would have had, also after NumPy or this code has
    # changed.
    drawn = {
        name: make(8, 7, (1, 2)).numbers(1, np.arange(8)).tolist() for name, make in ORDERS.items()
    }
    assert drawn == {
        "bijection": [3, 1, 4, 5, 6, 0, 7, 2],
        "permutation": [2, 4, 6, 3, 0, 7, 1, 5],
    }


# --- pieces


@dataclass
class Spoken:
    """Documents of which `trained` says which tokens are targets; the first token is none."""

    trained: list[list[bool]]
    group: int = 0
    """Documents of which something is known together; 0: nothing is."""

    def groups(self, source: int) -> np.ndarray | None:
        if not self.group:
            return None
        rows = range(0, len(self.trained), self.group)
        return np.array([self._known(self.trained[row : row + self.group]) for row in rows], GROUPS)

    def _known(self, group: list[list[bool]]) -> tuple[int, int, int, int]:
        learned = [len(each) for each in group if any(each[1:])]
        return sum(learned), max(learned, default=0), len(learned), max(map(len, group))

    def size(self, source: int) -> int:
        return len(self.trained)

    def first(self, source: int) -> int:
        return 0

    def name(self, document: int) -> str:
        return f"number {document}"

    def columns(self, source: int, which: Any) -> tuple[np.ndarray, np.ndarray]:
        lengths = np.array([len(each) for each in self.trained], np.int64)
        targets = np.array([sum(each[1:]) for each in self.trained], np.int64)
        return lengths[which], targets[which]

    def has_targets(
        self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray
    ) -> np.ndarray:
        spans = zip(documents.tolist(), starts.tolist(), stops.tolist(), strict=True)
        return np.array([any(self.trained[d][start + 1 : stop]) for d, start, stop in spans], bool)

    def listed(self, max_length: int, long_documents: str, left_out: set[int]) -> list[Any]:
        """All pieces, one after the other."""
        found = []
        for document, trained in enumerate(self.trained):
            length = len(trained)
            spans = [
                (start, min(start + max_length, length)) for start in range(0, length, max_length)
            ]
            if length > max_length and long_documents == "drop":
                spans = []
            elif long_documents == "truncate_left":
                spans = [(max(0, length - max_length), length)]
            elif long_documents == "truncate_right":
                spans = spans[:1]
            for start, stop in spans:
                if document not in left_out and any(trained[start + 1 : stop]):
                    found.append((document, start, stop))
        return found


documents_strategy = st.lists(
    st.one_of(
        st.lists(st.booleans(), min_size=1, max_size=30),
        st.integers(1, 30).map(lambda length: [True] * length),
    ),
    min_size=1,
    max_size=40,
)


@given(
    trained=documents_strategy,
    max_length=st.integers(1, 33),
    long_documents=st.sampled_from(["split", "drop", "truncate_left", "truncate_right"]),
    share=st.sampled_from([None, 0.0, 0.3]),
    group=st.sampled_from([(1, 1), (2, 4), (3, 9), (256, 1 << 20)]),
    known=st.booleans(),
)
@settings(max_examples=examples(80))
def test_pieces_are_those_of_a_plain_list(
    trained: list[list[bool]],
    max_length: int,
    long_documents: str,
    share: float | None,
    group: tuple[int, int],
    known: bool,
) -> None:
    documents = Spoken(trained, group[0] * known)
    names = [documents.name(number) for number in range(len(trained))]
    left_out = None if share is None else HeldOut(halves(names), documents.name, share)
    apart = set(np.flatnonzero(held_out(names, share or 0.0)).tolist())
    expected = documents.listed(max_length, long_documents, apart)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces_module, "GROUP", group[0])
        patch.setattr(pieces_module, "BLOCK", group[1])
        patch.setattr(pieces_module, "FOUND_AT_ONCE", 7)
        found = Pieces(
            documents, max_length=max_length, long_documents=long_documents, left_out=left_out
        )
        spans = [(piece.document, piece.start, piece.stop) for piece in found.in_order()]
        mixed = np.random.default_rng(0).permutation(len(expected))
        several = np.stack(found.find(mixed), axis=1).tolist()
    assert spans == expected
    assert several == [list(expected[number]) for number in mixed]
    tally = found.tally
    sizes = [stop - start for _, start, stop in expected]
    assert (tally.pieces, tally.tokens, tally.longest) == (
        len(sizes),
        sum(sizes),
        max(sizes, default=0),
    )
    kept = [len(each) for number, each in enumerate(trained) if number not in apart]
    assert (tally.documents, tally.long) == (len(kept), sum(size > max_length for size in kept))


@given(trained=documents_strategy, seed=st.integers(0, 9), size=st.integers(1, 90))
@settings(max_examples=examples(20))
def test_a_run_of_an_earlier_version_goes_on(
    trained: list[list[bool]], seed: int, size: int
) -> None:
    """Its pieces were listed, and permuted whole."""
    documents = Spoken(trained)
    listed = documents.listed(9, "split", set())
    options: dict[str, Any] = {"seed": seed, "max_length": 9, "long_documents": "split"}
    if not listed:
        with pytest.raises(SamplerError, match="has a token to train on"):
            Sampler(documents, global_tokens=1, **options)
        return
    subject = Sampler(documents, global_tokens=size, **options, order="permutation")
    cursor = 0
    for _ in range(3):
        pieces, following = subject.step(cursor)
        for piece in pieces:
            epoch, place = divmod(cursor, len(listed))
            number = np.random.RandomState([seed, epoch]).permutation(len(listed))[place]
            assert (piece.document, piece.start, piece.stop) == listed[number]
            assert piece.epoch == epoch
            cursor += 1
        assert cursor == following


def test_names_on_the_border_are_read() -> None:
    """Halves of hashes do not tell on which side they are."""
    names = [f"document {number}" for number in range(50)]
    border = sorted(name_hash(name) for name in names)[20]
    read: list[int] = []

    def name(number: int) -> str:
        read.append(number)
        return names[number]

    held = HeldOut(halves(names), name, 0.0)
    for below, count in ((border, 20), (border + 1, 21)):
        held._below = below
        for which in (slice(None), np.arange(50).reshape(5, 10)):
            assert held(which).sum() == count and held(which).shape == np.zeros(50)[which].shape
            assert held(which).ravel().tolist() == [name_hash(each) < below for each in names]
    assert len(set(read)) == 1
    assert HeldOut(halves(names), name, 1.0)(slice(None)).all()


def test_lengths_alone_have_no_targets() -> None:
    found = Pieces(LengthsAlone(np.array([1, 7, 3])), max_length=3, long_documents="split")
    assert [piece.length for piece in found.in_order()] == [1, 3, 3, 1, 3]

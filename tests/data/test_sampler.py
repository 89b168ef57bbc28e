"""A step depends only on the cursor; an epoch has every token once."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longctx.data.pieces import Piece, SamplerError
from longctx.data.sampler import MOST_PIECES, Sampler
from longctx.data.store.store import Lengths

lengths_strategy = st.lists(st.integers(1, 40), min_size=1, max_size=25)


def sampler(lengths: list[int], **options: Any) -> Sampler:
    settings = {
        "global_tokens": 30,
        "seed": 0,
        "max_length": 10,
        "long_documents": "split",
        **options,
    }
    return Sampler(np.array(lengths, np.int64), **settings)


def conversations(lengths: list[int], partly: list[bool], **options: Any) -> Sampler:
    """Of a store of documents of which some have tokens without loss."""
    store: Any = Lengths(lengths, "store", 9)
    store.trained_tokens -= np.array(partly)
    store.has_targets = lambda documents, starts, stops: np.ones(len(documents), np.bool_)
    settings = {
        "global_tokens": 30,
        "seed": 0,
        "max_length": 10,
        "long_documents": "split",
        **options,
    }
    return Sampler(store, **settings)


@given(lengths=lengths_strategy, max_length=st.integers(1, 45), seed=st.integers(0, 9))
def test_an_epoch_holds_every_token_once(lengths: list[int], max_length: int, seed: int) -> None:
    subject = sampler(lengths, global_tokens=1, max_length=max_length, seed=seed)
    seen: Counter[tuple[int, int]] = Counter()
    for cursor in range(subject.pieces):
        (piece,), following = subject.step(cursor)
        assert following == cursor + 1
        assert 1 <= piece.length <= max_length
        seen.update((piece.document, token) for token in range(piece.start, piece.stop))
        assert piece.length == max_length or piece.stop == lengths[piece.document], (
            "full pieces and a rest"
        )
    assert seen == Counter(
        (document, token) for document, length in enumerate(lengths) for token in range(length)
    )
    assert subject.pieces == sum(-(-length // max_length) for length in lengths)
    assert (subject.long, subject.dropped) == (sum(length > max_length for length in lengths), 0)


@given(lengths=lengths_strategy, global_tokens=st.integers(1, 500), seed=st.integers(0, 9))
def test_a_step_takes_whole_pieces_until_it_is_full(
    lengths: list[int], global_tokens: int, seed: int
) -> None:
    subject = sampler(lengths, global_tokens=global_tokens, seed=seed)
    cursor = 0
    flat: list[Piece] = []
    for _ in range(3):
        pieces, following = subject.step(cursor)
        assert following == cursor + len(pieces)
        total = sum(piece.length for piece in pieces)
        assert total - pieces[-1].length < global_tokens <= total
        flat += pieces
        cursor = following
    one_by_one = sampler(lengths, global_tokens=1, seed=seed)
    assert flat == [one_by_one.step(place)[0][0] for place in range(cursor)]


@given(lengths=lengths_strategy, steps=st.integers(0, 6), seed=st.integers(0, 9))
def test_any_cursor_can_be_gone_on_from(lengths: list[int], steps: int, seed: int) -> None:
    running = sampler(lengths, seed=seed)
    cursor = 0
    for _ in range(steps):
        _, cursor = running.step(cursor)
    fresh = sampler(lengths, seed=seed)
    assert fresh.step(cursor) == running.step(cursor)
    assert fresh.state(cursor)["epoch"] == cursor // fresh.pieces
    assert fresh.step(0) == running.step(0)  # and back again


def test_every_epoch_and_seed_has_its_own_order() -> None:
    lengths = [1] * 50

    def order(seed: int, epoch: int) -> list[int]:
        return [
            piece.document
            for piece in sampler(lengths, global_tokens=50, seed=seed).step(50 * epoch)[0]
        ]

    orders = [order(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert all(sorted(each) == list(range(50)) for each in orders)
    assert len(set(map(tuple, orders))) == 9


def test_the_order_is_the_one_of_earlier_versions() -> None:
    # A run goes on with the documents that it would have had, also after NumPy or this file has
    # changed.
    orders = {
        "permutation": [6, 7, 2, 3, 5, 0, 1, 4],
        "bijection": [6, 5, 4, 0, 1, 3, 7, 2],
    }
    for order, documents in orders.items():
        pieces, _ = sampler([10] * 8, global_tokens=80, seed=7, order=order).step(8)
        assert [piece.document for piece in pieces] == documents


def test_long_documents_are_refused_dropped_or_truncated() -> None:
    with pytest.raises(SamplerError) as caught:
        sampler([9, 25, 11], long_documents="error")
    assert "document '1' has 25 tokens, and 2 of 3 documents have more than the 10 that fit" in str(
        caught.value
    )
    assert "data.long_documents" in str(caught.value)
    assert sampler([9, 10], long_documents="error").pieces == 2
    subject = sampler([25, 10, 11, 3], global_tokens=13, long_documents="drop")
    assert (subject.long, subject.dropped, subject.pieces) == (2, 2, 2)
    assert {piece.document for piece in subject.step(0)[0]} == {1, 3}
    for side, span in (("left", (15, 25)), ("right", (0, 10))):
        subject = sampler([25, 9], long_documents=f"truncate_{side}")
        assert [(piece.start, piece.stop) for piece in subject.in_order()] == [span, (0, 9)]
        assert (subject.pieces, subject.dropped, subject.longest) == (2, 0, 10)


def test_conversations_are_not_cut_unless_that_is_asked_for() -> None:
    """Texts are split, and conversations that fit are no reason to refuse."""
    assert conversations([25, 9], [False, True], long_documents=None).pieces == 4
    some: Any = {"lengths": [25, 14, 9], "partly": [False, True, True]}
    says = r"document 'document 2' has 14 tokens, and 1 of 2 conversations, .* set data\.long_doc"
    with pytest.raises(SamplerError, match=says):
        conversations(**some, long_documents=None)
    assert conversations(**some).pieces == 6
    held = np.array([False, True, False])
    assert conversations(**some, long_documents=None, left_out=held.__getitem__).pieces == 4, (
        "what is held out does not count"
    )


def test_a_step_may_have_as_many_documents_as_are_said() -> None:
    most = 2 * MOST_PIECES
    assert sampler([2] * 129, global_tokens=most).pieces == 129
    with pytest.raises(SamplerError, match="would have more than 131,072 of them"):
        sampler([2] * 129, global_tokens=most + 1)


@pytest.mark.parametrize(
    ("lengths", "options", "says"),
    [
        ([], {}, "there are no documents"),
        ([25, 11], {"long_documents": "drop"}, "all 2 have more than 10 tokens"),
        (
            [5],
            {"long_documents": "cut"},
            "long_documents is 'cut': it must be one of split, drop, error",
        ),
        ([5], {"global_tokens": 0}, "global_tokens is 0"),
        ([5], {"max_length": 0}, "max_length 0"),
        (
            [9000],
            {"max_length": 2, "global_tokens": 4_000_000},
            "with 2 tokens per document, a step would have",
        ),
        ([5], {"seed": -1}, "seed is -1"),
        ([5], {"seed": 1 << 32}, "seed is 4294967296"),
    ],
)
def test_impossible_settings(lengths: list[int], options: dict[str, int | str], says: str) -> None:
    with pytest.raises(SamplerError, match=says):
        sampler(lengths, **options)

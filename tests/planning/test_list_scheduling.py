"""Rules of list scheduling: no slot gets more tokens than it has, and needy slots get the documents
with most time per token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.planning.assignment import Integers
from longctx.planning.planners.list_scheduling import emptiest_first, neediest_first
from tests.marks import examples


def arrays(*rows: list[int]) -> list[Integers]:
    return [np.array(row, dtype=np.int64) for row in rows]


@st.composite
def cases(draw: st.DrawFn) -> list[Integers]:
    """Draws time left and tokens left of slots, and time and tokens of documents."""
    slots = draw(st.integers(1, 7))
    documents = draw(st.integers(0, 20))
    left = draw(st.lists(st.integers(-20, 200), min_size=slots, max_size=slots))
    free = draw(st.lists(st.integers(0, 60), min_size=slots, max_size=slots))
    time = draw(st.lists(st.integers(0, 90), min_size=documents, max_size=documents))
    tokens = draw(st.lists(st.integers(1, 40), min_size=documents, max_size=documents))
    return arrays(left, free, sorted(time, reverse=True), tokens)


def first_by_all_slots(
    left: Integers, free: Integers, time: Integers, tokens: Integers
) -> list[int] | None:
    """Returns what `neediest_first` does, by looking at every slot for every document."""
    left = left.copy()
    free = free.copy()
    chosen = []
    for cost, need in zip(time.tolist(), tokens.tolist(), strict=True):
        possible = [slot for slot in range(len(left)) if free[slot] >= need]
        if not possible:
            return None
        in_time = [slot for slot in possible if left[slot] >= cost]
        if in_time:
            slot = max(in_time, key=lambda slot: (left[slot] // free[slot], -slot))
        else:
            slot = max(possible, key=lambda slot: (left[slot], -slot))
        left[slot] -= cost
        free[slot] -= need
        chosen.append(slot)
    return chosen


@settings(max_examples=examples(1200), deadline=None)
@given(cases())
def test_the_neediest_slot_is_that_of_all_slots(case: list[Integers]) -> None:
    slots = neediest_first(*case)
    expected = first_by_all_slots(*case)
    assert (None if slots is None else slots.tolist()) == expected


@settings(max_examples=examples(100), deadline=None)
@given(cases())
def test_both_rules_keep_the_tokens_of_slots(case: list[Integers]) -> None:
    left, free, time, tokens = case
    for slots in (neediest_first(*case), emptiest_first(-left, free, time, tokens)):
        if slots is not None:
            assert (np.bincount(slots, tokens, len(free)) <= free).all()


def test_a_slot_with_much_time_and_few_tokens_gets_the_longest_document_that_fits() -> None:
    left, free, time, tokens = arrays([90, 100], [10, 100], [60, 15, 15], [10, 5, 5])
    assert neediest_first(left, free, time, tokens).tolist() == [0, 1, 1]
    assert emptiest_first(-left, free, time, tokens).tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("left", "time", "expected"),
    [
        ([5, 50], [10], [1]),  # the needy slot has not the time
        ([5, 50], [10, 4], [1, 0]),  # but for a shorter document
        ([5, 8], [10], [1]),  # none has: the one with most time
    ],
)
def test_a_slot_waits_for_documents_that_it_has_time_for(
    left: list[int], time: list[int], expected: list[int]
) -> None:
    """The first slot has 2 tokens left, and so the most need; the other has 60."""
    given = arrays(left, [2, 60], time, [1] * len(time))
    assert neediest_first(*given).tolist() == expected


@pytest.mark.parametrize("rule", [neediest_first, emptiest_first])
def test_documents_without_room_for_their_tokens_are_refused(rule: object) -> None:
    left, free, time, tokens = arrays([90, 100], [10, 9], [60], [11])
    assert callable(rule)
    assert rule(left, free, time, tokens) is None

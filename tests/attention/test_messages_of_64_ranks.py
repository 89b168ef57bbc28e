"""No rank of 64 on eight nodes waits for ever, whatever the times of messages and the queues of
GPUs; and the model that says so finds ranks that would.

The programs of all ranks are those of the real attention (`tests/message_model.py`).
"""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.attention import Mask
from longctx.planning.layout import Placement
from tests.marks import examples
from tests.message_model import ACROSS, INSIDE, Meeting, Program, Step, in_one_queue, play

NODE = 8
INSIDE_NODES = (Placement(3, 8, 5, rounds=3), Placement(4, 27, 5, rounds=3))
SMALL = Step(
    64,
    (401, 51, 90, 55, 35),
    (
        (Placement(0, 3, 37, rounds=2), Placement(1, 51, 13, rounds=3), *INSIDE_NODES),
        (Placement(2, 5, 23),),
    ),
)
"""Rings of odd degrees over one to six nodes, in two micro-batches. Some ranks send messages inside
their node and to others at once."""


@st.composite
def steps(draw: st.DrawFn, ranks: int, node: int) -> Step:
    """Draws documents shorter than their ring or longer, on rings of any degree, with rounds of
    their own."""
    lengths: list[int] = []
    micro_batches = []
    for _ in range(draw(st.integers(1, 2))):
        placements = []
        for _ in range(draw(st.integers(1, 5))):
            degree = draw(st.integers(1, ranks))
            first = draw(st.integers(0, ranks - degree))
            rounds = draw(st.integers(1, 6))
            reverse = draw(st.booleans())
            placements.append(Placement(len(lengths), first, degree, reverse, rounds=rounds))
            lengths.append(draw(st.integers(1, 4 * degree)))
        micro_batches.append(tuple(placements))
    return Step(
        ranks,
        tuple(lengths),
        tuple(micro_batches),
        layers=draw(st.integers(1, 2)),
        ranks_per_node=node,
        keep_kv=draw(st.booleans()),
        mask=Mask(window=draw(st.none() | st.integers(1, 40))),
    )


def assert_ends(step: Step, seed: int) -> None:
    """Plays a step on GPUs of eight queues and of one, and of one that runs nothing before the end
    of what it was given before."""
    programs = step.programs()
    assert any(programs)
    assert play(programs, seed) == []
    assert play(programs, seed, queues=1) == []
    assert play(in_one_queue(programs), seed) == []


@given(step=st.integers(2, 5).flatmap(lambda node: steps(13, node)), seed=st.integers(0, 999))
@settings(max_examples=examples(8), deadline=None)
def test_13_ranks_end(step: Step, seed: int) -> None:
    assert_ends(step, seed)


@pytest.mark.slow
@given(step=steps(64, NODE), seed=st.integers(0, 999))
@settings(max_examples=examples(120), deadline=None)
def test_64_ranks_end(step: Step, seed: int) -> None:
    assert_ends(step, seed)


@pytest.fixture(scope="module")
def programs() -> list[Program]:
    return SMALL.programs()


@pytest.mark.parametrize("queues", [1, 3, 8, 32])
def test_64_ranks_end_whatever_the_times_and_queues(programs: list[Program], queues: int) -> None:
    """The more queues, the less two streams wait for each other."""
    assert play(programs, queues, queues=queues) == []


def test_64_ranks_end_if_nothing_runs_beside_anything(programs: list[Program]) -> None:
    assert play(in_one_queue(programs), 0) == []


def renumbered(program: Program) -> Program:
    """Returns a program whose meetings have the numbers that their order gives them."""
    counts: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
    found = []
    for operation in program:
        meetings = {}
        for meeting, content in operation.meetings.items():
            key = meeting.communicator, meeting.ranks
            meetings[Meeting(*key, counts[key])] = content
            counts[key] += 1
        found.append(replace(operation, meetings=meetings))
    return found


def without(program: Program, number: int, meeting: Meeting) -> Program:
    """Returns a program in which a rank does not send or receive one message."""
    others = dict(program[number].meetings)
    del others[meeting]
    rest = replace(program[number], meetings=others)
    return renumbered([*program[:number], rest, *program[number + 1 :]])


def swapped(program: Program, first: int, second: int) -> Program:
    """Returns a program with two batches of messages in each other's place."""
    found = list(program)
    found[first] = replace(program[first], meetings=program[second].meetings)
    found[second] = replace(program[second], meetings=program[first].meetings)
    return renumbered(found)


def neighbors(program: Program, communicator: str) -> list[tuple[int, int]]:
    """Returns the pairs of batches, one after the other on a communicator, with messages of
    different size or pass to or from the same rank."""
    numbers = [n for n, operation in enumerate(program) if operation.stream == communicator]
    found = []
    for first, second in pairwise(numbers):
        sizes = {meeting.ranks: size for meeting, size in program[first].meetings.items()}
        others = program[second].meetings.items()
        if any(sizes.get(meeting.ranks, size) != size for meeting, size in others):
            found.append((first, second))
    return found


def with_fault(programs: list[Program], rank: int, program: Program) -> list[Program]:
    return [*programs[:rank], program, *programs[rank + 1 :]]


@pytest.mark.parametrize("communicator", [INSIDE, ACROSS])
def test_a_message_that_one_rank_leaves_out_is_found(
    programs: list[Program], communicator: str
) -> None:
    random = Random(communicator)
    places = [
        (rank, number, meeting)
        for rank, program in enumerate(programs)
        for number, operation in enumerate(program)
        if operation.stream == communicator
        for meeting in operation.meetings
    ]
    for rank, number, meeting in random.sample(places, 4):
        fault = without(programs[rank], number, meeting=meeting)
        assert play(with_fault(programs, rank, fault), 1), (rank, number, meeting)


@pytest.mark.parametrize("communicator", [INSIDE, ACROSS])
def test_batches_that_one_rank_posts_in_another_order_are_found(
    programs: list[Program], communicator: str
) -> None:
    random = Random(communicator)
    places = [
        (rank, pair)
        for rank, program in enumerate(programs)
        for pair in neighbors(program, communicator)
    ]
    for rank, (first, second) in random.sample(places, 4):
        fault = swapped(programs[rank], first, second)
        assert play(with_fault(programs, rank, fault), 1), (rank, first, second)


def test_micro_batches_that_one_rank_runs_in_another_order_are_found(
    programs: list[Program],
) -> None:
    """Its messages then are others than those of the rest, on both communicators."""
    second, first = SMALL.micro_batches
    fault = replace(SMALL, micro_batches=(first, second)).program(10)
    assert play(with_fault(programs, 10, fault), 1)


def across_first(program: Program) -> Program:
    """Returns a program that posts each batch between nodes before the one inside the node that
    came just before it, if it does not wait for that."""
    order = list(range(len(program)))
    for place in range(len(order) - 1):
        before, after = order[place : place + 2]
        streams = program[before].stream, program[after].stream
        if streams == (INSIDE, ACROSS) and before not in program[after].after:
            order[place : place + 2] = after, before
    place_of = {number: place for place, number in enumerate(order)}
    found = []
    for number in order:
        after_places = frozenset(place_of[other] for other in program[number].after)
        found.append(replace(program[number], after=after_places))
    return found


def test_an_order_of_communicators_that_differs_between_two_ranks_is_found(
    programs: list[Program],
) -> None:
    """Where a GPU runs one batch at a time. With queues for both communicators it does no harm."""
    fault = list(programs)
    for rank in (3, 10):
        fault[rank] = across_first(programs[rank])
        assert fault[rank] != programs[rank]
    assert play(fault, 1) == []
    assert play(in_one_queue(fault), 1)


def test_ranks_wait_for_ever_if_a_gpu_has_no_room_for_several_communicators(
    programs: list[Program],
) -> None:
    """Each takes the one that is ready first, which on another rank is another. So messages may
    take but few multiprocessors."""
    assert play(programs, 1, resident=1)
    assert play(programs, 1, resident=3) == []

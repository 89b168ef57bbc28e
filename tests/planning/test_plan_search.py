"""The parts of mode auto's search: balancing keeps the budget, blocks are whole, paths are
shortest."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from longctx.comparison.baselines import plan_placed
from longctx.comparison.mixes import load_mix
from longctx.planning.assignment import NEVER, least_degrees, tokens_on_ranks
from longctx.planning.pipeline import Pipeline
from longctx.planning.planners import planner
from longctx.planning.planners.bins import derived_degrees
from longctx.planning.planners.degree_table import DegreeTable, _degrees
from longctx.planning.planners.few_documents import _choices, _Costs, _placed, with_other_degrees
from longctx.planning.planners.local_search import balance
from longctx.planning.planners.packing import FULL, place_side_by_side
from longctx.planning.planners.planner import make_plan
from longctx.planning.planners.planning_input import PlanningInput
from longctx.planning.planners.search import is_possible, refine, search, search_in_blocks
from longctx.planning.planners.settings import DEFAULT, HUGE, LARGE, PIPELINED, settings_for
from longctx.planning.planners.shortest_path import LimitGraph
from rivals import RIVALS
from tests.marks import examples
from tests.planning.test_plan_properties import requests
from tests.profile_cases import PINNED

H100 = PINNED


@st.composite
def standing(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, int]:
    """Draws slots, times and tokens of documents for a number of micro-batches and ranks."""
    ranks, micro_batches = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    number = draw(st.integers(1, 30))
    whole = [
        draw(st.lists(st.integers(low, high), min_size=number, max_size=number))
        for low, high in ((0, 999), (1, 90), (1, 90))
    ]
    slots, time, tokens = (np.array(values, dtype=np.int64) for values in whole)
    return slots % (ranks * micro_batches), time, tokens, ranks, ranks * micro_batches


@settings(max_examples=examples(150), deadline=None)
@given(standing(), st.integers(0, 60), st.integers(0, 40))
def test_evening_out_keeps_every_document_and_the_budget(
    case: tuple[np.ndarray, np.ndarray, np.ndarray, int, int], spare: int, rounds: int
) -> None:
    slots, time, tokens, ranks, count = case
    free = np.bincount(slots, tokens, count).astype(np.int64) + spare
    room = np.full(count, int(time.sum()) // count)
    before = slots.copy()
    after = balance(slots, time, tokens, room, free, ranks, rounds)
    assert (slots == before).all()
    assert after.shape == slots.shape and after.min() >= 0 and after.max() < count
    assert (np.bincount(after, tokens, count) <= free).all()


@pytest.mark.parametrize(
    ("slots", "time", "heights"),
    [
        ([0, 0, 0, 0], [4, 4, 4, 4], [8, 8]),  # moves
        ([0, 0, 1, 1], [9, 8, 3, 2], [11, 11]),  # a swap
        # A move to the one slot that is low enough.
        ([0, 0, 1, 2, 3], [5, 5, 1, 1, 1], [6, 6, 1, 0]),
    ],
)
def test_evening_out_finds_even_heights(
    slots: list[int], time: list[int], heights: list[int]
) -> None:
    count = len(heights)
    room, free = np.array(heights), np.full(count, 100)
    after = balance(
        np.array(slots), np.array(time), np.ones(len(time), dtype=np.int64), room, free, count, 20
    )
    assert np.bincount(after, np.array(time), count).max() <= max(heights)


def test_a_document_too_many_for_its_micro_batch_lets_the_others_use_its_time() -> None:
    """Micro-batch 0 takes 90 because of one document, so its other rank may take the excess of
    micro-batch 1, above 40."""
    slots, time = np.array([0, 1, 2, 2, 3, 3]), np.array([90, 30, 30, 30, 30, 30])
    room, free = np.array([40, 40, 40, 40]), np.full(4, 100)
    after = balance(slots, time, np.ones(6, dtype=np.int64), room, free, 2, 40)
    load = np.bincount(after, time, 4).reshape(2, 2)
    assert load.max(axis=1).tolist() == [90, 30]


@pytest.mark.parametrize(
    ("mix", "ranks", "seed"), [("wikipedia", 64, 2), ("wlb_128k", 24, 0), ("wlb_128k", 24, 1)]
)
def test_auto_is_not_behind_groups_of_ranks_where_documents_are_few(
    mix: str, ranks: int, seed: int
) -> None:
    """With one document per rank, sharing groups of ranks was up to 2 % faster before auto tried
    it."""
    lengths = load_mix(mix).draw(ranks, seed)
    auto = make_plan(lengths, ranks=ranks, tokens_per_rank=16384, profile=H100)
    flexsp = plan_placed(
        "flexsp", RIVALS["flexsp"], lengths, ranks=ranks, tokens_per_rank=16384, profile=H100
    )
    assert auto.makespan_s <= 1.003 * flexsp.makespan_s


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.integers(100, 5000), min_size=1, max_size=7), st.integers(1, 9), st.integers(0, 300)
)
def test_shortest_paths_are_as_short_as_any_cut_into_micro_batches(
    work: list[int], ranks: int, launch_ns: int
) -> None:
    """At price 0. A document of time w takes w/d on d ranks; limits of the graph are at most 5 %
    apart."""
    sizes = np.array(sorted(work, reverse=True))
    degree = np.arange(1, ranks + 1)
    cost = -(-sizes[:, None] // degree)
    # As if it did not fit one rank.
    cost = np.where((sizes > 2500)[:, None] & (degree == 1) & (ranks > 1), NEVER, cost)
    graph = LimitGraph.of(cost, np.ones_like(cost), degree, ranks, 8, 1.0, launch_ns)
    option, number = graph.shortest_path(0)
    time = cost[np.arange(len(sizes)), option]

    def lowest(run: range) -> int:
        fits = (
            limit
            for limit in np.unique(cost[cost < NEVER])
            if (cost[run] <= limit).any(axis=1).all()
        )
        return min(
            int(limit)
            for limit in fits
            if degree[(cost[run] <= limit).argmax(axis=1)].sum() <= ranks
        )

    runs = [np.flatnonzero(number == i) for i in range(number.max() + 1)]
    assert all(len(run) and degree[option[run]].sum() <= ranks for run in runs)
    total = sum(time[run].max() + launch_ns for run in runs)
    best = min(
        sum(
            lowest(range(start, stop)) + launch_ns
            for start, stop in itertools.pairwise((0, *cuts, len(sizes)))
        )
        for count in range(len(sizes))
        for cuts in itertools.combinations(range(1, len(sizes)), count)
        if all(
            _possible(cost, degree, range(start, stop), ranks)
            for start, stop in itertools.pairwise((0, *cuts, len(sizes)))
        )
    )
    assert total <= 1.05 * best + len(sizes)


def _possible(cost: np.ndarray, degree: np.ndarray, run: range, ranks: int) -> bool:
    return int(degree[(cost[run] < NEVER).argmax(axis=1)].sum()) <= ranks


def test_shortest_paths_leave_room_where_it_is_worth_something() -> None:
    """Two documents on four ranks: two ranks each finish first; one rank each leaves half of the
    ranks free."""
    cost = np.array([[8000, 6000, 5000, 4500]] * 2)
    graph = LimitGraph.of(cost, np.ones_like(cost), np.arange(1, 5), 4, 10**9, 1.0, 0)
    assert graph.shortest_path(0)[0].tolist() == [1, 1]
    assert graph.shortest_path(0.9)[0].tolist() == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(("mix", "most"), [("magi_192k", 0.12), ("wlb_128k", 0.10)])
def test_documents_of_a_million_tokens_have_micro_batches_as_long_as_they_need(
    mix: str, most: float
) -> None:
    """With one limit for all but two micro-batches, plans were 14 % and 11 % above the lower
    bound."""
    lengths = load_mix(mix).draw(128, 0)
    lengths = [max(1, length * (1 << 20) // max(lengths)) for length in lengths]
    assert make_plan(lengths, ranks=128, tokens_per_rank=16384, profile=H100).gap < most


def test_auto_is_near_the_lower_bound_where_the_budget_is_tight() -> None:
    """With 4,096 tokens per rank most documents of this mix need two ranks; minimum degrees are 22
    % above the bound."""
    lengths = load_mix("wlb_128k").draw(256, 0)
    assert make_plan(lengths, ranks=64, tokens_per_rank=4096, profile=H100).gap < 0.1


@settings(max_examples=examples(60), deadline=None)
@given(requests(), st.sampled_from([2, 3, 4, 8]))
def test_plans_in_blocks_hold_their_documents(request: dict[str, Any], block: int) -> None:
    """Also where ranks are left over, and where short documents take parts of a block."""
    lengths, budget = np.array(request["lengths"]), request["tokens_per_rank"]
    places = request["ranks"] // block
    if not places or not least_degrees(lengths, places, budget, block).all():
        return
    given = PlanningInput(H100, lengths, request["ranks"], budget)
    candidate = search_in_blocks(given.in_blocks(block), DEFAULT)
    assert candidate is not None
    assignment = candidate.assignment
    assert int((assignment.first_rank + assignment.degree).max()) <= request["ranks"]
    shape = assignment.micro_batches, request["ranks"]
    assert int(tokens_on_ranks(lengths, assignment, shape).max()) <= budget
    assert given.candidate("search", assignment).makespan_ns == candidate.makespan_ns


def test_finer_blocks_follow_while_they_are_near_the_best() -> None:
    lengths = load_mix("wlb_128k").draw(256, 0)
    given = PlanningInput(H100, np.array(lengths), 64, 16384)
    thorough = replace(DEFAULT, blocks=(8, 4, 2, 1), good_gap=-1.0)
    first = list(refine(given, replace(thorough, finer_gap=-1.0)))
    plans = list(refine(given, replace(thorough, finer_gap=math.inf)))
    assert len(first) == 1 < len(plans)
    assert plans[-1].makespan_ns < first[-1].makespan_ns


def test_steps_without_rings_begin_with_ranks() -> None:
    given = PlanningInput(H100, np.array([700] * 80), 8, 16384)
    first, *others = refine(given)
    assert not others
    assert (first.assignment.degree == 1).all()


@pytest.mark.parametrize(
    ("ranks", "block", "possible"),
    [
        (66, 32, True),
        (67, 32, False),
        (33, 32, False),
        (24, 16, False),
        (64, 32, True),
        (5, 1, True),
    ],
)
def test_blocks_leave_few_ranks_over(ranks: int, block: int, possible: bool) -> None:
    step = PlanningInput(H100, np.array([100]), ranks, 16384)
    assert is_possible(step, block) is possible


def test_large_steps_have_settings_of_their_own() -> None:
    assert settings_for(2048, 255, pipelined=False) == DEFAULT
    assert settings_for(2048, 255, pipelined=True) == PIPELINED
    assert settings_for(2048, 256, pipelined=True) == LARGE
    assert settings_for(8192, 1023, pipelined=False) == LARGE
    assert settings_for(8192, 1024, pipelined=False) == HUGE


@settings(max_examples=examples(60), deadline=None)
@given(requests(), st.integers(1, 5))
def test_documents_side_by_side_are_in_their_micro_batches(
    request: dict[str, Any], micro_batches: int
) -> None:
    """In the order given, with times and tokens of the ranks that they are on."""
    given = PlanningInput(H100, np.array(request["lengths"]), request["ranks"], 1 << 40)
    documents = np.argsort(-given.lengths, kind="stable")[: given.slots * micro_batches]
    numbers = np.arange(len(documents)) // given.slots
    degrees = given.with_degrees(np.ones_like(given.lengths))
    rings = place_side_by_side(given, degrees, micro_batches, documents=documents, numbers=numbers)
    assert rings is not None
    placed = documents[rings.placed[documents]]
    number = numbers[rings.placed[documents]]
    assert (rings.micro_batch[placed] == number).all()
    for row in range(micro_batches):
        inside = placed[number == row]
        assert rings.first_rank[inside].tolist() == list(range(len(inside)))
        assert rings.load[row, : len(inside)].tolist() == rings.time[inside].tolist()
        assert rings.load[row].sum() == rings.time[inside].sum()
        assert (given.tokens_per_rank - rings.free[row]).sum() == rings.tokens[inside].sum()


def test_rings_side_by_side_wait_for_the_nodes_that_they_cross() -> None:
    """Of three rings of 6 ranks the second lies on two nodes of 8."""
    slow = replace(H100, inter_node_bytes_per_s=1e9)
    given = PlanningInput(slow, np.array([90_000, 90_000, 90_000]), 24, 16384)
    documents = np.arange(3)
    degrees = given.with_degrees(np.full(3, 6))
    rings = place_side_by_side(
        given, degrees, 1, documents=documents, numbers=np.zeros(3, dtype=np.int64)
    )
    assert rings is not None
    alone = given.alone_ns(documents, np.full(3, 6), first_slot=np.array([0, 6, 12]))
    assert alone[1] > alone[0]
    assert rings.time.tolist() == alone.tolist()


TEN = (100, 300, 700, 1500, 2500, 4000, 6000, 9000, 14000, 20000)


def test_short_documents_of_a_few_stay_whole() -> None:
    """Of ten documents on 8 ranks all were split before a split had a price."""
    plan = make_plan(TEN, ranks=8, tokens_per_rank=16384, profile=H100)
    assert plan.degrees[1] >= 7
    assert plan.gap < 0.011


def test_short_documents_stay_whole_in_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    for _ in range(2):
        plans.append(
            make_plan(TEN * 5, ranks=8, tokens_per_rank=16384, profile=H100, pipeline=Pipeline(2))
        )
        monkeypatch.setattr(planner, "_with_fewer_splits", lambda given, best: best)
    whole, split = plans
    assert whole.degrees[1] > split.degrees[1]
    assert whole.makespan_s <= split.makespan_s * (1 + DEFAULT.few_gap)


@pytest.mark.parametrize("seed", range(2))
def test_long_tails_are_near_the_bound_with_most_documents_whole(seed: int) -> None:
    """Without short documents together, all or three quarters are split."""
    random = np.random.RandomState(seed)
    drawn = np.exp(random.normal(np.log(2000), 2.0, 32768))
    lengths = drawn[(drawn >= 16) & (drawn <= 1 << 20)][:8192].astype(int).tolist()
    plan = make_plan(lengths, ranks=512, tokens_per_rank=16384, profile=H100)
    assert plan.gap < 0.02
    assert plan.degrees[1] > 0.45 * len(lengths)


def test_a_dear_split_is_made_only_where_it_is_needed() -> None:
    """With a second for every rank of a split, only the document that fits no rank is split."""
    dear = replace(H100, split_document_s=1.0)
    plan = make_plan(TEN, ranks=8, tokens_per_rank=16384, profile=dear)
    assert plan.degrees[1] == 9


@pytest.mark.parametrize("ranks", [6, 8, 12])
def test_degrees_of_few_documents_are_those_of_all_combinations(ranks: int) -> None:
    """The best of all degrees of two rings, by a plain placement of each combination."""
    given = PlanningInput(H100, np.array([20000, 9000, 700, 300]), ranks, 16384)
    costs = _Costs.of(given)
    degrees = np.array([ranks, ranks, 1, 1])
    choices = _choices(degrees, np.array([0, 1]), ranks)
    placed = _placed(costs, choices, 1, tokens_per_rank=16384)
    assert len(choices) == 1 + ranks * ranks
    for choice, time in zip(choices, placed.time.tolist(), strict=True):
        load, fits = [0] * ranks, True
        for document in range(4):  # of descending length
            degree = int(choice[document])
            runs = [max(load[first : first + degree]) for first in range(ranks - degree + 1)]
            first = runs.index(min(runs))
            fits &= int(costs.tokens[document, degree - 1]) <= 16384
            for rank in range(first, first + degree):
                load[rank] += int(costs.time[document, degree - 1])
        assert time == max(load) if fits else time >= FULL


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.integers(1, 30_000), min_size=1, max_size=9),
    st.integers(2, 9),
    st.sampled_from([2048, 5000, 16384]),
)
def test_other_degrees_of_few_documents_split_fewer_and_fit(
    lengths: list[int], ranks: int, tokens_per_rank: int
) -> None:
    step = PlanningInput(H100, np.array(lengths), ranks, tokens_per_rank)
    assume(least_degrees(step.lengths, ranks, tokens_per_rank).all())
    best = search(step)
    found = with_other_degrees(step, best, DEFAULT)
    if found is best:
        return
    assert found.split_documents < best.split_documents
    assert found.makespan_ns <= (1 + DEFAULT.few_gap) * best.makespan_ns
    shape = found.timed.time.shape
    assert tokens_on_ranks(step.lengths, found.assignment, shape).max() <= tokens_per_rank


FULL_WITH_OTHERS = (
    (100, 2, [140, 25, 129, 66]),
    (100, 2, [119, 130, 159, 66]),
    (100, 3, [14, 96, 79, 9, 106, 59, 78, 100]),
    (64, 4, [8, 79, 36, 1, 31, 39, 48]),
    (2048, 2, [2685, 1108, 2778, 3517]),
)
"""Token budgets, ranks and lengths that fit no placement with other degrees."""


@pytest.mark.parametrize(("tokens_per_rank", "ranks", "lengths"), FULL_WITH_OTHERS)
def test_few_documents_that_fit_no_other_degrees_keep_theirs(
    tokens_per_rank: int, ranks: int, lengths: list[int]
) -> None:
    """Without a look at tokens, all but the last would be placed beyond the budget."""
    step = PlanningInput(H100, np.array(lengths), ranks, tokens_per_rank)
    best = search(step)
    assert with_other_degrees(step, best, DEFAULT) is best


def test_a_document_that_fits_no_whole_blocks_is_planned_in_smaller_ones() -> None:
    """21 tokens in shards of 3 fit 7 ranks, not 8: head and tail are rounded up."""
    assert derived_degrees(H100, np.array([21]), 8, 3).tolist() == [7]
    for mode in ("auto", "bins"):
        plan = make_plan([21], ranks=8, tokens_per_rank=3, profile=H100, mode=mode)
        assert plan.degrees == {7: 1}


def test_degrees_beyond_32_are_whole_nodes_if_these_are_small() -> None:
    least = np.array([37])
    in_steps = [*range(1, 33), *range(33, 65), 37]
    for node, expected in (
        (1, in_steps),
        (100, in_steps),
        (8, [*range(1, 33), 37, 40, 48, 56, 64]),
    ):
        assert _degrees(64, least, node).tolist() == sorted(set(expected))


def test_the_smallest_degree_within_a_limit_or_the_fastest() -> None:
    table: Any = DegreeTable.__new__(DegreeTable)
    table.time = np.array([[8, 5, 4, 4], [9, 9, 3, 1]])
    table.quickest = table.time.min(axis=1)
    assert table.smallest_degrees_within(5).tolist() == [1, 2]
    assert table.smallest_degrees_within(3).tolist() == [2, 2]


def test_documents_that_fill_no_placement_take_more_micro_batches() -> None:
    """The fewest micro-batches hold all tokens, and the rings of some placements, but then not all
    other documents."""
    lengths = [12, 36, 32, 37, 4, 62, 60, 49, 37, 63, 52, 49]
    found = search(PlanningInput(H100, np.array(lengths), 3, 64))
    assert len(found.assignment.degree) == len(lengths)
    plan = make_plan(lengths, ranks=3, tokens_per_rank=64, profile=H100)
    assert plan.lengths == tuple(lengths)

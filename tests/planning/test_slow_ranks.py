"""Slow ranks: what they take, what plans give them, and what bounds say of them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.comparison.mixes import load_mix
from longctx.planning.assignment import Assignment
from longctx.planning.cost.bounds import step_bound_ns, tight_step_bound_ns
from longctx.planning.cost.model import score
from longctx.planning.cost.rounds import _ExchangeTimes, choose_rounds, plan_score
from longctx.planning.cost.slow_ranks import even_ns
from longctx.planning.cost.tower import EncodingTimes
from longctx.planning.hardware_profile import HardwareProfile, ProfileError
from longctx.planning.image_work import ImageWork
from longctx.planning.plan import Plan, PlanError
from longctx.planning.planners.packing import place_rings
from longctx.planning.planners.planner import make_plan
from longctx.planning.planners.planning_input import PlanningInput
from longctx.planning.planners.settings import DEFAULT
from longctx.planning.planners.static import pack_static
from longctx.planning.planners.whole import with_more_whole
from tests.marks import examples
from tests.planning.test_plan_cost import assignments, plain_time_s
from tests.planning.test_plan_properties import H100, profiles

TIMES = (1.001, 1.1, 2.0, 7.5)


def with_slow(profile: HardwareProfile, times: dict[int, float]) -> HardwareProfile:
    return replace(profile, slow_ranks=tuple(sorted(times.items())))


@st.composite
def slow(draw: st.DrawFn) -> tuple[list[int], int, Assignment, HardwareProfile]:
    """Draws an assignment of documents to ranks of which some are slow."""
    lengths, ranks, a = draw(assignments())
    names = draw(st.sets(st.integers(0, ranks - 1), min_size=1))
    times = {rank: draw(st.sampled_from(TIMES)) for rank in names}
    return lengths, ranks, a, with_slow(draw(profiles()), times)


@settings(max_examples=examples(100), deadline=None)
@given(slow())
def test_slow_ranks_compute_longer_and_wait_as_long(
    case: tuple[list[int], int, Assignment, HardwareProfile],
) -> None:
    lengths, ranks, a, profile = case
    result = score(profile, np.array(lengths), a, ranks)
    times = dict(profile.slow_ranks)
    for k in range(a.micro_batches):
        inside = np.flatnonzero(a.micro_batch == k).tolist()
        rings = [(i, int(a.first_rank[i]), int(a.degree[i]), bool(a.reversed[i])) for i in inside]
        for rank in range(ranks):
            time, exposed = plain_time_s(profile, lengths, rings, rank)
            expected = times.get(rank, 1.0) * (time - exposed) + exposed
            rounding = 1e-9 * (4 + 2 * ranks * len(lengths)) * times.get(rank, 1.0)
            assert result.time[k, rank] / 1e9 == pytest.approx(expected, rel=1e-9, abs=rounding)


@settings(max_examples=examples(100), deadline=None)
@given(slow(), st.sampled_from([None, 3]))
def test_no_assignment_beats_the_bounds_of_slow_ranks(
    case: tuple[list[int], int, Assignment, HardwareProfile], most: int | None
) -> None:
    lengths, ranks, a, profile = case
    sizes = np.array(lengths)
    scored = score(profile, sizes, a, ranks)
    budget = 1 << 30
    _, timed = choose_rounds(profile, sizes, a, scored, max_remote_tokens=most)
    assert (timed.time >= scored.time - 1).all()
    assert scored.makespan_ns >= step_bound_ns(profile, sizes, ranks, budget)
    assert scored.makespan_ns >= tight_step_bound_ns(profile, sizes, ranks, budget)


def test_the_bound_counts_what_slow_ranks_do_not_do() -> None:
    """Three ranks of which one takes twice as long do as much as 2.5."""
    free = replace(H100, step_s=0.0, launch_s=0.0)
    lengths = np.array([4000] * 30)
    usual = step_bound_ns(free, lengths, 3, 1 << 20)
    slow = step_bound_ns(with_slow(free, {1: 2.0}), lengths, 3, 1 << 20)
    assert slow == pytest.approx(usual * 3 / 2.5, rel=1e-6)


def test_a_slow_rank_gets_as_much_less() -> None:
    """Of eight documents a rank that takes three times as long gets two."""
    plan = make_plan([1000] * 8, ranks=2, tokens_per_rank=16384, profile=with_slow(H100, {0: 3.0}))
    held = [len([p for p in plan.micro_batches[0] if p.first_rank == rank]) for rank in (0, 1)]
    assert plan.degrees == {1: 8}
    assert held == [2, 6]


def judged(plan: Plan, profile: HardwareProfile) -> float:
    """Returns the seconds of a plan by another profile."""
    return plan_score(replace(plan, profile=profile)).makespan_ns / 1e9


@pytest.mark.parametrize("relative", [1.1, 1.5])
@pytest.mark.parametrize(("ranks", "each"), [(16, 16), (64, 4), (37, 8)])
def test_plans_that_know_a_slow_rank_lose_little_by_it(
    ranks: int, each: int, relative: float
) -> None:
    lengths = load_mix("wlb_128k").draw(ranks * each, 0)
    slow = with_slow(H100, {ranks // 3: relative})
    arguments: dict[str, Any] = {"ranks": ranks, "tokens_per_rank": 16384}
    unaware = judged(make_plan(lengths, profile=H100, **arguments), slow)
    aware = make_plan(lengths, profile=slow, **arguments)
    assert judged(aware, slow) == pytest.approx(aware.makespan_s)
    assert aware.makespan_s < unaware
    lost = unaware / aware.lower_bound_s - 1
    assert aware.gap < 0.5 * lost


@pytest.mark.parametrize("mode", ["static", "bins", "auto"])
def test_every_mode_plans_with_slow_ranks(mode: str) -> None:
    lengths = load_mix("magi_192k").draw(60, 1)
    slow = with_slow(H100, {0: 1.2, 9: 1.05})
    plan = make_plan(lengths, ranks=10, tokens_per_rank=32768, profile=slow, mode=mode)
    assert plan.makespan_s >= plan.lower_bound_s
    assert judged(plan, slow) == pytest.approx(plan.makespan_s)


def test_rings_leave_a_slow_rank_to_shorter_documents() -> None:
    """A document on two of three ranks is on the usual ones."""
    step = PlanningInput(with_slow(H100, {0: 2.0}), np.array([30_000]), 3, 1 << 20)
    rings = place_rings(step, step.with_degrees(np.array([2])), 1)
    assert rings is not None
    assert rings.first_rank.tolist() == [1]


def test_a_block_is_as_slow_as_its_slowest_rank() -> None:
    step = PlanningInput(with_slow(H100, {3: 1.5, 4: 2.0, 5: 3.0, 10: 9.0}), np.array([1]), 11, 9)
    assert step.in_blocks(5).slowness.tolist() == [2.0, 3.0]
    assert step.slowness.tolist() == [1, 1, 1, 1.5, 2, 3, 1, 1, 1, 1, 9]


def test_what_every_rank_waits_for_bounds_no_more_than_itself() -> None:
    """A second on each of two ranks takes a second, whichever is slow."""
    profile = with_slow(H100, {1: 4.0})
    assert 0.5e9 / 2 < even_ns(profile, 0, 2 * 10**9, ranks=2) <= 10**9
    assert even_ns(H100, 0, 2 * 10**9, ranks=2) == 10**9


def test_documents_made_whole_leave_a_slow_rank_its_share() -> None:
    """Rank 0 takes twice as long, so it gets half as many as each of the others."""
    step = PlanningInput(with_slow(H100, {0: 2.0}), np.array([1000] * 75), 8, 16384)
    plan = pack_static(step, 2)
    assert plan is not None
    whole = with_more_whole(step, plan, DEFAULT)
    assert whole.split_documents == 0
    held = np.bincount(whole.assignment.first_rank, minlength=8)
    assert held.tolist() == [5, 10, 10, 10, 10, 10, 10, 10]


def test_queries_of_a_slow_rank_hide_what_those_of_others_do() -> None:
    lengths = np.array([50_000, 9000])
    zeros = np.zeros(2, dtype=np.int64)
    a = Assignment.alternating(zeros, zeros, np.array([4, 4]))
    found = []
    for profile in (H100, with_slow(H100, {2: 3.0})):
        timed = score(profile, lengths, a, 4)
        found.append(_ExchangeTimes(profile, lengths, a, timed).queries)
    assert (found[0] > 0).all()
    assert np.allclose(found[0], found[1], rtol=1e-6)


def test_a_slow_rank_encodes_images_longer() -> None:
    image = ImageWork(patches=64, flops=1, time_ns=5_000_000)
    encoding = EncodingTimes({0: [image]})
    zeros = np.zeros(1, dtype=np.int64)
    a = Assignment.alternating(zeros, zeros, np.array([1]))
    lengths = np.array([500])
    usual = score(H100, lengths, a, 2, encoding=encoding)
    slow = score(with_slow(H100, {0: 3.0}), lengths, a, 2, encoding=encoding)
    assert usual.encoding[0, 0] == 5_000_000
    assert slow.time[0, 0] == 3 * usual.time[0, 0]


def test_a_profile_with_slow_ranks_is_read_back() -> None:
    profile = with_slow(H100, {2: 1.25, 7: 1.1})
    assert profile.to_dict()["slow_ranks"] == [[2, 1.25], [7, 1.1]]
    assert HardwareProfile.from_dict(profile.to_dict()) == profile


@pytest.mark.parametrize(
    ("table", "rule"),
    [
        ({3: 1.1}, "must be a list of [rank, time relative to the others] pairs"),
        ([[3]], "must be a list of [rank, time relative to the others] pairs"),
        ([[3, float("nan")]], "must be a list of [rank, time relative to the others] pairs"),
        ([[3, 1.0]], "must be above 1, at most 100"),
        ([[3, 0.9]], "must be above 1, at most 100"),
        ([[3, 1e6]], "must be above 1, at most 100"),
        ([[3, 1.1], [3, 1.2]], "must be strictly ascending"),
        ([[-1, 1.1]], "must be whole numbers ≥ 0"),
        ([[1.5, 1.1]], "must be whole numbers ≥ 0"),
    ],
)
def test_slow_ranks_that_make_no_sense(table: Any, rule: str) -> None:
    with pytest.raises(ProfileError) as raised:
        HardwareProfile.from_dict(H100.to_dict() | {"slow_ranks": table})
    assert rule in str(raised.value)


def test_a_slow_rank_can_make_a_step_too_long() -> None:
    """Sums of nanoseconds would not be exact, though those of usual ranks are."""
    profile = replace(H100, linear_s_per_token=1e5)
    make_plan([30], ranks=8, tokens_per_rank=100, profile=profile)
    slow = with_slow(profile, {1: 1.001, 2: 100.0})
    with pytest.raises(PlanError, match="days by the hardware profile"):
        make_plan([30], ranks=8, tokens_per_rank=100, profile=slow)


def test_a_slow_rank_that_the_domain_does_not_have() -> None:
    with pytest.raises(PlanError, match="names rank 8, but the domain has ranks 0 to 7"):
        make_plan([100], ranks=8, tokens_per_rank=100, profile=with_slow(H100, {8: 1.1}))

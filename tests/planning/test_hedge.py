"""Plans for rates that may be wrong: what they lose where attention and matrices take other times
than the profile says."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.comparison.mixes import load_mix
from longctx.planning.cost.rounds import plan_score
from longctx.planning.hardware_profile import HardwareProfile, ProfileError
from longctx.planning.pipeline import Pipeline
from longctx.planning.plan import Plan
from longctx.planning.planners.hedge import with_rates
from longctx.planning.planners.planner import make_plan
from longctx.planning.planners.planning_input import PlanningInput
from tests.marks import examples
from tests.planning.test_plan_properties import H100

ERROR = 0.3
WRONG = ((1.0, 1.0), (1 - ERROR, 1 + ERROR), (1 + ERROR, 1 - ERROR))


def true_time_s(plan: Plan, truth: HardwareProfile) -> float:
    return plan_score(replace(plan, profile=truth)).makespan_ns / 1e9


def losses(plan: Plan, profile: HardwareProfile) -> list[float]:
    """Returns by how much longer the plan takes than a bound, by the profile and where attention
    and matrices take other times."""
    found = []
    for attention, matrices in WRONG:
        truth = with_rates(profile, attention=attention, matrices=matrices)
        given = PlanningInput(
            profile=truth,
            lengths=np.array(plan.lengths),
            slots=plan.ranks,
            tokens_per_rank=plan.tokens_per_rank,
            pipeline=plan.pipeline,
        )
        found.append(true_time_s(plan, truth) / given.step_bound_ns() * 1e9 - 1)
    return found


@pytest.mark.parametrize("mix", ["wlb_128k", "magi_192k", "wikipedia"])
def test_a_hedged_plan_loses_less_where_the_profile_is_wrong(mix: str) -> None:
    """Its price is a little time where the profile is right."""
    lengths = load_mix(mix).draw(256, 1)
    plain = make_plan(lengths, ranks=64, tokens_per_rank=16384, profile=H100)
    unsure = replace(H100, rate_error=ERROR)
    hedged = make_plan(lengths, ranks=64, tokens_per_rank=16384, profile=unsure)
    plain_losses = losses(plain, H100)
    hedged_losses = losses(hedged, H100)
    assert max(plain_losses) > 0.1
    assert max(hedged_losses) < 0.08
    assert plain_losses[0] < hedged_losses[0] < plain_losses[0] + 0.03
    assert (plain.winner, hedged.winner) == ("search", "hedged search")
    assert hedged.cost.makespan_s == true_time_s(hedged, H100)


@settings(max_examples=examples(30), deadline=None)
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=30),
    st.integers(1, 13),
    st.integers(1, 3),
)
def test_at_worst_a_hedged_plan_never_loses_more(
    lengths: list[int], ranks: int, stages: int
) -> None:
    pipeline = Pipeline(stages)
    tokens_per_rank = max(200, 3000 // ranks + 1)
    plain = make_plan(
        lengths, ranks=ranks, tokens_per_rank=tokens_per_rank, profile=H100, pipeline=pipeline
    )
    unsure = replace(H100, rate_error=ERROR)
    hedged = make_plan(
        lengths, ranks=ranks, tokens_per_rank=tokens_per_rank, profile=unsure, pipeline=pipeline
    )
    # The plan chooses numbers of rounds by the profile, and a loss is counted with the best ones.
    assert max(losses(hedged, H100)) <= max(losses(plain, H100)) * (1 + 1e-3) + 1e-4


def test_modes_with_given_degrees_are_as_ever() -> None:
    lengths = load_mix("wlb_128k").draw(64, 0)
    unsure = replace(H100, rate_error=ERROR)
    for mode in ("static", "bins"):
        plain = make_plan(lengths, ranks=16, tokens_per_rank=16384, profile=H100, mode=mode)
        same = make_plan(lengths, ranks=16, tokens_per_rank=16384, profile=unsure, mode=mode)
        assert same.micro_batches == plain.micro_batches


@pytest.mark.parametrize("error", [-0.1, 1.0, float("nan"), True, "much"])
def test_an_error_that_no_rate_can_have_is_refused(error: float) -> None:
    with pytest.raises(ProfileError, match=r"rate_error is .*: must be at least 0 and below 1"):
        replace(H100, rate_error=error)


@pytest.mark.slow
def test_plans_of_pipelines_are_hedged() -> None:
    lengths = load_mix("wikipedia").draw(128, 1)
    worst = []
    for rate_error in (0.0, ERROR):
        plan = make_plan(
            lengths,
            ranks=16,
            tokens_per_rank=16384,
            profile=replace(H100, rate_error=rate_error),
            pipeline=Pipeline(2),
        )
        worst.append(max(losses(plan, H100)))
    assert worst[1] < 0.8 * worst[0]

"""The checker rejects every kind of broken plan and names document, micro-batch and rank;
impossible requests are refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from longctx.planning.check import check_plan
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.layout import Placement
from longctx.planning.pipeline import Pipeline
from longctx.planning.plan import Plan, PlanError
from longctx.planning.planners.planner import make_plan

H100 = HardwareProfile.load("h100-nvlink-ib")


@pytest.fixture
def plan() -> Plan:
    """A sound plan."""
    made = Plan("auto", "search", 4, 100, (300, 20, 150), (tuple(FIRST), tuple(SECOND)), H100)
    check_plan(made)
    return made


FIRST, SECOND = [Placement(0, 0, 4), Placement(1, 0, 1)], [Placement(2, 2, 2)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ([FIRST, [*SECOND, Placement(1, 0, 1)]], "document 1 is placed 2 times.*0, 1"),
        ([FIRST[:1], SECOND], "document 1 is in no micro-batch"),
        ([FIRST, [Placement(2, 3, 2)]], "document 2 in micro-batch 1 .*ranks 3 to 4.*has 4"),
        ([[FIRST[0], Placement(1, 4, 1)], SECOND], "document 1 in micro-batch 0 .*ranks 4 to 4"),
        ([[FIRST[0], Placement(1, -1, 1)], SECOND], "document 1 in micro-batch 0 is malformed.*-1"),
        (
            [[FIRST[0], Placement(1, 0, 0)], SECOND],
            "document 1 in micro-batch 0 is malformed.*degree 0",
        ),
        ([[FIRST[0], Placement(3, 0, 1)], SECOND], "document 3 in micro-batch 0 does not exist"),
        (
            [[Placement(0, 0, 3), FIRST[1]], SECOND],
            r"rank 0 holds 120 tokens in micro-batch 0 .*\[0, 1\].*100",
        ),
        ([FIRST, [Placement(2, 2, 1)]], "rank 2 holds 150 tokens in micro-batch 1"),
        ([FIRST, []], "micro-batch 1 has no document"),
        (
            [FIRST, [Placement(2, 2, 2, rounds=0)]],
            "document 2 in micro-batch 1 has 0 exchange rounds",
        ),
        ({"ranks": 0}, "ranks 0"),
        ({"tokens_per_rank": 1.5}, "tokens_per_rank 1.5"),
        ({"lengths": (300, 0, 150)}, "document 1 has length 0"),
    ],
)
def test_each_broken_plan_is_caught(plan: Plan, change: Any, message: str) -> None:
    change = change if isinstance(change, dict) else {"micro_batches": tuple(map(tuple, change))}
    with pytest.raises(PlanError, match=message):
        check_plan(replace(plan, **change))


def test_one_token_over_the_budget_is_caught() -> None:
    """7 tokens on two ranks are split into 3 and 4, so a budget of 3 is one too small on one of the
    ranks."""
    plan = Plan("auto", "search", 2, 3, (7,), ((Placement(0, 0, 2),),), H100)
    with pytest.raises(PlanError, match="rank 1 holds 4 tokens in micro-batch 0"):
        check_plan(plan)
    with pytest.raises(PlanError, match="rank 0 holds 4 tokens"):
        check_plan(replace(plan, micro_batches=((Placement(0, 0, 2, reversed=True),),)))
    check_plan(replace(plan, tokens_per_rank=4))


def request(**change: Any) -> dict[str, Any]:
    return {"lengths": [100, 200], "ranks": 4, "tokens_per_rank": 128, "profile": H100, **change}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": []}, "lengths are empty"),
        ({"lengths": [5, 0]}, "document 1 has length 0"),
        ({"lengths": [5, -3]}, "document 1 has length -3"),
        ({"lengths": [5, 2.0]}, "document 1 has length 2.0"),
        ({"lengths": [5, True]}, "document 1 has length True"),
        ({"lengths": [5, "7"]}, "document 1 has length '7'"),
        ({"lengths": [5, 1 << 70]}, "document 1"),
        (
            {"lengths": [5, 900, 600]},
            r"document 1 has 900 tokens, but 4 ranks of 128 .*512.*1 more.*tokens_per_rank to 225, "
            r"use 8 ranks",
        ),
        ({"ranks": 0}, "ranks is 0"),
        ({"ranks": 2.5}, "ranks is 2.5"),
        ({"tokens_per_rank": 0}, "tokens_per_rank is 0"),
        ({"tokens_per_rank": None}, "tokens_per_rank is None"),
        ({"mode": "dynamic"}, "mode is 'dynamic'.*auto, static, bins"),
        ({"degree": 2}, "degree is 2, but mode is auto"),
        ({"mode": "static", "degree": 5}, "degree is 5.*1..4"),
        (
            {"mode": "static", "degree": 1},
            "document 1 has 200 tokens, but 1 ranks of 128.*degree 2",
        ),
        ({"mode": "static", "bins": {200: 2}}, "bins are given, but mode is static"),
        ({"mode": "bins", "bins": {150: 1}}, "document 1 has 200 tokens, but the bins end at 150"),
        (
            {"mode": "bins", "bins": {200: 1}},
            "document 1 has 200 tokens, but degree 1 of its bin holds at most 128: raise .* to 2, "
            "or tokens_per_rank to 200",
        ),
        ({"mode": "bins", "bins": {100: 1, 200: 5}}, "bin 200 has degree 5: must be in 1..4"),
        ({"mode": "bins", "bins": {}}, "the table must not be empty"),
        (
            {"lengths": [600, 901, 700]},
            r"document 1 has 901 tokens, but .* \(2 more documents do not fit\)",
        ),
        ({"max_remote_tokens": 0}, "max_remote_tokens is 0"),
        ({"pipeline": Pipeline(0)}, "pipeline ranks is 0"),
        ({"pipeline": Pipeline(2, 0)}, "pipeline chunks is 0"),
    ],
)
def test_impossible_requests_say_what_would_do(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make_plan(**request(**change))


def test_the_way_out_of_a_document_that_does_not_fit_is_true() -> None:
    lengths = [100, 901]
    with pytest.raises(PlanError, match="tokens_per_rank to 226, use 9 ranks"):
        make_plan(**request(lengths=lengths, tokens_per_rank=113))
    make_plan(**request(lengths=lengths, tokens_per_rank=226))
    make_plan(**request(lengths=lengths, tokens_per_rank=113, ranks=9))


def test_a_profile_that_asks_for_years_is_refused() -> None:
    slow = HardwareProfile(**{**H100.__dict__, "linear_s_per_token": 1e6})
    with pytest.raises(PlanError, match="days by the hardware profile"):
        make_plan(**request(profile=slow))


def test_auto_leaves_out_bins_that_do_not_hold_the_documents() -> None:
    assert make_plan(**request(bins={150: 1})).hash == make_plan(**request(bins={120: 1})).hash


def test_given_bins_are_followed() -> None:
    plan = make_plan(
        **request(lengths=np.array([50, 60, 300, 128, 129]), mode="bins", bins={128: 1, 512: 4})
    )
    degree = {p.document: p.degree for micro_batch in plan.micro_batches for p in micro_batch}
    assert degree == {0: 1, 1: 1, 2: 4, 3: 1, 4: 4}
    assert plan.winner == "bins"


def test_ranks_left_over_by_a_static_degree_stay_empty() -> None:
    plan = make_plan(**request(lengths=[100] * 9, ranks=7, mode="static", degree=3))
    used = {rank for micro_batch in plan.micro_batches for p in micro_batch for rank in p.ring}
    assert used == set(range(6))


def test_ranks_for_a_very_long_document_are_named_at_once() -> None:
    """With an odd budget, the smallest number of ranks took minutes to find."""
    with pytest.raises(PlanError, match=r"use 166666666667 ranks, or split the document"):
        make_plan([10**12], ranks=1, tokens_per_rank=7, profile=H100)
    with pytest.raises(PlanError, match=r"use 15 ranks, or split the document"):
        make_plan([100], ranks=1, tokens_per_rank=7, profile=H100)

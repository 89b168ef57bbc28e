"""Every plan keeps its guarantees for any lengths, ranks, budget and profile; auto is never worse
than the other modes."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longctx.planning.assignment import largest_shards, least_degrees
from longctx.planning.check import check_plan
from longctx.planning.cost.rounds import plan_score
from longctx.planning.cost.tower import EncodingTimes
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.image_work import NO_IMAGES, ImageWork, ImageWorks
from longctx.planning.layout import Placement, largest_shard
from longctx.planning.parts import EQUAL_PARTS, PartCosts
from longctx.planning.pipeline import NO_PIPELINE, Pipeline
from longctx.planning.plan import Plan, PlanError
from longctx.planning.planners.planner import make_plan
from longctx.planning.planners.planning_input import PlanningInput
from longctx.planning.planners.static import degree_bounds_ns, pack_static
from tests.marks import examples

H100 = HardwareProfile.load("h100-nvlink-ib")
HIDDEN_BY_QUERIES = replace(
    H100, attention_s_per_token2=1e-15, overlap=1.0, query_share=1.0, ranks_per_node=1
)


@st.composite
def profiles(draw: st.DrawFn) -> HardwareProfile:
    points = draw(st.lists(st.integers(1, 1 << 17), min_size=1, max_size=4, unique=True))
    values = draw(st.lists(st.floats(0.05, 1.0), min_size=len(points), max_size=len(points)))
    positive = st.floats(-3, 3).map(lambda exponent: 10.0**exponent)
    return HardwareProfile(
        linear_s_per_token=8.9e-5 * draw(positive),
        attention_s_per_token2=2.04e-9 * draw(positive),
        attention_efficiency=tuple(zip(sorted(points), sorted(values), strict=True)),
        kv_bytes_per_token=393216 * draw(positive),
        intra_node_bytes_per_s=300e9 * draw(positive),
        inter_node_bytes_per_s=40e9 * draw(positive),
        ranks_per_node=draw(st.integers(1, 9)),
        latency_s=draw(st.sampled_from([0.0, 2e-3, 1.0])),
        overlap=draw(st.sampled_from([0.0, 0.8, 1.0])),
        launch_s=draw(st.sampled_from([0.0, 0.05, 3.0])),
        step_s=draw(st.sampled_from([0.0, 0.3])),
        exchange_levels=draw(st.sampled_from([1, 1, 2])),
        attention_split_penalty=draw(st.sampled_from([0.0, 0.3, 1.7])),
        query_share=draw(st.sampled_from([0.0, 0.07, 1.0])),
        state_bytes=draw(st.sampled_from([0.0, 0.0, 1e6, 1e9])),
        split_s_per_token=draw(st.sampled_from([0.0, 1e-5])),
        received_s_per_token=draw(st.sampled_from([0.0, 1e-5])),
        split_document_s=draw(st.sampled_from([0.0, 1e-3, 1.0])),
    )


@st.composite
def requests(draw: st.DrawFn) -> dict[str, object]:
    """Draws lengths, ranks and a budget that fit or do not fit, with short, long and exactly full
    documents."""
    ranks = draw(st.one_of(st.integers(1, 9), st.sampled_from([12, 24, 48, 64])))
    budget = draw(st.one_of(st.integers(1, 40), st.integers(41, 5000)))
    length = st.one_of(
        st.integers(1, budget),
        st.integers(1, ranks * budget),
        st.sampled_from([1, budget, ranks * budget, max(1, ranks * budget - 1)]),
    )
    lengths = draw(st.lists(length, min_size=1, max_size=40))
    return {"lengths": lengths, "ranks": ranks, "tokens_per_rank": budget}


def image_works() -> st.SearchStrategy[ImageWorks]:
    """Draws images of a few documents, from none to many times the work of the texts."""
    work = st.builds(
        ImageWork,
        st.sampled_from([4, 64, 100]),
        st.just(0),
        st.sampled_from([1, 10**6, 3 * 10**6, 10**10]),
    )
    return st.dictionaries(st.integers(0, 4), st.lists(work, min_size=1, max_size=8), max_size=3)


def part_costs() -> st.SearchStrategy[PartCosts]:
    return st.builds(PartCosts, st.floats(0.1, 4), st.floats(0.1, 1.9), st.floats(0.1, 1.9))


def plan_or_none(**arguments: object) -> Plan | None:
    try:
        return make_plan(**arguments)
    except PlanError:
        return None


FLAT = replace(H100, attention_efficiency=((1, 1.0),), ranks_per_node=1, overlap=0.0)
"""Reversing documents moves single tokens between ranks, so candidates must be scored as they will
run."""


@settings(max_examples=examples(150), deadline=None)
@given(requests(), profiles())
@example({"lengths": [1, 1, 1, 1745], "ranks": 24, "tokens_per_rank": 77}, FLAT)
def test_auto_keeps_the_guarantees_and_is_never_worse(
    request: dict[str, object], profile: HardwareProfile
) -> None:
    auto = plan_or_none(**request, profile=profile)
    others = {
        mode: plan_or_none(**request, profile=profile, mode=mode) for mode in ("static", "bins")
    }
    if auto is None:
        assert not any(others.values())
        return
    check_plan(auto)
    assert auto.makespan_s >= auto.lower_bound_s
    for plan in filter(None, others.values()):
        check_plan(plan)
        assert plan.makespan_s >= plan.lower_bound_s == auto.lower_bound_s
        assert auto.makespan_s <= plan.makespan_s
        assert plan.hash != auto.hash


@settings(max_examples=examples(60), deadline=None)
@given(requests(), st.integers(1, 9), profiles())
def test_best_static_is_the_best_of_all_degrees(
    request: dict[str, object], degree: int, profile: HardwareProfile
) -> None:
    one = plan_or_none(**request, profile=profile, mode="static", degree=degree)
    if one is not None:
        best = make_plan(**request, profile=profile, mode="static")
        assert best.makespan_s <= one.makespan_s
        assert one.winner == f"static:{degree}"
        assert set(one.degrees) == {degree}


@settings(max_examples=examples(60), deadline=None)
@given(
    requests(),
    profiles(),
    st.sampled_from([NO_PIPELINE, Pipeline(3), Pipeline(4, 2)]),
    image_works(),
    part_costs(),
)
@example(
    {"lengths": [8000], "ranks": 8, "tokens_per_rank": 1000},
    HIDDEN_BY_QUERIES,
    NO_PIPELINE,
    NO_IMAGES,
    EQUAL_PARTS,
)
@example(
    {"lengths": [900, 800, 700, 600, 500, 400], "ranks": 4, "tokens_per_rank": 1000},
    H100,
    NO_PIPELINE,
    NO_IMAGES,
    EQUAL_PARTS,
)
@example(
    {"lengths": [9], "ranks": 3, "tokens_per_rank": 9},
    H100,
    NO_PIPELINE,
    {0: [ImageWork(4, 0, 10**10)] * 3},
    EQUAL_PARTS,
)
@example(
    {"lengths": [9000], "ranks": 3, "tokens_per_rank": 9000},
    H100,
    NO_PIPELINE,
    NO_IMAGES,
    PartCosts(1.0, 1.9, 0.1),
)
def test_no_static_plan_beats_the_bounds_of_its_degree(
    request: dict[str, Any],
    profile: HardwareProfile,
    pipeline: Pipeline,
    images: ImageWorks,
    parts: PartCosts,
) -> None:
    """The first bound of a degree holds for higher degrees too. Documents are taken as records with
    short sources."""
    encoding = EncodingTimes(
        {n: works for n, works in images.items() if n < len(request["lengths"])}
    )
    sizes = np.array(request["lengths"]), request["ranks"], request["tokens_per_rank"]
    sources = tuple(length // 4 for length in request["lengths"])
    step = PlanningInput(
        profile, *sizes, pipeline=pipeline, encoding=encoding, sources=sources, parts=parts
    )
    on_all_ranks = 0
    for degree in range(1, step.ranks + 1):
        found = pack_static(step, degree)
        if found is not None:
            bounds = degree_bounds_ns(step, degree)
            on_all_ranks = max(on_all_ranks, bounds[0])
            assert max(on_all_ranks, bounds[1]) <= found.makespan_ns
            again = pack_static(step, degree, below=found.makespan_ns + 1)
            assert again is not None and again.makespan_ns == found.makespan_ns


@settings(max_examples=examples(25), deadline=None)
@given(requests(), st.one_of(st.none(), st.integers(1, 4000)))
def test_plans_are_pure_and_survive_json(
    request: dict[str, object], max_remote_tokens: int | None
) -> None:
    plan = plan_or_none(**request, profile=H100, max_remote_tokens=max_remote_tokens)
    if plan is None:
        return
    again = make_plan(**request, profile=H100, max_remote_tokens=max_remote_tokens)
    assert again.hash == plan.hash
    read = json.loads(json.dumps(plan.to_json()))
    assert read == plan.to_json()
    assert (
        tuple(tuple(Placement(**p) for p in placements) for placements in read["micro_batches"])
        == plan.micro_batches
    )
    assert (tuple(read["lengths"]), read["hash"]) == (plan.lengths, plan.hash)


@settings(max_examples=examples(40), deadline=None)
@given(requests(), st.integers(1, 4000))
def test_rounds_bound_the_remote_tokens(request: dict[str, object], most: int) -> None:
    plan = plan_or_none(**request, profile=H100, max_remote_tokens=most)
    if plan is None:
        return
    for k, micro_batch in enumerate(plan.micro_batches):
        layouts = [plan.layout(k, rank) for rank in range(plan.ranks)]
        remote = max(
            sum(s.length - s.tokens for s in layout.shards if s.degree > 1) for layout in layouts
        )
        for p in micro_batch:  # a ring in one level has at most degree - 1 rounds
            assert p.rounds <= max(1, p.degree - 1)
            assert p.rounds * most >= remote or p.rounds == max(1, p.degree - 1)


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(1, 5000), st.integers(1, 70))
def test_closed_form_of_the_largest_shard(length: int, degree: int) -> None:
    assert largest_shards(np.array([length]), np.array([degree]))[0] == largest_shard(
        length, degree
    )


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 30))
def test_least_degree_is_the_first_that_fits(length: int, ranks: int, budget: int) -> None:
    fitting = [d for d in range(1, ranks + 1) if largest_shard(length, d) <= budget]
    assert least_degrees(np.array([length]), ranks, budget)[0] == (fitting[0] if fitting else 0)


@pytest.mark.parametrize("mode", ["auto", "static", "bins"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 6, 8, 24, 48, 64])
def test_a_document_that_fills_the_whole_domain_plans(ranks: int, mode: str) -> None:
    plan = make_plan([ranks * 4096], ranks=ranks, tokens_per_rank=4096, profile=H100, mode=mode)
    assert plan.degrees == {ranks: 1}


def test_documents_on_one_ring_take_turns_in_direction() -> None:
    plan = make_plan(
        [1000] * 8, ranks=2, tokens_per_rank=4096, profile=H100, mode="static", degree=2
    )
    assert sorted(p.reversed for p in plan.micro_batches[0]) == [False] * 4 + [True] * 4


def test_micro_batches_run_longest_first() -> None:
    plan = make_plan(
        [9000, 500, 8000, 4000, 16000, 100], ranks=2, tokens_per_rank=8192, profile=H100
    )
    times = plan_score(plan).micro_batch_ns.tolist()
    assert times == sorted(times, reverse=True)

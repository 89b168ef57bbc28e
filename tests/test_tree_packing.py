"""Plans with trees, the merging of sequences to trees, and the packing of trees beside other documents."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longctx.planning.check import check_plan
from longctx.planning.cost.bounds import tight_bound_s
from longctx.planning.cost.rounds import plan_score
from longctx.planning.cost.spec import LayerSpec, ModelSpec
from longctx.planning.cost.ulysses import micro_batch_ns
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.pipeline import NO_PIPELINE, Pipeline
from longctx.planning.plan import PlanError
from longctx.planning.planners.planner import make_plan
from longctx.planning.tree import Tree
from longctx.plots.bins import fill_bins
from longctx.plots.timeline import timeline
from tests.marks import examples
from tests.test_plan_properties import H100, profiles, requests
from tests.tree_cases import sequences, tree_of, trees

WIDE = tree_of((2048, *[256] * 8))


@st.composite
def with_trees(draw: st.DrawFn) -> dict[str, Any]:
    """Draws a step in which some documents that have the same length are trees."""
    request = draw(requests())
    lengths: Any = request["lengths"]
    chosen = draw(st.sets(st.integers(0, len(lengths) - 1)))
    return request | {"trees": {document: draw(of_length(lengths[document])) for document in chosen}}


@st.composite
def of_length(draw: st.DrawFn, length: int) -> Tree:
    """Draws a root with children that have so many tokens in all."""
    root = draw(st.integers(1, length))
    children = min(length - root, draw(st.integers(1, 9)))
    sizes = [len(part) for part in np.array_split(np.arange(length - root), children)] if children else []
    return tree_of((root, *sizes))


@settings(max_examples=examples(100), deadline=None)
@given(with_trees(), profiles(), st.sampled_from([NO_PIPELINE, NO_PIPELINE, Pipeline(3)]))
def test_plans_with_trees_keep_the_guarantees(request: dict[str, Any], profile: HardwareProfile, pipeline: Pipeline) -> None:
    plans = []
    for mode in ("auto", "static", "bins"):
        try:
            plans.append(make_plan(**request, profile=profile, mode=mode, pipeline=pipeline))
        except PlanError:
            continue
    for plan in plans:
        check_plan(plan)
        assert plan.makespan_s >= plan.lower_bound_s == plans[0].lower_bound_s
        assert plans[0].makespan_s <= plan.makespan_s
        if pipeline is NO_PIPELINE:
            assert plan_score(plan).makespan_ns / 1e9 == plan.makespan_s >= tight_bound_s(plan) >= plan.lower_bound_s


@settings(max_examples=examples(40), deadline=None)
@given(requests(), profiles(), st.sampled_from(["auto", "static", "bins"]))
def test_a_tree_of_one_path_is_planned_as_the_document(request: dict[str, Any], profile: HardwareProfile, mode: str) -> None:
    """All but its hash: the tree is part of that. A plan without trees is what it was."""
    lengths = request["lengths"]
    paths = {document: Tree((1,) * min(3, length), (-1, 0, 1)[: min(3, length)]) for document, length in enumerate(lengths)}
    paths = {n: replace(tree, lengths=(*tree.lengths[:-1], lengths[n] - len(tree.lengths) + 1)) for n, tree in paths.items()}
    try:
        plain = make_plan(**request, profile=profile, mode=mode)
    except PlanError:
        return
    plan = make_plan(**request, profile=profile, mode=mode, trees=paths)
    assert (plan.micro_batches, plan.cost) == (plain.micro_batches, plain.cost)
    assert tight_bound_s(plan) == tight_bound_s(plain) and plan.hash != plain.hash
    assert "trees" not in plain.to_json() and replace(plan, trees={}).hash == plain.hash


class Quarter(Tree):
    """A tree whose area is a quarter of that of a document."""

    @property
    def pairs(self) -> Any:
        return self.length**2 / 4


def long_and_short(documents: int, ranks: int) -> dict[str, Any]:
    lengths = [int(x) for x in np.geomspace(60, 120_000, documents)]
    return {"lengths": lengths, "ranks": ranks, "tokens_per_rank": 16384}


@settings(max_examples=examples(100), deadline=None)
@given(requests(), profiles(), st.sampled_from(["auto", "static", "bins"]), st.sampled_from([NO_PIPELINE, Pipeline(3)]))
@example(long_and_short(80, 16), H100, "auto", NO_PIPELINE)
@example(long_and_short(12, 64), H100, "auto", NO_PIPELINE)
@example(long_and_short(30, 16), H100, "static", NO_PIPELINE)
@example(long_and_short(30, 16), H100, "auto", Pipeline(3))
def test_all_costs_and_bounds_use_the_area(
    request: dict[str, Any], profile: HardwareProfile, mode: str, pipeline: Pipeline
) -> None:
    """With a quarter of the area, all is as on a device with four times the attention."""
    lengths, ranks = request["lengths"], request["ranks"]
    request = request | {"mode": mode, "pipeline": pipeline, "bins": None if mode == "static" else {max(lengths): ranks}}
    fast = replace(profile, attention_s_per_token2=profile.attention_s_per_token2 / 4)
    quarters = {document: Quarter((length,), (-1,)) for document, length in enumerate(lengths)}
    try:
        expected = make_plan(**request, profile=fast)
    except PlanError:
        return
    plan = make_plan(**request, profile=profile, trees=quarters)
    assert (plan.micro_batches, plan.cost, tight_bound_s(plan)) == (
        expected.micro_batches,
        expected.cost,
        tight_bound_s(expected),
    )
    assert plan_score(plan).makespan_ns == plan_score(expected).makespan_ns
    assert timeline(plan).blocks == timeline(expected).blocks
    assert fill_bins(plan, {max(lengths): 1}) == fill_bins(expected, {max(lengths): 1})
    for micro_batch in range(len(plan.micro_batches)):
        swapping = math.gcd(ranks, profile.ranks_per_node)
        assert len({micro_batch_ns(each, micro_batch, swapping, swapping, swapping) for each in (plan, expected)}) == 1


def test_the_plan_says_which_documents_are_trees() -> None:
    plan = make_plan([100, WIDE.length], ranks=3, tokens_per_rank=2048, profile=H100, trees={1: WIDE})
    saved = json.loads(json.dumps(plan.to_json()))
    assert saved["trees"] == {"1": {"lengths": list(WIDE.lengths), "parents": list(WIDE.parents)}}
    assert plan.hash != replace(plan, trees={}).hash
    shards = [shard for rank in range(3) for shard in plan.layout(0, rank).shards]
    assert {shard.tree for shard in shards if shard.document == 1} == {WIDE}
    assert {shard.tree for shard in shards if shard.document == 0} == {None}


@pytest.mark.parametrize("document", [-1, 0, 2, "1"])
def test_trees_that_are_not_the_documents_are_refused(document: Any) -> None:
    with pytest.raises(PlanError, match=f"document {document} is given as a tree of 4096 tokens, but"):
        make_plan([100, WIDE.length], ranks=3, tokens_per_rank=2048, profile=H100, trees={document: WIDE})


@given(tree=trees(), window=st.none() | st.integers(1, 99))
def test_operations_of_shared_tokens_count_once(tree: Tree, window: int | None) -> None:
    layer = LayerSpec(8, 2, 1, 4, 16, 100, 10, window=window)
    spec = ModelSpec((layer,), 8, 32, tie_word_embeddings=False)
    of_tokens: dict[int, int] = {}
    for sequence in sequences(tree):
        for position, token in enumerate(sequence.tolist()):
            of_tokens[token] = layer.attention_flops(position + 1) - layer.attention_flops(position)
    matrices = 2 * spec.multiplied_parameters * (tree.length + 7)
    assert spec.flops([7, tree.length], {1: tree}) == matrices + layer.attention_flops(7) + sum(of_tokens.values())

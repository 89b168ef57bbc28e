"""Plans with trees, the merging of sequences to trees, and the packing of trees beside other
documents."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longctx.data.packing import PackingError, StepBatch, pack_documents, pack_seq2seq
from longctx.data.trees import merge_prefixes, pack_merged
from longctx.errors import UserError
from longctx.planning.check import check_plan
from longctx.planning.cost.bounds import tight_bound_s
from longctx.planning.cost.rounds import plan_score
from longctx.planning.cost.spec import LayerSpec, Matrix, ModelSpec
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.pipeline import NO_PIPELINE, Pipeline
from longctx.planning.plan import PlanError
from longctx.planning.planners.planner import make_plan
from longctx.planning.tree import Tree
from longctx.plots.timeline import timeline
from longctx.training.objectives.balance import Balance
from longctx.training.objectives.objective import token_mean
from tests.marks import examples
from tests.planning.test_plan_properties import H100, profiles, requests
from tests.tree_cases import sequences, tree_of, trees

WIDE = tree_of((2048, *[256] * 8))


@st.composite
def with_trees(draw: st.DrawFn) -> dict[str, Any]:
    """Draws a step in which some documents that have the same length are trees."""
    request = draw(requests())
    lengths: Any = request["lengths"]
    chosen = draw(st.sets(st.integers(0, len(lengths) - 1)))
    return request | {
        "trees": {document: draw(of_length(lengths[document])) for document in chosen}
    }


@st.composite
def of_length(draw: st.DrawFn, length: int) -> Tree:
    """Draws a root with children that have so many tokens in all."""
    root = draw(st.integers(1, length))
    children = min(length - root, draw(st.integers(1, 9)))
    sizes = (
        [len(part) for part in np.array_split(np.arange(length - root), children)]
        if children
        else []
    )
    return tree_of((root, *sizes))


@settings(max_examples=examples(40), deadline=None)
@given(with_trees(), profiles(), st.sampled_from([NO_PIPELINE, NO_PIPELINE, Pipeline(3)]))
def test_plans_with_trees_keep_the_guarantees(
    request: dict[str, Any], profile: HardwareProfile, pipeline: Pipeline
) -> None:
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
            assert plan_score(plan).makespan_ns / 1e9 == plan.makespan_s
            assert tight_bound_s(plan) == plan.lower_bound_s or not plan.trees


class Quarter(Tree):
    """A tree whose area is a quarter of that of a document."""

    @property
    def pairs(self) -> Any:
        return self.length**2 / 4


def long_and_short(documents: int, ranks: int) -> dict[str, Any]:
    lengths = [int(x) for x in np.geomspace(60, 120_000, documents)]
    return {"lengths": lengths, "ranks": ranks, "tokens_per_rank": 16384}


@settings(max_examples=examples(30), deadline=None)
@given(
    requests(),
    profiles(),
    st.sampled_from(["auto", "static", "bins"]),
    st.sampled_from([NO_PIPELINE, Pipeline(3)]),
)
@example(long_and_short(80, 16), H100, "auto", NO_PIPELINE)
@example(long_and_short(12, 64), H100, "auto", NO_PIPELINE)
@example(long_and_short(30, 16), H100, "static", NO_PIPELINE)
@example(long_and_short(30, 16), H100, "auto", Pipeline(3))
def test_all_costs_and_bounds_use_the_area(
    request: dict[str, Any], profile: HardwareProfile, mode: str, pipeline: Pipeline
) -> None:
    """With a quarter of the area, all is as on a device with four times the attention."""
    lengths, ranks = request["lengths"], request["ranks"]
    request = request | {
        "mode": mode,
        "pipeline": pipeline,
        "bins": None if mode == "static" else {max(lengths): ranks},
    }
    fast = replace(profile, attention_s_per_token2=profile.attention_s_per_token2 / 4)
    quarters = {document: Quarter((length,), (-1,)) for document, length in enumerate(lengths)}
    try:
        expected = make_plan(**request, profile=fast)
    except PlanError:
        return
    plan = make_plan(**request, profile=profile, trees=quarters)
    assert (plan.micro_batches, plan.cost) == (expected.micro_batches, expected.cost)
    assert plan_score(plan).makespan_ns == plan_score(expected).makespan_ns
    assert timeline(plan).blocks == timeline(expected).blocks


def test_the_plan_says_which_documents_are_trees() -> None:
    plan = make_plan(
        [100, WIDE.length], ranks=3, tokens_per_rank=2048, profile=H100, trees={1: WIDE}
    )
    saved, plain = json.loads(json.dumps(plan.to_json())), replace(plan, trees={})
    assert saved["trees"] == {"1": {"lengths": list(WIDE.lengths), "parents": list(WIDE.parents)}}
    assert plan.hash != plain.hash and "trees" not in plain.to_json()
    shards = [shard for rank in range(3) for shard in plan.layout(0, rank).shards]
    assert {shard.tree for shard in shards if shard.document == 1} == {WIDE}
    assert {shard.tree for shard in shards if shard.document == 0} == {None}


@pytest.mark.parametrize("document", [-1, 0, 2, "1"])
def test_trees_that_are_not_the_documents_are_refused(document: Any) -> None:
    with pytest.raises(
        PlanError, match=f"document {document} is given as a tree of 4096 tokens, but"
    ):
        make_plan(
            [100, WIDE.length], ranks=3, tokens_per_rank=2048, profile=H100, trees={document: WIDE}
        )


@given(tree=trees(), window=st.none() | st.integers(1, 99))
def test_operations_of_shared_tokens_count_once(tree: Tree, window: int | None) -> None:
    layer = LayerSpec(8, 2, 1, 4, 16, (Matrix(10, 10),), 10, window=window)
    spec = ModelSpec((layer,), 8, 32, tie_word_embeddings=False)
    of_tokens: dict[int, int] = {}
    for sequence in sequences(tree):
        for position, token in enumerate(sequence.tolist()):
            of_tokens[token] = layer.attention_flops(position + 1) - layer.attention_flops(position)
    matrices = 2 * spec.multiplied_parameters * (tree.length + 7)
    assert spec.flops([7, tree.length], {1: tree}) == matrices + layer.attention_flops(7) + sum(
        of_tokens.values()
    )


Records = tuple[list[list[int]], list[list[int]]]
"""Sequences and their labels."""


@st.composite
def records(draw: st.DrawFn) -> Records:
    """Draws sequences of few tokens, many of which begin like another, some with labels for a part
    of their tokens."""
    token = st.integers(0, 2)
    sequences, labels = [], []
    for _ in range(draw(st.integers(1, 12))):
        known = draw(st.sampled_from(sequences)) if sequences else []
        sequence = [
            *known[: draw(st.integers(0, len(known)))],
            *draw(st.lists(token, min_size=1, max_size=9)),
        ]
        masked = draw(st.integers(0, len(sequence)))
        sequences.append(sequence)
        labels.append([*[-100] * masked, *sequence[masked:]])
    return sequences, labels


def keys(tokens: list[int], labels: list[int]) -> list[tuple[int, int]]:
    return list(zip(tokens, [*labels[1:], -100], strict=True))


@settings(max_examples=examples(200), deadline=None)
@given(records(), st.none() | st.integers(1, 60), st.integers(1, 4))
def test_merging_keeps_every_sequence(
    records: Records, most_tokens: int | None, least_shared: int
) -> None:
    sequences, labels = records
    merged = merge_prefixes(sequences, labels, most_tokens=most_tokens, least_shared=least_shared)
    held: dict[int, list[list[tuple[int, int]]]] = {}
    counted = [np.zeros(length) for length in merged.lengths]
    for sequence, label, (document, rows) in zip(sequences, labels, merged.rows, strict=True):
        got = zip(
            merged.tokens[document][rows].tolist(),
            merged.labels[document][rows].tolist(),
            strict=True,
        )
        assert list(got) == keys(sequence, label)
        held.setdefault(document, []).append(keys(sequence, label))
        counted[document][rows] += 1
        if document in merged.trees:
            assert merged.trees[document].positions[rows].tolist() == list(range(len(rows)))
        else:
            assert rows.tolist() == list(range(len(rows))) and merged.lengths[document] == len(rows)
    assert all((a == b).all() for a, b in zip(counted, merged.weights, strict=True))
    assert merged.target_weight == sum(value != -100 for label in labels for value in label[1:])
    assert sorted(held) == list(range(len(merged.tokens)))
    for document, of_document in held.items():
        prefixes = {tuple(key[:count]) for key in of_document for count in range(1, len(key) + 1)}
        assert merged.lengths[document] == len(prefixes), "no row twice"
        assert (
            most_tokens is None
            or len(prefixes) <= most_tokens
            or len({*map(tuple, of_document)}) == 1
        )
        assert len({*map(tuple, of_document)}) == 1 or all(
            key[:1] == of_document[0][:1] for key in of_document
        )
        if tree := merged.trees.get(document):
            assert tree.length == merged.lengths[document]
            elder: dict[int, int] = {}
            for node, parent in zip(tree.nodes[1:], tree.parents[1:], strict=True):
                assert elder.get(parent, 0) <= node.end - node.start, "shortest first"
                elder[parent] = node.end - node.start
    if most_tokens is None:
        assert (
            len(held)
            == len({tuple(keys(*each)[:least_shared]) for each in zip(*records, strict=True)})
            or least_shared > 1
        )


@settings(max_examples=examples(50), deadline=None)
@given(records(), st.integers(1, 4), st.integers(1, 9), st.sampled_from([1, 4]))
def test_packing_gives_ranks_their_rows(
    records: Records, ranks: int, budget: int, multiple: int
) -> None:
    """Trees beside documents; every rank's rows of tokens, labels, positions and weights."""
    merged = merge_prefixes(*records, most_tokens=budget * 10)
    plan = make_plan(
        merged.lengths,
        trees=merged.trees,
        ranks=ranks,
        tokens_per_rank=max(*merged.lengths, 10),
        profile=H100,
    )
    seen = [np.zeros(length, dtype=int) for length in merged.lengths]
    weight = 0.0
    for rank in range(ranks):
        packed, targets = pack_merged(plan, rank, merged, pad_to_multiple_of=multiple)
        assert targets == merged.target_weight
        for batch in packed:
            assert len(batch.tokens) % multiple == 0 and batch.weights is not None
            weight += float(batch.weights[batch.labels != -100].sum())
            for shard in batch.layout.shards:
                held = slice(shard.offset, shard.offset + shard.tokens)
                rows = np.r_[slice(*shard.head), slice(*shard.tail)]
                seen[shard.document][rows] += 1
                tree = merged.trees.get(shard.document)
                positions = rows if tree is None else tree.positions[rows]
                expected = merged.tokens, merged.labels, merged.weights
                for values, of_document in zip(
                    (batch.tokens, batch.labels, batch.weights), expected, strict=True
                ):
                    assert values[held].tolist() == of_document[shard.document][rows].tolist()
                assert batch.positions[held].tolist() == positions.tolist()
    assert all((count == 1).all() for count in seen) and weight == merged.target_weight


def test_first_tokens_of_completions_keep_their_loss() -> None:
    """The last token of a prompt is a row of each completion, as it has another label in each."""
    prompt = [5, 6, 7]
    pair = [[*prompt, 8, 9], [*prompt, 9]]
    merged = merge_prefixes(
        pair, [[-100, -100, -100, *each[3:]] for each in pair], weights=[1.0, 0.5]
    )
    assert merged.trees == {0: Tree((2, 2, 3), (-1, 0, 0))}
    assert merged.tokens[0].tolist() == [5, 6, 7, 9, 7, 8, 9]
    assert merged.labels[0].tolist() == [-100, -100, 9, -100, 8, 9, -100]
    assert merged.weights[0].tolist() == [1.5, 1.5, 0.5, 0.5, 1, 1, 1]
    assert merged.target_weight == 2.5


def test_many_sequences_merge_without_recursion() -> None:
    """Each goes on where the last one ended: as many levels as sequences."""
    merged = merge_prefixes(
        [range(length) for length in range(1, 1050)], [[-100] * length for length in range(1, 1050)]
    )
    assert merged.lengths == [1049] and len(merged.trees[0].path(1048)) == 1049


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sequences": [[1], []]}, "sequence 1 has tokens of shape"),
        ({"sequences": [[1, 2]], "labels": [[1]]}, "sequence 0 has tokens of shape"),
        ({"sequences": [[1]], "labels": []}, "there are 1 sequences, but 0 labels"),
        ({"sequences": [[1]], "weights": [1, 2]}, "there are 1 sequences, but weights of shape"),
    ],
)
def test_sequences_that_do_not_match_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PackingError, match=message):
        merge_prefixes(**arguments)


def test_trees_that_save_little_stay_small() -> None:
    documents = [[*range(1000, 1030), *[number] * 100] for number in range(60)]
    for tokens_per_rank, most in ((None, 60 * 101 + 30), (2000, 2000), (500, 8 * 130)):
        merged = merge_prefixes(documents, most_tokens=100_000, tokens_per_rank=tokens_per_rank)
        assert most - 101 < max(merged.lengths) <= most
    books = [[*range(1000), *[number] * 10] for number in range(200)]
    assert len(merge_prefixes(books, tokens_per_rank=500).trees) == 1


def tree_step(**changes: Any) -> StepBatch:
    """Returns a step of a tree and a document on one rank, packed."""
    merged = merge_prefixes([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 5], [6, 7]])
    plan = make_plan(merged.lengths, trees=merged.trees, ranks=1, tokens_per_rank=50, profile=H100)
    packed, targets = pack_merged(plan, 0, merged)
    return StepBatch(
        1, plan, ("a", "b"), sum(plan.lengths), 6, tuple(packed), target_weight=targets, **changes
    )


def test_the_loss_counts_rows_for_all_their_sequences() -> None:
    batch = tree_step()
    (micro_batch,) = batch.micro_batches
    weights = token_mean(batch)
    assert weights.divisor == 10 and weights.tokens is not None
    counted = weights.tokens[0][micro_batch.labels != -100]
    assert sorted(counted.tolist()) == [1, 1, 2, 3, 3] and counted.sum() == weights.divisor
    doubled = token_mean(replace(batch, weights=(2.0, 1.0)))
    assert doubled.tokens is not None and sorted(
        doubled.tokens[0][micro_batch.labels != -100].tolist()
    ) == [1, 2, 4, 6, 6]


def test_what_cannot_be_exact_is_refused() -> None:
    batch, router = tree_step(), SimpleNamespace(document_loss=0.1, z_loss=0.0)
    plan, (micro_batch,) = batch.plan, batch.micro_batches
    documents: Any = [list(range(length)) for length in plan.lengths]
    with pytest.raises(
        PackingError,
        match="has 1 trees, in which a token may have several next ones, but shift is True",
    ):
        pack_documents(plan, 0, documents)
    with pytest.raises(PackingError, match="has 1 trees, which encoder-decoders cannot read"):
        pack_seq2seq(plan, 0, documents, documents, start_token=0)
    with pytest.raises(UserError, match="has 1 trees, but losses of experts count every sequence"):
        Balance(cast("Any", [router]), 0.0, cast("Any", None)).documents(
            plan, micro_batch.layout, 10
        )

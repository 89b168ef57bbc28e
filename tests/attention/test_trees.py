"""Trees: attention over common prefixes equals that of every sequence alone, on any ranks, with any
mask and placement."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longctx.attention import Mask, RingAttention, RingSchedule
from longctx.attention.masks import MaskError
from longctx.planning.layout import Layout, Placement
from longctx.planning.tree import Tree, TreeError
from tests import linear_cases
from tests.attention.test_attention import swapped
from tests.attention_cases import Case, assert_exact, gather, relative_errors, run_case
from tests.marks import examples
from tests.tree_cases import TURNS, levels, masks, one_by_one, sequences, tree_cases, trees
from tests.workers import Workers

several_ranks = settings(
    max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck)
)


def check(workers: Workers, case: Case) -> None:
    assert_exact(gather(case, workers.run(run_case, case.ranks, case)), one_by_one(case))


@pytest.mark.parametrize("ranks", [2, 5])
@several_ranks
@given(data=st.data())
def test_equals_every_sequence_alone(workers: Workers, ranks: int, data: st.DataObject) -> None:
    """Any trees and degrees, windows, sinks, prompts, soft caps, kept keys, different head sizes
    and two-level exchange."""
    case = data.draw(tree_cases(ranks, children=3, tokens=30))
    options = {
        "mask": data.draw(masks(case)),
        "softcap": data.draw(st.sampled_from([0.0, 1.5])),
        "v_head_dim": data.draw(st.sampled_from([None, 6])),
        "sink_logits": data.draw(st.booleans()),
        "keep_kv": data.draw(st.booleans()),
        "ranks_per_node": data.draw(st.none() | st.integers(1, 3)),
    }
    check(workers, replace(case, **options))


@several_ranks
@given(data=st.data())
def test_with_swapped_heads(workers: Workers, data: st.DataObject) -> None:
    case = data.draw(swapped(data.draw(tree_cases(3, children=3, tokens=30))))
    check(workers, replace(case, mask=data.draw(masks(case))))


@settings(max_examples=examples(100), deadline=None)
@given(tree=trees(), degree=st.integers(1, 9), rounds=st.integers(1, 4), data=st.data())
def test_a_pass_has_few_kernel_calls_per_level(
    tree: Tree, degree: int, rounds: int, data: st.DataObject
) -> None:
    """One per level on own keys and in every round, and one more: as for documents, which are one
    level."""
    rank = data.draw(st.integers(0, degree - 1))
    layout = Layout.of([Placement(0, 0, degree, rounds=rounds)], [tree.length], 0, rank, {0: tree})
    for nodes in (None, 2):
        schedule = RingSchedule.build(layout, ranks_per_node=nodes)
        assert all(
            len(calls) <= levels(tree) + 1
            for calls in (schedule.local, *(each.calls for each in schedule.rounds))
        )


@pytest.mark.parametrize(
    "exchange", [{}, {"keep_kv": True}, {"ranks_per_node": 2}, {"mask": Mask(window=40, sinks=3)}]
)
def test_bfloat16_keeps_the_precision_contract(workers: Workers, exchange: dict[str, Any]) -> None:
    """The error is at most twice that of the kernel on every sequence alone, in one process."""
    sizes = tuple(9 * length for length in TURNS.lengths)
    large = Tree(sizes, TURNS.parents)
    case = Case(
        3,
        (large.length, 90),
        (Placement(0, 0, 3), Placement(1, 1, 2)),
        4,
        2,
        32,
        2,
        dtype=torch.bfloat16,
    )
    case = replace(case, trees={0: large}, **exchange)
    exact = one_by_one(case)
    ring = relative_errors(gather(case, workers.run(run_case, case.ranks, case)), exact)
    for ring_error, alone in zip(
        ring, relative_errors(kernel_one_by_one(case), exact), strict=True
    ):
        assert 0 < ring_error <= 2 * alone


def kernel_one_by_one(case: Case) -> list[torch.Tensor]:
    """Returns out, dq, dk, dv of the kernel on every sequence alone; gradients of shared rows are
    summed."""
    inputs = case.inputs()
    results = [torch.zeros_like(inputs[number], dtype=torch.float64) for number in (3, 0, 1, 2)]
    start, given = 0, torch.zeros(len(inputs[0]), dtype=torch.bool)
    for document, length in enumerate(case.lengths):
        for sequence in sequences(case.trees.get(document, Tree((length,), (-1,)))):
            rows, places = start + sequence, (Placement(0, 0, 1),)
            alone = replace(
                case, ranks=1, lengths=(len(rows),), placements=places, trees={}, exchange_rounds=1
            )
            q, k, v, dout = (tensor[rows] for tensor in inputs)
            out, *gradients = run_case(
                alone, (q, k, v, torch.where(given[rows, None, None], 0, dout))
            )
            results[0][rows], given[rows] = out.double(), True
            for total, gradient in zip(results[1:], gradients, strict=True):
                total[rows] += gradient.double()
        start += length
    return results


@pytest.mark.parametrize(
    ("lengths", "parents", "message"),
    [
        ((), (), "has 0 lengths and 0 parents"),
        ((1, 2), (-1,), "has 2 lengths and 1 parents"),
        ((1, 0), (-1, 0), "element 1 is 0, which must be a whole number ≥ 1"),
        ((1, 2), (0, 0), "node 0 of a tree has parent 0"),
        ((1, 2), (-1, -1), "node 1 of a tree has parent -1"),
        ((1, 2, 3), (-1, 2, 0), "node 1 of a tree has parent 2"),
        (
            (1, 2, 3, 4),
            (-1, 0, 0, 1),
            "node 3 of a tree has parent 1: nodes must be in depth-first order",
        ),
    ],
)
def test_only_depth_first_trees(
    lengths: tuple[int, ...], parents: tuple[int, ...], message: str
) -> None:
    with pytest.raises(TreeError, match=message):
        Tree(lengths, parents)


@given(tree=trees())
def test_positions_and_area_are_those_of_the_sequences(tree: Tree) -> None:
    """Positions are depths; the area is twice the visible pairs, without the diagonal's half."""
    seen = 0
    for sequence in sequences(tree):
        assert tree.positions[sequence.numpy()].tolist() == list(range(len(sequence)))
    for key in range(tree.length):
        seen += tree.nodes[tree.node_of(key)].end - key
    assert tree.pairs == 2 * seen - tree.length
    assert tree.longest == max(map(len, sequences(tree)))


@pytest.mark.parametrize("mask", [Mask(causal=False), Mask(prefix={0: 24})])
def test_masks_that_would_show_other_sequences_are_refused(mask: Mask) -> None:
    layout = Layout.of([Placement(0, 0, 1)], [TURNS.length], 0, 0, {0: TURNS})
    with pytest.raises(
        MaskError, match="document 0 is a tree, whose sequences share only their first 23 tokens"
    ):
        RingAttention(layout, mask=mask)


@several_ranks
@given(
    data=st.data(),
    kernel=st.integers(1, 6),
    rule=st.sampled_from(linear_cases.RULES),
    ranks=st.integers(1, 4),
)
def test_linear_layers_and_convolutions(
    workers: Workers, data: st.DataObject, kernel: int, rule: str, ranks: int
) -> None:
    """States and halos follow the path, on any ranks: equal to a loop over the tokens of every
    sequence alone."""
    case = data.draw(tree_cases(ranks, children=3, tokens=20))
    got = linear_cases.gather(case, workers.run(linear_cases.run_linear, ranks, case, kernel, rule))
    expected = linear_one_by_one(case, kernel, rule)
    for name in linear_cases.NAMES:
        error = (got[name] - expected[name]).norm() / (expected[name].norm() + 1e-30)
        assert error < 1e-10, f"{name}: {error:.1e}"


def linear_one_by_one(case: Case, kernel: int, rule: str) -> dict[str, torch.Tensor]:
    """Returns out and gradients in the names of `linear_cases`, of every sequence alone; those of
    shared rows are summed."""
    everything = linear_cases.inputs(case, kernel, rule)
    total = {
        name: torch.zeros_like(everything["dout" if name == "out" else name])
        for name in linear_cases.NAMES
    }
    start, given = 0, torch.zeros(sum(case.lengths), dtype=torch.bool)
    for document, length in enumerate(case.lengths):
        for sequence in sequences(case.trees.get(document, Tree((length,), (-1,)))):
            rows = start + sequence
            alone = {
                name: x if name in ("weight", "bias") else x[rows] for name, x in everything.items()
            }
            alone["dout"] = torch.where(given[rows, None, None], 0, alone["dout"])
            found = linear_cases.token_by_token(
                replace(case, lengths=(len(rows),)), kernel, rule, alone
            )
            total["out"][rows], given[rows] = found.pop("out"), True
            for name, gradient in found.items():
                total[name][... if name in ("weight", "bias") else rows] += gradient
        start += length
    return total

"""Block diffusion: attention of trees with nodes that see themselves both ways equals a dense mask
in float64, on any ranks; noisy keys and values stay at home."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longctx.attention import Mask, RingAttention, RingSchedule
from longctx.attention.kernels import triton
from longctx.attention.linear.segments import chain_of
from longctx.attention.masks import MaskError
from longctx.config import load
from longctx.planning.cost.work_overrides import WorkOverrides
from longctx.planning.layout import Layout, Placement
from longctx.planning.tree import ROOT, BlockTree, Tree, TreeError
from tests.attention_cases import Case, gather, relative_errors, run_case
from tests.block_cases import block_cases, block_trees, by_definition, comb, dense, seen_by
from tests.marks import examples
from tests.workers import Workers

several_ranks = settings(
    max_examples=examples(20), deadline=None, suppress_health_check=list(HealthCheck)
)


MOST = 1e-13


def check(workers: Workers, case: Case) -> None:
    """A single key has gradients of 0, which rounding leaves a bit off."""
    got = gather(case, workers.run(run_case, case.ranks, case))
    exact = dense(case)
    for error, part, reference in zip(relative_errors(got, exact), got, exact, strict=True):
        assert error <= MOST or float((part - reference).abs().max()) <= MOST


@pytest.mark.parametrize("ranks", [1, 2, 3])
@several_ranks
@given(data=st.data())
def test_equals_a_dense_mask(workers: Workers, ranks: int, data: st.DataObject) -> None:
    """Any blocks, lengths, degrees and rounds, windows with sinks, soft caps, kept keys and
    two-level exchange."""
    case = data.draw(block_cases(ranks))
    options = {
        "softcap": data.draw(st.sampled_from([0.0, 1.5])),
        "keep_kv": data.draw(st.booleans()),
        "ranks_per_node": data.draw(st.none() | st.integers(1, 3)),
    }
    check(workers, replace(case, **options))


def interpreted(case: Case) -> tuple[torch.Tensor, ...]:
    """Runs a case, for which Triton's kernel is allowed on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "refusal", lambda request: None)
        return run_case(case)


@pytest.mark.parametrize("kernel", ["cpu", "triton", "reference"])
def test_on_every_kernel(workers: Workers, kernel: str) -> None:
    tree = comb(41, 6, root=1)
    case = Case(
        2,
        lengths=(tree.length, 23),
        placements=(Placement(0, 0, 2), Placement(1, 1, 1)),
        kernel=kernel,
        head_dim=16,
        trees={0: tree},
    )
    got = gather(case, workers.run(interpreted, case.ranks, case))
    assert max(relative_errors(got, dense(case))) <= 2e-6


def test_swapped_heads(workers: Workers) -> None:
    tree = comb(50, 7)
    case = Case(
        4,
        lengths=(tree.length, 31),
        placements=(Placement(0, 0, 4), Placement(1, 0, 2)),
        heads=4,
        kv_heads=2,
        ulysses_degree=2,
        dtype=torch.float64,
        trees={0: tree},
    )
    check(workers, case)


@pytest.mark.parametrize("clean_both_ways", [True, False])
@given(length=st.integers(1, 40), block=st.integers(1, 9), root=st.integers(0, 3))
def test_combs_have_the_published_mask(
    length: int, block: int, root: int, clean_both_ways: bool
) -> None:
    tree = comb(length, block, root=root, clean_both_ways=clean_both_ways)
    expected = by_definition(length, block, root=root, clean_both_ways=clean_both_ways)
    assert torch.equal(seen_by(tree, Mask()), expected)


@given(tree=block_trees())
def test_area_is_that_of_the_visible_pairs(tree: BlockTree) -> None:
    assert tree.pairs == 2 * int(seen_by(tree, Mask()).sum()) - tree.length


@settings(max_examples=examples(40), deadline=None)
@given(
    blocks=st.integers(1, 60),
    block=st.integers(1, 9),
    degree=st.integers(1, 4),
    both_ways=st.booleans(),
)
def test_few_calls_and_no_noisy_rows(blocks: int, block: int, degree: int, both_ways: bool) -> None:
    """Calls grow by one when blocks double; of noisy rows only those of blocks that ranks
    share are sent."""
    tree = comb(blocks * block, block, clean_both_ways=both_ways)
    noisy = [node for node in tree.nodes if node.stop == node.end and node.stop > node.start]
    ends = {number * tree.length // (2 * degree) for number in range(2 * degree + 1)}
    for rank in range(degree):
        layout = Layout.of([Placement(0, 0, degree)], [tree.length], 0, rank, {0: tree})
        schedule = RingSchedule.build(layout)
        most = 3 + blocks.bit_length()
        assert len(schedule.local) <= most
        for round_ in schedule.rounds:
            assert len(round_.calls) <= most
            for _, run in round_.keys:
                for node in noisy:
                    if max(run.start, node.start) < min(run.stop, node.stop):
                        assert any(node.start < end < node.stop for end in ends)


def test_the_planner_counts_clean_keys_alone() -> None:
    tree = comb(100, 10)
    alone = WorkOverrides.of(torch.tensor([tree.length, 70]).numpy(), {0: tree})
    assert alone.keys is not None
    assert alone.keys.tolist() == [90, 70]  # nobody sees the last clean block
    prefixes = WorkOverrides.of(torch.tensor([5]).numpy(), {0: Tree((3, 1, 1), (ROOT, 0, 0))})
    assert prefixes.keys is None


def test_operations_count_later_tokens_of_a_block() -> None:
    spec = load(None, []).model_source(257).spec
    tree = comb(100, 10, root=1)
    one_way = Tree(tree.lengths, tree.parents)
    later = [n for n, both in zip(tree.lengths, tree.both_ways, strict=True) if both]
    expected = sum(layer.attention_flops(n) for layer in spec.layers for n in later)
    ways = [spec.flops([tree.length], {0: each}) for each in (tree, one_way)]
    assert ways[0] - ways[1] == expected > 0


def test_flags_must_be_those_of_the_nodes() -> None:
    with pytest.raises(TreeError, match="has 2 nodes, but 1 of both_ways"):
        BlockTree((1, 2), (ROOT, 0), (True,))
    with pytest.raises(TreeError, match="only the root may have no token"):
        BlockTree((1, 0), (ROOT, 0), (True, True))


def test_a_prefix_is_refused_where_the_root_sees_itself() -> None:
    tree = BlockTree((4, 2), (ROOT, 0), (True, False))
    layout = Layout.of([Placement(0, 0, 1)], [6], 0, 0, {0: tree})
    with pytest.raises(MaskError, match="and has a prefix of 3 tokens"):
        RingAttention(layout, mask=Mask(prefix={0: 3}))


def test_linear_layers_are_refused() -> None:
    tree = comb(9, 4)
    (shard,) = Layout.of([Placement(0, 0, 1)], [tree.length], 0, 0, {0: tree}).shards
    with pytest.raises(TreeError, match="knows only earlier tokens: use a model of softmax"):
        chain_of(shard)


def test_the_page_shows_who_sees_whom() -> None:
    """Of blocks of one token, the last of which has no clean copy."""
    page = (Path(__file__).parents[2] / "docs" / "block-diffusion.md").read_text("utf-8")
    head, *rows = page.partition("```text\n")[2].partition("```")[0].splitlines()
    columns = [head.index(name) for name in ("N0", "C0", "N1", "C1", "N2")]
    last = columns[-1] + 1
    names = [row[:last].replace("queries", "").split()[0] for row in rows]
    assert names == ["N0", "C0", "N1", "C1", "N2"]
    shown = [[row[column : column + 2].strip() == "x" for column in columns] for row in rows]
    assert torch.equal(torch.tensor(shown), by_definition(3, 1)[:5, :5])

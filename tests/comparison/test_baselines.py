"""Baselines: every plan passes the checker and follows the baseline's rules, and errors name what
is not supported."""

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.comparison.baselines import fixed_degree, plan_fixed_static, plan_placed
from longctx.comparison.mixes import load_mix
from longctx.planning.check import check_plan
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.plan import Plan, PlanError
from longctx.planning.planners.planner import make_plan
from rivals import RIVALS, MissingWheel, _even_cuts
from tests.marks import examples

H100 = HardwareProfile.load("h100-nvlink-ib")
OURS_TO_READ = [name for name in RIVALS if name != "megatron-main"]


def plan_baseline(name: str, lengths: list[int], **request: Any) -> Plan:
    return plan_placed(name, RIVALS[name], lengths, **request)


def is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


@settings(max_examples=examples(80), deadline=None)
@given(
    st.sampled_from(OURS_TO_READ),
    st.sampled_from([1, 2, 4, 6, 8, 24, 64]),
    st.lists(st.one_of(st.integers(1, 4096), st.integers(1, 40_000)), min_size=1, max_size=60),
)
def test_every_plan_is_sound(name: str, ranks: int, lengths: list[int]) -> None:
    lengths = [min(length, 4096 * (1 << (ranks.bit_length() - 1))) for length in lengths]
    plan = plan_baseline(name, lengths, ranks=ranks, tokens_per_rank=4096, profile=H100)
    check_plan(plan)
    assert plan.lengths == tuple(lengths)
    assert plan.makespan_s >= plan.lower_bound_s
    assert all(is_power_of_two(degree) or degree == ranks for degree in plan.degrees)


def test_megatron_main_is_the_real_class() -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    lengths = load_mix("wlb_128k").draw(256, seed=0)
    plan = plan_baseline("megatron-main", lengths, ranks=16, tokens_per_rank=16384, profile=H100)
    check_plan(plan)
    assert all(is_power_of_two(degree) for degree in plan.degrees)


def test_without_the_wheel_the_error_has_the_command_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    # What Python does for a package that is not there.
    monkeypatch.setitem(sys.modules, "megatron", None)
    with pytest.raises(
        MissingWheel, match=r"needs the package megatron-core .*: pip install '\.\[bench\]'"
    ):
        plan_baseline("megatron-main", [100], ranks=2, tokens_per_rank=4096, profile=H100)


@pytest.mark.parametrize("name", RIVALS)
def test_documents_that_fit_no_degree_are_named(name: str) -> None:
    with pytest.raises(PlanError, match="document 1 has 99999 tokens, but 4 ranks of 8192"):
        plan_baseline(name, [5, 99999], ranks=4, tokens_per_rank=8192, profile=H100)


def test_powers_of_two_do_not_hold_what_six_ranks_do() -> None:
    with pytest.raises(
        PlanError,
        match="FlexSP cannot hold document 0 of 24576 tokens: its largest degree here is 4",
    ):
        plan_baseline("flexsp", [6 * 4096], ranks=6, tokens_per_rank=4096, profile=H100)
    assert plan_baseline(
        "megatron-dev", [6 * 4096], ranks=6, tokens_per_rank=4096, profile=H100
    ).degrees == {6: 1}


def test_fixed_static_takes_the_smallest_power_of_two_that_divides_the_ranks() -> None:
    assert [fixed_degree(longest, 16, 4096) for longest in (1, 4096, 4097, 20_000, 65_536)] == [
        1,
        1,
        2,
        8,
        16,
    ]
    assert [fixed_degree(longest, 24, 4096) for longest in (20_000, 40_000)] == [8, 24], (
        "16 does not divide 24"
    )
    assert fixed_degree(8192, 4, 4095) == 4, "of an odd budget each rank loses a token"
    with pytest.raises(
        PlanError, match="cannot hold a document of 65,537 tokens: all 16 ranks hold 65,536"
    ):
        fixed_degree(65_537, 16, 4096)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=40), st.sampled_from([1, 2, 4, 8]))
def test_fixed_static_is_that_of_megatron(lengths: list[int], degree: int) -> None:
    """Against its rule, written down by token counts: drawn order, and group 0 first in every
    micro-batch."""
    # Padded as Megatron pads, so that shards are even.
    lengths = [2 * degree * length for length in lengths]
    plan = plan_fixed_static(lengths, ranks=8, tokens_per_rank=128, profile=H100, degree=degree)
    packs: list[list[int]] = [[]]
    for length in lengths:
        if sum(packs[-1]) + length > 128 * degree:
            packs.append([])
        packs[-1].append(length)
    groups = 8 // degree
    while len(packs) % groups and any(len(pack) > 1 for pack in packs):
        last = max(i for i, pack in enumerate(packs) if len(pack) > 1)
        packs.append([packs[last].pop()])
    found = [
        [plan.lengths[p.document] for p in micro_batch if p.first_rank == group * degree]
        for micro_batch in plan.micro_batches
        for group in range(groups)
    ]
    assert [sorted(pack) for pack in found if pack] == [sorted(pack) for pack in packs]


@pytest.mark.parametrize(
    ("degree", "message"),
    [
        (3, "static:3 on 8 ranks: the degree must divide the number of ranks"),
        (
            2,
            "does not hold the longest document of 9,000 tokens: 2 ranks with 4,096 tokens each "
            "hold 8,192; use degree 4 or",
        ),
        (16, "degree is 16: must be a whole number in 1..8"),
    ],
)
def test_invalid_fixed_degrees_are_refused(degree: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_fixed_static([100, 9000], ranks=8, tokens_per_rank=4096, profile=H100, degree=degree)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(1, 8))
def test_flexsp_cuts_keep_the_order_and_the_fullest_small(lengths: list[int], number: int) -> None:
    sizes = np.array(sorted(lengths, reverse=True))
    runs = _even_cuts(np.arange(len(sizes)), sizes, number)
    assert [document for run in runs for document in run] == list(range(len(sizes)))
    assert len(runs) <= number
    fullest = max(int(sizes[run].sum()) for run in runs)
    assert fullest <= sizes.sum() / min(number, len(sizes)) + sizes.max()


def test_megatron_dev_widens_until_no_rank_is_empty() -> None:
    plan = plan_baseline(
        "megatron-dev", [4000, 3000, 100], ranks=8, tokens_per_rank=4096, profile=H100
    )
    ranks = {rank for p in plan.micro_batches[0] for rank in p.ring}
    assert ranks == set(range(8))


def test_auto_is_ahead_of_every_baseline_where_documents_are_many() -> None:
    lengths = load_mix("wlb_128k").draw(256, seed=0)
    auto = make_plan(lengths, ranks=16, tokens_per_rank=16384, profile=H100)
    for name in OURS_TO_READ:
        plan = plan_baseline(name, lengths, ranks=16, tokens_per_rank=16384, profile=H100)
        assert (plan.winner, plan.gap < 0.5, plan.planning_ms > 0) == (name, True, True)
        assert auto.makespan_s < plan.makespan_s, name

"""Compares the loads of plans with the schedules that their ranks build."""

from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.attention import HybridAttention, packed_attention
from longctx.config import load
from longctx.memory.loads import Load, full_loads, heaviest, micro_batch_loads
from longctx.memory.model import estimate
from longctx.planning.cost.spec import RECOMPUTE_MODES
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.plan import Plan
from longctx.planning.planners.planner import make_plan
from tests.attention.test_operator_memory import RING, Watching
from tests.marks import examples
from tests.workers import Workers

H100 = HardwareProfile.load("h100-nvlink-ib")


class Rows(NamedTuple):
    """Rows of a rank, counted at full width (all heads)."""

    tokens: int
    remote: float
    held: float
    fullest: float
    swapped: int
    sent: float


KV_HEADS = 2


def scheduled(
    plan: Plan, micro_batch: int, rank: int, ulysses_degree: int, per_node: int | None
) -> Rows:
    """Returns the rows that this rank's attention really exchanges."""
    layout = plan.layout(micro_batch, rank)

    def without_a_group(attention: Any, _: Any, __: Any, device: str) -> None:
        attention.device = torch.device(device)

    with mock.patch("longctx.attention.inputs.CheckedAttention.__init__", without_a_group):
        attention = packed_attention(layout, ulysses_degree, ranks_per_node=per_node)
    swapped = 0
    if isinstance(attention, HybridAttention):
        schedules = [
            (attention.plain.schedule, 1.0),
            (attention.wide.schedule, 1 / min(ulysses_degree, KV_HEADS)),
        ]
        swapped = 0 if attention.swap is None else len(attention.swap.rows)
    else:
        schedules = [(attention.schedule, 1.0)]
    rounds = [0.0] * max(len(schedule.rounds) for schedule, _ in schedules)
    sent = 0.0
    for schedule, width in schedules:
        for number, round_ in enumerate(schedule.rounds):
            rounds[number] += round_.received_rows * width
            sent += sum(hop.sent_rows for hop in round_.hops) * width
    at_once = 3 if per_node else 2
    held = max((sum(rounds[first : first + at_once]) for first in range(len(rounds))), default=0)
    return Rows(layout.tokens, sum(rounds), held, max(rounds, default=0), swapped, sent)


@given(
    lengths=st.lists(st.integers(1000, 40_000), min_size=1, max_size=6),
    ranks=st.sampled_from([4, 8, 12]),
    per_node=st.sampled_from([2, 3, 4]),
    ulysses_degree=st.sampled_from([1, 2, 4]),  # of 4 query heads and 2 KV heads
    two_levels=st.booleans(),
    rounds=st.lists(st.integers(1, 5), min_size=6, max_size=6),
    mode=st.sampled_from(["auto", "static"]),
)
@settings(max_examples=examples(30), deadline=None)
def test_loads_are_those_of_the_schedules(
    lengths: list[int],
    ranks: int,
    per_node: int,
    ulysses_degree: int,
    two_levels: bool,
    rounds: list[int],
    mode: str,
) -> None:
    """With any number of rounds of every document."""
    profile = replace(H100, ranks_per_node=per_node)
    plan = make_plan(lengths, ranks=ranks, tokens_per_rank=16384, profile=profile, mode=mode)
    with_rounds = (
        tuple(replace(p, rounds=rounds[p.document]) for p in placements)
        for placements in plan.micro_batches
    )
    plan = replace(plan, micro_batches=tuple(with_rounds))
    config = load(
        None,
        [
            f"context.ulysses_degree={ulysses_degree}",
            f"context.two_level_exchange={str(two_levels).lower()}",
        ],
    )
    cut = len(lengths) * ranks  # chunks are whole tokens: up to one token of difference per rank
    for micro_batch in range(len(plan.micro_batches)):
        found = list(micro_batch_loads(plan, micro_batch, config))
        real = [
            scheduled(plan, micro_batch, rank, ulysses_degree, per_node if two_levels else None)
            for rank in range(ranks)
        ]
        for mine, rows in zip(found, real, strict=True):
            assert (
                mine.tokens,
                mine.remote,
                mine.held,
                mine.fullest,
                mine.swapped,
            ) == pytest.approx(rows[:-1], abs=cut)
        assert sum(mine.sent for mine in found) == pytest.approx(
            sum(rows.sent for rows in real), abs=cut * ranks
        )


def test_two_levels_hold_the_own_node_at_once() -> None:
    """With a million tokens on 64 ranks in nodes of 8, planned in 63 rounds, the rows of the own
    node are one more round."""
    long = [
        "batch.tokens_per_rank=16384",
        "context.max_remote_tokens=16384",
        "context.profile=h100-nvlink-ib",
    ]
    held = {
        value: max(
            found.held
            for found in full_loads(load(None, [*long, f"context.two_level_exchange={value}"]), 64)
        )
        for value in ("true", "false")
    }
    assert held == {"true": 7 * 16384 + round(2 * 56 * 16384 / 63), "false": 2 * 16384}


def test_ranks_that_swap_heads_receive_fewer_keys() -> None:
    straight = ["context.profile=h100-nvlink-ib", "context.two_level_exchange=false"]
    wide = ["model.preset=llama-3.1-8b", "batch.tokens_per_rank=4096", *straight]
    swapping, plain = (
        max(
            full_loads(load(None, [*wide, f"context.ulysses_degree={value}"]), 64),
            key=lambda found: found.remote,
        )
        for value in (8, 1)
    )
    assert (swapping.swapped, plain.swapped) == (swapping.tokens, 0)
    assert swapping.remote < plain.remote / 2


def rounds_at_once() -> int:
    """Returns the number of buffers of received rows that are alive at once in a forward pass of
    five rounds."""
    case = replace(RING, ranks_per_node=1)
    rank = dist.get_rank()
    Watching.buffers, Watching.most = [], 0
    case.attention(rank, Watching)(*(tensor[case.rows(rank)] for tensor in case.inputs()[:3]))
    return Watching.most


def test_two_levels_have_three_rounds_under_way(workers: Workers) -> None:
    assert max(workers.run(rounds_at_once, 6)) == 3


@pytest.mark.parametrize(("tokens", "expected"), [(1, 1), (8192, 1), (8193, 2), (16384, 2)])
def test_a_step_has_as_many_micro_batches_as_hold_its_tokens(tokens: int, expected: int) -> None:
    """Two ranks of 4,096 tokens: what is left over needs one more."""
    settings = ["batch.tokens_per_rank=4096", f"batch.global_tokens={tokens}"]
    config = load(None, [*settings, "data.max_length=64"], world_size=2)
    found = full_loads(config, 2, H100)
    assert {each.micro_batches for each in found} == {expected}
    assert {each.first for each in found} == {expected == 1}


@st.composite
def many_loads(draw: st.DrawFn) -> list[Load]:
    """Loads of ranks, of which many have as many rows of a kind."""
    few = st.integers(0, 3)
    found = []
    for _ in range(draw(st.integers(2, 5))):
        tokens = 2048 * draw(st.integers(1, 2))
        remote = 4096 * draw(few)
        held = remote * draw(few) // 3
        load = Load(
            tokens=tokens,
            remote=remote,
            sent=4096 * draw(few) if remote else 0,
            held=held,
            fullest=held * draw(few) // 3,
            micro_batches=draw(st.integers(1, 2)),
            swapped=tokens * draw(few) // 3,
            source=tokens * draw(few) // 3,
            first=draw(st.booleans()),
        )
        found.append(load)
    return found


@given(
    candidates=many_loads(),
    recompute=st.sampled_from(RECOMPUTE_MODES),
    keep_kv=st.booleans(),
    ulysses_degree=st.sampled_from((1, 2)),
    encoder_layers=st.sampled_from((0, 16)),
)
@settings(max_examples=examples(600), deadline=None)
def test_one_of_the_heaviest_loads_needs_the_most(
    candidates: list[Load],
    recompute: str,
    keep_kv: bool,
    ulysses_degree: int,
    encoder_layers: int,
) -> None:
    config = load(
        None,
        [
            "model.preset=llama-3.1-8b",
            f"train.recompute={recompute}",
            f"context.keep_kv={keep_kv}",
            f"context.ulysses_degree={ulysses_degree}",
            "batch.tokens_per_rank=4096",
        ],
        world_size=8,
    )
    spec = replace(config.model_source(1000).spec, encoder_layers=encoder_layers)
    few = heaviest(candidates)
    assert set(few) <= set(candidates)
    for one in candidates:
        of_all = estimate(spec, config, 8, [one], fused=True).total
        # Parts are rounded to bytes.
        assert of_all <= estimate(spec, config, 8, few, fused=True).total + 16


def test_a_load_that_another_exceeds_is_left_out() -> None:
    large = Load(tokens=9, remote=8, sent=4, held=8, fullest=8, micro_batches=1)
    small = replace(large, tokens=8)
    for kind in ("sent", "held", "fullest", "swapped", "source"):
        more_of_one = replace(small, **{kind: 9})
        assert set(heaviest([large, more_of_one])) == {large, more_of_one}, kind
    # Fewer remote rows, all of which are held at once: of what is sent, too.
    rounds = replace(large, held=4, fullest=4)
    at_once = replace(rounds, remote=4)
    assert set(heaviest([small, large, rounds])) == {large}
    assert set(heaviest([rounds, at_once])) == {rounds, at_once}

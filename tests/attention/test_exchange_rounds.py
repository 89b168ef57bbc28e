"""Exchange rounds: predicted waits are about those of the code that trains, on a virtual clock, and
rounds hide them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.modelled import ModelledKernel, _Work, pairs
from longctx.attention import Mask, RingAttention, inputs, ring_pass
from longctx.planning.assignment import Assignment, Integers, remote_tokens
from longctx.planning.cost.model import NANOSECONDS, attention_ns, linear_ns, score
from longctx.planning.cost.rounds import CHOICES, PRICE, _ExchangeTimes, choose_rounds, plan_score
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.layout import Layout
from longctx.planning.pipeline import NO_PIPELINE, Pipeline
from longctx.planning.planners.planner import make_plan
from tests.marks import examples

H100 = replace(HardwareProfile.load("h100-nvlink-ib"), latency_s=0.0, split_document_s=0.0)
HIDING = replace(H100, overlap=1.0, attention_efficiency=((64, 1.0),))
"""All computation hides messages, and kernels are as efficient on all documents: as on the virtual
clock."""


def one_ring(degree: int) -> Assignment:
    """A document on the first ranks."""
    return Assignment(*(np.array([x]) for x in (0, 0, degree)), np.array([False]))


class VirtualClock:
    """Runs one rank of ring attention in virtual nanoseconds: kernels and messages advance the
    time, nothing else does."""

    def __init__(self, profile: HardwareProfile, rank: int) -> None:
        self.profile, self.rank = profile, rank
        self.now = self.worked = 0.0
        self.free = [0.0, 0.0]  # links inside the node and across
        self.s_per_pair = 0.0

    def sleep(self, nanoseconds: float) -> None:
        self.now += nanoseconds
        self.worked += nanoseconds

    def exchange(self, group: Any, where: str) -> Any:
        one = SimpleNamespace(beside=self.beside, hold=lambda *tensors: None, across=None)
        one.start = lambda *arguments: self.start(one.across is None, *arguments)
        return one

    def beside(self, hops: Callable[[], None], device: torch.device) -> Callable[[], None]:
        began = self.now
        hops()
        self.now, ended = began, self.now

        def end() -> None:
            self.now = max(self.now, ended)

        return end

    def start(
        self, together: bool, outgoing: Any, incoming: torch.Tensor, rows: Sequence[tuple[int, int]]
    ) -> Any:
        """Posts messages, inside the node and across `together` on one communicator, or each on its
        own."""
        profile, node = self.profile, self.profile.ranks_per_node
        arrives = self.now
        self.free = [max(self.free)] * 2 if together else self.free
        for across, rate in enumerate(
            (profile.intra_node_bytes_per_s, profile.inter_node_bytes_per_s)
        ):
            tokens = sum(
                count for peer, count in rows if (peer // node != self.rank // node) == across
            )
            if tokens:
                time = tokens * profile.kv_bytes_per_token / 3 / rate * NANOSECONDS
                self.free[across] = max(self.free[across], self.now) + time
                arrives = max(arrives, self.free[across])

        def wait() -> torch.Tensor:
            self.now = max(self.now, arrives)
            return incoming.zero_()

        return SimpleNamespace(wait=wait)


def waited(
    profile: HardwareProfile,
    lengths: list[int],
    a: Assignment,
    rank: int,
    rounds: Integers,
    across: Any = "another group",
) -> tuple[float, float]:
    """Returns the times that `rank` waits for messages and computes in both passes, by the code of
    the runtime."""
    clock = VirtualClock(profile, rank)
    layout = Layout.of(a.placements(rounds)[0], lengths, 0, rank)
    seen = Mask(causal=False)
    per_node = profile.ranks_per_node if profile.exchange_levels == 2 else None
    with (
        mock.patch.object(ring_pass, "choose_kernel", return_value=ModelledKernel(clock)),  # type: ignore[arg-type]
        mock.patch.object(inputs.dist, "is_initialized", return_value=True),
        mock.patch.object(inputs.dist, "get_rank", return_value=rank),
    ):
        attention = RingAttention(
            layout, exchange=clock.exchange, mask=seen, ranks_per_node=per_node, across=across
        )
        lengths_here, degrees = (
            np.array([getattr(s, name) for s in layout.shards]) for name in ("length", "degree")
        )
        total = attention_ns(profile, lengths_here, degrees).sum()
        clock.s_per_pair = total / sum(pairs(call.segments) for call in attention.schedule.calls)
        q, k, v = (torch.zeros(layout.tokens, 1, 2, requires_grad=True) for _ in range(3))
        linear = profile.query_share * float(linear_ns(profile, np.array([layout.tokens]))[0])
        out = attention(lambda sent: _Work.apply(sent(q), None, clock, linear), k, v)  # type: ignore[no-untyped-call]
        out.sum().backward()
    return clock.now - clock.worked, clock.worked


@st.composite
def cases(draw: st.DrawFn) -> tuple[HardwareProfile, list[int], Assignment, int, Integers]:
    """Draws a profile, documents in one micro-batch, a rank and rounds of documents, with chunks
    that all parts divide."""
    levels = draw(st.sampled_from([1, 2, 2]))
    node = draw(st.sampled_from([2, 4] if levels == 2 else [3, 5, 7]))
    nodes = draw(st.integers(2, 4)) if levels == 2 else 1
    # The rank holds a document alone. Rings over whole nodes have chunks that can be cut into six
    # parts.
    rank = draw(st.integers(0, nodes * node - 1))
    documents = [(draw(st.integers(1, 50)), rank, 1, 1)]
    over = draw(st.integers(2, nodes)) if levels == 2 else 1
    rounds = (
        (over - 1) * draw(st.integers(1, 3))
        if levels == 2
        else draw(st.sampled_from([1, 2, node - 1]))
    )
    for _ in range(draw(st.integers(1, 2))):
        first_node = draw(st.integers(0, nodes - over))
        documents.append(
            (12 * over * node * draw(st.integers(1, 4)), node * first_node, node * over, rounds)
        )
    for _ in range(draw(st.integers(0, 3))):
        inside = draw(st.integers(2, node))
        first = node * draw(st.integers(0, nodes - 1)) + draw(st.integers(0, node - inside))
        own = draw(st.sampled_from([1, inside - 1]))
        documents.append(
            (2 * inside * draw(st.integers(1, 200)), first, inside, own if own <= rounds else 1)
        )
    lengths, first_rank, degree, own_rounds = (
        np.array(column) for column in zip(*documents, strict=True)
    )
    assignment = Assignment(
        np.zeros_like(degree), first_rank, degree, np.zeros(len(degree), dtype=bool)
    )
    profile = replace(
        HIDING,
        ranks_per_node=node,
        exchange_levels=levels,
        attention_s_per_token2=10 ** draw(st.floats(-9, -6)),
        intra_node_bytes_per_s=H100.intra_node_bytes_per_s * draw(st.floats(0.3, 3)),
        inter_node_bytes_per_s=H100.inter_node_bytes_per_s * draw(st.floats(0.3, 3)),
        query_share=draw(st.sampled_from([0.0, 0.05, 0.3])),
    )
    return profile, lengths.tolist(), assignment, rank, own_rounds


def waits_as_predicted(
    profile: HardwareProfile,
    lengths: list[int],
    a: Assignment,
    rank: int,
    rounds: Integers,
    error: float = 0.002,
) -> float:
    """Returns the time that `rank` waits by the code that trains, which the closed form predicts up
    to a share of the time."""
    sizes, ranks = np.array(lengths), max(rank + 1, int((a.first_rank + a.degree).max()))
    exchange = _ExchangeTimes(profile, sizes, a, score(profile, sizes, a, ranks))
    predicted = float(exchange.waits(exchange.possible(rounds[exchange.rings]))[0, rank])
    measured, computed = waited(profile, lengths, a, rank, rounds)
    assert predicted == pytest.approx(measured, rel=0.02, abs=error * (computed + measured))
    return measured


@given(cases())
@settings(max_examples=examples(80), deadline=None)
def test_predicted_waits_are_about_those_of_the_runtime(
    case: tuple[HardwareProfile, list[int], Assignment, int, Integers],
) -> None:
    """Most exactly; least in short rings over nodes, and where two kinds of rings share links that
    are far too slow."""
    waits_as_predicted(*case, error=0.25)


@given(cases())
@settings(max_examples=examples(80), deadline=None)
def test_a_rank_waits_for_its_own_documents_alone(
    case: tuple[HardwareProfile, list[int], Assignment, int, Integers],
) -> None:
    """Whatever rounds the documents of other ranks have."""
    profile, lengths, a, rank, rounds = case
    ranks = max(rank + 1, int((a.first_rank + a.degree).max()))

    def time(documents: Integers) -> int:
        part = Assignment(
            *(x[documents] for x in (a.micro_batch, a.first_rank, a.degree, a.reversed))
        )
        sizes = np.array(lengths)[documents]
        exchange = _ExchangeTimes(profile, sizes, part, score(profile, sizes, part, ranks))
        return int(exchange.time(exchange.possible(rounds[documents][exchange.rings]))[0, rank])

    here = np.flatnonzero((a.first_rank <= rank) & (rank < a.first_rank + a.degree))
    assert time(here) == time(np.arange(len(lengths)))


@given(st.integers(2, 7), st.integers(100, 3000), st.floats(0.02, 1), st.floats(0, 0.3))
@settings(max_examples=examples(40), deadline=None)
def test_a_ring_in_a_node_waits_as_long_with_two_exchange_levels(
    degree: int, tokens: int, speed: float, query_share: float
) -> None:
    """Queries hide the return of its gradients, although those of rings across nodes take two
    hops."""
    ring = one_ring(degree)
    links = replace(
        HIDING, query_share=query_share, intra_node_bytes_per_s=H100.intra_node_bytes_per_s * speed
    )
    one_level, two_levels = (
        waits_as_predicted(
            replace(links, exchange_levels=levels),
            [2 * degree * tokens],
            ring,
            degree // 2,
            np.array([1]),
        )
        for levels in (1, 2)
    )
    assert two_levels == pytest.approx(one_level, rel=1e-9)


@given(st.integers(2, 4), st.integers(1, 40), st.integers(1, 3))
@settings(max_examples=examples(20), deadline=None)
def test_queries_hide_both_hops_of_returning_gradients(node: int, tokens: int, rounds: int) -> None:
    """They travel beside the queries' backward: first to the relay, which adds them up, and then
    across nodes."""
    ring = one_ring(2 * node)
    profile = replace(HIDING, ranks_per_node=node, exchange_levels=2, attention_s_per_token2=1e-6)

    def waits(query_share: float) -> float:
        links = replace(profile, query_share=query_share)
        return waits_as_predicted(links, [24 * node * tokens], ring, node // 2, np.array([rounds]))

    assert waits(0.0) > 0
    assert waits(1.0) == pytest.approx(0, abs=1e-3)


def test_on_one_communicator_messages_between_nodes_wait_longer_than_predicted() -> None:
    """NCCL runs its batches one after the other: those of the own node first, then those of
    others."""
    ring, two_rounds = one_ring(16), np.array([2])
    slow = replace(HIDING, inter_node_bytes_per_s=H100.inter_node_bytes_per_s / 5)
    predicted = waits_as_predicted(slow, [160_000], ring, 3, two_rounds)
    assert waited(slow, [160_000], ring, 3, two_rounds, across=None)[0] > 1.1 * predicted > 0


def test_the_planner_takes_the_rounds_that_hide_the_exchange() -> None:
    """A document over two nodes waits less in several rounds, which cost more where they hide
    nothing."""
    lengths = np.array([120_000])
    over_two_nodes = one_ring(16)

    def chosen(
        profile: HardwareProfile, most: int | None = None, ring: Assignment = over_two_nodes
    ) -> int:
        plain = score(profile, lengths, ring, 16)
        (rounds,), timed = choose_rounds(profile, lengths, ring, plain, most)
        busy = plain.time - plain.exposed
        exchange = _ExchangeTimes(profile, lengths, ring, plain)
        prices = [
            (count - 1)
            * PRICE
            * profile.linear_s_per_token
            * 120_000
            / ring.degree[0]
            * NANOSECONDS
            for count in (1, rounds)
        ]
        times = [
            float((busy + exchange.waits(exchange.possible(count))).max()) + price
            for count, price in zip((1, rounds), prices, strict=True)
        ]
        assert times[1] == pytest.approx(float(timed.time.max()), rel=1e-6)
        assert most or (times[1] <= times[0] and (rounds == 1 or times[1] < times[0]))
        return rounds

    slow = replace(H100, inter_node_bytes_per_s=H100.inter_node_bytes_per_s / 5)
    assert chosen(slow) > chosen(H100) > 1
    # Nothing to hide.
    assert chosen(replace(H100, inter_node_bytes_per_s=1e15, intra_node_bytes_per_s=1e15)) == 1
    in_a_node = replace(over_two_nodes, degree=np.array([8]))
    slow_inside = replace(H100, intra_node_bytes_per_s=H100.intra_node_bytes_per_s / 20)
    assert (
        chosen(slow_inside, ring=in_a_node)
        > chosen(replace(slow_inside, overlap=0.0), ring=in_a_node)
        == 1
    )
    remote = 15 * 7500
    assert chosen(slow, remote // 12) == 12 > chosen(slow)


@pytest.mark.parametrize(
    ("levels", "nodes", "tokens", "slower"),
    [(1, 1, 20, 4), (1, 4, 40, 1), (2, 2, 10, 4), (2, 2, 40, 1)],
)
def test_the_chosen_rounds_are_the_fastest_on_the_virtual_clock(
    levels: int, nodes: int, tokens: int, slower: int
) -> None:
    ring = one_ring(8 * nodes)
    profile = replace(
        HIDING, exchange_levels=levels, intra_node_bytes_per_s=H100.intra_node_bytes_per_s / slower
    )
    lengths = np.array([16 * nodes * 12 * tokens])
    plain = score(profile, lengths, ring, 8 * nodes)
    (chosen,), timed = choose_rounds(profile, lengths, ring, plain)
    price = PRICE * float(linear_ns(profile, lengths // ring.degree)[0])
    counts = [count for count in CHOICES if count < 8 * nodes]
    extra = {
        n: waited(profile, lengths.tolist(), ring, 3, np.array([n]))[0] + (n - 1) * price
        for n in counts
    }
    busy = float((plain.time - plain.exposed).max())
    assert chosen > 1
    assert busy + extra[chosen] <= 1.005 * (busy + min(extra.values()))
    assert timed.time.max() == pytest.approx(busy + extra[chosen], rel=0.015)


def test_rings_in_a_node_do_not_pay_for_rounds_across_nodes() -> None:
    """Their links are fast enough for one round, unless memory allows fewer rows or the links are
    slow."""
    lengths = np.array([120_000, 50_000, 2_000])
    a = Assignment(
        *(np.array(x) for x in ([0] * 3, [0, 8, 3], [16, 8, 1])), np.zeros(3, dtype=bool)
    )

    def chosen(profile: HardwareProfile, most: int | None = None) -> list[int]:
        rounds, timed = choose_rounds(
            profile, lengths, a, plain := score(profile, lengths, a, 16), most
        )
        exchange = _ExchangeTimes(profile, lengths, a, plain)
        same = [exchange.time(exchange.possible(count)).max() for count in CHOICES]
        assert most or timed.makespan_ns <= plain.makespan_ns - plain.time.max() + min(same)
        return rounds.tolist()

    network = replace(H100, inter_node_bytes_per_s=H100.inter_node_bytes_per_s / 5)
    across, inside, alone = chosen(network)
    assert across > inside == alone == 1
    across, inside, alone = chosen(network, most=50_000)
    assert across >= inside == 4 and alone == 1  # 112,500 and 43,750 remote tokens
    across, inside, alone = chosen(
        replace(network, intra_node_bytes_per_s=H100.intra_node_bytes_per_s / 20)
    )
    assert across >= inside > alone == 1


@given(
    st.lists(st.integers(1, 100_000), min_size=1, max_size=12),
    st.integers(1, 3),
    st.sampled_from([None, 20_000, 100_000]),
    st.sampled_from([NO_PIPELINE, Pipeline(3)]),
)
@settings(max_examples=examples(12), deadline=None)
def test_plans_take_as_long_as_their_rounds(
    lengths: list[int], nodes: int, most: int | None, pipeline: Pipeline
) -> None:
    """Waits and rounds make no plan faster, and mode auto is never behind the others with them."""
    request: dict[str, Any] = {
        "ranks": 8 * nodes,
        "tokens_per_rank": 16384,
        "profile": H100,
        "pipeline": pipeline,
    }
    plans = {
        mode: make_plan(lengths, mode=mode, max_remote_tokens=most, **request)
        for mode in ("auto", "static", "bins")
    }
    for plan in plans.values():
        assignment, sizes = Assignment.of(plan), np.array(lengths)
        plain, timed = score(H100, sizes, assignment, plan.ranks, pipeline), plan_score(plan)
        assert timed.makespan_ns == round(plan.makespan_s * NANOSECONDS) >= plain.makespan_ns
        assert (timed.time >= plain.time).all() and (
            timed.time - timed.exposed == plain.time - plain.exposed
        ).all()
        remote = remote_tokens(sizes, assignment, timed.time.shape).max(axis=1)
        for rows, placements in zip(remote.tolist(), plan.micro_batches, strict=True):
            assert most is None or all(
                rows <= most * p.rounds or p.rounds >= p.degree - 1 for p in placements
            )
    assert plans["auto"].makespan_s <= min(plan.makespan_s for plan in plans.values())

"""Compares the vectorized cost model with a slow plain-Python version of the formulas, rank by
rank."""

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.planning.assignment import Assignment, tokens_on_ranks
from longctx.planning.cost.bounds import document_bound_ns, step_bound_ns, tight_step_bound_ns
from longctx.planning.cost.model import alone_ns, attention_ns, score, states_ns
from longctx.planning.cost.rounds import CHOICES, PRICE, choose_rounds
from longctx.planning.cost.unhidden import unhidden_exchange_ns
from longctx.planning.hardware_profile import BESIDE, HardwareProfile
from longctx.planning.layout import shard_tokens
from longctx.planning.planners.planner import make_plan
from tests.marks import examples
from tests.planning.test_plan_properties import H100, profiles
from tests.profile_cases import PINNED


def plain_efficiency(profile: HardwareProfile, segment: Fraction) -> float:
    table = profile.attention_efficiency
    if segment <= table[0][0]:
        return table[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(table):
        if segment <= x1:
            return y0 + (y1 - y0) * (math.log2(segment) - math.log2(x0)) / (
                math.log2(x1) - math.log2(x0)
            )
    return table[-1][1]


def plain_attention_s(profile: HardwareProfile, length: int, degree: int) -> float:
    chunk = length / (1 + Fraction(profile.attention_split_penalty) * (degree - 1))
    return profile.attention_s_per_token2 * length**2 / degree / plain_efficiency(profile, chunk)


def plain_time_s(
    profile: HardwareProfile, lengths: list[int], rings: list[tuple[int, int, int, bool]], rank: int
) -> tuple[float, float]:
    """Returns (time, exposed) of one rank that holds shards of `rings`: (document, first rank,
    degree, reversed)."""
    tokens = split = documents_split = 0
    attention = intra = inter = near_states = far_states = received = 0.0
    mates = False
    node = rank // profile.ranks_per_node
    for document, first, degree, reverse in rings:
        if first <= rank < first + degree:
            index = rank - first
            held = shard_tokens(lengths[document], degree, degree - 1 - index if reverse else index)
            tokens += held
            split += held * (degree > 1)
            documents_split += degree > 1
            received += lengths[document] * (degree - 1) / degree
            attention += plain_attention_s(profile, lengths[document], degree)
            others = [r for r in range(first, first + degree) if r != rank]
            near = sum(r // profile.ranks_per_node == node for r in others)
            mates |= bool(others)
            far = len(others) - near
            near_states += near * profile.state_bytes / profile.intra_node_bytes_per_s
            far_states += far * profile.state_bytes / profile.inter_node_bytes_per_s
            size = lengths[document] / degree * profile.kv_bytes_per_token
            # Ranks of the node share the received rows and pass them on.
            if profile.exchange_levels == 2:
                passed_on = far * near / (near + 1)
                near, far = near + passed_on, far / (near + 1)
            intra += size * near / profile.intra_node_bytes_per_s
            inter += size * far / profile.inter_node_bytes_per_s
    exchange = profile.latency_s * (not profile.state_bytes) + max(intra, inter) if mates else 0.0
    states = (
        profile.latency_s * bool(profile.state_bytes) + max(near_states, far_states)
        if mates
        else 0.0
    )
    linear = profile.linear_s_per_token * tokens
    in_queries = min(profile.overlap * profile.query_share * linear, 2 / 3 * exchange)
    exposed = (
        max(0.0, exchange - profile.overlap * attention - in_queries)
        + states
        + profile.split_s_per_token * split
    )
    exposed += profile.received_s_per_token * received
    exposed += profile.split_document_s * documents_split
    return linear + attention + exposed, exposed


@st.composite
def assignments(draw: st.DrawFn) -> tuple[list[int], int, Assignment]:
    ranks = draw(st.integers(1, 20))
    lengths = draw(
        st.lists(st.one_of(st.integers(1, 50), st.integers(1, 40_000)), min_size=1, max_size=12)
    )
    rows = []
    for _ in lengths:
        degree = draw(st.integers(1, ranks))
        rows.append(
            (
                draw(st.integers(0, 2)),
                draw(st.integers(0, ranks - degree)),
                degree,
                draw(st.booleans()),
            )
        )
    micro_batch, first, degree_, reverse = (np.array(column) for column in zip(*rows, strict=True))
    return lengths, ranks, Assignment(micro_batch, first, degree_, reverse)


@settings(max_examples=examples(150), deadline=None)
@given(assignments(), profiles())
def test_score_equals_the_plain_reference(
    case: tuple[list[int], int, Assignment], profile: HardwareProfile
) -> None:
    lengths, ranks, a = case
    result = score(profile, np.array(lengths), a, ranks)
    total = profile.step_s
    for k in range(a.micro_batches):
        rings = [
            (i, int(a.first_rank[i]), int(a.degree[i]), bool(a.reversed[i]))
            for i in range(len(lengths))
            if a.micro_batch[i] == k
        ]
        plain = [plain_time_s(profile, lengths, rings, rank) for rank in range(ranks)]
        # Each document and each peer is rounded up to a nanosecond.
        rounding = 1e-9 * (4 + 2 * ranks * len(lengths))
        for rank, (time, exposed) in enumerate(plain):
            assert result.time[k, rank] / 1e9 == pytest.approx(time, rel=1e-9, abs=rounding)
            assert result.exposed[k, rank] / 1e9 == pytest.approx(
                exposed, rel=1e-6, abs=rounding + 1e-9 * time
            )
        total += profile.launch_s + max(time for time, _ in plain)
    assert result.makespan_ns / 1e9 == pytest.approx(total, rel=1e-9, abs=1e-6)
    assert 0 <= result.idle_share < 1
    assert 0 <= result.exposed_share < 1


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.integers(1, 100_000), min_size=1, max_size=20),
    st.integers(1, 64),
    st.integers(1, 20_000),
    profiles(),
)
def test_bound_equals_the_plain_reference(
    lengths: list[int], ranks: int, budget: int, profile: HardwareProfile
) -> None:
    work = 0.0
    for s in lengths:
        least = -(-s // budget)
        work += profile.linear_s_per_token * s + plain_attention_s(profile, s, least) * least
        work += profile.split_document_s * least * (least > 1)
    expected = (
        profile.step_s + profile.launch_s * -(-sum(lengths) // (ranks * budget)) + work / ranks
    )
    bound = step_bound_ns(profile, np.array(lengths), ranks, budget) / 1e9
    if max(lengths) > profile.ranks_per_node * budget:  # exchange across nodes counts as well
        assert bound >= expected * (1 - 1e-9) - 1e-7
    else:
        assert bound == pytest.approx(expected, rel=1e-9, abs=1e-7)


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("length", [150_000, 262_144, 1_000_003])
def test_exchange_that_no_rounds_hide_is_that_of_the_best_degree_and_rounds(
    levels: int, length: int
) -> None:
    """By a loop over all degrees and numbers of rounds, of which the bound has a grid."""
    profile, budget, ranks = replace(H100, exchange_levels=levels), 16384, 256
    node, queries = 8, 2 / 3 * H100.query_share * H100.overlap * H100.linear_s_per_token * budget
    best = math.inf
    for degree in range(-(-length // budget), ranks + 1):
        size = length / degree * profile.kv_bytes_per_token / profile.inter_node_bytes_per_s
        messages = (degree - node) * size / 3 / (node if levels == 2 else 1)
        for rounds in CHOICES:
            returning = 2 if levels == 2 and rounds > 1 else 1
            waits = max(0.0, returning * messages / rounds - queries)
            price = PRICE * profile.linear_s_per_token * (length / degree) * (rounds - 1)
            best = min(best, degree * (waits + price))
    found = unhidden_exchange_ns(profile, np.array([length]), ranks, budget) / 1e9
    assert 0.85 * best <= found <= best
    assert unhidden_exchange_ns(profile, np.array([node * budget]), ranks, budget) == 0


@settings(max_examples=examples(150), deadline=None)
@given(assignments(), profiles(), st.sampled_from([None, 1, 3]))
def test_no_rounds_take_less_than_the_bound_counts(
    case: tuple[list[int], int, Assignment], profile: HardwareProfile, most: int | None
) -> None:
    """Any assignment, with the rounds that are best for it, and the budget that it needs."""
    lengths, ranks, a = case
    sizes = np.array(lengths)
    timed = score(profile, sizes, a, ranks)
    budget = int(tokens_on_ranks(sizes, a, timed.time.shape).max())
    _, with_rounds = choose_rounds(profile, sizes, a, timed, max_remote_tokens=most)
    bound = step_bound_ns(profile, sizes, ranks, budget)
    assert bound <= with_rounds.makespan_ns + 10


def test_a_worked_example() -> None:
    """One document of 8192 tokens on two ranks, 4096 each: as efficient as an unsplit document of
    8192 / 1.3 tokens, between the points at 2048 (85 %) and 8192 (100 %). Attention hides the
    exchange."""
    a = Assignment(np.array([0]), np.array([0]), np.array([2]), np.array([False]))
    result = score(H100, np.array([8192]), a, 2)
    attention = H100.attention_s_per_token2 * 8192**2 / 2 / (1 - 0.15 * math.log2(1.3) / 2)
    fixed = H100.step_s + H100.launch_s + H100.split_document_s
    linear = H100.linear_s_per_token * 4096
    assert result.makespan_ns == pytest.approx((fixed + linear + attention) * 1e9, abs=5)
    assert result.exposed_share == H100.split_document_s * 1e9 / result.makespan_ns
    assert result.idle_share == 0


def test_attention_does_not_fall_when_a_document_is_split_further() -> None:
    degrees = np.arange(1, 257)
    total = attention_ns(H100, np.full(256, 131072), degrees) * degrees
    assert (np.diff(total) >= -2 * degrees[1:]).all()


@settings(max_examples=examples(100), deadline=None)
@given(assignments(), profiles())
def test_no_assignment_beats_the_tight_bound(
    case: tuple[list[int], int, Assignment], profile: HardwareProfile
) -> None:
    """Any assignment is a valid plan if the budget is that of its fullest rank."""
    lengths, ranks, a = case
    _, row = np.unique(a.micro_batch, return_inverse=True)
    a = Assignment(row, a.first_rank, a.degree, a.reversed)
    tokens = int(tokens_on_ranks(np.array(lengths), a, (a.micro_batches, ranks)).max())
    bound = tight_step_bound_ns(profile, np.array(lengths), ranks, tokens)
    assert step_bound_ns(profile, np.array(lengths), ranks, tokens) <= bound
    timed = score(profile, np.array(lengths), a, ranks)
    _, with_rounds = choose_rounds(profile, np.array(lengths), a, timed)
    assert bound <= with_rounds.makespan_ns + 10


def test_the_tight_bound_counts_exchange_that_no_rounds_hide() -> None:
    """As the loose one does, which is larger here: the documents lie over several nodes."""
    lengths = np.array([1_000_000] * 4)
    loose = step_bound_ns(H100, lengths, 256, 16384)
    assert unhidden_exchange_ns(H100, lengths, 256, 16384) > 0
    assert tight_step_bound_ns(H100, lengths, 256, 16384) >= loose


def test_the_tight_bound_counts_the_tokens_beside_the_longest_document() -> None:
    """On a slow network the longest document stays in a node, and the budget of other ranks is too
    small to keep them busy."""
    slow = replace(PINNED, inter_node_bytes_per_s=PINNED.inter_node_bytes_per_s / 64)
    lengths = np.array([65536, *[2000] * 400])
    alone = int(document_bound_ns(slow, lengths[:1], np.arange(1, 65), 8192).min())
    fixed = slow.step_s + slow.launch_s * 2
    plan = make_plan(lengths.tolist(), ranks=64, tokens_per_rank=8192, profile=slow)
    tight = tight_step_bound_ns(slow, lengths, 64, 8192) / 1e9
    assert step_bound_ns(slow, lengths, 64, 8192) / 1e9 < fixed + alone / 1e9 < tight - 0.4
    # Which counts neither waits nor the price of rounds.
    assert tight <= plan.makespan_s < 1.02 * tight
    # Where links in a node are slow too, the ring waits for long, but has no token to spare.
    slower = replace(
        PINNED,
        intra_node_bytes_per_s=PINNED.intra_node_bytes_per_s / 64,
        inter_node_bytes_per_s=PINNED.inter_node_bytes_per_s / 256,
    )
    ring, others = (
        int(document_bound_ns(slower, lengths[row], np.array([degree]), 8192).min())
        for row, degree in ((0, 8), (1, 1))
    )
    left = 400 - 56 * 8192 // 2000
    tight = tight_step_bound_ns(slower, lengths, 64, 8192) / 1e9
    assert tight >= fixed + (ring + (left - 3) * others / 64) / 1e9


def test_the_tight_bound_of_one_document_is_nearly_its_best_degree() -> None:
    """For 131072 tokens on 64 ranks, the bound accounts for every degree being slower than even
    work at full efficiency."""
    straight, length, degrees = (
        replace(H100, exchange_levels=1),
        np.array([131072]),
        np.arange(1, 65),
    )
    best = min(
        score(
            straight,
            length,
            Assignment(np.array([0]), np.array([0]), np.array([d]), np.array([False])),
            64,
        ).makespan_ns
        for d in degrees[7:]
    )
    assert 0.999 * best <= tight_step_bound_ns(straight, length, 64, 16384) <= best
    assert step_bound_ns(straight, length, 64, 16384) < 0.9 * best


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 200_000), st.integers(1, 40), st.integers(0, 39))
def test_a_ring_alone_takes_what_the_score_says(length: int, degree: int, first: int) -> None:
    offset = np.array([first % H100.ranks_per_node])
    alone = int(alone_ns(H100, np.array([length]), np.array([degree]), offset)[0])
    a = Assignment(np.array([0]), np.array([first]), np.array([degree]), np.array([False]))
    exact = int(score(H100, np.array([length]), a, 80).time.max())
    two_tokens = 2 * 89_000  # the largest shard may not be on the rank that waits longest
    assert alone - two_tokens - 2 * degree - 4 <= exact <= alone + 2 * degree + 4
    assert document_bound_ns(H100, np.array([length]), np.array([degree]), 1 << 40)[0] <= exact


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 200_000), st.integers(2, 40), st.integers(0, 39), profiles())
def test_a_ring_with_states_is_between_its_bound_and_its_estimate(
    length: int, degree: int, first: int, profile: HardwareProfile
) -> None:
    profile = replace(profile, state_bytes=max(1e6, profile.state_bytes))
    lengths, degrees, offset = (
        np.array([length]),
        np.array([degree]),
        np.array([first % profile.ranks_per_node]),
    )
    a = Assignment(np.array([0]), np.array([first]), degrees, np.array([False]))
    timed = score(profile, lengths, a, 80)
    exact, states = int(timed.time.max()), states_ns(profile, lengths, a, (1, 80))
    assert document_bound_ns(profile, lengths, degrees, 1 << 40)[0] <= exact
    assert exact <= int(alone_ns(profile, lengths, degrees, offset)[0]) + 4 * degree + 6
    nothing = dict.fromkeys(BESIDE, 0.0)
    without = score(replace(profile, **nothing, latency_s=0.0), lengths, a, 80)
    # Nothing hides them.
    assert (timed.time == without.time + states).all() and (
        states[:, first : first + degree] > 0
    ).all()
    assert choose_rounds(profile, lengths, a, timed)[1].makespan_ns >= timed.makespan_ns

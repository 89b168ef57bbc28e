"""Linear attention and convolutions over split documents equal a loop over tokens, for any lengths
and degrees."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longctx.attention.linear.recurrence import Recurrence
from longctx.planning.layout import Layout, Placement
from tests.attention_cases import Case
from tests.linear_cases import NAMES, RULES, gather, run_linear, token_by_token
from tests.marks import examples, slow_unless
from tests.workers import Workers

LENGTHS = st.one_of(st.integers(1, 12), st.integers(1, 90))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks = draw(st.integers(1, 5))
    lengths = draw(st.lists(LENGTHS, min_size=1, max_size=5))
    placements = []
    for document in range(len(lengths)):
        degree = draw(st.integers(1, ranks))
        placements.append(
            Placement(document, draw(st.integers(0, ranks - degree)), degree, draw(st.booleans()))
        )
    seed = draw(st.integers(0, 2**31))
    return Case(
        ranks,
        tuple(lengths),
        tuple(placements),
        heads=draw(st.integers(1, 3)),
        padding=draw(st.integers(0, 2)),
        seed=seed,
    )


def check(workers: Workers, case: Case, kernel: int, rule: str) -> None:
    found = gather(case, workers.run(run_linear, case.ranks, case, kernel, rule))
    expected = token_by_token(case, kernel, rule)
    for name in NAMES:
        error = (found[name] - expected[name]).norm() / (expected[name].norm() + 1e-30)
        assert error < 1e-10, f"{name}: {error:.1e}"


@settings(
    max_examples=examples(15),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(case=cases(), kernel=st.integers(1, 6), rule=st.sampled_from(RULES))
def test_any_split_equals_a_loop_over_tokens(
    workers: Workers, case: Case, kernel: int, rule: str
) -> None:
    check(workers, case, kernel, rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("degree", [1, 3, 4])
def test_every_degree(workers: Workers, degree: int, rule: str) -> None:
    """One document on all ranks beside short ones; rank 3 holds nothing of them, and nothing at all
    below degree 4."""
    lengths = (151, 1, 2, 3, 7, 13)
    ranks = [0, 1, 2, 0, 1, 0]
    placements = [
        Placement(0, 0, degree),
        *(Placement(i, ranks[i] % degree, degree - ranks[i] % degree) for i in range(1, 6)),
    ]
    check(workers, Case(4, lengths, tuple(placements), heads=2), 4, rule)


@pytest.mark.parametrize("rule", slow_unless(lambda rule: rule == "kimi", RULES))
def test_segments_of_several_lanes(workers: Workers, rule: str) -> None:
    """Segments of 9 and 18 chunks beside short ones."""
    check(
        workers,
        Case(2, (2200, 70, 1150), (Placement(0, 0, 2), Placement(1, 0, 1), Placement(2, 1, 1))),
        2,
        rule,
    )


def test_a_halo_spans_segments_that_are_shorter_than_it(workers: Workers) -> None:
    check(
        workers,
        Case(4, (8, 5, 3), (Placement(0, 0, 4), Placement(1, 0, 4, True), Placement(2, 1, 3))),
        6,
        "delta",
    )


def test_accuracy_of_strong_decays() -> None:
    """Sums of the decays between two tokens keep their digits, which differences of cumulative sums
    would not."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(64, 2, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    decay = -8 * torch.rand(64, 2, generator=generator, dtype=torch.float64)
    found = []
    for dtype in (torch.float32, torch.float64):
        given = decay.to(dtype).requires_grad_()
        out = Recurrence(Layout.of([Placement(0, 0, 1)], [64], 0, 0)).attend(
            q.to(dtype), k.to(dtype), v.to(dtype), given
        )
        found.append(torch.autograd.grad(out.sum(), given)[0].double())
    assert (found[0] - found[1]).norm() / found[1].norm() < 2e-6


def test_a_convolution_in_float32_returns_the_type_of_its_input() -> None:
    recurrence = Recurrence(Layout.of([Placement(0, 0, 1)], [5], 0, 0))
    x = torch.randn(5, 3).bfloat16()
    weight = torch.randn(3, 2)
    exact = recurrence.convolve(x.float(), weight, None)
    assert torch.equal(recurrence.convolve(x, weight, None), exact.bfloat16())


def test_a_rank_that_only_sends_waits_for_gradients(workers: Workers) -> None:
    """The first of two tokens is on another rank than the second, which alone uses the state."""
    check(workers, Case(2, (2,), (Placement(0, 0, 2),)), 1, "delta")

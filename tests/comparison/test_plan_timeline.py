"""The timeline agrees with the cost model: blocks and waits fill each rank up to its modelled time
and never overlap."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from longctx.planning.cost.rounds import plan_score
from longctx.planning.plan import Plan
from longctx.planning.planners.planner import make_plan
from longctx.plots.colours import by_class, class_name, degree_class
from longctx.plots.picture import FIXED, _mark_gain, draw_timeline
from longctx.plots.terminal import IDLE, LAUNCH, WAIT, _row
from longctx.plots.timeline import timeline
from tests.marks import examples
from tests.planning.test_plan_properties import H100, plan_or_none, requests


def busy_on(plan: Plan, micro_batch: int, rank: int) -> list[tuple[float, float]]:
    times = timeline(plan)
    spans = [
        (w.start_s, w.stop_s) for w in times.waits if (w.micro_batch, w.rank) == (micro_batch, rank)
    ]
    for block in times.blocks:
        if block.micro_batch == micro_batch and 0 <= rank - block.first_rank < block.degree:
            spans.append(
                (block.start_s[rank - block.first_rank], block.stop_s[rank - block.first_rank])
            )
    return sorted(spans)


@settings(max_examples=examples(30), deadline=None)
@given(requests())
def test_every_rank_is_busy_for_its_modelled_time(request: dict[str, object]) -> None:
    plan = plan_or_none(**request, profile=H100)
    if plan is None or plan.ranks > 9:
        return
    times = timeline(plan)
    assert times.makespan_s == plan.makespan_s
    assert sorted(block.document for block in times.blocks) == list(range(len(plan.lengths)))
    result = plan_score(plan)
    for k, (start_s, stop_s) in enumerate(times.micro_batches):
        for rank in range(plan.ranks):
            spans = busy_on(plan, k, rank)
            edges = [start_s, *(edge for span in spans for edge in span)]
            assert edges == pytest.approx(sorted(edges), abs=1e-12)
            assert sum(b - a for a, b in spans) == pytest.approx(
                result.time[k, rank] / 1e9, abs=1e-8 * (1 + len(spans))
            )
            assert edges[-1] <= stop_s + 1e-8 * (1 + len(spans))


def test_a_ring_starts_together() -> None:
    plan = plan_or_none(
        lengths=[8000, 900, 800],
        ranks=2,
        tokens_per_rank=8192,
        profile=H100,
        mode="static",
        degree=2,
    )
    assert plan is not None
    block = timeline(plan).blocks[0]
    assert block.document == 0
    assert block.start_s == (0.05, 0.05)
    assert timeline(plan).micro_batches[0][0] == 0.05


def test_degree_classes() -> None:
    names = [class_name(degree_class(degree)) for degree in (1, 2, 3, 4, 5, 8, 9, 64)]
    assert names == ["1", "2", "3–4", "3–4", "5–8", "5–8", "9–16", "33–64"]
    plan = plan_or_none(
        lengths=[8000, 900, 800],
        ranks=2,
        tokens_per_rank=8192,
        profile=H100,
        mode="static",
        degree=2,
    )
    assert plan is not None
    assert by_class(plan) == {1: (3, 9700)}


def test_a_row_of_a_terminal_shows_the_waits_of_its_own_rank() -> None:
    wait = SimpleNamespace(rank=1, start_s=4.0, stop_s=6.0)
    times: Any = SimpleNamespace(
        makespan_s=10.0, micro_batches=[(0.0, 10.0)], blocks=[], waits=[wait]
    )
    rows = ["".join(letter for letter, _ in _row(times, rank, 10)) for rank in range(3)]
    idle = LAUNCH + IDLE * 9
    assert rows == [idle, LAUNCH + IDLE * 3 + WAIT * 2 + IDLE * 4, idle]


def test_a_picture_shows_launches_and_the_optimizer_between_micro_batches() -> None:
    plan = make_plan([5000, 300, 4000, 900], ranks=4, tokens_per_rank=2048, profile=H100)
    times, axes = timeline(plan), Figure().add_subplot()
    draw_timeline(axes, times, span_s=2 * times.makespan_s)
    colour_of_fixed = to_rgba(FIXED)
    bands = [
        path.get_extents().width
        for collection in axes.collections
        if tuple(collection.get_facecolor()[0]) == colour_of_fixed
        for path in collection.get_paths()
    ]
    computed_s = sum(stop - start for start, stop in times.micro_batches)
    assert len(bands) == len(times.micro_batches) + 1
    assert sum(bands) == pytest.approx(times.makespan_s - computed_s)


@pytest.mark.parametrize(("stop_s", "marked"), [(5.0, True), (8.4, True), (8.6, False)])
def test_a_gain_is_marked_where_there_is_room(stop_s: float, marked: bool) -> None:
    axes = Figure().add_subplot()
    _mark_gain(axes, stop_s, 10.0, "2.00×")
    words = [text.get_text() for text in axes.texts]
    assert words == (["", "2.00× as fast", f"{10 - stop_s:.3g} s saved"] if marked else [])

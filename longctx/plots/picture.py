"""Picture of a plan: ranks over time, one block per document in the colour of its degree, so that rings are seen as blocks."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from longctx.planning.plan import Plan
from longctx.plots.colours import by_class, class_name, colour
from longctx.plots.timeline import Block, Timeline, timeline

Polygon = Sequence[tuple[float, float]]
INK, QUIET, FIXED, WAIT = "#22303c", "#6d7a86", "#e9edf0", "#c9b8a0"


def save_plan(plan: Plan, path: Path) -> None:
    """Draws the plan into an image file: .png, .svg, .pdf. Raises OSError."""
    times = timeline(plan)
    figure = Figure(figsize=(12, 5.6), dpi=160, facecolor="white")
    axes = figure.add_axes((0.055, 0.105, 0.93, 0.70))
    draw_timeline(axes, times, times.makespan_s)
    _words(figure, plan, bool(times.waits))
    figure.savefig(path)


def draw_timeline(axes: Axes, times: Timeline, span_s: float) -> None:
    """Draws ranks over time; the axis ends at `span_s`, so that several drawings can share a scale."""
    edge = min(0.9, 30 / times.ranks)
    for face in dict.fromkeys(colour(block.degree) for block in times.blocks):
        shapes = [_outline(block) for block in times.blocks if colour(block.degree) == face]
        axes.add_collection(PolyCollection(shapes, facecolors=face, edgecolors="white", linewidths=edge))
    waits = [_box(wait.start_s, wait.stop_s, wait.rank, wait.rank + 1) for wait in times.waits]
    axes.add_collection(PolyCollection(waits, facecolors=WAIT, edgecolors="none"))
    _fixed_costs(axes, times)
    _frame(axes, times.ranks, span_s)


def _outline(block: Block) -> Polygon:
    """The polygon of a document: down the left edge rank by rank, and up the right one."""
    left = [(t, block.first_rank + i + side) for i, t in enumerate(block.start_s) for side in (0, 1)]
    right = [(t, block.first_rank + i + side) for i, t in enumerate(block.stop_s) for side in (0, 1)]
    return left + right[::-1]


def _box(left: float, right: float, top: int, bottom: int) -> Polygon:
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _fixed_costs(axes: Axes, times: Timeline) -> None:
    """Launches and the optimizer, in which all ranks do the same: pale bands between the micro-batches."""
    stops = [0.0, *(stop for _, stop in times.micro_batches)]
    starts = [*(start for start, _ in times.micro_batches), times.makespan_s]
    bands = [_box(stop, start, 0, times.ranks) for stop, start in zip(stops, starts, strict=True)]
    axes.add_collection(PolyCollection(bands, facecolors=FIXED, edgecolors="none"))
    for stop in stops[1:]:
        axes.axvline(stop, color=INK, linewidth=0.9)


def _frame(axes: Axes, ranks: int, span_s: float) -> None:
    axes.set_xlim(0, span_s)
    axes.set_ylim(ranks, 0)
    axes.set_xlabel("seconds (modelled)", color=QUIET, fontsize=10)
    axes.set_ylabel("rank", color=QUIET, fontsize=10)
    named = range(0, ranks, 1 << max(0, (ranks // 8).bit_length() - 1))
    axes.set_yticks([rank + 0.5 for rank in named], [str(rank) for rank in named])
    axes.tick_params(colors=QUIET, labelsize=9, length=3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#c4ccd3")


def _words(figure: Figure, plan: Plan, waits: bool) -> None:
    tokens = sum(plan.lengths)
    step = f"{len(plan.lengths):,} documents on {plan.ranks:,} ranks"
    title = f"{step}: {plan.makespan_s:.3g} s, {plan.gap:.1%} above the lower bound"
    under = (
        f"{plan.mode} → {plan.winner}   ·   {tokens:,} tokens, the longest document {max(plan.lengths):,}   ·   "
        f"{plan.tokens_per_rank:,} tokens a rank   ·   exposed exchange {plan.exposed_share:.1%}, idle {plan.idle_share:.1%}"
    )
    figure.text(0.055, 0.945, title, fontsize=15, fontweight="bold", color=INK, va="center")
    figure.text(0.055, 0.897, under, fontsize=9.5, color=QUIET, va="center")
    classes = by_class(plan)
    keys = [
        Patch(facecolor=colour(1 << index), label=f"{class_name(index)}{f' ({documents:,})'}")
        for index, (documents, _) in classes.items()
    ]
    if waits:
        keys.append(Patch(facecolor=WAIT, label="waits for K and V"))
    keys.append(Patch(facecolor=FIXED, label="launch, optimizer"))
    figure.text(0.055, 0.846, "degree (documents)", fontsize=9, color=QUIET, va="center")
    figure.legend(
        handles=keys,
        loc="center left",
        bbox_to_anchor=(0.163, 0.846),
        ncols=len(keys),
        frameon=False,
        fontsize=9,
        handlelength=1.1,
        handleheight=1.1,
        columnspacing=1.4,
        labelcolor=INK,
    )

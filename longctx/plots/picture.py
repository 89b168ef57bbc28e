"""Picture of plans: ranks over time, one block per document in the colour of its degree, several
plans on one time axis."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from longctx.planning.plan import Plan
from longctx.plots.colours import EDGE, INK, QUIET, STYLE, by_class, class_name, colour
from longctx.plots.timeline import DocumentBlock, Timeline, timeline

Polygon = Sequence[tuple[float, float]]
FIXED, WAIT, IDLE = "#98a4b050", "#c9a98b", "#e04a3c26"
WIDTH, PANEL_HEIGHT, HEAD, FOOT = 10.0, 2.35, 1.1, 0.95
"""Inches."""


class Panel(NamedTuple):
    name: str
    plan: Plan


def save_plans(panels: Sequence[Panel], source: str, path: Path) -> None:
    """Draws plans of the same documents, the baseline first, into an image file: .png, .svg or
    .pdf. Raises OSError.

    A .png carries `pictured(...)` as the text chunk `Description`.
    """
    height = HEAD + PANEL_HEIGHT * len(panels) + FOOT
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), dpi=160, facecolor="white")
        draw_panels(figure, panels, top=1 - HEAD / height, bottom=FOOT / height)
        title, *under = _title(panels, source)
        figure.text(
            0.012, 1 - 0.28 / height, title, fontsize=17, fontweight="bold", color=INK, va="center"
        )
        for i, line in enumerate(under):
            figure.text(
                0.012, 1 - (0.60 + 0.23 * i) / height, line, fontsize=11.5, color=QUIET, va="center"
            )
        if path.suffix == ".png":
            metadata = {"Description": pictured(panels, source), "Software": None}
        else:
            metadata = None
        figure.savefig(path, metadata=metadata)


def pictured(panels: Sequence[Panel], source: str) -> str:
    """Returns what a picture shows as JSON: its words and the hashes of its plans, equal for equal
    pictures."""
    names = [{"name": _panel_title(panel), "plan": panel.plan.hash} for panel in panels]
    return json.dumps(
        {"title": _title(panels, source), "panels": names, "speedup": _speedup(panels)},
        ensure_ascii=False,
    )


def draw_panels(figure: Figure, panels: Sequence[Panel], *, top: float, bottom: float) -> None:
    """Draws one timeline below the other between the heights `bottom` and `top` of the figure, and
    the legend below them."""
    grid = figure.add_gridspec(
        len(panels), 1, left=0.062, right=0.988, top=top - 0.05, bottom=bottom, hspace=0.3
    )
    span = max(panel.plan.makespan_s for panel in panels)
    for i, panel in enumerate(panels):
        axes = figure.add_subplot(grid[i])
        draw_timeline(axes, timeline(panel.plan), span)
        axes.set_title(_panel_title(panel), loc="left", fontsize=12.5, fontweight="bold", color=INK)
        if i + 1 < len(panels):
            axes.set_xlabel("")
        elif speedup := _speedup(panels):
            _mark_gain(axes, panel.plan.makespan_s, span, speedup)
    _legend(figure, [panel.plan for panel in panels])


def _panel_title(panel: Panel) -> str:
    return f"{panel.name}: {panel.plan.makespan_s:.3g} s"


def _title(panels: Sequence[Panel], source: str) -> list[str]:
    """Returns the headline and the lines below it."""
    plan = panels[-1].plan
    step = f"One training step, {len(plan.lengths):,} documents on {plan.ranks:,} ranks"
    if speedup := _speedup(panels):
        title = f"{step}: {speedup} as fast"
    else:
        title = f"{step}: {plan.makespan_s:.3g} s"
    tokens = (
        f"{sum(plan.lengths):,} tokens, longest document {max(plan.lengths):,}, "
        f"{plan.tokens_per_rank:,} tokens per rank"
    )
    return [title, tokens, source]


def _speedup(panels: Sequence[Panel]) -> str:
    """Speedup of the last plan over the first one; empty for a single plan."""
    if len(panels) > 1:
        return f"{panels[0].plan.makespan_s / panels[-1].plan.makespan_s:.2f}×"
    return ""


def _mark_gain(axes: Axes, stop_s: float, span_s: float, speedup: str) -> None:
    """Marks the time that a plan saves, if there is room for the words; the headline of a picture
    states the gain anyway."""
    saved = 1 - stop_s / span_s
    if saved < 0.15:
        return
    large = saved > 0.3
    middle = axes.get_ylim()[0] / 2
    arrow = {"arrowstyle": "<->", "color": INK, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (stop_s, middle), (span_s, middle), arrowprops=arrow)
    centre = (stop_s + span_s) / 2
    words: dict[str, Any] = {
        "ha": "center",
        "xycoords": "data",
        "textcoords": "offset points",
        "color": INK,
    }
    axes.annotate(
        f"{speedup} as fast",
        (centre, middle),
        (0, 8),
        fontsize=20 if large else 12,
        fontweight="bold",
        va="bottom",
        **words,
    )
    axes.annotate(
        f"{span_s - stop_s:.3g} s saved",
        (centre, middle),
        (0, -8),
        fontsize=11.5,
        va="top",
        **words,
    )


def draw_timeline(axes: Axes, times: Timeline, span_s: float) -> None:
    """Draws ranks over time; the axis ends at `span_s`, so that several drawings can share a
    scale."""
    edge = min(0.9, 24 / times.ranks)
    _add(axes, [_box(start, stop, 0, times.ranks) for start, stop in times.micro_batches], IDLE)
    for face in dict.fromkeys(colour(block.degree) for block in times.blocks):
        shapes = [_outline(block) for block in times.blocks if colour(block.degree) == face]
        _add(axes, shapes, face, edgecolors="white", linewidths=edge)
    _add(
        axes,
        [_box(wait.start_s, wait.stop_s, wait.rank, wait.rank + 1) for wait in times.waits],
        WAIT,
    )
    _fixed_costs(axes, times)
    _frame(axes, times.ranks, span_s)


def _add(axes: Axes, shapes: Sequence[Polygon], face: str, **look: Any) -> None:
    axes.add_collection(PolyCollection(shapes, facecolors=face, **(look or {"edgecolors": "none"})))


def _outline(block: DocumentBlock) -> Polygon:
    """The polygon of a document: down the left edge rank by rank, and up the right one."""
    left = [
        (t, block.first_rank + i + side) for i, t in enumerate(block.start_s) for side in (0, 1)
    ]
    right = [
        (t, block.first_rank + i + side) for i, t in enumerate(block.stop_s) for side in (0, 1)
    ]
    return left + right[::-1]


def _box(left: float, right: float, top: int, bottom: int) -> Polygon:
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _fixed_costs(axes: Axes, times: Timeline) -> None:
    """Draws launches and the optimizer, in which all ranks do the same, as pale bands between the
    micro-batches."""
    stops = [0.0, *(stop for _, stop in times.micro_batches)]
    starts = [*(start for start, _ in times.micro_batches), times.makespan_s]
    bands = [_box(stop, start, 0, times.ranks) for stop, start in zip(stops, starts, strict=True)]
    _add(axes, bands, FIXED)
    for stop in stops[1:]:
        axes.axvline(stop, color=INK, linewidth=1.0)


def _frame(axes: Axes, ranks: int, span_s: float) -> None:
    axes.set_facecolor("none")
    axes.set_xlim(0, span_s)
    axes.set_ylim(ranks, 0)
    axes.set_xlabel("seconds (modelled)", color=QUIET, fontsize=11)
    axes.set_ylabel("rank", color=QUIET, fontsize=11)
    named = range(0, ranks, 1 << max(0, (ranks // 4).bit_length() - 1))
    axes.set_yticks([rank + 0.5 for rank in named], [str(rank) for rank in named])
    axes.tick_params(colors=QUIET, labelsize=10.5, length=3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(EDGE)


def _legend(figure: Figure, plans: Iterable[Plan]) -> None:
    classes = sorted({index for plan in plans for index in by_class(plan)})
    keys = [Patch(facecolor=colour(1 << index), label=class_name(index)) for index in classes]
    keys += [Patch(facecolor=WAIT, label="waits for K, V"), Patch(facecolor=IDLE, label="idle")]
    keys.append(Patch(facecolor=FIXED, label="launch, optimizer"))
    keys.insert(0, Patch(facecolor="none", label="degree"))
    figure.legend(
        handles=keys,
        loc="lower center",
        bbox_to_anchor=(0.5, 0),
        ncols=len(keys),
        frameon=False,
        fontsize=11,
        handlelength=1.1,
        handleheight=1.1,
        handletextpad=0.5,
        columnspacing=1.2,
        labelcolor=INK,
    )

"""Figures of the comparison page, each as a data URI: SVG for charts, PNG for timelines, which hold thousands of shapes."""

import base64
import io
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from longctx.comparison.modelled import SPEEDUPS, TITLES, Row
from longctx.planning.plan import Plan
from longctx.plots.colours import by_class, class_name, colour
from longctx.plots.picture import FIXED, INK, QUIET, WAIT, draw_timeline
from longctx.plots.timeline import timeline

LOOKS = {
    "auto": ("#1f5c99", "o"),
    "bins": ("#3f8fc5", "s"),
    "fixed-static": ("#3c4650", "|"),
    "static": ("#6d7a86", "_"),
    "plain-static": ("#a9b4bd", "x"),
    "megatron-main": ("#cf4b3e", "v"),
    "megatron-dev": ("#e8833a", "^"),
    "flexsp": ("#932f5e", "D"),
    "bytescale": ("#c79a1e", "P"),
}
"""Colour and marker of every planner."""
AXES = {"ranks": "ranks", "tokens_per_rank": "tokens a rank", "max_length": "longest document in tokens"}
GRID = "#e3e8ec"
BOUND = "#2f7d4f"
STYLE: dict[Any, object] = {"svg.fonttype": "none", "svg.hashsalt": "longctx", "font.family": "sans-serif", "font.size": 10}


def speedup_bars(rows: Sequence[Row], speedup: str, bound: float) -> str:
    """This speedup of every planner as bars, and the one that no plan can pass as a line."""
    shown = {row.planner: value for row in rows if (value := getattr(row, speedup)) is not None}
    figure, axes = _figure(9.2, 0.42 * len(shown) + 1.15)
    for y, (planner, value) in enumerate(shown.items()):
        axes.barh(y, value, height=0.64, color=LOOKS[planner][0], zorder=2)
        _label(axes, f"{value:.2f}×", value, y, -7, color="white", fontweight="bold")
    axes.set_yticks(range(len(shown)), [TITLES[planner] for planner in shown])
    axes.axvline(1, color=INK, linewidth=0.9, zorder=1)
    axes.axvline(bound, color=BOUND, linewidth=1.4, linestyle=(0, (4, 3)))
    white = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    _label(axes, f"no plan can pass {bound:.2f}×", bound, -0.82, -6, color=BOUND, fontsize=9, bbox=white)
    axes.set_ylim(len(shown) - 0.5, -1.15)
    axes.set_xlim(0, max(bound, *shown.values()) * 1.12)
    axes.set_xlabel(f"speedup over {TITLES[SPEEDUPS[speedup]]}")
    axes.grid(axis="x", color=GRID)
    return _svg(figure)


def lines(rows: Sequence[Row], x: str, speedup: str) -> str:
    """This speedup of every planner over the figure `x` of a row, evenly spaced in its order."""
    figure, axes = _figure(9.2, 3.6)
    positions = sorted({getattr(row, x) for row in rows})
    for planner, (face, marker) in LOOKS.items():
        found = ((getattr(row, x), getattr(row, speedup)) for row in rows if row.planner == planner)
        points = sorted({(positions.index(at), value) for at, value in found if value is not None})
        if points and planner != SPEEDUPS[speedup]:
            width, order = (2.6, 3) if planner == "auto" else (1.3, 2)
            look: dict[str, Any] = {"color": face, "marker": marker, "markersize": 6, "linewidth": width, "zorder": order}
            axes.plot(*zip(*points, strict=True), label=TITLES[planner], **look)
    axes.set_xticks(range(len(positions)), [f"{value:,}" for value in positions])
    axes.set_xlabel(AXES[x])
    axes.set_ylabel("speedup")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=GRID)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9, labelcolor=INK)
    return _svg(figure)


def length_histogram(lengths: Sequence[int]) -> str:
    """Share of documents and of tokens by length, in bins from one power of two to the next."""
    low = [length.bit_length() - 1 for length in lengths]
    bins = range(min(low), max(low) + 1)
    documents = [low.count(b) / len(lengths) for b in bins]
    tokens = [sum(s for s, value in zip(lengths, low, strict=True) if value == b) / sum(lengths) for b in bins]
    return _pairs(documents, tokens, [_power(b) for b in bins], "length of the document in tokens: from this up to the next")


def degree_histogram(plan: Plan) -> str:
    """Share of documents and of tokens by degree under a plan."""
    classes = by_class(plan)
    documents = [count / len(plan.lengths) for count, _ in classes.values()]
    tokens = [count / sum(plan.lengths) for _, count in classes.values()]
    return _pairs(documents, tokens, [class_name(index) for index in classes], "degree: ranks that a document is split over")


def timelines(plans: Sequence[tuple[str, Plan]]) -> str:
    """Ranks over time under several plans, one above the other on the same scale."""
    figure = Figure(figsize=(11, 3.1 * len(plans) + 0.7), dpi=120, facecolor="white")
    span = max(plan.makespan_s for _, plan in plans)
    classes: set[int] = set()
    for i, (title, plan) in enumerate(plans):
        axes = figure.add_subplot(len(plans), 1, i + 1)
        draw_timeline(axes, timeline(plan), span)
        axes.set_title(f"{title}: {plan.makespan_s:.3g} s", loc="left", fontsize=12, fontweight="bold", color=INK)
        if i + 1 < len(plans):
            axes.set_xlabel("")
        classes |= set(by_class(plan))
    keys = [Patch(facecolor=colour(1 << index), label=f"degree {class_name(index)}") for index in sorted(classes)]
    keys += [Patch(facecolor=WAIT, label="waits for K and V"), Patch(facecolor=FIXED, label="launch, optimizer")]
    figure.legend(handles=keys, loc="lower center", ncols=6, frameon=False, fontsize=9, labelcolor=INK)
    figure.tight_layout(rect=(0, 0.085, 1, 1), h_pad=1.6)
    return _uri("image/png", figure, format="png")


def _pairs(documents: Sequence[float], tokens: Sequence[float], names: Sequence[str], label: str) -> str:
    figure, axes = _figure(9.2, 2.9)
    at = range(len(names))
    axes.bar([i - 0.2 for i in at], documents, width=0.38, color="#8fbfe0", label="share of documents")
    axes.bar([i + 0.2 for i in at], tokens, width=0.38, color="#1f5c99", label="share of tokens")
    axes.set_xticks(at, names)
    axes.set_xlabel(label)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.grid(axis="y", color=GRID)
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    return _svg(figure)


def _power(exponent: int) -> str:
    """2^10 → 1k, 2^20 → 1M."""
    return str(1 << exponent) if exponent < 10 else f"{1 << exponent - 10}k" if exponent < 20 else f"{1 << exponent - 20}M"


def _label(axes: Axes, words: str, x: float, y: float, shift: int, **style: Any) -> None:
    """Words beside the point (x, y): to its right if `shift` points are positive, else to its left."""
    align = "left" if shift > 0 else "right"
    axes.annotate(words, (x, y), xytext=(shift, 0), textcoords="offset points", ha=align, va="center", **style)


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), facecolor="white")
        axes = figure.add_subplot()
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=9.5, length=0)
    axes.xaxis.label.set_color(QUIET)
    axes.yaxis.label.set_color(QUIET)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#c4ccd3")
    return figure, axes


def _svg(figure: Figure) -> str:
    with mpl.rc_context(STYLE):
        return _uri("image/svg+xml", figure, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})


def _uri(kind: str, figure: Figure, **how: Any) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, **how)
    return f"data:{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"

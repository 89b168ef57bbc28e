"""Figures of the comparison page, each as an SVG data URI."""

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from longctx.comparison.modelled import SPEEDUPS, TITLES, PlannerRow
from longctx.plots.charts import GRID, INK, STYLE, new_axes, svg_uri
from longctx.plots.picture import Panel, draw_panels

LOOKS = {
    "auto": ("#1f5c99", "o"),
    "bins": ("#3f8fc5", "s"),
    "single-degree": ("#8a5a2b", "x"),
    "fixed-static": ("#3c4650", "|"),
    "static": ("#6c7985", "_"),
}
"""Colour and marker of every planner."""


def speedup_lines(rows: Sequence[PlannerRow], speedup: str) -> str:
    """Draws the speedup of every planner against the number of ranks, whose values are evenly spaced."""
    figure, axes = new_axes(9.2, 3.6)
    positions = sorted({row.ranks for row in rows})
    for planner, (face, marker) in LOOKS.items():
        values = ((row.ranks, getattr(row, speedup)) for row in rows if row.planner == planner)
        points = sorted({(positions.index(at), value) for at, value in values if value is not None})
        if points and planner != SPEEDUPS[speedup]:
            width, order = (2.6, 3) if planner == "auto" else (1.3, 2)
            look: dict[str, Any] = {"color": face, "marker": marker, "markersize": 6, "linewidth": width, "zorder": order}
            axes.plot(*zip(*points, strict=True), label=TITLES[planner], **look)
    axes.set_xticks(range(len(positions)), [f"{value:,}" for value in positions])
    axes.set_xlabel("ranks")
    axes.set_ylabel("speedup")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=GRID)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9, labelcolor=INK)
    return svg_uri(figure)


def timelines(panels: Sequence[Panel]) -> str:
    """Draws ranks over time under several plans of the same documents, one above the other on the same time axis."""
    height = 2.6 * len(panels) + 0.9
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, height), facecolor="none")
        draw_panels(figure, panels, top=1.0, bottom=0.9 / height, rasterized=True)
    return svg_uri(figure)

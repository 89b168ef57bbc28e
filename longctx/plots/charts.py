"""Style of all charts, and figures as SVG data URIs."""

import base64
import io
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, QUIET, EDGE, GRID = "#22303c", "#6d7a86", "#c4ccd3", "#e3e8ec"
STYLE: dict[Any, object] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "longctx",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": QUIET,
}


def new_axes(width: float, height: float) -> tuple[Figure, Axes]:
    """Returns a figure of this size in inches with one pair of axes; of frame and tick marks only the bottom line is drawn."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), facecolor="none")
        axes = figure.subplots()
    axes.set_facecolor("none")
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=9.5, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(EDGE)
    return figure, axes


def svg_uri(figure: Figure, dpi: int = 150) -> str:
    """Renders the figure as a data URI. Rasterized parts get `dpi`; text stays text."""
    buffer = io.StringIO()
    with mpl.rc_context(STYLE):
        figure.savefig(buffer, format="svg", dpi=dpi, bbox_inches="tight", metadata={"Date": None, "Creator": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(buffer.getvalue().encode()).decode()}"

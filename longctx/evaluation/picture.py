"""Picture of a retrieval grid: lengths from left to right, depths from top to bottom, dark where every answer is right."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from longctx.evaluation.retrieval import Cell, Grid
from longctx.plots.picture import INK, QUIET

SHARES = LinearSegmentedColormap.from_list("shares", ["#f7f4ee", "#8fbfe0", "#1f5c99"])


def save_grid(grid: Grid, cells: Sequence[Cell], name: str, trained_length: int | None, path: Path) -> None:
    """Draws the cells into an image file (.png, .svg, .pdf), with a line after the lengths up to `trained_length`."""
    lengths, depths = list(grid.lengths), list(grid.depths)
    share = {(cell.length, cell.depth): cell.share for cell in cells}
    size = (max(6.0, 1.6 + 0.9 * len(lengths)), max(3.2, 1.5 + 0.42 * len(depths)))
    figure = Figure(figsize=size, dpi=160, facecolor="white")
    axes = figure.add_axes((0.95 / size[0], 0.62 / size[1], 1 - 1.1 / size[0], 1 - 1.45 / size[1]))
    axes.imshow([[share[x, y] for x in lengths] for y in depths], cmap=SHARES, vmin=0, vmax=1, aspect="auto")
    for column, x in enumerate(lengths):
        for row, y in enumerate(depths):
            value = share[x, y]
            ink = "white" if value > 0.6 else INK
            axes.text(column, row, f"{value:.0%}", ha="center", va="center", fontsize=9, color=ink)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes.set_xlabel("tokens of the document", color=QUIET, fontsize=10)
    axes.set_ylabel("depth of the fact", color=QUIET, fontsize=10)
    axes.tick_params(colors=QUIET, labelsize=9, length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    within = sum(trained_length is not None and length <= trained_length for length in lengths)
    if trained_length is not None and 0 < within < len(lengths):
        axes.axvline(within - 0.5, color="#cf4b3e", linewidth=2)
    right, asked = sum(cell.right for cell in cells), sum(cell.samples for cell in cells)
    figure.text(
        0.2 / size[0], 1 - 0.3 / size[1], f"{right:,} of {asked:,} answers right", fontsize=13, fontweight="bold", color=INK
    )
    facts = "one fact" if grid.keys == 1 else f"{grid.keys} facts, one asked for"
    trained = "" if trained_length is None else f"   ·   trained on up to {trained_length:,} tokens"
    figure.text(0.2 / size[0], 1 - 0.56 / size[1], f"{name}   ·   {facts}{trained}", fontsize=9, color=QUIET)
    figure.savefig(path)

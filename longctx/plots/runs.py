"""Figure of training runs, several overlaid: loss, speed, measured against predicted time, parts of the time, degrees."""

from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from longctx.plots.charts import GRID, INK, PAPER, QUIET, STYLE, dress
from longctx.plots.colours import class_name, colour
from longctx.plots.run_log import PARTS, RunLog

RUN_COLOURS = ("#1f77c9", "#ec7d26", "#2f9e6e", "#a22162", "#7a5cc4", "#d6402f", "#b08a1e", "#6c7985")
PART_COLOURS = dict(zip(PARTS, ("#1f77c9", "#d6402f", "#a22162", "#f5b32c", "#98a4ae", "#7a5cc4"), strict=True))
SMOOTHED_FROM = 60
"""Runs of at least this number of steps get a running mean over the single steps."""
MOST_BINS = 240
"""Columns of the degree chart; longer runs are averaged."""


def draw_loss(axes: Axes, runs: Sequence[RunLog]) -> None:
    """Draws the training loss of every run, and the validation loss as circles."""
    for i, run in enumerate(runs):
        _curve(axes, *run.column("loss"), i, run.name)
        steps, losses = run.column("validation_loss")
        if steps:
            look: dict[str, Any] = {"color": run_colour(i), "marker": "o", "markersize": 5, "linestyle": (0, (3, 2))}
            axes.plot(steps, losses, linewidth=1.2, label=_plain(f"{run.name}, validation"), **look)
    _label(axes, "step", "loss")
    _legend(axes, runs, always=any(run.column("validation_loss")[0] for run in runs))


POLICY = {
    "reward": "mean reward",
    "completion_tokens": "tokens per completion",
    "ratio": "ratio to the old model",
    "clip_share": "share of clipped tokens",
    "kl": "KL divergence to the reference",
    "entropy": "entropy, mean of -log p",
}
"""Metrics of policy gradients that are drawn: column → name."""


def draw_metric(axes: Axes, runs: Sequence[RunLog], column: str) -> None:
    """Draws a metric of POLICY of every run that has it."""
    for i, run in enumerate(runs):
        if run.column(column)[0]:
            _curve(axes, *run.column(column), i, run.name)
    _label(axes, "step", POLICY[column])
    _legend(axes, runs)


def draw_speed(axes: Axes, runs: Sequence[RunLog]) -> None:
    """Draws tokens per second over all ranks."""
    for i, run in enumerate(runs):
        speeds = [step["tokens"] / step["step_time_s"] for step in run.steps]
        _curve(axes, [step["step"] for step in run.steps], speeds, i, run.name)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    _label(axes, "step", "tokens per second")
    _legend(axes, runs)


def draw_predicted(axes: Axes, runs: Sequence[RunLog]) -> None:
    """Draws the measured time of every step against the time that the plan predicted; the line is a perfect prediction."""
    longest = 0.0
    for i, run in enumerate(runs):
        predicted, measured = ([step[name] for step in run.usual()] for name in ("predicted_s", "step_time_s"))
        longest = max(longest, *predicted, *measured)
        label = _plain(f"{run.name}: {run.over_predicted():.2f} × predicted")
        axes.scatter(
            predicted, measured, s=14, alpha=0.55, color=run_colour(i), edgecolors="none", label=label, rasterized=True
        )
    axes.plot([0, 1.08 * longest], [0, 1.08 * longest], color=QUIET, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_xlim(0, 1.08 * longest)
    axes.set_ylim(0, 1.08 * longest)
    _label(axes, "predicted seconds per step", "measured seconds")
    _legend(axes, runs, always=True, loc="upper left")


def draw_time_parts(axes: Axes, runs: Sequence[RunLog]) -> None:
    """Draws the mean step time of every run as a bar of its parts."""
    means = [run.time_parts() for run in runs]
    left, totals = np.zeros(len(runs)), np.array([sum(parts.values()) for parts in means])
    for part, name in PARTS.items():
        seconds = np.array([parts[part] for parts in means])
        if (seconds > 0.001 * totals).any():
            axes.barh(range(len(runs)), seconds, left=left, height=0.6, color=PART_COLOURS[part], label=name)
        left += seconds
    for y, total in enumerate(totals):
        axes.annotate(f" {total:.3g} s", (total, y), va="center", color=INK, fontsize=9.5)
    axes.set_yticks(range(len(runs)), [_plain(run.name) for run in runs])
    axes.set_ylim(len(runs) - 0.4, -0.6)
    axes.set_xlim(0, 1.12 * float(totals.max()))
    axes.set_xlabel("mean seconds per step")
    axes.grid(axis="x", color=GRID)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=6, frameon=False, labelcolor=INK, **_SMALL_KEYS)


def draw_degrees(axes: Axes, run: RunLog) -> None:
    """Draws one band per degree class: its height is the number of documents of a step, on a logarithmic scale."""
    steps = np.array([step["step"] for step in run.steps])
    size = -(-len(steps) // MOST_BINS)
    starts = np.arange(0, len(steps), size)
    edges = np.append(steps[starts], steps[-1] + 1)
    classes = run.degrees()
    means = {index: np.add.reduceat(counts, starts) / np.diff([*starts, len(steps)]) for index, counts in classes.items()}
    most = max(float(values.max()) for values in means.values())
    for y, (index, values) in enumerate(means.items()):
        height = 0.82 * np.log1p(values) / np.log1p(most)
        axes.stairs(y + height, edges, baseline=y, fill=True, color=colour(1 << index), linewidth=0)
        axes.axhline(y, color=GRID, linewidth=0.8, zorder=0)
        mean = float(np.mean(classes[index]))
        axes.annotate(f" {mean:,.3g}", (1, y + 0.3), xycoords=("axes fraction", "data"), va="center", color=QUIET, fontsize=9)
    axes.annotate(" mean", (1, len(means) + 0.05), xycoords=("axes fraction", "data"), va="center", color=QUIET, fontsize=9)
    axes.set_yticks([y + 0.3 for y in range(len(means))], [class_name(index) for index in means])
    axes.set_ylim(0, len(means))
    axes.set_xlim(edges[0], edges[-1])
    axes.set_xlabel("step")
    axes.set_ylabel("degree")


def draw_runs(runs: Sequence[RunLog]) -> Figure:
    """Draws all charts into one figure."""
    charts: list[tuple[str, Callable[[Axes, Sequence[RunLog]], None]]] = [
        ("Loss", draw_loss),
        ("Speed, all ranks", draw_speed),
        ("Measured against predicted time", draw_predicted),
        ("Parts of the step time", draw_time_parts),
    ]
    policy = [column for column in POLICY if any(any(run.column(column)[1]) for run in runs)]
    heights = [
        3.0,
        *[2.4] * -(-len(policy) // 2),
        3.0,
        0.9 + 0.36 * len(runs),
        *(0.7 + 0.42 * len(run.degrees()) for run in runs),
    ]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, sum(heights) + 0.75 * len(heights)), dpi=140, facecolor=PAPER, layout="constrained")
        grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
        for number, column in enumerate(policy):
            draw_metric(
                _titled(figure, grid[1 + number // 2, number % 2], POLICY[column][:1].upper() + POLICY[column][1:]),
                runs,
                column,
            )
        row = 1 + -(-len(policy) // 2)
        for (title, draw), place in zip(charts, (grid[0, :], grid[row, 0], grid[row, 1], grid[row + 1, :]), strict=True):
            draw(_titled(figure, place, title, pad=24 if draw is draw_time_parts else 6), runs)
        for number, run in enumerate(runs, start=row + 2):
            draw_degrees(_titled(figure, grid[number, :], f"Documents per step by degree: {_plain(run.name)}"), run)
    return figure


def run_colour(index: int) -> str:
    return RUN_COLOURS[index % len(RUN_COLOURS)]


_SMALL_KEYS: dict[str, Any] = {"fontsize": 9, "handlelength": 1.1, "handletextpad": 0.5, "columnspacing": 1.2}


def _titled(figure: Figure, place: Any, title: str, pad: float = 6) -> Axes:
    axes = figure.add_subplot(place)
    dress(axes)
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK, pad=pad)
    return axes


def _curve(axes: Axes, steps: Sequence[int], values: Sequence[float], index: int, name: str) -> None:
    """Draws single steps as a line; of a long run as a pale line below its running mean."""
    face, label = run_colour(index), _plain(name)
    if len(steps) < SMOOTHED_FROM:
        axes.plot(steps, values, color=face, linewidth=1.8, label=label, marker="o" if len(steps) == 1 else None)
        return
    width = len(steps) // 30
    mean = [float(np.mean(values[max(0, i + 1 - width) : i + 1])) for i in range(len(values))]
    axes.plot(steps, values, color=face, linewidth=0.8, alpha=0.3, rasterized=True)
    axes.plot(steps, mean, color=face, linewidth=2.0, label=label)


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(axis="y", color=GRID)


def _legend(axes: Axes, runs: Sequence[RunLog], always: bool = False, **style: Any) -> None:
    if always or len(runs) > 1:
        axes.legend(frameon=False, labelcolor=INK, **_SMALL_KEYS, **style)


def _plain(name: str) -> str:
    """Returns a label that matplotlib shows as it is: `$` would begin a formula, a leading `_` hides a curve."""
    return (f" {name}" if name.startswith("_") else name).replace("$", r"\$")

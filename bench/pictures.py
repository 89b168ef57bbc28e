"""Draws the pictures of docs/how-it-works.md: the cut of a document, the rounds of a ring, and the
exchange in two levels.

    python bench/pictures.py docs

Each .png carries what it shows as the text chunk `Description`; tests/comparison/test_pictures.py compares it
with the code.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from longctx.attention.ring_schedule import RingSchedule
from longctx.planning.layout import Layout, Placement
from longctx.plots.colours import INK, QUIET, STYLE

RANKS, LENGTH, NODE = 4, 64, 4
COLOURS = ("#3b96de", "#f5b32c", "#a22162", "#4a9b6e")
Shown = dict[str, Any]


def schedule(ranks: int, rank: int, rounds: int, ranks_per_node: int | None = None) -> RingSchedule:
    """Returns the schedule of a rank for one document over all ranks."""
    layout = Layout.of([Placement(0, 0, ranks, rounds=rounds)], [16 * ranks], 0, rank)
    return RingSchedule.build(layout, ranks_per_node=ranks_per_node)


def chunks() -> Shown:
    """Returns the tokens of head and tail of every rank, and the pairs of query and key that each
    computes."""
    spans = []
    for rank in range(RANKS):
        (shard,) = Layout.of([Placement(0, 0, RANKS)], [LENGTH], 0, rank).shards
        spans.append([shard.head, shard.tail])
    return {
        "spans": spans,
        "pairs": [
            sum(stop * (stop + 1) // 2 - start * (start + 1) // 2 for start, stop in of)
            for of in spans
        ],
    }


def received() -> Shown:
    """Returns the messages of every round of a ring in as many rounds as it has distances: (from,
    to, rows)."""
    rounds: list[list[tuple[int, int, int]]] = [[] for _ in range(RANKS - 1)]
    for rank in range(RANKS):
        for number, round_ in enumerate(schedule(RANKS, rank, RANKS - 1).rounds):
            rounds[number] += [
                (peer, rank, rows) for hop in round_.hops for peer, rows in hop.receives
            ]
    return {"rounds": [sorted(messages) for messages in rounds]}


def across() -> Shown:
    """Returns the messages and the rows that cross the network between two nodes, directly and in
    two levels."""
    shown: Shown = {}
    for name, per_node in (("direct", None), ("two levels", NODE)):
        hops = [
            (peer, rank, rows)
            for rank in range(2 * NODE)
            for round_ in schedule(2 * NODE, rank, 2, per_node).rounds
            for hop in round_.hops
            for peer, rows in hop.receives
        ]
        shown[name] = sorted(hop for hop in hops if hop[0] // NODE != hop[1] // NODE)
    return shown


def draw_cut(figure: Figure) -> Shown:
    shown = chunks()
    line, square = figure.add_axes((0.03, 0.35, 0.5, 0.3)), figure.add_axes((0.62, 0.06, 0.36, 0.8))
    for rank, spans in enumerate(shown["spans"]):
        for (start, stop), part in zip(spans, ("head", "tail"), strict=True):
            line.add_patch(
                Rectangle((start, 0), stop - start, 1, facecolor=COLOURS[rank], edgecolor="white")
            )
            line.text(
                (start + stop) / 2,
                0.5,
                f"{part}\n{rank}",
                ha="center",
                va="center",
                color="white",
                fontsize=11,
            )
            for query in range(start, stop):
                square.add_patch(
                    Rectangle((0, query), query + 1, 1, facecolor=COLOURS[rank], linewidth=0)
                )
    line.set_xlim(0, LENGTH)
    titled(
        line, f"A document of {LENGTH} tokens on {RANKS} ranks: {2 * RANKS} chunks, two per rank"
    )
    square.set_xlim(0, LENGTH)
    square.set_ylim(LENGTH, 0)
    square.set_aspect("equal")
    share = shown["pairs"][0] / sum(shown["pairs"])
    titled(square, f"Queries × keys: {share:.0%} each")
    return shown


def draw_rounds(figure: Figure) -> Shown:
    shown = received()
    for number, messages in enumerate(shown["rounds"]):
        axes = figure.add_axes((0.04 + 0.325 * number, 0.08, 0.28, 0.74))
        for sender, receiver, rows in messages:
            bend = "arc3,rad=0.25"
            axes.annotate(
                "",
                (0.95, RANKS - 1 - receiver),
                (0.05, RANKS - 1 - sender),
                arrowprops={
                    "arrowstyle": "->",
                    "color": COLOURS[sender],
                    "linewidth": rows / 5,
                    "connectionstyle": bend,
                },
            )
        for rank in range(RANKS):
            for left in (0, 1):
                axes.scatter([left], [RANKS - 1 - rank], s=320, color=COLOURS[rank], zorder=3)
                axes.text(
                    left,
                    RANKS - 1 - rank,
                    str(rank),
                    ha="center",
                    va="center",
                    color="white",
                    zorder=4,
                )
        axes.set_xlim(-0.15, 1.15)
        axes.set_ylim(-0.5, RANKS - 0.5)
        titled(axes, f"Round {number + 1}: distance {number + 1}")
    return shown


def draw_levels(figure: Figure) -> Shown:
    shown = across()
    for number, (name, messages) in enumerate(shown.items()):
        axes = figure.add_axes((0.04 + 0.5 * number, 0.1, 0.42, 0.72))
        for sender, receiver, _ in messages:
            if sender < receiver:
                axes.annotate(
                    "",
                    (0.93, NODE - 1 - receiver % NODE),
                    (0.07, NODE - 1 - sender % NODE),
                    arrowprops={
                        "arrowstyle": "->",
                        "color": COLOURS[sender % NODE],
                        "linewidth": 1.4,
                    },
                )
        for rank in range(2 * NODE):
            axes.scatter(
                [rank // NODE],
                [NODE - 1 - rank % NODE],
                s=320,
                color=COLOURS[rank % NODE],
                zorder=3,
            )
            axes.text(
                rank // NODE,
                NODE - 1 - rank % NODE,
                str(rank),
                ha="center",
                va="center",
                color="white",
                zorder=4,
            )
        rows = sum(rows for *_, rows in messages)
        axes.set_xlim(-0.15, 1.15)
        axes.set_ylim(-0.6, NODE - 0.4)
        titled(axes, f"{name.capitalize()}: {rows} rows cross the network")
    return shown


def titled(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=11.5, fontweight="bold", color=INK)
    axes.set_axis_off()


PICTURES: dict[str, tuple[Callable[[Figure], Shown], float]] = {
    "cut": (draw_cut, 4.0),
    "rounds": (draw_rounds, 3.2),
    "levels": (draw_levels, 3.4),
}
"""Name → what draws it, and its height in inches."""


def draw(name: str, path: Path | None) -> str:
    """Draws a picture, to a file if one is given. Returns what it shows, as JSON."""
    function, height = PICTURES[name]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, height), dpi=160, facecolor="white")
        shown = json.dumps(function(figure))
        if name != "levels":
            keys = [
                Patch(facecolor=colour, label=f"rank {rank}") for rank, colour in enumerate(COLOURS)
            ]
            figure.legend(
                handles=keys,
                loc="lower left",
                ncols=RANKS,
                frameon=False,
                fontsize=10.5,
                labelcolor=QUIET,
            )
        if path is not None:
            figure.savefig(path, metadata={"Description": shown, "Software": None})
    return shown


if __name__ == "__main__":
    for each in PICTURES:
        draw(each, Path(sys.argv[1]) / f"{each}.png")

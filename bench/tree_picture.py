"""Draws docs/trees.png: a prompt with three completions as a tree, its cut over three ranks, and
what each token sees.

    python bench/tree_picture.py docs/trees.png

The .png carries what it shows as the text chunk `Description`; tests/comparison/test_pictures.py compares it
with the code.
"""

import json
import sys

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from numpy.typing import NDArray

from longctx.data.trees import merge_prefixes
from longctx.planning.layout import Layout, Placement
from longctx.planning.tree import Tree
from longctx.plots.colours import INK, QUIET, STYLE

PROMPT, COMPLETIONS, RANKS = 24, (5, 9, 15), 3
COLOURS = ("#3b96de", "#f5b32c", "#a22162")
"""Colour of every rank."""


def main() -> None:
    tree = drawn()
    ranks = ranks_of(tree)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 4.4), dpi=160, facecolor="white")
        draw_paths(figure.add_axes((0.02, 0.36, 0.51, 0.55)), tree, ranks)
        draw_document(figure.add_axes((0.02, 0.12, 0.51, 0.13)), tree, ranks)
        draw_mask(figure.add_axes((0.6, 0.04, 0.39, 0.87)), tree, ranks)
        keys = [
            Patch(facecolor=colour, label=f"rank {rank}") for rank, colour in enumerate(COLOURS)
        ]
        figure.legend(
            handles=keys,
            loc="lower left",
            bbox_to_anchor=(0.01, -0.01),
            ncols=RANKS,
            frameon=False,
            fontsize=10.5,
        )
        figure.savefig(sys.argv[1], metadata={"Description": pictured(), "Software": None})


def pictured() -> str:
    """Returns what the picture shows as JSON: nodes, the rank of every token, and the tokens that
    each sees."""
    tree = drawn()
    ranks = "".join(map(str, ranks_of(tree)))
    return json.dumps(
        {"lengths": tree.lengths, "ranks": ranks, "seen": seen(tree).sum(axis=1).tolist()}
    )


def drawn() -> Tree:
    """Returns the tree."""
    sequences = [[0] * PROMPT + [1 + number] * tokens for number, tokens in enumerate(COMPLETIONS)]
    return merge_prefixes(sequences, most_tokens=100).trees[0]


def ranks_of(tree: Tree) -> list[int]:
    """Returns the rank of every token of a tree that is split over all ranks."""
    ranks = [0] * tree.length
    for rank in range(RANKS):
        (shard,) = Layout.of([Placement(0, 0, RANKS)], [tree.length], 0, rank).shards
        for token in (*range(*shard.head), *range(*shard.tail)):
            ranks[token] = rank
    return ranks


def seen(tree: Tree) -> NDArray[np.bool_]:
    """Returns which keys each query sees, [queries, keys]: those before it, while it is in the
    subtree of the key's node."""
    queries = np.arange(tree.length)
    ends = np.repeat([node.end for node in tree.nodes], tree.lengths)
    return (queries[None, :] <= queries[:, None]) & (queries[:, None] < ends[None, :])


def box(
    axes: Axes, left: float, top: float, width: float, colour: str, height: float = 0.8
) -> None:
    axes.add_patch(
        Rectangle((left, top), width, height, facecolor=colour, edgecolor="white", linewidth=0.5)
    )


def title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=11.5, fontweight="bold", color=INK)
    axes.set_axis_off()


def draw_paths(axes: Axes, tree: Tree, ranks: list[int]) -> None:
    """Draws every node at the positions of its tokens, one line per completion."""
    for number, node in enumerate(tree.nodes):
        line = max(0, number - 1)
        for token in range(node.start, node.stop):
            box(axes, node.positions[0] + token - node.start, line, 1, COLOURS[ranks[token]])
        if number > 1:
            axes.plot([node.above] * 2, [0.8, line + 0.4], color=QUIET, linewidth=1.2, zorder=0)
        words = "prompt, once" if number == 0 else f"completion {number}"
        axes.text(
            0 if number == 0 else node.positions[1] + 0.6,
            1.3 if number == 0 else line + 0.4,
            words,
            va="center",
        )
    axes.set_xlim(0, tree.longest + 11)
    axes.set_ylim(len(tree.lengths) - 1, 0)
    title(axes, "A tree: tokens at their positions")


def draw_document(axes: Axes, tree: Tree, ranks: list[int]) -> None:
    for token, rank in enumerate(ranks):
        box(axes, token, 0, 1, COLOURS[rank], 1)
    for node in tree.nodes[1:]:
        axes.axvline(node.start, color=INK, linewidth=1.6)
    axes.set_xlim(0, tree.length)
    axes.set_ylim(1, 0)
    title(axes, f"One document of {tree.length} tokens, cut over {RANKS} ranks like any other")


def draw_mask(axes: Axes, tree: Tree, ranks: list[int]) -> None:
    for query, keys in enumerate(seen(tree)):
        for key in np.flatnonzero(keys):
            box(axes, float(key), query, 1, COLOURS[ranks[query]], 1)
    for node in tree.nodes[1:]:
        axes.axvline(node.start, color=INK, linewidth=0.8)
        axes.axhline(node.start, color=INK, linewidth=0.8)
    axes.set_xlim(0, tree.length)
    axes.set_ylim(tree.length, 0)
    axes.set_aspect("equal")
    title(axes, "What each token (row) sees (columns)")


if __name__ == "__main__":
    main()

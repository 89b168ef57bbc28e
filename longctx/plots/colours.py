"""Style of all pictures, and degree classes with their colours: 1, 2, 3–4, 5–8, … from blue within
a node to red and violet."""

from typing import Any

from longctx.planning.plan import Plan

INK, QUIET, EDGE = "#22303c", "#6d7a86", "#c4ccd3"
STYLE: dict[Any, object] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "longctx",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": QUIET,
}
"""Settings of matplotlib."""

COLOURS = (
    *("#7cc0f2", "#3b96de", "#1c69b5", "#123f7a"),  # within a node of 8
    *("#f5b32c", "#ec7d26", "#d6402f", "#a22162", "#6b2380", "#472063", "#2c1444"),
)
"""Colour of class i: degrees above 2^(i-1) up to 2^i."""
DARK_TEXT_ON = frozenset({0, 1, 4, 5})
"""Classes whose colour needs dark text on it."""


def degree_class(degree: int) -> int:
    """0 for degree 1, 1 for 2, 2 for 3 and 4, 3 for 5 to 8, …"""
    return (degree - 1).bit_length()


def colour(degree: int) -> str:
    return COLOURS[min(degree_class(degree), len(COLOURS) - 1)]


def class_name(index: int) -> str:
    """`1`, `2`, `3–4`, `5–8`, …"""
    high = 1 << index
    low = high // 2 + 1
    if low >= high:
        return str(high)
    return f"{low}–{high}"


def by_class(plan: Plan) -> dict[int, tuple[int, int]]:
    """Number of documents and of tokens in every degree class in use, ascending."""
    result: dict[int, tuple[int, int]] = {}
    for placements in plan.micro_batches:
        for p in placements:
            documents, tokens = result.get(degree_class(p.degree), (0, 0))
            result[degree_class(p.degree)] = documents + 1, tokens + plan.lengths[p.document]
    return dict(sorted(result.items()))

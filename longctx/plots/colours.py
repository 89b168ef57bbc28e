"""Degree classes and their colours, the same in every drawing: 1, 2, 3–4, 5–8, … from pale for one rank to dark for many."""

from longctx.planning.plan import Plan

COLOURS = (
    *("#cfe0ee", "#8fbfe0", "#3f8fc5", "#1f5c99"),  # within a node of 8
    *("#f4b942", "#e8833a", "#cf4b3e", "#932f5e", "#5b2a6e", "#3b1d4a", "#1d1128"),
)
"""Colour of class i: degrees above 2^(i-1) up to 2^i."""


def degree_class(degree: int) -> int:
    """0 for degree 1, 1 for 2, 2 for 3 and 4, 3 for 5 to 8, …"""
    return (degree - 1).bit_length()


def colour(degree: int) -> str:
    return COLOURS[min(degree_class(degree), len(COLOURS) - 1)]


def class_name(index: int) -> str:
    """`1`, `2`, `3–4`, `5–8`, …"""
    high = 1 << index
    low = high // 2 + 1
    return str(high) if low >= high else f"{low}–{high}"


def by_class(plan: Plan) -> dict[int, tuple[int, int]]:
    """Documents and tokens of every degree class in use, ascending."""
    result: dict[int, tuple[int, int]] = {}
    for placements in plan.micro_batches:
        for p in placements:
            documents, tokens = result.get(degree_class(p.degree), (0, 0))
            result[degree_class(p.degree)] = documents + 1, tokens + plan.lengths[p.document]
    return dict(sorted(result.items()))

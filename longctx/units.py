"""Formats memory sizes, counts, times and ranks for people, and reads whole numbers that they
write."""

import math
from collections.abc import Iterable, Sequence


def whole_number(text: str) -> int | None:
    """Returns the number that up to 18 digits spell, as 64 bits hold; None for any other text."""
    if text.isascii() and text.isdecimal() and len(text) <= 18:
        return int(text)
    return None


def format_bytes(size: int) -> str:
    """Formats bytes in GiB with two decimals, or in MiB if that would round to 0.00 GiB."""
    gibibytes = f"{size / 2**30:,.2f}"
    if gibibytes == "0.00":
        return f"{size / 2**20:,.2f} MiB"
    return f"{gibibytes} GiB"


def format_count(number: int) -> str:
    """Formats a number of parameters in billions, or in millions below 1 billion: 8.03B, 0.918M."""
    if number >= 1e9:
        return f"{number / 1e9:,.3g}B"
    return f"{number / 1e6:.3g}M"


def three_digits(number: float) -> str:
    """Formats a number with three digits, or all of a whole part that has more: 1,903, 37.8,
    0.0912."""
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.3g}"


def format_duration(seconds: float) -> str:
    """Formats seconds in hours, minutes or seconds with one decimal."""
    if seconds > 7200:
        return f"{seconds / 3600:,.1f} hours"
    if seconds > 120:
        return f"{seconds / 60:.1f} minutes"
    return f"{seconds:.1f} seconds"


def format_ranks(ranks: Sequence[int]) -> str:
    """Returns ascending numbers of ranks for people: `rank 3`, or `ranks 0 to 2, 5`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    spans: list[tuple[int, int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    return "ranks " + ", ".join(
        str(first) if first == last else f"{first} to {last}" for first, last in spans
    )


def largest(numbers: Iterable[float], default: float = math.nan) -> float:
    """Returns the largest number, NaN if one is NaN, which `max` overlooks unless it comes first;
    `default` of none."""
    found = list(numbers)
    if any(map(math.isnan, found)):
        return math.nan
    return max(found, default=default)

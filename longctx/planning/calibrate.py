"""Calibration: from measured times to the constants of the cost model. Pure functions; `longctx.training.profiling` measures.

Every fit weighs relative errors, so that short times count as much as long ones, and says how far it is off: `residual` is the
root mean square of (modelled / measured - 1) over its points.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from longctx.planning.least_squares import nonnegative_least_squares

OVERLAP_STEPS = 1000


@dataclass(frozen=True)
class Line:
    """seconds = intercept + slope · amount."""

    intercept: float
    slope: float
    residual: float


def fit_line(amounts: Sequence[float], seconds: Sequence[float]) -> Line:
    """The line through measured times, intercept ≥ 0 and slope > 0.

    Where time does not grow with the amount, within the noise, the slope is that of the largest amount from zero: the most
    that it can be. The residual then tells that this is no line.
    """
    rows = [(1 / y, x / y) for x, y in zip(amounts, seconds, strict=True)]
    intercept, slope = nonnegative_least_squares(rows, [1.0] * len(rows))
    if slope <= 0:
        largest, its_seconds = max(zip(amounts, seconds, strict=True))
        intercept, slope = 0.0, its_seconds / largest
    return Line(intercept, slope, _residual([intercept + slope * x for x in amounts], seconds))


@dataclass(frozen=True)
class AttentionTime:
    """What a rank needed for its part of a document: `seconds` for `pairs` = length² / degree at that `segment` length.

    segment: the length at degree 1, length / (2 · degree) above, as in the cost model.
    """

    segment: int
    pairs: float
    seconds: float


@dataclass(frozen=True)
class AttentionFit:
    s_per_token2: float
    efficiency: tuple[tuple[int, float], ...]
    residual: float


def fit_attention(times: Sequence[AttentionTime]) -> AttentionFit:
    """Seconds per token² at the longest segment, and the efficiency of shorter ones, which never falls with length.

    Several times at one segment (a whole document, a part of a ring) are averaged geometrically: the model has one table for
    both. A segment that was measured faster than a longer one counts as equally fast, so the longest, which take most of the
    time, are met exactly.
    """
    rates: dict[int, list[float]] = {}
    for time in times:
        rates.setdefault(time.segment, []).append(time.seconds / time.pairs)
    slowest, table = 0.0, []
    s_per_token2 = 0.0
    for segment in sorted(rates, reverse=True):
        rate = math.exp(math.fsum(map(math.log, rates[segment])) / len(rates[segment]))
        s_per_token2 = s_per_token2 or rate
        slowest = max(slowest, rate)
        table.append((segment, s_per_token2 / slowest))
    efficiency = dict(table)
    modelled = [s_per_token2 * time.pairs / efficiency[time.segment] for time in times]
    return AttentionFit(s_per_token2, tuple(reversed(table)), _residual(modelled, [time.seconds for time in times]))


@dataclass(frozen=True)
class OverlapTime:
    """Seconds of the same ring attention without messages, of its messages alone, and of both together."""

    attention: float
    exchange: float
    both: float


def fit_overlap(times: Sequence[OverlapTime]) -> tuple[float, float]:
    """(overlap in [0, 1], residual): both = attention + max(0, exchange - overlap · attention), as in the cost model."""

    def modelled(overlap: float) -> list[float]:
        return [t.attention + max(0.0, t.exchange - overlap * t.attention) for t in times]

    measured = [t.both for t in times]
    residual, overlap = min(
        (_residual(modelled(i / OVERLAP_STEPS), measured), i / OVERLAP_STEPS) for i in range(OVERLAP_STEPS + 1)
    )
    return overlap, residual


def _residual(modelled: Sequence[float], measured: Sequence[float]) -> float:
    squares = [(a / b - 1) ** 2 for a, b in zip(modelled, measured, strict=True)]
    return math.sqrt(math.fsum(squares) / len(squares))


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, element_bytes: int, passes: int = 3) -> int:
    """Bytes of one token's K and V in all layers and passes: fetched forward, fetched again and returned in backward.

    That is what crosses the wire at the ends of a ring: index 0 fetches all rows of its mates and returns all their gradients,
    the last index sends all of its rows and gets all their gradients back. Ranks between them move less (three quarters on
    average), but a pass takes as long as its slowest rank. Recomputed attention makes 4 `passes`, K and V kept for backward one
    less. Gradients travel in the dtype of K and V.
    """
    return layers * 2 * kv_heads * head_dim * element_bytes * passes

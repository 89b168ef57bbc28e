"""Fits the constants of the cost model to measured times. Pure functions; `longctx.calibration` measures.

Every fit minimizes relative errors, so short times count as much as long ones, and reports its `residual`: the root mean square
of (modelled / measured - 1) over its points.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longctx.planning.cost.model import efficiency, equivalent_length
from longctx.planning.hardware_profile import EfficiencyTable

OVERLAP_STEPS = 1000
SPLIT_PENALTY_STEPS, MOST_SPLIT_PENALTY = 400, 4.0
"""Number and maximum of the penalties tried; at 4.0 a ring of 8 is as efficient as an unsplit document 1/29 as long."""


@dataclass(frozen=True)
class Line:
    """A fitted line: seconds = intercept + slope · amount."""

    intercept: float
    slope: float
    residual: float


def fit_line(amounts: Sequence[float], seconds: Sequence[float]) -> Line:
    """Fits a line to measured times, with intercept ≥ 0 and slope > 0.

    If time does not grow with the amount, because of noise, returns the line from zero to the largest amount, an upper bound on
    the slope. The residual then shows that the line fits badly.
    """
    rows = np.array([(1 / y, x / y) for x, y in zip(amounts, seconds, strict=True)])
    ones = np.ones(len(rows))
    intercept, slope = np.linalg.lstsq(rows, ones)[0].tolist()
    if intercept < 0:  # the best line that is allowed goes through the origin
        intercept, slope = 0.0, float(rows[:, 1] @ ones / (rows[:, 1] @ rows[:, 1]))
    if slope <= 0:
        largest, its_seconds = max(zip(amounts, seconds, strict=True))
        intercept, slope = 0.0, its_seconds / largest
    return Line(intercept, slope, _residual([intercept + slope * x for x in amounts], seconds))


@dataclass(frozen=True)
class AttentionTime:
    """Measured seconds per rank for attention on a document of `length` tokens at `degree`."""

    length: int
    degree: int
    seconds: float

    @property
    def pairs(self) -> float:
        """Attention work per rank: length² / degree, in tokens²."""
        return self.length**2 / self.degree


@dataclass(frozen=True)
class AttentionFit:
    """Fitted attention constants; `split_penalty` is None if no document was split.

    `residual` is that of unsplit documents, `split_residual` that of split ones.
    """

    s_per_token2: float
    efficiency: EfficiencyTable
    residual: float
    split_penalty: float | None
    split_residual: float


def fit_attention(times: Sequence[AttentionTime]) -> AttentionFit:
    """Fits seconds per token² to the longest unsplit document, efficiencies to shorter ones, and the split penalty.

    The table uses unsplit documents only and matches them exactly, except that efficiency never falls with length: a document
    that was measured faster than a longer one counts as equally fast. The split penalty is the one that fits the split
    documents best. At least one document must be unsplit.
    """
    whole = {time.length: time for time in times if time.degree == 1}
    slowest, table = 0.0, []
    s_per_token2 = whole[max(whole)].seconds / whole[max(whole)].pairs
    for length in sorted(whole, reverse=True):
        slowest = max(slowest, whole[length].seconds / whole[length].pairs)
        table.append((length, s_per_token2 / slowest))
    efficiencies = tuple(reversed(table))

    def residual(chosen: Sequence[AttentionTime], penalty: float) -> float:
        lengths, degrees = (np.array([getattr(time, name) for time in chosen], float) for name in ("length", "degree"))
        fitted = efficiency(efficiencies, equivalent_length(lengths, degrees, penalty)).tolist()
        modelled = [s_per_token2 * time.pairs / share for time, share in zip(chosen, fitted, strict=True)]
        return _residual(modelled, [time.seconds for time in chosen])

    split = [time for time in times if time.degree > 1]
    steps = range(SPLIT_PENALTY_STEPS + 1) if split else ()
    candidates = ((residual(split, MOST_SPLIT_PENALTY * i / SPLIT_PENALTY_STEPS), i) for i in steps)
    split_residual, best = min(candidates, default=(0.0, None))
    penalty = None if best is None else MOST_SPLIT_PENALTY * best / SPLIT_PENALTY_STEPS
    return AttentionFit(s_per_token2, efficiencies, residual(list(whole.values()), 0.0), penalty, split_residual)


@dataclass(frozen=True)
class OverlapTime:
    """Seconds of the same ring attention: without messages, its messages alone, and both together."""

    attention: float
    exchange: float
    both: float


def fit_overlap(times: Sequence[OverlapTime]) -> tuple[float, float]:
    """Returns (overlap in [0, 1], residual) for both = attention + max(0, exchange - overlap · attention).

    Nothing computes queries in these measurements, so the result does not include what they hide.
    """

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

"""Calibration: from measured times to the constants of the cost model. Pure functions; `longctx.profiling` measures.

Every fit weighs relative errors, so that short times count as much as long ones, and says how far it is off: `residual` is the
root mean square of (modelled / measured - 1) over its points.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longctx.planning.calibration.least_squares import nonnegative_least_squares
from longctx.planning.cost.hardware_profile import EfficiencyTable
from longctx.planning.cost.model import efficiency, equivalent_length

OVERLAP_STEPS = 1000
SPLIT_PENALTY_STEPS, MOST_SPLIT_PENALTY = 400, 4.0
"""Penalties that are tried: with the greatest, a ring of 8 is as efficient as a whole document of a 29th of the length."""


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
    """What each rank needed for its part of a document of `length` tokens at that `degree`."""

    length: int
    degree: int
    seconds: float

    @property
    def pairs(self) -> float:
        """What time grows with: length² / degree, in tokens²."""
        return self.length**2 / self.degree


@dataclass(frozen=True)
class AttentionFit:
    """`split_penalty` is None where no document was split. Residuals: of whole documents, and of split ones."""

    s_per_token2: float
    efficiency: EfficiencyTable
    residual: float
    split_penalty: float | None
    split_residual: float


def fit_attention(times: Sequence[AttentionTime]) -> AttentionFit:
    """Seconds per token² of the longest whole document, the efficiency of shorter ones, and what splitting costs.

    Whole documents alone make the table, so that they are met exactly, as far as they allow a table that never falls with the
    length: one that was measured faster than a longer one counts as equally fast. The split penalty is the one under which the
    table meets the split documents best. There must be a whole document.
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
        found = efficiency(efficiencies, equivalent_length(lengths, degrees, penalty)).tolist()
        modelled = [s_per_token2 * time.pairs / share for time, share in zip(chosen, found, strict=True)]
        return _residual(modelled, [time.seconds for time in chosen])

    split = [time for time in times if time.degree > 1]
    steps = range(SPLIT_PENALTY_STEPS + 1) if split else ()
    candidates = ((residual(split, MOST_SPLIT_PENALTY * i / SPLIT_PENALTY_STEPS), i) for i in steps)
    split_residual, best = min(candidates, default=(0.0, None))
    penalty = None if best is None else MOST_SPLIT_PENALTY * best / SPLIT_PENALTY_STEPS
    return AttentionFit(s_per_token2, efficiencies, residual(list(whole.values()), 0.0), penalty, split_residual)


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

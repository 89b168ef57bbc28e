"""Spikes: steps whose loss, gradient norm or time is far above those of the steps before."""

import math
from collections import deque
from statistics import median

WINDOW, FEWEST = 50, 20
"""Steps to compare with, and the fewest of them."""
DEVIATIONS, SHARE = 6.0, 0.2
"""A spike is more median absolute deviations, and a larger share, above the median."""


class Spikes:
    """Compares every step with the ones before it, as this process has seen them."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[float]] = {}

    def of(self, values: dict[str, float]) -> list[str]:
        """Returns the names of values that are not finite or far above those of the steps before, and remembers the others."""
        found = []
        for name, value in values.items():
            seen = self._seen.setdefault(name, deque(maxlen=WINDOW))
            if not math.isfinite(value) or (len(seen) >= FEWEST and value > _limit(seen)):
                found.append(name)
            if math.isfinite(value):  # a spike too: at a new level they end
                seen.append(value)
        return found


def _limit(seen: deque[float]) -> float:
    usual = median(seen)
    spread = median(abs(value - usual) for value in seen)
    return usual + max(DEVIATIONS * spread, SHARE * abs(usual))

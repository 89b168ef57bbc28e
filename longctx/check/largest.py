"""Numbers of which one may be NaN."""

import math
from collections.abc import Iterable


def largest(numbers: Iterable[float], default: float = math.nan) -> float:
    """Returns the largest number, NaN if one is NaN, which `max` overlooks unless it comes first;
    `default` of none."""
    found = list(numbers)
    for number in found:
        if math.isnan(number):
            return number
    return max(found, default=default)

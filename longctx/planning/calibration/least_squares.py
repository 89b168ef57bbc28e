"""Non-negative least squares for a few unknowns, in plain IEEE operations so that all ranks agree bit by bit."""

import itertools
import math
from collections.abc import Sequence

Row = Sequence[float]


def nonnegative_least_squares(rows: Sequence[Row], targets: Row, weights: Row | None = None) -> tuple[float, ...]:
    """Returns the x ≥ 0 that minimizes Σ weight·(row · x - target)².

    rows [equations][unknowns]. Tries every subset of positive unknowns, so there should be only a few; unknowns that the rows
    do not distinguish stay 0.
    """
    unknowns = len(rows[0])
    weights = [1.0] * len(rows) if weights is None else weights
    columns = list(zip(*rows, strict=True))
    gram = [[_dot(weights, a, b) for b in columns] for a in columns]
    moment = [_dot(weights, a, targets) for a in columns]
    best, least = (0.0,) * unknowns, 0.0
    for free in itertools.chain.from_iterable(itertools.combinations(range(unknowns), n) for n in range(1, unknowns + 1)):
        found = _solve([[gram[i][j] for j in free] for i in free], [moment[i] for i in free])
        if found is None or min(found) < 0:
            continue
        cost = -math.fsum(a * moment[i] for a, i in zip(found, free, strict=True))  # up to a constant, at a solution
        if cost < least:
            solution = dict(zip(free, found, strict=True))
            best, least = tuple(solution.get(i, 0.0) for i in range(unknowns)), cost
    return best


def _dot(weights: Row, a: Row, b: Row) -> float:
    return math.fsum(w * x * y for w, x, y in zip(weights, a, b, strict=True))


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Solves a symmetric positive definite system by elimination; returns None if it is numerically singular."""
    size = len(right)
    rows = [[*line, value] for line, value in zip(matrix, right, strict=True)]
    for i in range(size):
        if rows[i][i] <= 1e-12 * matrix[i][i]:
            return None
        for k in range(i + 1, size):
            factor = rows[k][i] / rows[i][i]
            rows[k] = [a - factor * b for a, b in zip(rows[k], rows[i], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = math.fsum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution

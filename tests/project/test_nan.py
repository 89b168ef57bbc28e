"""NaN fails every comparison of ours: a rule over the code, and the places where it hid before."""

import ast
import math
import re
from collections.abc import Callable, Iterator

import pytest

from longctx import units
from longctx.check.largest import largest as largest_of_check
from tests.project.test_imports import MODULES, tree

TOLERANCE = re.compile(
    r"toleran|^(EXACT|CLOSE|SAME|LOGGED|BACKWARD|FAR_OFF|ROUNDING)$", re.IGNORECASE
)
SMALL = 0.0049


def is_tolerance(node: ast.expr) -> bool:
    """Returns whether an operand is a bound of an error: a name that says so, or a small number,
    also as a factor."""
    for part in ast.walk(node):
        name = (
            part.id
            if isinstance(part, ast.Name)
            else part.attr
            if isinstance(part, ast.Attribute)
            else ""
        )
        number = part.value if isinstance(part, ast.Constant) else None
        if TOLERANCE.search(name) or (isinstance(number, float) and 0 < abs(number) < SMALL):
            return True
    return False


def hidden(source: ast.Module) -> Iterator[str]:
    """Yields the comparisons that are false for NaN where false means that all is well: `error >
    tolerance`."""
    for node in ast.walk(source):
        if not isinstance(node, ast.Compare):
            continue
        for left, operator, right in zip(
            [node.left, *node.comparators], node.ops, node.comparators, strict=False
        ):
            exceeds = isinstance(operator, ast.Gt | ast.GtE) and is_tolerance(right)
            below = isinstance(operator, ast.Lt | ast.LtE) and is_tolerance(left)
            is_error = not isinstance(left if exceeds else right, ast.Constant)
            if (exceeds or below) and is_error:
                yield ast.unparse(node)


def test_errors_are_compared_so_that_nan_fails() -> None:
    """Write `not error <= tolerance`: `error > tolerance` takes NaN for small."""
    found = [f"{name}: {text}" for name in MODULES for text in hidden(tree(name))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("if error > TOLERANCE: pass", 1),
        ("if error >= 1e-3 * norm: pass", 1),
        ("assert 1e-6 < error", 1),
        ("bad = abs(a - b) > self.tolerance * c", 1),
        ("if not error <= TOLERANCE: pass", 0),
        ("right = error < 1e-5", 0),
        ("if length > 4096 or share > 0.5: pass", 0),
    ],
)
def test_the_rule_finds_what_it_should(code: str, count: int) -> None:
    assert len(list(hidden(ast.parse(code)))) == count


@pytest.mark.parametrize("values", [[math.nan, 1.0], [1.0, math.nan], [1.0, math.nan, 2.0]])
@pytest.mark.parametrize("largest", [units.largest, largest_of_check])
def test_the_largest_of_numbers_with_nan_is_nan(
    values: list[float], largest: Callable[..., float]
) -> None:
    assert math.isnan(largest(values))
    assert largest([1.0, 3.0, 2.0]) == 3.0 and largest([], default=0.5) == 0.5

"""Marks for parametrized tests, and numbers of examples of property tests."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import settings


def slow_unless(quick: Callable[..., bool], cases: Iterable[Any]) -> list[Any]:
    """Cases (values, or tuples of them), marked slow but for those that `quick` is true of."""
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=() if quick(*values) else (pytest.mark.slow,)))
    return found


def examples(count: int) -> int:
    """Returns the number of examples of a property test: fewer in `make test`, which draws the same ones every time."""
    return count if settings.get_current_profile_name() == "explore" else max(8, 2 * count // 5)

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
    """Returns the number of examples of a property test: few in `make test`, ten times as many to
    explore."""
    few = max(8, count // 6)
    return 10 * few if settings.get_current_profile_name() == "explore" else few

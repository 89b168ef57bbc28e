"""Marks for parametrized tests."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_unless(quick: Callable[..., bool], cases: Iterable[Any]) -> list[Any]:
    """Cases (values, or tuples of them), marked slow but for those that `quick` is true of."""
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=() if quick(*values) else (pytest.mark.slow,)))
    return found

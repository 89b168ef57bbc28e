"""Faults and right set-ups of loops on several processes."""

from bench.check_hidden.cases import Case

CASES: list[Case] = []

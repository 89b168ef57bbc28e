"""Step and candidate: what a planner of any mode is given, and what it gives back."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from longctx.planning.assignment import Assignment, Integers, largest_shards
from longctx.planning.cost.hardware_profile import HardwareProfile
from longctx.planning.cost.model import alone_ns


@dataclass(frozen=True)
class Step:
    """A step to plan: `lengths` [documents], each of which fits some degree, and what `make_plan` was asked for."""

    profile: HardwareProfile
    lengths: Integers
    ranks: int
    tokens_per_rank: int
    degree: int | None = None
    bins: Mapping[int, int] | None = None

    @cached_property
    def single_ns(self) -> Integers:
        """What each document would take on one rank alone."""
        return alone_ns(self.profile, self.lengths, np.ones_like(self.lengths))

    @property
    def fewest_micro_batches(self) -> int:
        """No plan has fewer: all tokens over all ranks' budgets."""
        return -(-int(self.lengths.sum()) // (self.ranks * self.tokens_per_rank))

    def split(self, degrees: Integers) -> "Degrees":
        """The documents on these degrees."""
        time, tokens = self.single_ns.copy(), self.lengths.copy()
        rings = np.flatnonzero(degrees > 1)
        time[rings] = alone_ns(self.profile, self.lengths[rings], degrees[rings])
        tokens[rings] = largest_shards(self.lengths[rings], degrees[rings])
        return Degrees(degrees, time, tokens)


@dataclass(frozen=True)
class Degrees:
    """Of every document: ranks, nanoseconds and most tokens on each of them (arrays [documents])."""

    degree: Integers
    time: Integers
    tokens: Integers

    @cached_property
    def work(self) -> int:
        """Nanoseconds of all documents on all their ranks."""
        return int((self.degree * self.time).sum())


class Candidate(NamedTuple):
    """A plan that may be taken; `winner` is its name in `Plan.winner`."""

    makespan_ns: int
    winner: str
    assignment: Assignment


def fastest(*candidates: Candidate | None) -> Candidate:
    """The least makespan; the first of equals. Some may be missing, not all."""
    return min((found for found in candidates if found is not None), key=lambda found: found.makespan_ns)

"""Step and Candidate: the input and the result of every planner."""

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
    """A step to plan: the arguments of `make_plan`, with `lengths` as an array [documents] that all fit some degree."""

    profile: HardwareProfile
    lengths: Integers
    ranks: int
    tokens_per_rank: int
    degree: int | None = None
    bins: Mapping[int, int] | None = None

    @cached_property
    def single_ns(self) -> Integers:
        """Time of each document alone on one rank, in nanoseconds."""
        return alone_ns(self.profile, self.lengths, np.ones_like(self.lengths))

    @property
    def fewest_micro_batches(self) -> int:
        """Minimum number of micro-batches: all tokens divided by the budgets of all ranks."""
        return -(-int(self.lengths.sum()) // (self.ranks * self.tokens_per_rank))

    def split(self, degrees: Integers) -> "Degrees":
        """Returns the cost of each document at its degree."""
        time, tokens = self.single_ns.copy(), self.lengths.copy()
        rings = np.flatnonzero(degrees > 1)
        time[rings] = alone_ns(self.profile, self.lengths[rings], degrees[rings])
        tokens[rings] = largest_shards(self.lengths[rings], degrees[rings])
        return Degrees(degrees, time, tokens)


@dataclass(frozen=True)
class Degrees:
    """Degree, time per rank in nanoseconds and maximum tokens per rank of every document (arrays [documents])."""

    degree: Integers
    time: Integers
    tokens: Integers

    @cached_property
    def work(self) -> int:
        """Time summed over all documents and their ranks, in nanoseconds."""
        return int((self.degree * self.time).sum())


class Candidate(NamedTuple):
    """A possible plan; `winner` becomes `Plan.winner` if it is chosen."""

    makespan_ns: int
    winner: str
    assignment: Assignment


def fastest(*candidates: Candidate | None) -> Candidate:
    """Returns the candidate with the smallest makespan, the first of equals. At least one must not be None."""
    return min((found for found in candidates if found is not None), key=lambda found: found.makespan_ns)

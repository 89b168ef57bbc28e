"""Request and candidate: what a planner of any mode is given, and what it gives back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from longctx.planning.assignment import Assignment, Integers
from longctx.planning.cost.hardware_profile import HardwareProfile


@dataclass(frozen=True)
class Request:
    """A step to plan: `lengths` [documents], each of which fits some degree, and what `make_plan` was asked for."""

    profile: HardwareProfile
    lengths: Integers
    ranks: int
    tokens_per_rank: int
    degree: int | None = None
    bins: Mapping[int, int] | None = None


class Candidate(NamedTuple):
    """A plan that may be taken; `winner` is its name in `Plan.winner`."""

    makespan_ns: int
    winner: str
    assignment: Assignment


def fastest(*candidates: Candidate | None) -> Candidate:
    """The least makespan; the first of equals. Some may be missing, not all."""
    return min((found for found in candidates if found is not None), key=lambda found: found.makespan_ns)

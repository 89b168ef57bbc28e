"""Search for the split of GPUs that is best for a static run: one degree for all documents, packed in
the order drawn, at the smallest power of two that holds the longest document."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from longctx.comparison.baselines import fixed_degree, place_fixed_static
from longctx.planning.assignment import Integers
from longctx.planning.cost.bounds import step_bound_ns
from longctx.planning.cost.model import NANOSECONDS, score
from longctx.planning.cost.rounds import choose_rounds
from longctx.planning.cost.spec import ModelSpec
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.plan import PlanError
from split_cost import Machine, Split, profile_of
from split_search import BUDGETS, memory_of, possible_splits


@dataclass(frozen=True)
class StaticSplit:
    """A split, and its predictions for a static run.

    Attributes:
        split: the split.
        degree: that of all documents.
        step_s: mean time per step.
    """

    split: Split
    degree: int
    step_s: float


@dataclass(frozen=True)
class Candidate:
    """A split that may be the best one, and lower bounds on the time of each step."""

    split: Split
    degree: int
    profile: HardwareProfile
    bounds_ns: Sequence[float]


def best_static(
    machine: Machine,
    spec: ModelSpec,
    steps: Sequence[Integers],
    gpus: int,
    *,
    longest: int,
    budgets: Sequence[int] = BUDGETS,
) -> StaticSplit | None:
    """Returns the fastest of all splits that hold documents of up to `longest` tokens, None if none
    does. `budgets`: tokens per rank.

    Splits are visited in ascending order of their bounds.
    """
    splits = possible_splits(spec, gpus, machine.profile.ranks_per_node, budgets)
    candidates = list(_candidates(machine, spec, steps, splits, longest=longest))
    candidates.sort(key=lambda candidate: sum(candidate.bounds_ns))
    best = None
    least_ns = math.inf
    for candidate in candidates:
        if sum(candidate.bounds_ns) >= least_ns:
            break
        time_ns = _time_ns(machine, spec, steps, candidate, longest=longest, limit_ns=least_ns)
        if time_ns < least_ns:
            least_ns = time_ns
            best = candidate
    if best is None:
        return None
    return StaticSplit(best.split, best.degree, least_ns / len(steps) / NANOSECONDS)


def _candidates(
    machine: Machine,
    spec: ModelSpec,
    steps: Sequence[Integers],
    splits: Iterable[Split],
    *,
    longest: int,
) -> Iterator[Candidate]:
    """Yields the splits with enough ranks for the longest document."""
    for split in splits:
        try:
            degree = fixed_degree(longest, split.domain, split.tokens_per_rank)
        except PlanError:
            continue
        profile = profile_of(machine, spec, split)
        bounds = []
        for step in steps:
            bound_ns = step_bound_ns(
                profile, step, split.domain, split.tokens_per_rank, split.pipeline
            )
            bounds.append(bound_ns)
        yield Candidate(split, degree, profile=profile, bounds_ns=bounds)


def _time_ns(
    machine: Machine,
    spec: ModelSpec,
    steps: Sequence[Integers],
    candidate: Candidate,
    *,
    longest: int,
    limit_ns: float,
) -> float:
    """Returns the time of all steps; infinity if memory is too small or the time reaches the
    limit."""
    split = candidate.split
    profile = candidate.profile
    times = list(candidate.bounds_ns)
    for number, lengths in enumerate(steps):
        assignment = place_fixed_static(
            profile, lengths, split.domain, split.tokens_per_rank, candidate.degree
        )
        plain = score(profile, lengths, assignment, split.domain, split.pipeline)
        times[number] = plain.makespan_ns  # and with rounds no less
        if sum(times) >= limit_ns:
            return math.inf
        memory = memory_of(machine, spec, split, longest, assignment.micro_batches)
        if memory.total > machine.memory_bytes:
            return math.inf
        _, with_rounds = choose_rounds(profile, lengths, assignment, plain, split.max_remote_tokens)
        times[number] = with_rounds.makespan_ns
    return sum(times)

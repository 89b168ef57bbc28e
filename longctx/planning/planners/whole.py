"""Whole documents: of a plan's split documents the shortest are placed anew, each on one rank, as
long as that takes hardly more time.

A search compares few placements, all with many splits or with few, by estimated loads. Here loads
are those of the cost model for the plan, with the real waits of its rings: by these the plan's own
whole documents are placed anew first.
"""

import numpy as np

from longctx.planning.assignment import Integers, largest_shards
from longctx.planning.cost.model import beyond_ns, linear_ns, nanoseconds
from longctx.planning.cost.slow_ranks import usual_ns
from longctx.planning.planners.packing import even_out, fill, with_targets
from longctx.planning.planners.planning_input import Candidate, Degrees, PlanningInput, fastest
from longctx.planning.planners.settings import SearchSettings


def with_more_whole(given: PlanningInput, best: Candidate, settings: SearchSettings) -> Candidate:
    """Returns a plan that splits fewer documents and takes at most a share `settings.whole_gap`
    more time than the given one with its whole documents evened out, or that one."""
    none = np.zeros(0, dtype=np.int64)
    evened = _with_whole(given, best, none, rounds=settings.whole_rounds)
    if evened is not None:
        best = fastest(best, evened)
    a = best.assignment
    limit = (1 + settings.whole_gap) * best.makespan_ns
    split = np.flatnonzero((a.degree > 1) & (given.single_tokens <= given.tokens_per_rank))
    split = split[np.argsort(given.lengths[split], kind="stable")]
    found = best
    whole = 0
    most = len(split)
    count = most
    for _ in range(settings.whole_tries):
        if whole == most:
            break
        candidate = _with_whole(given, best, split[:count], rounds=settings.whole_rounds)
        if candidate is not None and candidate.makespan_ns <= limit:
            whole = count
            found = candidate
        else:
            most = count - 1
        count = (whole + most + 1) // 2
    return found


def _with_whole(
    given: PlanningInput, best: Candidate, documents: Integers, rounds: int
) -> Candidate | None:
    """Returns the plan with these documents on one rank each, and all that are whole placed anew;
    None if tokens do not fit."""
    a = best.assignment
    moved = a.degree == 1
    moved[documents] = True
    degree = np.where(moved, 1, a.degree)
    shape = best.timed.time.shape
    movable = np.flatnonzero(moved)
    usual = usual_ns(given.profile, best.timed.time)
    load = usual - a[movable].runs(shape).spread(_own_ns(given, best)[movable])
    kept = np.flatnonzero(~moved)
    # Rings may be reversed otherwise, so that each of their ranks counts as the fullest.
    held = largest_shards(given.lengths[kept], a.degree[kept])
    free = given.tokens_per_rank - a[kept].runs(shape).spread(held)
    rings = with_targets(
        Degrees(degree, given.single_ns, given.single_tokens),
        placed=~moved,
        micro_batch=a.micro_batch,
        first_rank=a.first_rank,
        load=load,
        free=free,
        slowness=given.slowness,
    )
    if rings is None:
        return None
    plan = fill(rings)
    if plan is None:
        return None
    return given.candidate(best.winner, even_out(rings, plan, rounds))


def _own_ns(given: PlanningInput, best: Candidate) -> Integers:
    """Returns the time that the tokens of each document take on each of its ranks, without their
    exchange."""
    degree = best.assignment.degree
    linear = linear_ns(given.profile, given.lengths / degree)
    linear = linear + beyond_ns(given.profile, given.overrides, degree)
    price = np.where(degree > 1, nanoseconds(given.profile.split_document_s), 0)
    result: Integers = best.timed.attention + linear + price
    return result

"""Modes: the table of planners by mode, used by `make_plan` and its checks."""

import contextlib
from collections.abc import Callable

from longctx.planning.cost.bounds import bound_ns
from longctx.planning.plan import PlanError
from longctx.planning.planners.auto.search import search
from longctx.planning.planners.bins import bin_degrees, pack_bins, plan_bins
from longctx.planning.planners.static import best_static, plan_static
from longctx.planning.planners.step import Candidate, Step, fastest


def plan_auto(step: Step) -> Candidate:
    """Returns the fastest plan of the search, mode bins and mode static."""
    return or_by_other_modes(step, search(step))


def or_by_other_modes(step: Step, best: Candidate) -> Candidate:
    """Returns a faster plan of mode bins or static, or else the given one; lower bounds skip most static degrees."""
    with contextlib.suppress(PlanError):  # the table may not fit these documents; auto does not need it
        degrees = bin_degrees(step)
        if bound_ns(step.profile, step.lengths, degrees, step.ranks, step.tokens_per_rank) < best.makespan_ns:
            best = fastest(best, step.candidate_below(best.makespan_ns, "bins", pack_bins(step, degrees)))
    return fastest(best, best_static(step, range(1, step.ranks + 1), below=best.makespan_ns))


MODES: dict[str, Callable[[Step], Candidate]] = {"auto": plan_auto, "static": plan_static, "bins": plan_bins}
"""Mode → planner; planners raise PlanError if the documents do not fit."""

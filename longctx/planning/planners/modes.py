"""Modes: the table of planners by the name of their mode, which `make_plan` and its checks take them from."""

import contextlib
from collections.abc import Callable

from longctx.planning.cost.bounds import bound_ns
from longctx.planning.plan import PlanError
from longctx.planning.planners.auto.packing import Step
from longctx.planning.planners.auto.search import search
from longctx.planning.planners.bins import bin_degrees, pack_bins, plan_bins
from longctx.planning.planners.request import Candidate, Request, fastest
from longctx.planning.planners.static import best_static, plan_static


def plan_auto(request: Request) -> Candidate:
    """The plan that the search finds, or that of mode bins or static where it is faster. Their bounds spare most of them."""
    profile, lengths, ranks, tokens_per_rank = request.profile, request.lengths, request.ranks, request.tokens_per_rank
    assignment, makespan = search(Step.of(profile, lengths, ranks, tokens_per_rank))
    best = Candidate(makespan, "search", assignment)
    with contextlib.suppress(PlanError):  # a given table may not hold these documents; auto does not depend on it
        degrees = bin_degrees(request)
        if bound_ns(profile, lengths, degrees, ranks, tokens_per_rank) < best.makespan_ns:
            best = fastest(best, pack_bins(request, degrees))
    return fastest(best, best_static(request, range(1, ranks + 1), below=best.makespan_ns))


MODES: dict[str, Callable[[Request], Candidate]] = {"auto": plan_auto, "static": plan_static, "bins": plan_bins}
"""Mode → its planner, which raises PlanError where the mode cannot hold the documents."""

"""Baselines: schedulers of other systems on the same documents, as checked `Plan`s scored by the same cost model.

Only scheduling is compared: every baseline uses longctx's ring attention, exchange and packing of a rank's documents into one
micro-batch. `BASELINES` tells for each what is the authors' code and what is our reading. All plan a step from its documents;
fixed static also needs the degree of the whole data set. Static plans at every degree come from `make_plan(mode="static")`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from longctx.comparison.baselines.fixed_static import check_fixed_degree, place_fixed_static
from longctx.comparison.baselines.megatron_main_branch import MissingBaseline, load_scheduler, place_megatron_main
from longctx.comparison.baselines.plain_static import place_plain_static
from longctx.planning.assignment import Assignment, Integers
from longctx.planning.check import check_lengths, check_plan, check_settings
from longctx.planning.cost.bounds import plan_cost
from longctx.planning.cost.model import score
from longctx.planning.cost.rounds import choose_rounds
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.plan import Plan

__all__ = ["BASELINES", "Baseline", "MissingBaseline", "plan_baseline", "plan_fixed_static"]

Place = Callable[[HardwareProfile, Integers, int, int], Assignment]
"""(profile, lengths, ranks, tokens_per_rank) → assignment. Raises PlanError if the system cannot hold the documents."""


@dataclass(frozen=True)
class Baseline:
    """Another system's scheduler. `about` tells what is the authors' code and what is our reading."""

    title: str
    place: Place
    about: str = ""
    load: Callable[[], object] = lambda: None  # imports the system's package; not part of planning time


BASELINES: dict[str, Baseline] = {
    "plain-static": Baseline(
        "plain static",
        place_plain_static,
        "One power-of-two degree per step, the best one, documents packed best-fit by tokens, without a cost model: stronger "
        "than what trainers run, which is fixed static.",
    ),
    "megatron-main": Baseline(
        "Megatron main",
        place_megatron_main,
        "Theirs: the class BalancedCPScheduler of the megatron-core wheel, unchanged. Ours: documents that it runs one after "
        "another on a rank within a group are packed into micro-batches of the token budget.",
        load_scheduler,
    ),
}


def plan_baseline(
    name: str,
    lengths: Sequence[int],
    *,
    ranks: int,
    tokens_per_rank: int,
    profile: HardwareProfile,
    baselines: Mapping[str, Baseline] = BASELINES,
) -> Plan:
    """Plans the documents with one of `baselines`, by its name.

    Raises:
        PlanError: for invalid input, or if the baseline cannot hold the documents.
        MissingBaseline: if the baseline needs a package that is not installed.
    """
    check_settings(ranks, tokens_per_rank, "auto", None, None, None)
    sizes = check_lengths(lengths, ranks, tokens_per_rank, profile)
    baselines[name].load()
    return _plan("auto", name, baselines[name].place, sizes, ranks, tokens_per_rank, profile)


def plan_fixed_static(
    lengths: Sequence[int], *, ranks: int, tokens_per_rank: int, profile: HardwareProfile, degree: int
) -> Plan:
    """Plans the documents, in the order in which they were drawn, at the fixed degree of their data set (see `fixed_static`).

    Raises PlanError for invalid input, or if the degree does not divide the ranks or does not hold every document.
    """
    check_settings(ranks, tokens_per_rank, "static", degree, None, None)
    sizes = check_lengths(lengths, ranks, tokens_per_rank, profile)
    check_fixed_degree(degree, int(sizes.max()), ranks, tokens_per_rank)
    place = partial(place_fixed_static, degree=degree)
    return _plan("static", f"static:{degree}", place, sizes, ranks, tokens_per_rank, profile)


def _plan(
    mode: str, winner: str, place: Place, sizes: Integers, ranks: int, tokens_per_rank: int, profile: HardwareProfile
) -> Plan:
    """Places the documents, then scores and checks the plan; only placing counts as planning time."""
    began = time.perf_counter()
    assignment = place(profile, sizes, ranks, tokens_per_rank)
    planning_ms = (time.perf_counter() - began) * 1e3
    rounds, timed = choose_rounds(profile, sizes, assignment, score(profile, sizes, assignment, ranks))
    plan = Plan(
        mode=mode,
        winner=winner,
        ranks=ranks,
        tokens_per_rank=tokens_per_rank,
        lengths=tuple(sizes.tolist()),
        micro_batches=assignment.placements(rounds),
        profile=profile,
        cost=plan_cost(timed, profile, sizes, tokens_per_rank),
        planning_ms=planning_ms,
    )
    check_plan(plan)
    return plan

"""Modelled comparison: plans the same documents by auto, bins and static degrees, scored by one
cost model.

A `Case` is one step. `compare_case` plans it with every planner. Speedups are over three static
plans: one degree for all steps, the smallest or the best, as in trainers without dynamic degrees;
and the best degree of every step (`context.mode: static`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean, geometric_mean
from types import MappingProxyType
from typing import Any

import numpy as np

from longctx.comparison.baselines import (
    Place,
    best_single_degree,
    fixed_degree,
    plan_fixed_static,
    plan_placed,
)
from longctx.planning.assignment import Assignment, remote_tokens, tokens_on_ranks
from longctx.planning.cost.bounds import tight_bound_s, unavoidable_gap
from longctx.planning.cost.model import NANOSECONDS
from longctx.planning.cost.rounds import plan_score
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.plan import Plan, PlanError
from longctx.planning.planners.planner import make_plan

TITLES = {
    "auto": "auto",
    "bins": "bins",
    "single-degree": "best single",
    "fixed-static": "fixed static",
    "static": "best static",
}
PLANNERS = tuple(TITLES)
"""Planners that are compared, in the order of all tables and figures."""
SPEEDUPS = {
    "speedup_over_fixed": "fixed-static",
    "speedup_over_single": "single-degree",
    "speedup_over_best_static": "static",
}
"""Speedup of a row → planner it is relative to, the headline first."""


@dataclass(frozen=True)
class Case:
    """One step to be planned.

    Attributes:
        longest: tokens of the longest document of the data set, which sets the degree of fixed
            static; None: of this step.
        fixed_degree: degree of fixed static, if given explicitly.
        single_degree: degree with which fixed static takes least time for all steps of a
            comparison; None: for this step.
    """

    lengths: tuple[int, ...]
    ranks: int
    tokens_per_rank: int
    seed: int = 0
    longest: int | None = None
    fixed_degree: int | None = None
    single_degree: int | None = None


@dataclass(frozen=True)
class PlannerRow:
    """The plan of one step by one planner.

    Times are in seconds, shares are fractions of all ranks' time in the step (work, exchange, idle
    and fixed add up to 1). `note` is empty, or the reason why there is no plan; all values of the
    plan are None then.

    Attributes:
        speedup_over_fixed: time of the fixed static plan / time of this plan; None without a fixed
            static plan.
        speedup_over_single: time of fixed static at the best single degree / time of this plan.
        speedup_over_best_static: time of the best static plan of the step, over all degrees / time
            of this plan.
        no_barrier_s: time if ranks synchronized only at the end of the step. Exact for fixed
            static, whose groups never change, where no micro-batch gathers or reduces weights; for
            other plans a lower bound.
        tight_bound_s: tight lower bound on the time of any plan of these documents; at least
            `lower_bound_s`.
        unavoidable_gap: `tight_bound_s` relative to `lower_bound_s`: the part of `gap` that no plan
            can avoid.
        exchange_share: waiting for K and V.
        idle_share: waiting for the slowest rank of the micro-batch.
        fixed_share: launches of micro-batches, and the optimizer.
        padding_share: unused token budget, as a share of micro-batches × ranks × tokens per rank.
            Nothing is padded.
        most_tokens: maximum tokens per rank in a micro-batch.
        remote_tokens: maximum number of remote tokens per rank whose K and V are in memory, with
            one exchange round.
    """

    seed: int
    ranks: int
    tokens_per_rank: int
    documents: int
    tokens: int
    longest: int
    planner: str
    winner: str = ""
    makespan_s: float | None = None
    lower_bound_s: float | None = None
    speedup_over_fixed: float | None = None
    speedup_over_single: float | None = None
    speedup_over_best_static: float | None = None
    no_barrier_s: float | None = None
    tight_bound_s: float | None = None
    gap: float | None = None
    unavoidable_gap: float | None = None
    work_share: float | None = None
    exchange_share: float | None = None
    idle_share: float | None = None
    fixed_share: float | None = None
    padding_share: float | None = None
    most_tokens: int | None = None
    remote_tokens: int | None = None
    micro_batches: int | None = None
    planning_ms: float | None = None
    note: str = ""


COLUMNS = tuple(f.name for f in fields(PlannerRow))


def compare_case(
    case: Case,
    profile: HardwareProfile,
    planners: Sequence[str] = PLANNERS,
    places: Mapping[str, Place] = MappingProxyType({}),
) -> list[PlannerRow]:
    """Plans one step with the given planners; returns their rows.

    If a planner has no plan, the note of its row gives the reason. `places` are the planners that
    only assign documents. Raises PlanError if no degree holds the documents.
    """
    request: dict[str, Any] = {
        "ranks": case.ranks,
        "tokens_per_rank": case.tokens_per_rank,
        "profile": profile,
    }
    plans = {"auto": make_plan(case.lengths, **request)}
    tight_s = tight_bound_s(plans["auto"])
    notes: dict[str, str] = {}
    for planner in planners:
        try:
            if planner in places:
                plans[planner] = plan_placed(planner, places[planner], case.lengths, **request)
            elif planner in ("fixed-static", "single-degree"):
                plans[planner] = plan_fixed_static(
                    case.lengths, **request, degree=_degree(planner, case, profile)
                )
            elif planner not in plans:
                plans[planner] = make_plan(case.lengths, **request, mode=planner)
        except PlanError as error:
            notes[planner] = str(error)
    baseline_s = {
        speedup: plans[name].makespan_s for speedup, name in SPEEDUPS.items() if name in plans
    }
    return [
        PlannerRow(
            seed=case.seed,
            ranks=case.ranks,
            tokens_per_rank=case.tokens_per_rank,
            documents=len(case.lengths),
            tokens=sum(case.lengths),
            longest=max(case.lengths),
            planner=planner,
            note=notes.get(planner, ""),
            **(_figures(plans[planner], baseline_s, tight_s) if planner in plans else {}),
        )
        for planner in planners
    ]


def _degree(planner: str, case: Case, profile: HardwareProfile) -> int:
    """Returns the degree of fixed static, or the best single one. Raises PlanError if no degree
    holds the documents."""
    longest = case.longest or max(case.lengths)
    if planner == "fixed-static":
        return case.fixed_degree or fixed_degree(longest, case.ranks, case.tokens_per_rank)
    steps = [case.lengths]
    return case.single_degree or best_single_degree(
        steps, longest, ranks=case.ranks, tokens_per_rank=case.tokens_per_rank, profile=profile
    )


def _figures(plan: Plan, baseline_s: Mapping[str, float], tight_s: float) -> dict[str, Any]:
    """Returns the values of a plan's row. `baseline_s`: seconds of the baseline of every speedup,
    by its name."""
    lengths = np.array(plan.lengths, dtype=np.int64)
    assignment = Assignment.of(plan)
    times = plan_score(plan)
    makespan = times.makespan_ns
    ranks = plan.ranks
    exchange = int(times.exposed.sum()) / ranks / makespan
    busy = int(times.time.sum()) / ranks / makespan
    fixed_ns = times.step_ns + len(times.time) * times.launch_ns
    fixed = fixed_ns / makespan
    shape = (len(plan.micro_batches), ranks)
    local, remote = (
        int(held(lengths, assignment, shape).max()) for held in (tokens_on_ranks, remote_tokens)
    )
    return {
        "winner": plan.winner,
        "makespan_s": plan.makespan_s,
        "lower_bound_s": plan.lower_bound_s,
        "no_barrier_s": (fixed_ns + int(times.time.sum(axis=0).max())) / NANOSECONDS,
        "tight_bound_s": tight_s,
        **{name: seconds / plan.makespan_s for name, seconds in baseline_s.items()},
        "gap": plan.gap,
        "unavoidable_gap": unavoidable_gap(tight_s, plan.lower_bound_s),
        "work_share": busy - exchange,
        "exchange_share": exchange,
        "idle_share": 1 - fixed - busy,
        "fixed_share": fixed,
        "padding_share": 1 - sum(plan.lengths) / (shape[0] * ranks * plan.tokens_per_rank),
        "most_tokens": local,
        "remote_tokens": remote,
        "micro_batches": shape[0],
        "planning_ms": plan.planning_ms,
    }


def mean_rows(rows: Sequence[PlannerRow]) -> list[PlannerRow]:
    """Returns one row per number of ranks and planner, of all seeds, as MEANS says; the most
    frequent `winner`.

    A planner that failed for some seed has no values, and the first of its notes.
    """
    groups: dict[tuple[int, str], list[PlannerRow]] = {}
    for row in rows:
        groups.setdefault((row.ranks, row.planner), []).append(row)
    return [_mean(group) for group in groups.values()]


def _rounded(values: Sequence[float]) -> int:
    return round(fmean(values))


MEANS: dict[str, Callable[[Sequence[float]], float]] = {
    **dict.fromkeys(("documents", "tokens", "longest", "micro_batches"), _rounded),
    **dict.fromkeys(("most_tokens", "remote_tokens"), max),
    **dict.fromkeys(SPEEDUPS, geometric_mean),
}
"""How one number is made of the numbers of several seeds; otherwise by their mean."""
SAME = ("seed", "ranks", "tokens_per_rank", "planner", "note")


def _mean(rows: list[PlannerRow]) -> PlannerRow:
    winners, notes = ([getattr(row, name) for row in rows] for name in ("winner", "note"))
    note = next(filter(None, notes), "")
    values: dict[str, Any] = {name: getattr(rows[0], name) for name in SAME}
    values |= {"note": note, "winner": "" if note else max(winners, key=winners.count)}
    for name in (name for name in COLUMNS if name not in values):
        each = [getattr(row, name) for row in rows]
        values[name] = None if None in each else MEANS.get(name, fmean)(each)
    return PlannerRow(**values)


def most_speedup(rows: Sequence[PlannerRow], speedup: str) -> float | None:
    """Returns the upper bound on `speedup` of any plan of these documents, from auto's speedup and
    the tight bound.

    Computed relative to auto, so that for means over steps (geometric for speedups) the bound is
    never below auto's speedup.
    """
    auto = next(row for row in rows if row.planner == "auto")
    reached = getattr(auto, speedup)
    if reached is None or auto.makespan_s is None or not auto.tight_bound_s:
        return None
    return float(reached * auto.makespan_s / auto.tight_bound_s)


def over_fixed_without_barriers(rows: Sequence[PlannerRow]) -> float | None:
    """Returns the speedup of auto over fixed static without barriers between the micro-batches of
    fixed static."""
    by = {row.planner: row for row in rows}
    speedup = by["auto"].speedup_over_fixed
    fixed = by["fixed-static"]
    if speedup is None or fixed.no_barrier_s is None or fixed.makespan_s is None:
        return None
    # Scales the headline, which is a geometric mean over steps.
    return speedup * fixed.no_barrier_s / fixed.makespan_s


def degree_of(row: PlannerRow) -> str:
    """Returns the degree of a static plan as text, `8` for `static:8`; empty for plans with several
    degrees."""
    if row.planner in SPEEDUPS.values():
        return row.winner.removeprefix("static:")
    return ""

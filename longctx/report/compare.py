"""Compare: the same documents planned by auto, bins, every static degree and the baselines, all scored by one cost model.

A `Case` is one step: documents, ranks and budget. `compare_case` plans it in every way and gives a `Row` for each, `compare`
does so over ranks, budgets and longest documents. Times are modelled: what is compared is plans, on the constants of one
hardware profile.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from statistics import fmean
from typing import Any

import numpy as np

from longctx.planning.assignment import Assignment, spread, tokens_on_ranks
from longctx.planning.baselines import BASELINES, MissingBaseline, plan_baseline
from longctx.planning.cost import NANOSECONDS, score
from longctx.planning.plan import Plan, PlanError
from longctx.planning.planner import make_plan
from longctx.planning.profile import HardwareProfile
from longctx.planning.static import static_bounds_ns

OURS = ("auto", "bins")
TITLES = {"auto": "auto", "bins": "bins", "static": "best static"} | {name: b.title for name, b in BASELINES.items()}
PLANNERS = tuple(TITLES)
"""Every way of planning that is compared, in the order of all tables and figures."""
ALL_DEGREES_UP_TO = 64
"""Up to so many ranks every static degree is tried; beyond, 2^k, 3·2^k, N and the one that auto found."""


@dataclass(frozen=True)
class Case:
    """One step to be planned. `sweep` says which figure it belongs to (ranks, budget or longest), `max_length` where its
    documents were cut, if they were."""

    lengths: tuple[int, ...]
    ranks: int
    tokens_per_rank: int
    sweep: str = "ranks"
    seed: int = 0
    max_length: int | None = None


@dataclass(frozen=True)
class Row:
    """One way of planning one step.

    Times in seconds, shares as fractions of all ranks' time in the step (work, exchange, idle and fixed add up to 1). `speedup`
    is the best static plan's time over this one's. `note` is empty, or says why there is no plan; all figures are then None.

    Attributes:
        exchange_share: ranks wait for K and V that attention could not hide.
        idle_share: ranks wait for the slowest rank of their micro-batch.
        fixed_share: launches of micro-batches, and the optimizer.
        padding_share: token slots (micro-batches × ranks × tokens per rank) that hold no token; longctx does not compute them.
        remote_tokens: most tokens of other ranks whose K and V a rank holds at once, at one exchange stage.
    """

    sweep: str
    seed: int
    ranks: int
    tokens_per_rank: int
    max_length: int | None
    documents: int
    tokens: int
    longest: int
    planner: str
    winner: str = ""
    makespan_s: float | None = None
    lower_bound_s: float | None = None
    speedup: float | None = None
    gap: float | None = None
    work_share: float | None = None
    exchange_share: float | None = None
    idle_share: float | None = None
    fixed_share: float | None = None
    padding_share: float | None = None
    remote_tokens: int | None = None
    micro_batches: int | None = None
    planning_ms: float | None = None
    note: str = ""


COLUMNS = tuple(f.name for f in fields(Row))


@dataclass(frozen=True)
class Outcome:
    """The rows of one case, and the plans behind them by planner."""

    case: Case
    rows: tuple[Row, ...]
    plans: Mapping[str, Plan] = field(repr=False)

    def row(self, planner: str) -> Row | None:
        return next((row for row in self.rows if row.planner == planner), None)


def compare_case(
    case: Case,
    profile: HardwareProfile,
    planners: Sequence[str] = PLANNERS,
    started: Callable[[str], object] = lambda planner: None,
    finished: Callable[[], object] = lambda: None,
) -> Outcome:
    """Plans one step in every way asked for; a planner that cannot hold the documents says so in the note of its row.

    `started` and `finished` are called around every planner, to show progress.

    Raises PlanError if the documents fit no degree at all.
    """
    started("auto")
    plans: dict[str, Plan] = {"auto": make_plan(case.lengths, **_request(case, profile))}
    notes: dict[str, str] = {}
    for planner in planners:
        started(planner)
        try:
            if planner == "static":
                plans[planner] = best_static(case, profile, plans["auto"])
            elif planner in BASELINES:
                plans[planner] = plan_baseline(planner, case.lengths, **_request(case, profile))
            elif planner not in plans:
                plans[planner] = make_plan(case.lengths, **_request(case, profile), mode=planner)
        except (PlanError, MissingBaseline) as error:
            notes[planner] = str(error)
        finished()
    static = plans["static"].makespan_s if "static" in plans else None
    rows = [_row(case, planner, plans.get(planner), static, notes.get(planner, "")) for planner in planners]
    return Outcome(case, tuple(rows), plans)


def best_static(case: Case, profile: HardwareProfile, auto: Plan) -> Plan:
    """The best plan with one degree for all. Degrees whose own bound is no better than the best so far are not planned."""
    lengths = np.array(case.lengths, dtype=np.int64)
    degrees = static_degrees(case.ranks)
    if auto.winner.startswith("static:"):
        degrees.add(int(auto.winner.removeprefix("static:")))
    bounds = [
        (static_bounds_ns(profile, lengths, case.ranks, case.tokens_per_rank, degree)[1], degree)
        for degree in degrees
        if degree * case.tokens_per_rank >= max(case.lengths)
    ]
    best: Plan | None = None
    planning_ms = 0.0
    for bound, degree in sorted(bounds):
        if best is not None and bound / NANOSECONDS >= best.makespan_s:
            break
        try:
            plan = make_plan(case.lengths, **_request(case, profile), mode="static", degree=degree)
        except PlanError:
            continue  # an odd budget holds a token less than the bound assumed
        planning_ms += plan.planning_ms
        if best is None or plan.makespan_s < best.makespan_s:
            best = plan
    if best is None:
        raise PlanError(f"no single degree holds every document at {case.tokens_per_rank} tokens a rank")
    return Plan(**{**best.__dict__, "planning_ms": planning_ms})


def static_curve(case: Case, profile: HardwareProfile) -> list[tuple[int, float | None]]:
    """(degree, makespan in seconds, or None if a document does not fit) for degrees 2^k, 3·2^k and N."""
    curve: list[tuple[int, float | None]] = []
    for degree in sorted(_coarse_degrees(case.ranks)):
        try:
            plan = make_plan(case.lengths, **_request(case, profile), mode="static", degree=degree)
        except PlanError:
            curve.append((degree, None))
        else:
            curve.append((degree, plan.makespan_s))
    return curve


def static_degrees(ranks: int) -> set[int]:
    """The degrees among which the best static one is sought."""
    if ranks <= ALL_DEGREES_UP_TO:
        return set(range(1, ranks + 1))
    return _coarse_degrees(ranks)


def _coarse_degrees(ranks: int) -> set[int]:
    return {d << i for d in (1, 3) for i in range(ranks.bit_length()) if d << i <= ranks} | {ranks}


def cut(lengths: Sequence[int], longest: int) -> tuple[int, ...]:
    """Documents with those longer than `longest` split into pieces of that many tokens and a rest, as training does."""
    pieces: list[int] = []
    for length in lengths:
        pieces += [longest] * (length // longest)
        if length % longest:
            pieces.append(length % longest)
    return tuple(pieces)


def _request(case: Case, profile: HardwareProfile) -> dict[str, Any]:
    return {"ranks": case.ranks, "tokens_per_rank": case.tokens_per_rank, "profile": profile}


def _row(case: Case, planner: str, plan: Plan | None, static: float | None, note: str) -> Row:
    row = Row(
        sweep=case.sweep,
        seed=case.seed,
        ranks=case.ranks,
        tokens_per_rank=case.tokens_per_rank,
        max_length=case.max_length,
        documents=len(case.lengths),
        tokens=sum(case.lengths),
        longest=max(case.lengths),
        planner=planner,
        note=note,
    )
    if plan is None:
        return row
    lengths = np.array(plan.lengths, dtype=np.int64)
    assignment = Assignment.of(plan)
    times = score(plan.profile, lengths, assignment, plan.ranks)
    makespan, ranks = times.makespan_ns, plan.ranks
    exchange = int(times.exposed.sum()) / ranks / makespan
    busy = int(times.time.sum()) / ranks / makespan
    fixed = (times.step_ns + len(times.time) * times.launch_ns) / makespan
    shape = (len(plan.micro_batches), ranks)
    rings = assignment.degree > 1
    stop = assignment.first_rank + assignment.degree
    whole = spread(lengths * rings, assignment.micro_batch, assignment.first_rank, stop, shape)
    own = tokens_on_ranks(lengths, assignment, shape)
    alone = np.bincount(assignment.micro_batch * ranks + assignment.first_rank, lengths * ~rings, shape[0] * ranks)
    remote = int((whole - (own - alone.reshape(shape))).max())
    return Row(
        **{
            **asdict(row),
            "winner": plan.winner,
            "makespan_s": plan.makespan_s,
            "lower_bound_s": plan.lower_bound_s,
            "speedup": None if static is None else static / plan.makespan_s,
            "gap": plan.gap,
            "work_share": busy - exchange,
            "exchange_share": exchange,
            "idle_share": 1 - fixed - busy,
            "fixed_share": fixed,
            "padding_share": 1 - row.tokens / (shape[0] * ranks * plan.tokens_per_rank),
            "remote_tokens": remote,
            "micro_batches": shape[0],
            "planning_ms": plan.planning_ms,
        }
    )


def mean_rows(rows: Sequence[Row]) -> list[Row]:
    """One row for each planner and setting, the mean over seeds; speedups by geometric mean, `winner` the commonest.

    A planner that failed for some seed has no figures, and the first of its notes. What describes the documents is a mean too.
    """
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        cap = row.max_length if row.sweep == "longest" else None
        groups.setdefault((row.sweep, row.ranks, row.tokens_per_rank, cap, row.planner), []).append(row)
    return [_mean(group) for group in groups.values()]


DESCRIPTION = ("documents", "tokens", "longest")
WHOLE = ("micro_batches", "remote_tokens")
FIGURES = (
    *("makespan_s", "lower_bound_s", "gap", "work_share", "exchange_share", "idle_share", "fixed_share", "padding_share"),
    "planning_ms",
)


def _mean(rows: list[Row]) -> Row:
    values: dict[str, Any] = asdict(rows[0])
    values |= {name: round(fmean(getattr(row, name) for row in rows)) for name in DESCRIPTION}
    values["note"] = next((row.note for row in rows if row.note), "")
    if values["note"]:
        values |= dict.fromkeys((*FIGURES, *WHOLE, "speedup"), None) | {"winner": ""}
        return Row(**values)
    winners = [row.winner for row in rows]
    values["winner"] = max(winners, key=winners.count)
    values |= {name: fmean(getattr(row, name) for row in rows) for name in FIGURES}
    values |= {name: round(fmean(getattr(row, name) for row in rows)) for name in WHOLE}
    speedups = [row.speedup for row in rows if row.speedup is not None]
    values["speedup"] = math.exp(fmean(map(math.log, speedups))) if len(speedups) == len(rows) else None
    return Row(**values)


def sweep_budgets(tokens_per_rank: int) -> list[int]:
    """Budgets around the one given: a quarter to four times."""
    return sorted({max(1, tokens_per_rank * factor // 4) for factor in (1, 2, 4, 8, 16)})


def sweep_longest(longest: int, tokens_per_rank: int) -> list[int]:
    """Maximum lengths, in powers of two from a quarter of the budget up to the longest document."""
    start = max(1, 1 << (max(1, tokens_per_rank // 4).bit_length() - 1))
    powers = [start << i for i in range(64) if start << i < longest]
    return [*powers[-7:], longest]

"""Benchmark of planning: auto, bins, static degrees and other systems on every length mix, by the
cost model.

    python bench/plan.py      # all tables: some minutes
    python bench/plan.py --only "speedups wlb_128k 64 ranks" --seeds 2 --out /tmp/plan

Three tables: `speedups` has every planner on 8 to 1,024 ranks, over fixed static (one degree for
the whole run, the smallest that holds the longest document of the mix), and auto also over the best
single degree for the run and over the best static degree of every step; `gaps` has auto's gap to
the lower bound, and the part that no plan of ours can avoid, also for numbers of ranks other than
powers of two, and with documents stretched until the longest of a step has 2M tokens, and for the
synthetic mix `few_long`; `windows` has the most that moving documents between steps could gain,
over windows of 2, 4 and 8 steps. Writes OUT.csv (one line per planner and setting, means over
seeds) and OUT.md. Documents that do not fit (on few ranks) are split as in training. Planning times
are processor time of one thread for auto, and wall clock for the others.
"""

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, geometric_mean
from typing import Any

import numpy as np

import rivals
from harness import Table, command, facts, markdown, options
from longctx.comparison import baselines, modelled
from longctx.comparison.baselines import plan_fixed_static
from longctx.comparison.mixes import load_mix, mix_names
from longctx.comparison.modelled import COLUMNS, Case, PlannerRow
from longctx.comparison.steps import fit
from longctx.planning.cost.bounds import step_bound_ns
from longctx.planning.cost.model import NANOSECONDS
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.layout import longest_document
from longctx.planning.planners.planner import make_plan
from rivals import RIVALS

TOKENS_PER_RANK = 16384
PROFILE = "h100-nvlink-ib"
STRETCHED = 2 << 20
"""Tokens of the longest document of every step with stretched documents."""
FEW_LONG = "few_long"
WINDOWS = (2, 4, 8)
TITLES = modelled.TITLES | rivals.TITLES
PLANNERS = (*(name for name in modelled.PLANNERS if name != "single-degree"), *RIVALS)
FIGURES = [name for name in COLUMNS if name not in ("seed", "speedup_over_single")]


@dataclass(frozen=True)
class Setting:
    """Steps of documents from a mix, stretched until the longest of a step has `stretched_to`
    tokens (None: not stretched)."""

    table: str
    mix: str
    ranks: int
    documents_a_rank: int
    stretched_to: int | None = None

    @property
    def label(self) -> str:
        stretched = f" stretched to {self.stretched_to}" if self.stretched_to else ""
        return (
            f"{self.table} {self.mix} {self.ranks} ranks {self.documents_a_rank} documents a "
            f"rank{stretched}"
        )


@dataclass(frozen=True)
class SingleDegree:
    """The best single degree for all steps of a setting, with documents packed as fixed static
    packs them."""

    best_single_degree: int
    speedup_over_best_single: float  # of auto, geometric mean over steps


@dataclass(frozen=True)
class Result:
    """What is measured for a setting: the mean rows of all planners, and of `speedups` the best
    single degree."""

    setting: Setting
    rows: list[PlannerRow]
    single: SingleDegree | None = field(default=None)

    def __getitem__(self, planner: str) -> PlannerRow:
        return next(row for row in self.rows if row.planner == planner)


def settings(mixes: Sequence[str]) -> list[Setting]:
    """Returns all settings, in the order of the tables."""
    speedups = [
        Setting("speedups", mix, n, d)
        for mix in mixes
        for n in (8, 64, 256, 1024)
        for d in (1, 4, 16)
    ]
    gaps = [
        Setting("gaps", mix, n, d)
        for mix in mixes
        for n in (6, 8, 24, 48, 64, 256)
        for d in (1, 4, 10)
    ]
    few_long = [Setting("gaps", FEW_LONG, n, d) for n in (8, 64, 256) for d in (1, 4, 10)]
    stretched = [Setting("gaps", mix, 256, d, STRETCHED) for mix in mixes for d in (1, 4, 10)]
    windows = [
        Setting("windows", mix, n, d)
        for mix in (*mixes, FEW_LONG)
        for n in (8, 64, 256)
        for d in (1, 4)
    ]
    return speedups + gaps + few_long + stretched + windows


def few_long(documents: int, seed: int) -> list[int]:
    """Draws lengths of which an eighth is 32k to 128k, log-uniform, and the rest about 1.5k."""
    random = np.random.default_rng(seed)
    long = np.exp(random.uniform(np.log(32768), np.log(131072), documents // 8))
    short = np.maximum(1, random.normal(1500, 400, documents - documents // 8))
    return [int(length) for length in (*long, *short)]


def draw(setting: Setting, seed: int) -> list[int]:
    """Draws the documents of a step."""
    documents = setting.documents_a_rank * setting.ranks
    return (
        few_long(documents, seed)
        if setting.mix == FEW_LONG
        else list(load_mix(setting.mix).draw(documents, seed))
    )


def draw_steps(setting: Setting, seeds: int) -> list[tuple[int, ...]]:
    """Draws a step for every seed; documents longer than all ranks hold are split, as training
    splits them."""
    fits = longest_document(setting.ranks, TOKENS_PER_RANK)
    return [fit(stretch(draw(setting, seed), setting.stretched_to), fits) for seed in range(seeds)]


def main() -> None:
    parser = options(__doc__, "plan")
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="only settings whose label matches"
    )
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    began = time.monotonic()
    profile = HardwareProfile.load(PROFILE)
    wanted = [setting for setting in settings(mix_names()) if re.search(given.only, setting.label)]
    windows = [setting for setting in wanted if setting.table == "windows"]
    wanted = [setting for setting in wanted if setting.table != "windows"]
    about = facts("longctx", "numpy", "megatron-core") | {
        "profile": PROFILE,
        "seeds": str(given.seeds),
    }
    about |= {"load before": f"{os.getloadavg()[0]:.1f}", "command": command()}
    columns = [
        "table",
        "mix",
        "documents_a_rank",
        "stretched_to",
        *FIGURES,
        *SingleDegree.__annotations__,
    ]
    table = Table(given.out.with_suffix(".csv"), columns, about, overwrite=True)
    # A small step first, so that imports and first calls do not count as planning time.
    modelled.compare_case(Case((5000, 300, 20000), 4, TOKENS_PER_RANK), profile, PLANNERS, RIVALS)
    results: list[Result] = []
    for number, setting in enumerate(wanted, 1):
        print(f"{number} of {len(wanted)}: {setting.label}", file=sys.stderr)
        results.append(result := measure(setting, given.seeds, profile))
        for row in result.rows:
            single = asdict(result.single) if result.single and row.planner == "auto" else {}
            table.append(asdict(row) | asdict(setting) | single)
    gains = {setting: window_gains(setting, profile) for setting in windows}
    if not results and not gains:
        sys.exit(
            f"--only {given.only!r} matches no label; labels look like "
            f"{settings(mix_names())[0].label!r}"
        )
    text = page(results, gains, about | {"minutes": f"{(time.monotonic() - began) / 60:.1f}"})
    given.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


def measure(setting: Setting, seeds: int, profile: HardwareProfile) -> Result:
    """Plans the steps of a setting with all planners; of tables without speedups only with auto and
    the static degrees."""
    rows: list[PlannerRow] = []
    speedups = setting.table == "speedups"
    longest = (
        min(load_mix(setting.mix).longest, longest_document(setting.ranks, TOKENS_PER_RANK))
        if speedups
        else None
    )
    steps = draw_steps(setting, seeds)
    for seed, lengths in enumerate(steps):
        case = Case(lengths, setting.ranks, TOKENS_PER_RANK, seed=seed, longest=longest)
        planned = modelled.compare_case(
            case, profile, PLANNERS if speedups else ("auto", "static"), RIVALS
        )
        began_s = time.process_time()
        make_plan(lengths, ranks=setting.ranks, tokens_per_rank=TOKENS_PER_RANK, profile=profile)
        auto_ms = 1e3 * (time.process_time() - began_s)
        rows += [
            replace(row, planning_ms=auto_ms) if row.planner == "auto" else row for row in planned
        ]
    auto_s = [row.makespan_s for row in rows if row.planner == "auto" and row.makespan_s]
    single = best_single_degree(steps, longest, setting.ranks, profile, auto_s) if longest else None
    return Result(setting, modelled.mean_rows(rows), single)


def best_single_degree(
    steps: Sequence[Sequence[int]],
    longest: int,
    ranks: int,
    profile: HardwareProfile,
    auto_s: Sequence[float],
) -> SingleDegree:
    """Returns the power of two with which fixed static takes least time for all steps. `auto_s`:
    auto's time of each step."""
    best = baselines.best_single_degree(steps, longest, ranks, TOKENS_PER_RANK, profile)
    request: dict[str, Any] = {
        "ranks": ranks,
        "tokens_per_rank": TOKENS_PER_RANK,
        "profile": profile,
        "degree": best,
    }
    times = [plan_fixed_static(lengths, **request).makespan_s for lengths in steps]
    return SingleDegree(best, geometric_mean([a / b for a, b in zip(times, auto_s, strict=True)]))


def stretch(lengths: Sequence[int], longest: int | None) -> list[int]:
    """Scales all lengths by one factor, so that the longest becomes `longest` (None: no
    scaling)."""
    return (
        list(lengths)
        if longest is None
        else [max(1, length * longest // max(lengths)) for length in lengths]
    )


def window_gains(setting: Setting, profile: HardwareProfile) -> list[float]:
    """Returns by how much less time the steps of a window could take, if documents could move
    between them: at most.

    That is the time of auto's plans over a lower bound for all documents of a window, for windows
    of each size.
    """
    steps = draw_steps(setting, max(WINDOWS))
    request: dict[str, Any] = {
        "ranks": setting.ranks,
        "tokens_per_rank": TOKENS_PER_RANK,
        "profile": profile,
    }
    times = [make_plan(lengths, **request).makespan_s for lengths in steps]

    def bound_s(window: Sequence[Sequence[int]]) -> float:
        lengths = np.array([length for step in window for length in step], dtype=np.int64)
        # micro-batches, and at least one per step.
        least = -(-int(lengths.sum()) // (setting.ranks * TOKENS_PER_RANK))
        fixed = (len(window) - 1) * profile.step_s + max(0, len(window) - least) * profile.launch_s
        return fixed + step_bound_ns(profile, lengths, setting.ranks, TOKENS_PER_RANK) / NANOSECONDS

    starts = [range(0, len(steps), size) for size in WINDOWS]
    windows = [
        [(sum(times[i : i + r.step]), bound_s(steps[i : i + r.step])) for i in r] for r in starts
    ]
    return [fmean(time / bound - 1 for time, bound in window) for window in windows]


def page(
    results: Sequence[Result], gains: Mapping[Setting, Sequence[float]], about: dict[str, str]
) -> str:
    """Returns all tables in Markdown, and the facts of the run."""
    speedups = [result for result in results if result.setting.table == "speedups"]
    gaps = [result for result in results if result.setting.table == "gaps"]
    lines = [*(speedup_table(speedups) if speedups else []), *(gap_table(gaps) if gaps else [])]
    lines += window_table(gains) if gains else []
    told = ", ".join(f"{name} {value}" for name, value in about.items())
    lines += [
        f"{TOKENS_PER_RANK:,} tokens per rank; documents longer than all ranks hold are split. "
        f"Means over seeds, geometric ones of speedups. {told}",
        "",
    ]
    return "\n".join(lines)


def speedup_table(results: Sequence[Result]) -> list[str]:
    """Returns the table of speedups: all planners over fixed static, and auto over better static
    degrees."""
    others = [planner for planner in PLANNERS if planner not in ("auto", "fixed-static")]
    head = [
        "mix",
        "ranks",
        "docs per rank",
        "tokens per step",
        "fixed",
        "**auto**",
        "without barriers",
    ]
    head += ["over best single", "over best static"]
    head += [
        *(TITLES[planner] for planner in others),
        "upper bound",
        "gap",
        "unavoidable gap",
        "planning time of auto",
    ]
    lines, notes = [], []
    for result in results:
        setting, rows, auto, single = result.setting, result.rows, result["auto"], result.single
        line = [
            setting.mix,
            f"{auto.ranks:,}",
            str(setting.documents_a_rank),
            f"{auto.tokens / 1e6:.2f}M",
        ]
        line += [
            modelled.degree_of(result["fixed-static"]),
            f"**{times(auto.speedup_over_fixed)}**",
        ]
        line.append(times(modelled.over_fixed_without_barriers(rows)))
        line.append(
            f"{times(single.speedup_over_best_single)} ({single.best_single_degree})"
            if single
            else "—"
        )
        line.append(times(auto.speedup_over_best_static))
        for planner in others:
            speedup = result[planner].speedup_over_fixed
            ahead = (
                speedup
                and auto.speedup_over_fixed
                and round(speedup, 2) > round(auto.speedup_over_fixed, 2)
            )
            line.append(f"[{times(speedup)}]" if ahead else times(speedup))
        line.append(times(modelled.most_speedup(rows, "speedup_over_fixed")))
        lines.append(
            [*line, f"{auto.gap:.1%}", f"{auto.unavoidable_gap:.1%}", f"{auto.planning_ms:,.0f} ms"]
        )
        notes += [
            f"- {TITLES[row.planner]}, {setting.mix}, {row.ranks} ranks: {row.note}"
            for row in rows
            if row.note
        ]
    return [
        "Modelled speedup over fixed static: one degree for the whole run, the smallest power of "
        "two that holds the longest document of the mix, documents packed in the order drawn. "
        "`without barriers`: speedup of auto if the groups of fixed static synchronize only at "
        "the end of a step, as when every rank keeps all weights. `over best single`: speedup of "
        "auto over the best power of two for the whole run (in brackets), packed in the same way. "
        "`over best static`: speedup of auto over the best static degree of every step, packed by "
        "time, as `context.mode: static` does. Square brackets mark planners ahead of auto. "
        "`upper bound`: bound on the speedup of any plan of ours. Gap: of auto to the lower bound "
        "on time, and its unavoidable part.",
        "",
        *markdown(head, lines, 1),
        "",
        *dict.fromkeys(notes),
        *([""] if notes else []),
    ]


def gap_table(results: Sequence[Result]) -> list[str]:
    """Returns the table of gaps; settings that differ only in documents per rank share a line."""
    counts = sorted({result.setting.documents_a_rank for result in results})
    gaps: dict[tuple[str, int, int | None], dict[int, str]] = {}
    for result in results:
        setting, auto = result.setting, result["auto"]
        line = gaps.setdefault((setting.mix, setting.ranks, setting.stretched_to), {})
        line[setting.documents_a_rank] = f"{auto.gap:.1%} ({auto.unavoidable_gap:.1%})"
    lines = []
    for (mix, ranks, longest), line in gaps.items():
        length = "as in the mix" if longest is None else f"stretched to {longest:,}"
        lines.append([mix, f"{ranks:,}", length, *(line.get(count, "") for count in counts)])
    head = ["mix", "ranks", "longest document", *(f"{count} per rank" for count in counts)]
    return [
        "Gap of auto to the lower bound, by documents per rank; in brackets the part that no plan "
        "of ours can avoid.",
        "",
        *markdown(head, lines, 1),
        "",
    ]


def window_table(gains: Mapping[Setting, Sequence[float]]) -> list[str]:
    """Returns the table of what moving documents between steps could gain."""
    lines = [
        [s.mix, str(s.ranks), str(s.documents_a_rank), *(f"{gain:.1%}" for gain in found)]
        for s, found in gains.items()
    ]
    return [
        "The most that planning several steps at once could gain, by moving documents between "
        "them: auto's time over a lower bound for all documents of the window. Mean over the "
        "windows of 8 steps.",
        "",
        *markdown(
            ["mix", "ranks", "documents per rank", *(f"{size} steps" for size in WINDOWS)], lines, 1
        ),
        "",
    ]


def times(speedup: float | None) -> str:
    return "—" if speedup is None else f"{speedup:.2f}"


if __name__ == "__main__":
    main()

"""Benchmark of planning: auto, bins, static degrees and other systems on every length mix, by the cost model alone.

    python bench/plan.py      # both tables: some minutes
    python bench/plan.py --tables speedups --mixes wlb_128k --ranks 64 --seeds 2 --out /tmp/plan

Two tables: `speedups` has every planner on 8 to 1,024 ranks, over fixed static (one degree for the steps of all seeds, that
of their longest document) and over the best static degree of every step; `gaps` has auto's distance to the lower bound, and
how much of it no plan can avoid, also on numbers of ranks that are no powers of two, and with documents stretched until the
longest of a step has 2M tokens. Writes OUT.csv (a line for each planner and setting, means over seeds, with machine, versions
and date) and OUT.md. Where documents do not fit (few ranks), they are split as in training. Planning times are wall clock in
one process: compare them within one run, on a machine that does nothing else (its load before the run is noted).
"""

import argparse
import csv
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from longctx.comparison.mixes import load_mix, mix_names
from longctx.comparison.modelled import (
    COLUMNS,
    PLANNERS,
    SPEEDUPS,
    TITLES,
    Case,
    Row,
    compare_case,
    cut,
    degree_of,
    mean_rows,
    most_speedup,
    over_fixed_without_barriers,
)
from longctx.planning.cost.hardware_profile import HardwareProfile
from longctx.planning.layout import longest_document

TOKENS_PER_RANK = 16384
SEEDS = 5
PROFILE = "h100-nvlink-ib"
STRETCHED = 2 << 20
"""Tokens of the longest document of every step, where documents are stretched."""
BRACKETS = "In brackets those ahead of auto; no plan passes `limit`."


@dataclass(frozen=True)
class Setting:
    """Steps of `documents` a rank from a mix; `longest` stretches them until the longest of a step has so many tokens."""

    table: str
    mix: str
    ranks: int
    documents: int
    longest: int | None = None

    @property
    def planners(self) -> tuple[str, ...]:
        return PLANNERS if self.table == "speedups" else ("auto", "static")


Result = tuple[Setting, list[Row]]


def settings(mixes: Sequence[str]) -> list[Setting]:
    """Everything that is measured, in the order of the tables."""
    speedups = [Setting("speedups", mix, n, d) for mix in mixes for n in (8, 64, 256, 1024) for d in (1, 4, 16)]
    gaps = [Setting("gaps", mix, n, d) for mix in mixes for n in (6, 8, 24, 48, 64, 256) for d in (1, 4, 10)]
    return speedups + gaps + [Setting("gaps", mix, 256, d, STRETCHED) for mix in mixes for d in (1, 4, 10)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", default="speedups,gaps")
    parser.add_argument("--mixes", default=",".join(mix_names()))
    parser.add_argument("--ranks", help="only rows with these ranks, such as 8,64")
    parser.add_argument("--documents", help="only cells with so many documents a rank, such as 1,4")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--exchange-levels", type=int, choices=(1, 2), default=2, help="2: one copy for each node, as training")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "plan", help="without a suffix")
    arguments = parser.parse_args()
    began, load = time.perf_counter(), os.getloadavg()[0]
    profile = HardwareProfile.load(PROFILE, arguments.exchange_levels)
    wanted = [
        setting
        for setting in settings(arguments.mixes.split(","))
        if setting.table in arguments.tables.split(",")
        and (arguments.ranks is None or str(setting.ranks) in arguments.ranks.split(","))
        and (arguments.documents is None or str(setting.documents) in arguments.documents.split(","))
    ]
    warm_up(profile)
    results: list[Result] = []
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("planning", total=len(wanted))
        for setting in wanted:
            progress.update(task, description=f"{setting.mix}, {setting.ranks} ranks, {setting.documents} a rank")
            results.append((setting, measure(setting, arguments.seeds, profile)))
            progress.advance(task)
    facts = {
        **machine(),
        "profile": PROFILE,
        "exchange levels": str(arguments.exchange_levels),
        "seeds": str(arguments.seeds),
        "load before": f"{load:.1f}",
        "minutes": f"{(time.perf_counter() - began) / 60:.1f}",
        "command": shlex.join(["python", "bench/plan.py", *sys.argv[1:]]),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_csv(results, facts, arguments.out.with_suffix(".csv"))
    text = markdown(results, facts)
    arguments.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


def warm_up(profile: HardwareProfile) -> None:
    """One small step, so that imports and first calls are not counted as planning."""
    compare_case(Case((5000, 300, 20000), 4, TOKENS_PER_RANK), profile)


def measure(setting: Setting, seeds: int, profile: HardwareProfile) -> list[Row]:
    """Mean rows of the setting's planners."""
    rows: list[Row] = []
    fits = longest_document(setting.ranks, TOKENS_PER_RANK)
    drawn = [load_mix(setting.mix).draw(setting.documents * setting.ranks, seed) for seed in range(seeds)]
    steps = [cut(stretch(lengths, setting.longest), fits) for lengths in drawn]
    for seed, lengths in enumerate(steps):
        case = Case(lengths, setting.ranks, TOKENS_PER_RANK, seed=seed, longest=max(map(max, steps)))
        rows += compare_case(case, profile, setting.planners).rows
    return mean_rows(rows)


def stretch(lengths: Sequence[int], longest: int | None) -> list[int]:
    """All lengths times one factor, so that the longest becomes `longest`; as they are if it is None."""
    return list(lengths) if longest is None else [max(1, length * longest // max(lengths)) for length in lengths]


def machine() -> dict[str, str]:
    """Where and with what this was measured."""
    facts = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{processor()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
    }
    for package in ("longctx", "numpy", "megatron-core"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    return facts


def processor() -> str:
    """The processor's name as Linux gives it, else the architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def write_csv(results: Sequence[Result], facts: dict[str, str], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        columns = [name for name in COLUMNS if name not in ("sweep", "seed", "max_length", "remote_kv_bytes")]
        names = ["table", "mix", "documents_a_rank", "stretched_to", *columns, *facts]
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        for setting, rows in results:
            where = {"table": setting.table, "mix": setting.mix, "documents_a_rank": setting.documents}
            for row in rows:
                values = {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in asdict(row).items()}
                writer.writerow({**where, "stretched_to": setting.longest, **values, **facts})


def markdown(results: Sequence[Result], facts: dict[str, str]) -> str:
    lines: list[str] = []
    if speedups := [(setting, rows) for setting, rows in results if setting.table == "speedups"]:
        lines += speedup_table(speedups)
    if gaps := [(setting, rows) for setting, rows in results if setting.table == "gaps"]:
        lines += gap_table(gaps)
    lines += [
        f"{TOKENS_PER_RANK:,} tokens a rank; documents longer than all ranks hold are split. Means over seeds. "
        + ", ".join(f"{name} {value}" for name, value in facts.items()),
        "",
    ]
    return "\n".join(lines)


def speedup_table(results: Sequence[Result]) -> list[str]:
    """First over fixed static, then over the best static degree of every step."""
    lines = [
        "Speedup over fixed static, modelled: one degree for all steps, the smallest power of two that holds the longest "
        f"document of all seeds, documents packed as they are drawn. {BRACKETS} The gap is that of auto to the lower bound; "
        "beside it stands the part that no plan can avoid. `without barriers` is auto's speedup "
        "where the groups of fixed static wait for each other at the end of the step alone, as every rank keeps all weights.",
        "",
        *speedups_over("speedup_over_fixed", "fixed", results),
        "",
        "Speedup over the best static degree of every step, an oracle that no trainer has (its commonest degree is named). "
        f"{BRACKETS}",
        "",
        *speedups_over("speedup_over_best_static", "best static", results),
    ]
    notes = dict.fromkeys(
        f"{TITLES[r.planner]}, {s.mix}, {r.ranks} ranks: {r.note}" for s, rows in results for r in rows if r.note
    )
    return [*lines, "", *(f"- {note}" for note in notes), *([""] if notes else [])]


def speedups_over(speedup: str, title: str, results: Sequence[Result]) -> list[str]:
    baseline = SPEEDUPS[speedup]
    others = [planner for planner in PLANNERS if planner not in ("auto", baseline)]
    headline = speedup == next(iter(SPEEDUPS))
    free = ["without barriers"] if headline else []
    head = ["mix", "ranks", "docs a rank", title, "**auto**", *free, *(TITLES[p] for p in others), "limit"]
    lines = table_head([*head, "gap", "unavoidable gap", "auto plans in"] if headline else head)
    for setting, rows in results:
        by = {row.planner: row for row in rows}
        auto, over = by["auto"], by[baseline]
        limit = most_speedup(rows, speedup)
        cells = [setting.mix, f"{auto.ranks:,}", str(setting.documents), degree_of(over) or "none fits"]
        cells += [f"**{times(auto, speedup)}**", *([f"{over_fixed_without_barriers(rows) or 0:.2f}"] if headline else [])]
        cells += [f"[{times(by[p], speedup)}]" if ahead(by[p], auto, speedup) else times(by[p], speedup) for p in others]
        cells += [f"{limit:.2f}" if limit else "—"]
        if headline:
            cells += [f"{auto.gap:.1%}", f"{auto.unavoidable_gap:.1%}", f"{auto.planning_ms:,.0f} ms"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def gap_table(results: Sequence[Result]) -> list[str]:
    """Settings that differ only in the documents a rank share a line."""
    counts = sorted({setting.documents for setting, _ in results})
    lines = [
        "Gap of auto to the lower bound by documents a rank; in brackets the part of it that no plan can avoid.",
        "",
        *table_head(["mix", "ranks", "longest document", *(f"{count} a rank" for count in counts)]),
    ]
    cells: dict[tuple[str, int, int | None], dict[int, Row]] = {}
    for setting, rows in results:
        auto = next(row for row in rows if row.planner == "auto")
        cells.setdefault((setting.mix, setting.ranks, setting.longest), {})[setting.documents] = auto
    for (mix, ranks, longest), found in cells.items():
        length = "that of the mix" if longest is None else f"all stretched to {longest:,}"
        gaps = [f"{row.gap:.1%} ({row.unavoidable_gap:.1%})" if (row := found.get(count)) else "" for count in counts]
        lines.append("| " + " | ".join([mix, f"{ranks:,}", length, *gaps]) + " |")
    return [*lines, ""]


def table_head(names: Sequence[str]) -> list[str]:
    return ["| " + " | ".join(names) + " |", "|---|" + "---:|" * (len(names) - 1)]


def times(row: Row, speedup: str) -> str:
    value = getattr(row, speedup)
    return "—" if value is None else f"{value:.2f}"


def ahead(row: Row, auto: Row, speedup: str) -> bool:
    """Whether it shows as faster than auto with two digits."""
    here, of_auto = getattr(row, speedup), getattr(auto, speedup)
    return here is not None and of_auto is not None and bool(round(here, 2) > round(of_auto, 2))


if __name__ == "__main__":
    main()

"""Benchmark of planning: auto, bins, the best static degree and other systems on every length mix, by the cost model alone.

    python bench/plan.py      # all mixes × 8, 64, 256, 1,024 ranks × 1, 4, 16 documents a rank: some minutes
    python bench/plan.py --mixes wlb_128k --ranks 64 --seeds 2 --out /tmp/plan

Writes OUT.csv (a line for each planner and setting, means over seeds, with machine, versions and date) and OUT.md (the table).
Where documents do not fit (few ranks), they are split as in training. Planning times are wall clock in one process: compare
them within one run, on a machine that does nothing else (its load before the run is noted).
"""

import argparse
import csv
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from longctx.planning.layout import longest_document
from longctx.planning.mixes import load_mix, mix_names
from longctx.planning.profile import HardwareProfile
from longctx.report.compare import COLUMNS, PLANNERS, TITLES, Case, Row, compare_case, cut, mean_rows

RANKS = (8, 64, 256, 1024)
DOCUMENTS_A_RANK = (1, 4, 16)
TOKENS_PER_RANK = 16384
SEEDS = 5
PROFILE = "h100-nvlink-ib"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixes", default=",".join(mix_names()))
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)))
    parser.add_argument("--documents", default=",".join(map(str, DOCUMENTS_A_RANK)), help="documents a rank")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "plan", help="without a suffix")
    arguments = parser.parse_args()
    began, load = time.perf_counter(), os.getloadavg()[0]
    profile = HardwareProfile.load(PROFILE)
    settings = [
        (mix, int(ranks), int(documents))
        for mix in arguments.mixes.split(",")
        for ranks in arguments.ranks.split(",")
        for documents in arguments.documents.split(",")
    ]
    warm_up(profile)
    results: list[tuple[str, int, list[Row]]] = []
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("planning", total=len(settings))
        for mix, ranks, documents in settings:
            progress.update(task, description=f"{mix}, {ranks} ranks, {documents} a rank")
            results.append((mix, documents, measure(mix, ranks, documents, arguments.seeds, profile)))
            progress.advance(task)
    facts = {
        **machine(),
        "profile": PROFILE,
        "seeds": str(arguments.seeds),
        "load before": f"{load:.1f}",
        "minutes": f"{(time.perf_counter() - began) / 60:.1f}",
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_csv(results, facts, arguments.out.with_suffix(".csv"))
    text = markdown(results, facts)
    arguments.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


def warm_up(profile: HardwareProfile) -> None:
    """One small step, so that imports and first calls are not counted as planning."""
    compare_case(Case((5000, 300, 20000), 4, TOKENS_PER_RANK), profile)


def measure(mix: str, ranks: int, documents: int, seeds: int, profile: HardwareProfile) -> list[Row]:
    """Mean rows of all planners over steps of `documents` a rank."""
    rows: list[Row] = []
    for seed in range(seeds):
        lengths = cut(load_mix(mix).draw(documents * ranks, seed), longest_document(ranks, TOKENS_PER_RANK))
        rows += compare_case(Case(lengths, ranks, TOKENS_PER_RANK, seed=seed), profile).rows
    return mean_rows(rows)


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


def write_csv(results: Sequence[tuple[str, int, list[Row]]], facts: dict[str, str], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        columns = [name for name in COLUMNS if name not in ("sweep", "seed", "max_length")]
        writer = csv.DictWriter(file, ["mix", "documents_a_rank", *columns, *facts], extrasaction="ignore")
        writer.writeheader()
        for mix, documents, rows in results:
            for row in rows:
                values = {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in asdict(row).items()}
                writer.writerow({"mix": mix, "documents_a_rank": documents, **values, **facts})


def markdown(results: Sequence[tuple[str, int, list[Row]]], facts: dict[str, str]) -> str:
    others = [planner for planner in PLANNERS if planner not in ("auto", "static")]
    head = [
        "mix",
        "ranks",
        "docs a rank",
        "best static",
        "**auto**",
        *(TITLES[p] for p in others),
        "bound",
        "gap of auto",
        "auto plans in",
    ]
    lines = [
        "Speedup over the best static degree (its commonest degree is named), modelled; in brackets those ahead of auto.",
        "",
        "| " + " | ".join(head) + " |",
        "|---|" + "---:|" * (len(head) - 1),
    ]
    for mix, documents, rows in results:
        by = {row.planner: row for row in rows}
        auto, static = by["auto"], by["static"]
        limit = (static.makespan_s or 0) / (static.lower_bound_s or 1)
        cells = [
            mix,
            f"{auto.ranks:,}",
            str(documents),
            static.winner.removeprefix("static:") or "none fits",
            f"**{times(auto)}**",
        ]
        cells += [f"[{times(by[p])}]" if ahead(by[p], auto) else times(by[p]) for p in others]
        cells += [f"{limit:.2f}" if limit else "—", f"{auto.gap:.1%}", f"{auto.planning_ms:,.0f} ms"]
        lines.append("| " + " | ".join(cells) + " |")
    notes = dict.fromkeys(
        f"{TITLES[r.planner]}, {mix}, {r.ranks} ranks: {r.note}" for mix, _, rows in results for r in rows if r.note
    )
    lines += ["", *(f"- {note}" for note in notes)] if notes else []
    lines += [
        "",
        f"{TOKENS_PER_RANK:,} tokens a rank; documents longer than all ranks hold are split. Means over seeds; the bound is "
        "the speedup that no plan can pass. " + ", ".join(f"{name} {value}" for name, value in facts.items()) + ". Made by "
        "`python bench/plan.py`.",
        "",
    ]
    return "\n".join(lines)


def times(row: Row) -> str:
    return "—" if row.speedup is None else f"{row.speedup:.2f}"


def ahead(row: Row, auto: Row) -> bool:
    """Whether it shows as faster than auto with two digits."""
    return row.speedup is not None and auto.speedup is not None and round(row.speedup, 2) > round(auto.speedup, 2)


if __name__ == "__main__":
    main()

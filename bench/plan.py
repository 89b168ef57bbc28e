"""Benchmark of planning: auto, bins, static degrees and other systems on every length mix, by the cost model.

    python bench/plan.py      # both tables: some minutes
    python bench/plan.py --only "speedups wlb_128k 64 ranks" --seeds 2 --out /tmp/plan

Two tables: `speedups` has every planner on 8 to 1,024 ranks, over fixed static (one degree for the steps of all seeds, for
their longest document), and auto also over the best static degree of every step; `gaps` has auto's gap to the lower bound, and
the part that no plan can avoid, also for numbers of ranks other than powers of two, and with documents stretched until the
longest of a step has 2M tokens. Writes OUT.csv (one line per planner and setting, means over seeds) and OUT.md. Documents that
do not fit (on few ranks) are split as in training. Planning times are wall clock in one process: compare them within one run,
on an idle machine (its load before the run is recorded).
"""

import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from harness import Table, command, facts, markdown, options
from longctx.comparison import modelled
from longctx.comparison.mixes import load_mix, mix_names
from longctx.comparison.modelled import COLUMNS, PLANNERS, TITLES, Case, Row
from longctx.planning.cost.hardware_profile import HardwareProfile
from longctx.planning.layout import longest_document

TOKENS_PER_RANK = 16384
PROFILE = "h100-nvlink-ib"
STRETCHED = 2 << 20
"""Tokens of the longest document of every step with stretched documents."""
FIGURES = [name for name in COLUMNS if name not in ("sweep", "seed", "max_length", "remote_kv_bytes")]


@dataclass(frozen=True)
class Setting:
    """Steps of documents from a mix, stretched until the longest of a step has `stretched_to` tokens (None: not stretched)."""

    table: str
    mix: str
    ranks: int
    documents_a_rank: int
    stretched_to: int | None = None

    @property
    def label(self) -> str:
        stretched = f" stretched to {self.stretched_to}" if self.stretched_to else ""
        return f"{self.table} {self.mix} {self.ranks} ranks {self.documents_a_rank} documents a rank{stretched}"


Result = tuple[Setting, list[Row]]


def settings(mixes: Sequence[str]) -> list[Setting]:
    """Returns all settings, in the order of the tables."""
    speedups = [Setting("speedups", mix, n, d) for mix in mixes for n in (8, 64, 256, 1024) for d in (1, 4, 16)]
    gaps = [Setting("gaps", mix, n, d) for mix in mixes for n in (6, 8, 24, 48, 64, 256) for d in (1, 4, 10)]
    return speedups + gaps + [Setting("gaps", mix, 256, d, STRETCHED) for mix in mixes for d in (1, 4, 10)]


def main() -> None:
    parser = options(__doc__, "plan")
    parser.add_argument("--only", default="", metavar="REGEX", help="only settings whose label matches")
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    began = time.monotonic()
    profile = HardwareProfile.load(PROFILE)
    wanted = [setting for setting in settings(mix_names()) if re.search(given.only, setting.label)]
    about = facts("longctx", "numpy", "megatron-core") | {"profile": PROFILE, "seeds": str(given.seeds)}
    about |= {"load before": f"{os.getloadavg()[0]:.1f}", "command": command()}
    columns = ["table", "mix", "documents_a_rank", "stretched_to", *FIGURES]
    table = Table(given.out.with_suffix(".csv"), columns, about, overwrite=True)
    # A small step first, so that imports and first calls do not count as planning time.
    modelled.compare_case(Case((5000, 300, 20000), 4, TOKENS_PER_RANK), profile)
    results: list[Result] = []
    for number, setting in enumerate(wanted, 1):
        print(f"{number} of {len(wanted)}: {setting.label}", file=sys.stderr)
        results.append((setting, measure(setting, given.seeds, profile)))
        for row in results[-1][1]:
            table.append(asdict(row) | asdict(setting))
    if not results:
        sys.exit(f"--only {given.only!r} matches no label; labels look like {settings(mix_names())[0].label!r}")
    text = page(results, about | {"minutes": f"{(time.monotonic() - began) / 60:.1f}"})
    given.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


def measure(setting: Setting, seeds: int, profile: HardwareProfile) -> list[Row]:
    """Returns the mean rows of all planners for a setting."""
    rows: list[Row] = []
    planners = PLANNERS if setting.table == "speedups" else ("auto", "static")
    fits = longest_document(setting.ranks, TOKENS_PER_RANK)
    drawn = [load_mix(setting.mix).draw(setting.documents_a_rank * setting.ranks, seed) for seed in range(seeds)]
    steps = [modelled.cut(stretch(lengths, setting.stretched_to), fits) for lengths in drawn]
    for seed, lengths in enumerate(steps):
        case = Case(lengths, setting.ranks, TOKENS_PER_RANK, seed=seed, longest=max(map(max, steps)))
        rows += modelled.compare_case(case, profile, planners).rows
    return modelled.mean_rows(rows)


def stretch(lengths: Sequence[int], longest: int | None) -> list[int]:
    """Scales all lengths by one factor, so that the longest becomes `longest` (None: no scaling)."""
    return list(lengths) if longest is None else [max(1, length * longest // max(lengths)) for length in lengths]


def page(results: Sequence[Result], about: dict[str, str]) -> str:
    """Returns both tables in Markdown, and the facts of the run."""
    speedups = [(setting, rows) for setting, rows in results if setting.table == "speedups"]
    gaps = [(setting, rows) for setting, rows in results if setting.table == "gaps"]
    lines = [*(speedup_table(speedups) if speedups else []), *(gap_table(gaps) if gaps else [])]
    told = ", ".join(f"{name} {value}" for name, value in about.items())
    lines += [
        f"{TOKENS_PER_RANK:,} tokens per rank; documents longer than all ranks hold are split. Means over seeds. {told}",
        "",
    ]
    return "\n".join(lines)


def speedup_table(results: Sequence[Result]) -> list[str]:
    """Returns the table of speedups: all planners over fixed static, and auto over the best static degree of every step."""
    others = [planner for planner in PLANNERS if planner not in ("auto", "fixed-static")]
    head = ["mix", "ranks", "docs per rank", "fixed", "**auto**", "without barriers", "over best static"]
    head += [*(TITLES[planner] for planner in others), "upper bound", "gap", "unavoidable gap", "planning time of auto"]
    lines, notes = [], []
    for setting, rows in results:
        by = {row.planner: row for row in rows}
        auto, fixed = by["auto"], modelled.degree_of(by["fixed-static"]) or "none fits"
        line = [setting.mix, f"{auto.ranks:,}", str(setting.documents_a_rank), fixed, f"**{times(auto.speedup_over_fixed)}**"]
        line += [times(modelled.over_fixed_without_barriers(rows)), times(auto.speedup_over_best_static)]
        for planner in others:
            speedup = by[planner].speedup_over_fixed
            ahead = speedup and auto.speedup_over_fixed and round(speedup, 2) > round(auto.speedup_over_fixed, 2)
            line.append(f"[{times(speedup)}]" if ahead else times(speedup))
        line.append(times(modelled.most_speedup(rows, "speedup_over_fixed")))
        lines.append([*line, f"{auto.gap:.1%}", f"{auto.unavoidable_gap:.1%}", f"{auto.planning_ms:,.0f} ms"])
        notes += [f"- {TITLES[row.planner]}, {setting.mix}, {row.ranks} ranks: {row.note}" for row in rows if row.note]
    return [
        "Modelled speedup over fixed static: one degree for all steps, the smallest power of two that holds the longest "
        "document of all seeds, documents packed in the order drawn. `without barriers`: speedup of auto if the groups of "
        "fixed static synchronize only at the end of a step, as when every rank keeps all weights. `over best static`: speedup "
        "of auto over the best static degree of every step, an oracle that no trainer has. Brackets mark planners ahead of "
        "auto. `upper bound`: bound on the speedup of any plan. Gap: of auto to the lower bound on time, and its unavoidable "
        "part.",
        "",
        *markdown(head, lines, 1),
        "",
        *dict.fromkeys(notes),
        *([""] if notes else []),
    ]


def gap_table(results: Sequence[Result]) -> list[str]:
    """Returns the table of gaps; settings that differ only in documents per rank share a line."""
    counts = sorted({setting.documents_a_rank for setting, _ in results})
    gaps: dict[tuple[str, int, int | None], dict[int, str]] = {}
    for setting, rows in results:
        auto = next(row for row in rows if row.planner == "auto")
        line = gaps.setdefault((setting.mix, setting.ranks, setting.stretched_to), {})
        line[setting.documents_a_rank] = f"{auto.gap:.1%} ({auto.unavoidable_gap:.1%})"
    lines = []
    for (mix, ranks, longest), line in gaps.items():
        length = "as in the mix" if longest is None else f"stretched to {longest:,}"
        lines.append([mix, f"{ranks:,}", length, *(line.get(count, "") for count in counts)])
    head = ["mix", "ranks", "longest document", *(f"{count} per rank" for count in counts)]
    return [
        "Gap of auto to the lower bound, by documents per rank; in brackets the part that no plan can avoid.",
        "",
        *markdown(head, lines, 1),
        "",
    ]


def times(speedup: float | None) -> str:
    return "—" if speedup is None else f"{speedup:.2f}"


if __name__ == "__main__":
    main()

"""Writes the figures of README.md and of pages of docs/ from bench/results, between their `figures`
comments.

    python bench/figures.py            # after bench/plan.py, bench/against.py, bench/scaling.py ..
    python bench/figures.py --check    # exits with 1 if a page has other figures

All speedups are those of longctx's mode auto, predicted by the cost model unless a table says
otherwise.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from figures_against import OF_AGAINST
from figures_of_pages import OF_PAGES, Row, rows_of, to, trainer_trees_gains, wrapped
from harness import RESULTS, markdown, speedups
from longctx.comparison.modelled import PlannerRow, over_fixed_without_barriers
from plan import FEW_LONG, times

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "trainers.md",
    ROOT / "docs" / "agents.md",
    ROOT / "docs" / "data.md",
    *(
        ROOT / "docs" / "evidence" / f"{name}.md"
        for name in ("bound", "emulated", "latents", "linear", "others")
    ),
    ROOT / "docs" / "block-diffusion.md",
    *(ROOT / "docs" / "evidence" / f"{name}.md" for name in ("small-runs", "speedup", "trees")),
)
BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
HEADLINE = ("wlb_128k", 64, 4)
"""Mix, ranks and documents per rank of README's example."""
EMULATED = {
    "wlb_128k, 4": "modelled-4x8-wlb_128k-4",
    "wlb_128k, 16": "modelled-4x8-wlb_128k-16",
    "magi_192k, 1": "modelled-4x8-magi_192k-1",
}
EMULATED_BESIDE_MEGATRON = {
    "wlb_128k, 4": "modelled-4x8-wlb_128k-4-megatron-dev",
    "magi_192k, 1": "modelled-4x8-magi_192k-1",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit with 1 if a figure differs"
    )
    arguments = parser.parse_args()
    stale = [page for page in PAGES if filled(text := page.read_text("utf-8")) != text]
    for page in stale:
        print(
            f"{page.relative_to(ROOT)}: its figures are not those of bench/results", file=sys.stderr
        )
        if not arguments.check:
            page.write_text(filled(page.read_text("utf-8")), "utf-8")
    return int(arguments.check and bool(stale))


def filled(text: str) -> str:
    """Returns a page with its figures replaced. Raises KeyError for a name that `FIGURES` lacks."""
    return BLOCK.sub(
        lambda block: block[1] + "\n".join(FIGURES[block[2]]()) + "\n" + block[3], text
    )


def planned(table: str, planner: str = "auto", **values: object) -> list[Row]:
    """Returns the rows of a table and planner of plan.csv that have these values."""
    wanted = {"table": table, "planner": planner} | {
        name: str(value) for name, value in values.items()
    }
    return [
        row for row in rows_of("plan") if all(row[name] == value for name, value in wanted.items())
    ]


def same_step(auto: Row, planner: str) -> Row:
    """Returns the row of another planner for the documents of a row."""
    same = {name: auto[name] for name in ("mix", "documents_a_rank", "ranks")}
    return planned(auto["table"], planner, **same)[0]


def without_barriers(auto: Row) -> float:
    """Returns auto's speedup over fixed static whose ranks wait for each other only at the end of a
    step."""
    rows = []
    for row in (auto, same_step(auto, "fixed-static")):
        seconds = {
            name: float(row[name]) for name in ("makespan_s", "no_barrier_s", "speedup_over_fixed")
        }
        rows.append(PlannerRow(0, 0, 0, 0, 0, 0, row["planner"], **seconds))
    speedup = over_fixed_without_barriers(rows)
    assert speedup is not None
    return speedup


def measured(name: str) -> dict[str, dict[str, Any]]:
    """Returns the modes of an emulated run, by name."""
    modes = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))["measured"]["modes"]
    return {mode["mode"]: mode for mode in modes}


# --- README


def headline() -> list[str]:
    """The table of the first screen."""
    mix, ranks, documents = HEADLINE
    (auto,) = planned("speedups", mix=mix, ranks=ranks, documents_a_rank=documents)
    splits = [row for row in rows_of("scaling") if not row["refused"]]
    gains = [float(row["static_step_s"]) / float(row["step_s"]) for row in splits]
    (own,) = [
        gain
        for row, gain in zip(splits, gains, strict=True)
        if (row["model"], row["gpus"]) == ("8B", str(ranks))
    ]
    tokens = f"{int(auto['tokens']) / 1e6:.1f}M tokens per step"
    head = [
        f"8B model, {ranks} H100s, {tokens}, documents of up to 128k tokens, five steps, "
        "**predicted**; compared with",
        "speedup",
    ]
    gpus = f"8 to {max(int(row['gpus']) for row in splits):,} GPUs"
    rows = [
        [
            "a static run on its own best tensor and pipeline split, without zero-bubble schedules",
            f"**{own:.1f}×** ({to(gains, 1)}× for 8B to 1T on {gpus})",
        ],
        [
            "64 data-parallel ranks at the best single context-parallel degree",
            f"{float(auto['speedup_over_best_single']):.1f}×",
        ],
        [
            "64 data-parallel ranks at the smallest degree that holds every document",
            f"{float(auto['speedup_over_fixed']):.1f}× ({without_barriers(auto):.1f}× if ranks "
            "wait for each other once per step)",
        ],
    ]
    return markdown(head, rows)


def measured_sentences() -> list[str]:
    """The sentences of the first screen on what was measured."""
    runs = [measured(name) for name in EMULATED.values()]
    texts = [speedups(modes["static:8"], modes["auto"])[0] for modes in runs]
    reached, predicted = zip(*(re.findall(r"([\d.]+)×", text) for text in texts), strict=True)
    gains = trainer_trees_gains()
    return wrapped(
        "**Measured on CPUs:** packing with prompts computed once makes a step of DPO "
        f"{gains['DPO']:.1f} times as fast as plain TRL, and one of GRPO, without its sampling, "
        f"{gains['GRPO']:.1f} times, for prompts of 512 to 1,023 tokens with completions of 32 "
        "([how](docs/trainers.md#dpo-kto-grpo-and-rloo)), and [little with long "
        "ones](docs/evidence/trees.md). The comparison with the smallest degree, in smaller "
        "steps, also ran on 32 processes that plan and send messages, but sleep instead of "
        f"computing: {min(reached)} to {max(reached)}×, with {min(predicted)} to "
        f"{max(predicted)}× predicted ([how](docs/evidence/emulated.md))."
    )


# --- docs/evidence


def modelled_table() -> list[str]:
    """Speedups on 64 ranks, the largest steps first."""
    head = [
        "lengths, documents per rank",
        "tokens per step",
        "its degree",
        "auto over fixed static",
        "without barriers",
    ]
    head += [
        "over the best single degree",
        "over the best static degree of every step",
        "bins",
        "FlexSP-like",
    ]
    head += ["Megatron dev", "Megatron main", "limit"]
    lines = []
    for auto in sorted(planned("speedups", ranks=64), key=lambda row: -int(row["tokens"])):
        fixed = same_step(auto, "fixed-static")
        line = [f"{auto['mix']}, {auto['documents_a_rank']}", f"{int(auto['tokens']) / 1e6:.2f}M"]
        line += [
            fixed["winner"].removeprefix("static:"),
            f"**{float(auto['speedup_over_fixed']):.2f}**",
        ]
        line += [times(without_barriers(auto))]
        line += [f"{float(auto['speedup_over_best_single']):.2f} ({auto['best_single_degree']})"]
        line += [times(float(auto["speedup_over_best_static"]))]
        others = [
            same_step(auto, name) for name in ("bins", "flexsp", "megatron-dev", "megatron-main")
        ]
        line += [
            times(float(row["speedup_over_fixed"]) if row["speedup_over_fixed"] else None)
            for row in others
        ]
        line.append(
            times(
                float(auto["speedup_over_fixed"])
                * float(auto["makespan_s"])
                / float(auto["tight_bound_s"])
            )
        )
        lines.append(line)
    return markdown(head, lines, 1)


def ranges_table() -> list[str]:
    """Lowest, median and highest speedup over all mixes, by documents per rank and number of
    ranks."""
    head = [
        "ranks",
        "documents per rank",
        "tokens per step",
        "auto over fixed static",
        "over the best single degree",
    ]
    head += ["over the best static degree of every step", "bins over fixed static"]
    lines = []
    for ranks in (8, 64, 256, 1024):
        for documents in (1, 4, 16):
            setting = {"ranks": ranks, "documents_a_rank": documents}
            autos, bins = planned("speedups", **setting), planned("speedups", "bins", **setting)
            tokens = [int(row["tokens"]) / 1e6 for row in autos]
            columns = [(autos, name) for name in ("fixed", "best_single", "best_static")] + [
                (bins, "fixed")
            ]
            values = [
                [float(row[f"speedup_over_{name}"]) for row in rows] for rows, name in columns
            ]
            lines.append(
                [f"{ranks:,}", str(documents), f"{to(tokens)}M", *map(low_median_high, values)]
            )
    return markdown(head, lines, 2)


def low_median_high(values: Sequence[float]) -> str:
    return f"{min(values):.2f}, {statistics.median(values):.2f}, {max(values):.2f}"


def sources() -> list[str]:
    """The two parts of the gain, and the tie with FlexSP, over all settings with 64 ranks."""
    autos = planned("speedups", ranks=64)
    mix, ranks, documents = HEADLINE
    (auto,) = planned("speedups", mix=mix, ranks=ranks, documents_a_rank=documents)
    packing = float(same_step(auto, "static")["speedup_over_fixed"])
    flexsp = [
        float(row["speedup_over_fixed"]) / float(same_step(row, "flexsp")["speedup_over_fixed"])
        for row in autos
    ]
    dev = [
        float(row["speedup_over_fixed"])
        / float(same_step(row, "megatron-dev")["speedup_over_fixed"])
        for row in autos
    ]
    return [
        *wrapped(
            f"- **Two gains.** Of the {float(auto['speedup_over_fixed']):.2f}× for {mix} with "
            f"{documents} documents per rank, {packing:.2f}× is packing by predicted time at the "
            "best degree of each step, which `context.mode: static` does too, and "
            f"{float(auto['speedup_over_best_static']):.2f}× is a degree for every document."
        ),
        *wrapped(
            f"- **FlexSP: a tie.** `auto` is {to(flexsp)} times as fast as our reading, whose "
            "plans FlexSP's own solver beats by up to 6 % or misses by up to 18 %. Planning time "
            "differs: its authors report 5 to 15 s per step."
        ),
        *wrapped(
            f"- **Megatron's development branch**: `auto` is {to(dev)} times as fast as our "
            "reading, which makes the plans of its code (snapshot d48bd6be0a) without their "
            "padding."
        ),
    ]


def gaps_table() -> list[str]:
    """Gaps of auto to the lower bound."""
    counts = ("1", "4", "10")
    lines = []
    for ranks in (64, 256):
        for mix in ("wlb_128k", "magi_192k", "wikipedia", FEW_LONG):
            cells = []
            for documents in counts:
                (row,) = planned(
                    "gaps", mix=mix, ranks=ranks, documents_a_rank=documents, stretched_to=""
                )
                unavoidable = float(row["unavoidable_gap"])
                cells.append(
                    f"{float(row['gap']):.1%}"
                    + (f" ({unavoidable:.1%})" if unavoidable >= 0.0005 else "")
                )
            lines.append([str(ranks), mix.replace("_", " ") if mix == FEW_LONG else mix, *cells])
    return markdown(["ranks", "lengths", *(f"{count} per rank" for count in counts)], lines, 2)


def emulated_table() -> list[str]:
    """Measured steps of the emulated ranks."""
    head = [
        "lengths, documents per rank",
        "mean tokens per step",
        "auto over fixed static (degree 8)",
        "over Megatron dev",
    ]
    head += [
        "over the best static degree of every step",
        "prediction error of auto",
        "of fixed static",
        "day",
    ]
    lines = []
    for setting, name in EMULATED.items():
        run = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
        modes = measured(name)
        auto, line = modes["auto"], [setting]
        line.append(f"{statistics.fmean(step['tokens'] for step in auto['steps']) / 1e6:.2f}M")
        line.append(speedups(modes["static:8"], auto, mark="**")[0])
        beside = (
            measured(EMULATED_BESIDE_MEGATRON[setting])
            if setting in EMULATED_BESIDE_MEGATRON
            else {}
        )
        line.append(speedups(beside["megatron-dev"], beside["auto"])[0] if beside else "–")
        best = "best static of every step"
        line.append(speedups(modes[best], auto)[0] if best in modes else "–")
        line += [f"{modes[mode]['prediction_error']:+.1%}" for mode in ("auto", "static:8")]
        lines.append([*line, run["about"]["date"]])
    return markdown(head, lines, 1)


FIGURES: dict[str, Callable[[], list[str]]] = {
    "headline": headline,
    "measured-sentences": measured_sentences,
    "modelled": modelled_table,
    "ranges": ranges_table,
    "sources": sources,
    "gaps": gaps_table,
    "emulated": emulated_table,
    **OF_AGAINST,
    **OF_PAGES,
}

if __name__ == "__main__":
    sys.exit(main())

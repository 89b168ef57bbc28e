"""Tables of the comparison as text, and their output on the terminal."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from longctx.comparison.modelled import (
    TITLES,
    PlannerRow,
    degree_of,
    most_speedup,
    over_fixed_without_barriers,
)

OVER = {
    "speedup_over_fixed": "speedup over fixed static (one degree for all steps)",
    "speedup_over_single": "speedup over the best single degree for all steps",
    "speedup_over_best_static": "speedup over the best static degree of every step",
}
LIMIT = "bound for any plan"
SHOWN = ("speedup_over_fixed", "speedup_over_best_static")
"""Speedups in columns of the table of plans; `gains` has the third."""


class Words(NamedTuple):
    """A table as text. `lines` begin with the name of a planner or LIMIT, and may be shorter than
    `headings`."""

    headings: list[str]
    lines: list[list[str]]


def plans_table(rows: Sequence[PlannerRow]) -> Words:
    """Returns time, speedups, gap and shares of all planners that have a plan, and the bounds for
    any plan."""
    auto = next(row for row in rows if row.planner == "auto")
    lines = [
        [
            f"{TITLES[row.planner]} ({degree_of(row)})" if degree_of(row) else TITLES[row.planner],
            f"{row.makespan_s:.3g} s",
            *(times(getattr(row, speedup)) for speedup in SHOWN),
            *(
                f"{share:.1%}"
                for share in (row.gap, row.exchange_share, row.idle_share, row.padding_share)
            ),
            f"{row.micro_batches}",
            f"{row.planning_ms:,.0f} ms",
        ]
        for row in rows
        if row.makespan_s is not None
    ]
    limits = [times(most_speedup(rows, speedup)) for speedup in SHOWN]
    return Words(
        [
            "",
            "time",
            "over\nfixed",
            "over\nbest",
            "gap",
            "waits",
            "idle",
            "unused\nbudget",
            "micro-\nbatches",
            "to\nplan",
        ],
        [*lines, [LIMIT, f"{auto.tight_bound_s:.3g} s", *limits, f"{auto.unavoidable_gap:.1%}"]],
    )


def memory_table(rows: Sequence[PlannerRow]) -> Words:
    """Returns maximum local and remote tokens per rank."""
    lines = [
        [TITLES[row.planner], f"{row.most_tokens:,}", f"{row.remote_tokens:,}"]
        for row in rows
        if row.makespan_s is not None
    ]
    return Words(["", "local tokens", "remote tokens"], lines)


def speedups_table(rows: Sequence[PlannerRow], speedup: str) -> Words:
    """Returns one speedup of every planner by number of ranks."""
    everywhere = sorted({row.ranks for row in rows})
    lines = []
    for planner in dict.fromkeys(row.planner for row in rows):
        by_ranks = {
            row.ranks: times(getattr(row, speedup)) for row in rows if row.planner == planner
        }
        lines.append([TITLES[planner], *(by_ranks.get(ranks, "") for ranks in everywhere)])
    limits = [
        times(most_speedup([row for row in rows if row.ranks == ranks], speedup))
        for ranks in everywhere
    ]
    return Words(["", *(f"{ranks:,}" for ranks in everywhere)], [*lines, [LIMIT, *limits]])


def captions(rows: Sequence[PlannerRow]) -> list[str]:
    lines = [
        "over fixed, over best: speedup over fixed static, which packs documents as they come "
        "(another degree: --baseline static:DEGREE), and over the best static degree of every "
        "step, as context.mode static has it; best single: fixed static at the degree that is "
        "best for all steps; degrees are in brackets",
        "gap: time above the lower bound with a free network; waits: for the exchange; idle: for "
        "the slowest rank",
        "remote tokens: of other ranks, if gathered in one round; more rounds need less memory",
    ]
    if (free := over_fixed_without_barriers(rows)) is not None:
        lines.append(
            f"auto is {times(free)} as fast as fixed static if the groups of fixed static "
            "synchronize only at the end of a step, that is, if every rank keeps all weights "
            "during the step"
        )
    return lines


def gains(rows: Sequence[PlannerRow]) -> list[str]:
    """Returns auto's gain in the three comparisons of the README, in their order."""
    by = {row.planner: row for row in rows}
    ranks = rows[0].ranks
    auto = by["auto"]
    over = (
        ("the best single context-parallel degree", "single-degree", auto.speedup_over_single),
        (
            "the smallest degree that holds all, or --baseline",
            "fixed-static",
            auto.speedup_over_fixed,
        ),
    )
    split = (
        "auto over the best tensor and pipeline split of a static run: python bench/split.py "
        f"--gpus {ranks} --static"
    )
    return [
        split,
        *(
            f"auto over {what} ({degree_of(by[name]) or 'none'}): {times(speedup)}"
            for what, name, speedup in over
        ),
    ]


def missing(rows: Sequence[PlannerRow]) -> list[str]:
    """Returns one line for each planner and reason why it has no plan, with the numbers of ranks
    unless it has none at all."""
    ranks: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.note:
            ranks.setdefault((row.planner, row.note), []).append(f"{row.ranks:,}")
    everywhere = len({row.ranks for row in rows})
    lines = []
    for (planner, note), numbers in ranks.items():
        where = "" if len(numbers) == everywhere else f", {', '.join(numbers)} ranks"
        lines.append(f"{TITLES[planner]}{where}: {note}")
    return lines


def times(speedup: float | None) -> str:
    if speedup is None:
        return "—"
    return f"{speedup:.2f}×"


def print_comparison(rows: Sequence[PlannerRow], ranks: int, source: str, console: Console) -> None:
    """Prints the mean rows, with details for `ranks` ranks."""
    detailed = [row for row in rows if row.ranks == ranks]
    console.print(
        f"{source}; {rows[0].tokens_per_rank:,} tokens per rank", highlight=False, markup=False
    )
    if len(detailed) < len(rows):
        for speedup, words in OVER.items():
            _print(f"{words}, by ranks", speedups_table(rows, speedup), console)
    step = (
        f"{detailed[0].documents:,} documents, {detailed[0].tokens:,} tokens, longest document "
        f"{detailed[0].longest:,}"
    )
    _print(f"{ranks:,} ranks: {step}", plans_table(detailed), console)
    for line in gains(detailed):
        console.print(line, highlight=False, markup=False)
    _print(
        f"{ranks:,} ranks: maximum tokens per rank, with one exchange round",
        memory_table(detailed),
        console,
    )
    for line in [*missing(rows), "", *captions(detailed)]:
        console.print(line, style="dim", highlight=False, markup=False)


def _print(title: str, words: Words, console: Console) -> None:
    console.print(f"\n{title}", style="italic", highlight=False)
    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading in words.headings:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for line in words.lines:
        table.add_row(*line, style={TITLES["auto"]: "bold", LIMIT: "dim"}.get(line[0]))
    console.print(table)

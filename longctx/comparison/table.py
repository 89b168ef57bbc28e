"""Tables of the comparison as text, shared by terminal and page, and their output on the terminal."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from longctx.comparison.modelled import (
    PLANNERS,
    SPEEDUPS,
    TITLES,
    Row,
    degree_of,
    most_speedup,
    over_fixed_without_barriers,
)

OVER = {
    "speedup_over_fixed": "speedup over fixed static (one degree for all steps)",
    "speedup_over_best_static": "speedup over the best static degree of every step",
}
LIMIT = "bound for any plan"


class Words(NamedTuple):
    """A table as text. `lines` begin with the name of a planner or LIMIT, and may be shorter than `headings`."""

    headings: list[str]
    lines: list[list[str]]


def plans_table(rows: Sequence[Row]) -> Words:
    """Returns time, speedups, gap and shares of all planners that have a plan, and the bounds for any plan."""
    auto = next(row for row in rows if row.planner == "auto")
    lines = [
        [
            f"{TITLES[row.planner]} ({degree_of(row)})" if degree_of(row) else TITLES[row.planner],
            f"{row.makespan_s:.3g} s",
            *(times(getattr(row, speedup)) for speedup in SPEEDUPS),
            *(f"{share:.1%}" for share in (row.gap, row.exchange_share, row.idle_share, row.padding_share)),
            f"{row.micro_batches}",
            f"{row.planning_ms:,.0f} ms",
        ]
        for row in rows
        if row.makespan_s is not None
    ]
    limits = [times(most_speedup(rows, speedup)) for speedup in SPEEDUPS]
    return Words(
        ["", "time", "over\nfixed", "over\nbest", "gap", "waits", "idle", "unused\nbudget", "micro-\nbatches", "to\nplan"],
        [*lines, [LIMIT, f"{auto.tight_bound_s:.3g} s", *limits, f"{auto.unavoidable_gap:.1%}"]],
    )


def memory_table(rows: Sequence[Row]) -> Words:
    """Returns maximum local and remote tokens per rank, and the bytes of remote K and V if known."""
    shown = [row for row in rows if row.makespan_s is not None]
    headings, lines = ["", "local tokens", "remote tokens"], []
    for row in shown:
        lines.append([TITLES[row.planner], f"{row.most_tokens:,}", f"{row.remote_tokens:,}"])
        if row.remote_kv_bytes is not None:
            lines[-1].append(f"{row.remote_kv_bytes / (1 << 30):.2f} GiB")
    return Words([*headings, "remote K and V per layer"][: len(lines[0])], lines)


def speedups_table(rows: Sequence[Row], speedup: str) -> Words:
    """Returns one speedup of every planner by number of ranks."""
    everywhere = sorted({row.ranks for row in rows})
    lines = []
    for planner in PLANNERS:
        found = {row.ranks: times(getattr(row, speedup)) for row in rows if row.planner == planner}
        lines.append([TITLES[planner], *(found.get(ranks, "") for ranks in everywhere)])
    limits = [times(most_speedup([row for row in rows if row.ranks == ranks], speedup)) for ranks in everywhere]
    return Words(["", *(f"{ranks:,}" for ranks in everywhere)], [*lines, [LIMIT, *limits]])


def captions(rows: Sequence[Row], model: str | None) -> list[str]:
    """Returns explanations of the tables of plans and memory; `model` is the preset that K and V bytes are for."""
    lines = [
        "over fixed, over best: speedup over fixed static and over the best static degree of every step, an oracle; degrees "
        "are in brackets. Fixed static packs documents as they come, all other plans pack them well; another single degree for "
        "all steps: --baseline static:DEGREE",
        "plain static: the best power-of-two degree of every step, documents packed by tokens alone",
        "gap: time above the lower bound, which assumes a free network; in the last line, the part that no plan can avoid",
        "waits, idle: shares of all ranks' time spent waiting for the exchange (not hidden by computation), and for "
        "the slowest rank of the micro-batch; unused budget: share of micro-batches × ranks × tokens per rank without a token; "
        "nothing is padded",
        "local, remote tokens: maximum per rank in a micro-batch, of its own and of other ranks if gathered in one round; "
        "more rounds need less memory",
    ]
    if (free := over_fixed_without_barriers(rows)) is not None:
        lines.append(
            f"auto is {times(free)} as fast as fixed static if the groups of fixed static synchronize only at the end of a "
            "step, that is, if every rank keeps all weights during the step"
        )
    if model:
        lines.append(
            f"K and V: one layer of preset {model} in bfloat16, in forward; backward needs as many bytes again for gradients, "
            "context.keep_kv those of all layers"
        )
    return lines


def missing(rows: Sequence[Row]) -> list[str]:
    """Returns one line for each planner and reason why it has no plan, with the numbers of ranks unless it has none at all."""
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
    return "—" if speedup is None else f"{speedup:.2f}×"


def print_comparison(rows: Sequence[Row], ranks: int, source: str, model: str | None, console: Console) -> None:
    """Prints the mean rows of the ranks sweep, with details for `ranks` ranks."""
    swept = [row for row in rows if row.sweep == "ranks"]
    here = [row for row in swept if row.ranks == ranks]
    console.print(f"{source}; {swept[0].tokens_per_rank:,} tokens per rank", highlight=False, markup=False)
    if len(here) < len(swept):
        for speedup, words in OVER.items():
            _print(f"{words}, by ranks", speedups_table(swept, speedup), console)
    words = f"{here[0].documents:,} documents, {here[0].tokens:,} tokens, longest document {here[0].longest:,}"
    _print(f"{ranks:,} ranks: {words}", plans_table(here), console)
    _print(f"{ranks:,} ranks: maximum tokens per rank, with one exchange round", memory_table(here), console)
    for line in [*missing(swept), "", *captions(here, model)]:
        console.print(line, style="dim", highlight=False, markup=False)


def _print(title: str, words: Words, console: Console) -> None:
    console.print(f"\n{title}", style="italic", highlight=False)
    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading in words.headings:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for line in words.lines:
        table.add_row(*line, style={TITLES["auto"]: "bold", LIMIT: "dim"}.get(line[0]))
    console.print(table)

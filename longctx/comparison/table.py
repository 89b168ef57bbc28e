"""The comparison on a terminal: speedups by ranks, and what is behind them on one number of ranks."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from longctx.comparison.modelled import (
    PLANNERS,
    SPEEDUPS,
    TITLES,
    Row,
    degree_of,
    gibibytes,
    most_speedup,
    over_fixed_without_barriers,
)

OVER = {
    "speedup_over_fixed": "speedup over fixed static, one degree for all steps",
    "speedup_over_best_static": "speedup over the best static degree of every step",
}


def print_comparison(rows: Sequence[Row], ranks: int, source: str, console: Console) -> None:
    """Prints mean rows of the ranks sweep; details are those on `ranks` ranks."""
    swept = [row for row in rows if row.sweep == "ranks"]
    console.print(f"{source}   {swept[0].tokens_per_rank:,} tokens a rank", highlight=False, markup=False)
    everywhere = sorted({row.ranks for row in swept})
    if len(everywhere) > 1:
        for speedup, words in OVER.items():
            _title(f"{words}, by ranks", console)
            console.print(_speedups(swept, everywhere, speedup))
    here = [row for row in swept if row.ranks == ranks]
    words = f"{here[0].documents:,} documents, {here[0].tokens:,} tokens, the longest {here[0].longest:,}"
    _title(f"{ranks:,} ranks: {words}", console)
    console.print(_details(here))
    _title(f"{ranks:,} ranks: most that a rank holds at once, in one exchange stage", console)
    console.print(_memory(here))
    notes = dict.fromkeys((TITLES[row.planner], f"{row.ranks} ranks", row.note) for row in swept if row.note)
    for title, where, note in notes:
        console.print(f"{title}, {where}: {note}", style="dim", highlight=False, markup=False)
    console.print()
    for line in _captions(here):
        console.print(line, style="dim", highlight=False, markup=False)


def _captions(rows: Sequence[Row]) -> list[str]:
    lines = [
        "over fixed, over best: speedup over fixed static and over the best static degree of every step",
        "gap: above the lower bound, which takes the network for free; what `no plan can pass` shows of it is unavoidable",
        "fixed static: the degree in brackets for all steps, documents packed as they come; best static: the best degree of "
        "every step, which no trainer knows beforehand",
    ]
    if (free := over_fixed_without_barriers(rows)) is not None:
        lines.append(
            f"auto is {_times(free)} as fast as fixed static if its groups wait for each other at the end of a step alone: "
            "where every rank keeps all weights for the step"
        )
    if any(row.remote_kv_bytes is not None for row in rows):
        lines.append(
            "K and V: bfloat16, forward; backward holds as many bytes of gradients beside them, context.keep_kv all layers"
        )
    return lines


def _title(words: str, console: Console) -> None:
    console.print()
    console.print(words, style="italic", highlight=False)


def _speedups(rows: Sequence[Row], everywhere: Sequence[int], speedup: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for ranks in everywhere:
        table.add_column(f"{ranks:,}", justify="right")
    for planner in PLANNERS:
        found = {row.ranks: row for row in rows if row.planner == planner}
        cells = [_times(getattr(found[ranks], speedup)) if ranks in found else "" for ranks in everywhere]
        if any(cells):
            table.add_row(TITLES[planner], *cells, style="bold" if planner == "auto" else None)
    bounds = [_times(most_speedup([row for row in rows if row.ranks == ranks], speedup)) for ranks in everywhere]
    table.add_row("no plan can pass", *bounds, style="dim")
    return table


def _details(rows: Sequence[Row]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    figures = ("seconds", "over\nfixed", "over\nbest", "gap", "waits", "idle", "padding", "micro-\nbatches", "ms to\nplan")
    for name in ("", *figures):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for row in rows:
        if row.makespan_s is None:
            continue
        name = f"{TITLES[row.planner]} ({degree_of(row)})" if degree_of(row) else TITLES[row.planner]
        table.add_row(
            name,
            f"{row.makespan_s:.4g}",
            *(_times(getattr(row, speedup)) for speedup in SPEEDUPS),
            f"{row.gap:.1%}",
            f"{row.exchange_share:.1%}",
            f"{row.idle_share:.1%}",
            f"{row.padding_share:.1%}",
            str(row.micro_batches),
            f"{row.planning_ms:,.0f}",
            style="bold" if row.planner == "auto" else None,
        )
    auto = next(row for row in rows if row.planner == "auto")
    bounds = [_times(most_speedup(rows, speedup)) for speedup in SPEEDUPS]
    table.add_row("no plan can pass", f"{auto.tight_bound_s:.4g}", *bounds, f"{auto.unavoidable_gap:.1%}", style="dim")
    return table


def _memory(rows: Sequence[Row]) -> Table:
    """Tokens of its own, tokens of its ring mates, and the bytes of their K and V if it is known what a token takes."""
    shown = [row for row in rows if row.makespan_s is not None]
    in_bytes = any(row.remote_kv_bytes is not None for row in shown)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("", "tokens", "tokens of others", *(["their K and V in a layer"] if in_bytes else [])):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for row in shown:
        cells = [f"{row.most_tokens:,}", f"{row.remote_tokens:,}"]
        cells += [gibibytes(row.remote_kv_bytes)] if in_bytes else []
        table.add_row(TITLES[row.planner], *cells, style="bold" if row.planner == "auto" else None)
    return table


def _times(speedup: float | None) -> str:
    return "—" if speedup is None else f"{speedup:.2f}×"

"""What longctx gains over other ways to train, as text: a sentence, one table and remarks, all
within 80 columns."""

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from longctx.comparison.against import OURS, AgainstRow

WIDTH = 80
GIB = 2**30
HEADINGS = (
    "",
    "seconds\nper 1M",
    "longctx\nis",
    "\nwaits",
    "pad-\nding",
    "tokens of\na rank",
)
CAPTION = (
    "Predicted by the cost model, for steps of as many tokens. waits: for the slowest rank, in "
    "every micro-batch, as the gathers of FSDP2 make ranks do; under DDP and Megatron once a step. "
    "Times are without recomputation."
)
MEMORY_CAPTION = (
    "GiB: the least that the fullest rank needs to train all weights, with every block recomputed, "
    "by estimate; (no): does not fit. Adapters and offloading need less."
)


def sentence(rows: Sequence[AgainstRow], whose: str) -> str:
    """Returns what longctx gains over each way that has a plan; `whose`: `on your lengths`."""
    gains = [
        f"{row.speedup:.2f} times as fast as {row.title}{_doubt(row)}"
        for row in _said(rows)
        if row.speedup is not None
    ]
    if not gains:
        return f"None of these ways can train these documents {_on(rows)}: the reasons are below."
    return f"longctx is {', '.join(gains)} {whose}, {_on(rows)}, predicted."


def _said(rows: Sequence[AgainstRow]) -> list[AgainstRow]:
    """Returns the rows of other ways for the sentence: of each way those that fit, else its first
    one."""
    by_way: dict[str, list[AgainstRow]] = {}
    for row in rows:
        if row.way != OURS:
            by_way.setdefault(row.way, []).append(row)
    said = []
    for of_way in by_way.values():
        fitting = [row for row in of_way if row.fits]
        said += fitting or of_way[:1]
    return said


def best_sentence(rows: Sequence[AgainstRow], whose: str) -> str:
    """Returns what longctx gains over the fastest way that fits."""
    fitting = [row for row in rows if row.fits and row.way != OURS]
    if not fitting:
        return f"No other way fits {_on(rows)}: what each would take is below."
    best = min(fitting, key=lambda row: row.seconds_per_million or 0)
    return (
        f"longctx is {best.speedup:.2f} times as fast as {best.title}, the fastest other way that "
        f"fits, {whose}, {_on(rows)}, predicted."
    )


def _on(rows: Sequence[AgainstRow]) -> str:
    ranks = rows[0].ranks
    plural = "s" if ranks > 1 else ""
    return f"{ranks:,} GPU{plural}"


def _doubt(row: AgainstRow) -> str:
    if row.fits:
        return ""
    return " (which does not fit)"


def table_line(row: AgainstRow) -> list[str]:
    """Returns the cells of a way, in the order of HEADINGS and GiB; dashes if it has no plan."""
    if row.seconds_per_million is None:
        return [row.title, *["–"] * len(HEADINGS)]
    gain = ""
    if row.way != OURS:
        gain = f"{row.speedup:.2f}×"
    memory = "?"
    if row.least_bytes is not None:
        memory = f"{row.least_bytes / GIB:.0f}"
    if not row.fits:
        memory += " (no)"
    return [
        row.title,
        three_digits(row.seconds_per_million),
        gain,
        f"{row.waiting:.0%}",
        f"{row.padding:.0%}",
        f"{row.most_tokens:,}",
        memory,
    ]


def three_digits(value: float) -> str:
    """Formats a positive number with three digits, or all those of its whole part."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


def remarks(rows: Sequence[AgainstRow]) -> list[str]:
    """Returns what must be known about each way, or why it has no plan; of ways with the same
    remark once."""
    titles: dict[str, list[str]] = {}
    for row in rows:
        if row.remark:
            titles.setdefault(row.remark, []).append(row.title)
    return [f"{' and '.join(ways)}: {remark}" for remark, ways in titles.items()]


def print_against(
    rows: Sequence[AgainstRow], said: str, source: str, notes: Sequence[str], console: Console
) -> None:
    """Prints the sentence `said`, the documents that `source` names, the table, and what must be
    known: remarks on the ways and `notes`."""
    width = min(WIDTH, console.width)
    _print(said, console, width=width, style="bold")
    _print(source, console, width=width, style="")
    available = rows[0].available_bytes
    memory = "GiB"
    captions = [*remarks(rows), CAPTION]
    if available is not None:
        memory = f"GiB of\n{available / GIB:.0f}"
        captions.append(MEMORY_CAPTION)
    captions += notes
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("", justify="left", no_wrap=True)
    for heading in (*HEADINGS[1:], memory):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = table_line(row)
        table.add_row(*cells)
    console.print()
    console.print(table)
    console.print()
    for caption in captions:
        _print(caption, console, width=width, style="dim")


def _print(text: str, console: Console, *, width: int, style: str) -> None:
    for line in textwrap.wrap(text, width, subsequent_indent="  "):
        console.print(line, style=style, highlight=False, markup=False)

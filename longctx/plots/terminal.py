"""Terminal drawing of a plan: what was chosen and how good it is, degrees, and ranks over time.

A letter is a document: capitals are rings, and the same capital on neighbouring rows is one ring; small letters stand on one
rank. Colour is the degree. Without colour (a file, a pipe) the letters say the same.
"""

import itertools
import string

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from longctx.planning.cost.bounds import tight_bound_s, unavoidable_gap
from longctx.planning.plan import Plan
from longctx.plots.colours import by_class, class_name, colour
from longctx.plots.timeline import Timeline, timeline

MOST_ROWS = 32
IDLE, WAIT, LAUNCH = "·", "~", "│"
BAR = 24


def draw_plan(plan: Plan, console: Console, source: str = "") -> None:
    """Prints the plan to a console of any width from 40 columns on. `source` says where the lengths come from."""
    _header(plan, console, source)
    _degrees(plan, console)
    _ranks_over_time(plan, console)


def _header(plan: Plan, console: Console, source: str) -> None:
    tokens, tight_s = sum(plan.lengths), tight_bound_s(plan)
    lines = [
        f"[bold]{plan.mode} → {escape(plan.winner)}[/bold]   {plan.ranks:,} ranks × {plan.tokens_per_rank:,} tokens",
        f"{len(plan.lengths):,} documents, {tokens:,} tokens, longest {max(plan.lengths):,}"
        + (f"   from {escape(source)}" if source else ""),
        f"makespan [bold]{plan.makespan_s:.4g} s[/bold]   bound {plan.lower_bound_s:.4g} s   gap [bold]{plan.gap:.1%}[/bold]   "
        f"exposed {plan.exposed_share:.1%}   idle {plan.idle_share:.1%}",
        f"no plan takes less than {tight_s:.4g} s: {unavoidable_gap(tight_s, plan.lower_bound_s):.1%} of gap is unavoidable",
        f"{len(plan.micro_batches)} micro-batches   stages {_ranges(plan.stages)}   planned in {plan.planning_ms:.0f} ms",
    ]
    if (pipeline := plan.pipeline).ranks > 1:
        chunks = f" × {pipeline.chunks} chunks" if pipeline.chunks > 1 else ""
        lines.append(f"pipeline of {pipeline.ranks:,} ranks{chunks}, {pipeline.schedule}   bubble {plan.bubble_share:.1%}")
    for line in lines:
        console.print(line, highlight=False)


def _ranges(stages: tuple[int, ...]) -> str:
    return str(stages[0]) if len(set(stages)) == 1 else f"{min(stages)}–{max(stages)}"


def _degrees(plan: Plan, console: Console) -> None:
    """A histogram: documents of every degree class, and the share of tokens they carry as a bar."""
    console.print()
    console.print(f"{'degree':>9} {'documents':>10}  share of tokens", style="dim", highlight=False)
    total = sum(plan.lengths)
    for index, (documents, tokens) in by_class(plan).items():
        line = Text(f"{class_name(index):>9} {documents:>10,}  ")
        line.append("█" * max(1, round(BAR * tokens / total)), style=colour(1 << index))
        line.append(f" {tokens / total:.1%}")
        console.print(line)


def _ranks_over_time(plan: Plan, console: Console) -> None:
    times = timeline(plan)
    group = -(-plan.ranks // MOST_ROWS)
    margin = len(str(plan.ranks - 1)) + 6
    width = max(20, console.width - margin - 1)
    console.print()
    shown = "" if group == 1 else f"   a row stands for {group} ranks and shows the first"
    console.print(f"ranks over time{shown}", style="dim", highlight=False)
    letters = _letters(times)
    for rank in range(0, plan.ranks, group):
        line = Text(f"{f'rank {rank}':>{margin - 1}} ")
        for letter, style in _row(times, letters, rank, width):
            line.append(letter, style=style)
        console.print(line, no_wrap=True, overflow="crop")
    stop = f"{times.makespan_s:.4g} s"
    console.print(" " * margin + "0 s" + stop.rjust(width - 3), style="dim", highlight=False)
    legend = f"A ring on all its rows   a on one rank   {WAIT} waits for K and V   {IDLE} idle   {LAUNCH} launch"
    console.print(legend, style="dim", highlight=False)


def _letters(times: Timeline) -> dict[int, str]:
    """A letter for every document, in the order of the timeline, so that neighbours differ."""
    rings, singles = itertools.cycle(string.ascii_uppercase), itertools.cycle(string.ascii_lowercase)
    return {block.document: next(rings if block.degree > 1 else singles) for block in times.blocks}


def _row(times: Timeline, letters: dict[int, str], rank: int, width: int) -> list[tuple[str, str]]:
    """(letter, style) of every column: what the rank does in the middle of that slice of time."""
    cells = [(" ", "")] * width
    scale = width / times.makespan_s if times.makespan_s > 0 else 0.0

    def paint(start_s: float, stop_s: float, letter: str, style: str) -> None:
        for column in range(round(start_s * scale), min(width, round(stop_s * scale))):
            cells[column] = (letter, style)

    for start_s, stop_s in times.micro_batches:
        paint(start_s, stop_s, IDLE, "dim")
    for block in times.blocks:
        index = rank - block.first_rank
        if 0 <= index < block.degree:
            ink = "black" if block.degree <= 4 else "white"
            style = f"{ink} on {colour(block.degree)}"
            paint(block.start_s[index], block.stop_s[index], letters[block.document], style)
    for wait in times.waits:
        if wait.rank == rank:
            paint(wait.start_s, wait.stop_s, WAIT, "red")
    for start_s, _ in times.micro_batches:
        column = max(0, round(start_s * scale) - 1)
        cells[column] = (LAUNCH, "dim")
    return cells

"""Terminal drawing of a plan: the choice and its quality, degrees, and ranks over time.

Every document is drawn with its number, counted from 0 in the order of the lengths. Double lines
are rings (the same number on neighbouring rows is one document), single lines are documents on one
rank. Colour is the degree; without colour (a file, a pipe) lines and numbers say the same.
"""

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from longctx.planning.cost.bounds import tight_bound_s, unavoidable_gap
from longctx.planning.plan import Plan
from longctx.plots.colours import DARK_TEXT_ON, by_class, class_name, colour, degree_class
from longctx.plots.timeline import Timeline, timeline

MOST_ROWS = 32
EDGE = "▏"
RING = "═"
SINGLE = "─"
IDLE = "·"
WAIT = "~"
LAUNCH = "│"
BAR = 24


def draw_plan(plan: Plan, console: Console, source: str = "", baseline: Plan | None = None) -> None:
    """Prints the plan to a console of at least 40 columns.

    Args:
        source: the source of the lengths, in words.
        baseline: a static plan of the same documents that the plan is compared with.
    """
    _header(plan, console, source, baseline)
    _degrees(plan, console)
    _ranks_over_time(plan, console)


def _header(plan: Plan, console: Console, source: str, baseline: Plan | None) -> None:
    tokens = sum(plan.lengths)
    tight_s = tight_bound_s(plan)
    rounds = [
        p.rounds for placements in plan.micro_batches for p in placements if p.degree > 1
    ] or [1]
    lines = [
        f"[bold]{plan.mode} → {escape(plan.winner)}[/bold]   {plan.ranks:,} ranks × "
        f"{plan.tokens_per_rank:,} tokens",
        f"{len(plan.lengths):,} documents, {tokens:,} tokens, longest {max(plan.lengths):,}"
        + (f"   from {escape(source)}" if source else ""),
        *_times(plan),
        f"{len(plan.micro_batches)} micro-batch{'es' * (len(plan.micro_batches) > 1)}   "
        f"exchange rounds {'–'.join(map(str, sorted({min(rounds), max(rounds)})))}   planned in "
        f"{plan.planning_ms:.0f} ms",
    ]
    if tight_s > 1.0005 * plan.lower_bound_s:  # else it is the lower bound
        share = unavoidable_gap(tight_s, plan.lower_bound_s)
        lines.insert(
            3, f"no plan takes less than {tight_s:.4g} s: {share:.1%} of gap is unavoidable"
        )
    if baseline is not None:
        lines.insert(
            2,
            f"[bold]{baseline.makespan_s / plan.makespan_s:.2f}×[/bold] as fast as the best single "
            f"degree: {baseline.winner.removeprefix('static:')} for every document takes "
            f"{baseline.makespan_s:.4g} s",
        )
    if (pipeline := plan.pipeline).ranks > 1:
        chunks = f" × {pipeline.chunks} chunks" if pipeline.chunks > 1 else ""
        lines.append(
            f"pipeline of {pipeline.ranks:,} ranks{chunks}   bubble {plan.bubble_share:.1%}"
        )
    for line in lines:
        console.print(line, highlight=False)


def _times(plan: Plan) -> list[str]:
    """Returns the modelled time of a step and its bound, and the shares that are lost."""
    return [
        f"step time [bold]{plan.makespan_s:.4g} s[/bold] (modelled)   lower bound "
        f"{plan.lower_bound_s:.4g} s   gap [bold]{plan.gap:.1%}[/bold]",
        f"exposed exchange {plan.exposed_share:.1%}   idle {plan.idle_share:.1%}",
    ]


def _degrees(plan: Plan, console: Console) -> None:
    """Prints a histogram: the number of documents in every degree class, and their share of the
    tokens as a bar."""
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
    shown = "" if group == 1 else f"   one row per {group} ranks, which shows the first of them"
    console.print(f"ranks over time{shown}", style="dim", highlight=False)
    for rank in range(0, plan.ranks, group):
        line = Text(f"{f'rank {rank}':>{margin - 1}} ")
        for letter, style in _row(times, rank, width):
            line.append(letter, style=style)
        console.print(line, no_wrap=True, overflow="crop")
    stop = f"{times.makespan_s:.4g} s"
    console.print(" " * margin + "0 s" + stop.rjust(width - 3), style="dim", highlight=False)
    legend = [
        f"{EDGE}7{RING * 3} document 7 in a ring, on each of its rows",
        f"{EDGE}8{SINGLE * 3} document 8 on one rank",
        f"{EDGE} a document too short for its number",
        *([f"{WAIT} waits for K and V"] if times.waits else []),
        f"{IDLE} idle",
        f"{LAUNCH} micro-batch begins",
        "blank: launch, optimizer",
    ]
    console.print(
        "   ".join(words.replace(" ", "\u00a0") for words in legend), style="dim", highlight=False
    )


def _row(times: Timeline, rank: int, width: int) -> list[tuple[str, str]]:
    """Returns (character, style) of every column: what the rank does in the middle of that slice of
    time."""
    cells = [(" ", "")] * width
    scale = width / times.makespan_s if times.makespan_s > 0 else 0.0

    def columns(start_s: float, stop_s: float) -> range:
        return range(round(start_s * scale), min(width, round(stop_s * scale)))

    def paint(start_s: float, stop_s: float, letter: str, style: str) -> None:
        for column in columns(start_s, stop_s):
            cells[column] = (letter, style)

    for start_s, stop_s in times.micro_batches:
        paint(start_s, stop_s, IDLE, "dim")
    for block in times.blocks:
        index = rank - block.first_rank
        if 0 <= index < block.degree:
            ink = "black" if degree_class(block.degree) in DARK_TEXT_ON else "white"
            slot = columns(block.start_s[index], block.stop_s[index])
            words = _words(block.document, block.degree, len(slot))
            for column, letter in zip(slot, words, strict=True):
                cells[column] = (letter, f"{ink} on {colour(block.degree)}")
    for wait in times.waits:
        if wait.rank == rank:
            paint(wait.start_s, wait.stop_s, WAIT, "red")
    for start_s, _ in times.micro_batches:
        column = max(0, round(start_s * scale) - 1)
        cells[column] = (LAUNCH, "dim")
    return cells


def _words(document: int, degree: int, width: int) -> str:
    """Returns `width` characters for a document: an edge, its number if there is room for all of
    it, and a line."""
    number = f"{EDGE}{document}"
    start = number if len(number) <= width else EDGE
    return start.ljust(width, RING if degree > 1 else SINGLE)[:width]

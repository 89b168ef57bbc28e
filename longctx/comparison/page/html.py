"""Page of a comparison: one HTML file in which every figure has a caption that says how it was computed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from longctx.comparison.modelled import SPEEDUPS, TITLES, PlannerRow, degree_of
from longctx.comparison.page import figures
from longctx.comparison.table import LIMIT, captions, memory_table, missing, plans_table, step_words, times
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.plan import Plan
from longctx.plots.page import cards, facts, figure, numbers, page
from longctx.plots.picture import Panel

LOOKS = {TITLES["auto"]: "ours", LIMIT: "bound"}
"""CSS classes of table rows."""


@dataclass(frozen=True)
class Comparison:
    """Content of a page. `rows` are means over the steps; `plans` are those of the first step on `ranks` ranks.

    Attributes:
        source: the source of the lengths, in words.
        about: facts about the run, such as the command, versions and the machine: name → value.
        changed: what was done to documents that do not fit, in words; empty if nothing.
    """

    source: str
    profile_name: str
    profile: HardwareProfile
    ranks: int
    tokens_per_rank: int
    steps: int
    rows: Sequence[PlannerRow]
    plans: dict[str, Plan]
    about: dict[str, str]
    changed: str

    def reference(self) -> list[PlannerRow]:
        """Rows on `ranks` ranks, in the order of PLANNERS."""
        return [row for row in self.rows if row.ranks == self.ranks]


def render(comparison: Comparison) -> str:
    """Returns the page as HTML text."""
    c = comparison
    sections = [_summary(c), _setting(c), *_at_reference(c), _timelines(c), *_by_ranks(c), _method(c)]
    return page(f"Dynamic against static context parallelism: {c.source}", sections)


def _summary(c: Comparison) -> str:
    rows = {row.planner: row for row in c.reference()}
    auto, fixed, static = rows["auto"], rows["fixed-static"], rows["static"]
    boxes = []
    if auto.speedup_over_fixed:
        words = f"auto over fixed static: degree {degree_of(fixed)} for all steps, documents packed as they come"
        boxes.append((times(auto.speedup_over_fixed), words))
    if auto.speedup_over_single:
        words = f"auto over the best single degree for all steps ({degree_of(rows['single-degree'])}), packed as they come"
        boxes.append((times(auto.speedup_over_single), words))
    if auto.speedup_over_best_static:
        words = f"auto over the best static degree of every step (degree {degree_of(static)}), as context.mode static"
        boxes.append((times(auto.speedup_over_best_static), words))
    left = (auto.makespan_s or 0) / (auto.tight_bound_s or 1) - 1
    boxes.append((f"{left:.1%}", "above the lower bound on step time of any plan: the most that is left to gain"))
    boxes.append((f"{auto.planning_ms:,.0f} ms", "to plan the step, while the previous step trains"))
    lead = (
        "How long would one training step take if every document had the same context-parallel degree, and how long if each "
        f"has its own? Here: {c.source}; {c.ranks:,} ranks with {c.tokens_per_rank:,} tokens each, hardware profile "
        f"{c.profile_name}{f'; mean of {c.steps} steps' if c.steps > 1 else ''}. All times are modelled, by the cost "
        "model at the end of this page."
    )
    return f"<h1>Dynamic against static context parallelism</h1>\n<p class=lead>{escape(lead)}</p>\n{cards(boxes)}"


def _setting(c: Comparison) -> str:
    return facts(
        {
            "step": step_words(c.reference()),
            **({"long documents": c.changed} if c.changed else {}),
            **c.about,
        }
    )


def _at_reference(c: Comparison) -> Iterator[str]:
    rows = c.reference()
    yield f"<h2>One step on {c.ranks:,} ranks</h2>"
    for table in (plans_table(rows), memory_table(rows)):
        yield numbers(table.headings, table.lines, LOOKS)
    yield "".join(f"<p class=caption>{escape(line)}.</p>" for line in captions(rows))
    if notes := missing(rows):
        yield f"<p>Not shown, with the reason:</p><ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>"


def _timelines(c: Comparison) -> str:
    panels = [Panel(f"Auto (chose {c.plans['auto'].winner})", c.plans["auto"])]
    static = next((planner for planner in SPEEDUPS.values() if planner in c.plans), None)
    words = ""
    if static:
        degree = c.plans[static].winner.removeprefix("static:")
        panels.insert(0, Panel(f"{TITLES[static].capitalize()} (degree {degree})", c.plans[static]))
        words = f"under {TITLES[static]} and "
    return "<h2>What the ranks do</h2>" + figure(
        figures.timelines(panels),
        f"Ranks over time in one step, {words}under auto",
        "One row is one rank, and time runs to the right on one scale. A block is a document, its colour the number of ranks "
        "that the document is split over: a ring is a block across several rows. Reddish space is idle time. A line ends a "
        "micro-batch, where ranks wait for each other. First step; the cost model gives the busy time of each rank, and the "
        "order inside a micro-batch is chosen for display.",
    )


def _by_ranks(c: Comparison) -> Iterator[str]:
    """Yields figures of the speedups by number of ranks, if there are several."""
    documents = {row.ranks: row.documents for row in c.rows}
    if len(documents) == 1:
        return
    grow = "the same documents on all" if len(set(documents.values())) == 1 else "the step grows with the ranks"
    counted = ", ".join(f"{documents[ranks]:,} documents on {ranks:,}" for ranks in sorted(documents))
    yield "<h2>When the gain is large</h2>"
    yield figure(
        figures.speedup_lines(c.rows, "speedup_over_fixed"),
        "Speedup over fixed static by ranks",
        f"At {c.tokens_per_rank:,} tokens per rank; {grow} ({counted}). Dynamic degrees gain most where a long document forces "
        "many ranks on short ones.",
    )
    yield figure(
        figures.speedup_lines(c.rows, "speedup_over_best_static"),
        "Speedup over the best static degree of every step by ranks",
        "The same plans, over the fastest static plan of every step: the best of all degrees, searched for each step.",
    )


def _method(c: Comparison) -> str:
    return f"""<h2>How it was computed</h2>
<p>Every way of planning gets the same documents, ranks and token budget, and its plan is checked: each document is in exactly
one micro-batch, and no rank holds more tokens than the budget. All plans are then scored by one cost model, in which attention
is a ring exchange that is hidden behind computation as far as the profile says:</p>
<pre>rank       = linear · tokens + attention + max(0, exchange − hidden)
attention  = Σ attention · s² / degree / efficiency(s / (1 + penalty · (degree − 1)))
hidden     = overlap · attention + min(overlap · share of queries · linear · tokens, 2/3 · exchange)
exchange   = latency + max(bytes inside the node / bandwidth, bytes across nodes / bandwidth)
step       = fixed + Σ over micro-batches (launch + slowest rank)
lower      = fixed + launch · fewest micro-batches + all work at its best efficiency / ranks
tight      = fixed + launch · fewest micro-batches + the smallest M such that every document has a degree
             at which it alone takes at most M, and all work at these degrees is at most M per rank</pre>
<p>Not modelled: pipeline bubbles, jitter, stragglers and the data loader. Modelled times are as good as the profile: measure
your own machine before you trust seconds; ratios are less sensitive.</p>
<p><b>Fixed static</b>: one degree for all steps, as in trainers without dynamic degrees. Unless it was given, the degree is
the smallest power of two that divides the ranks and holds the longest document of the data set (of a mix: of the steps shown),
or all ranks where no power of two does. Documents are packed next-fit in the order in which they are drawn, and the last packs
are split until every group has one in every micro-batch, like dp_balanced, the baseline of the dynamic context parallelism
benchmark of Megatron. <b>Best static</b>: the best of all degrees, not only of powers of two, searched for every step, as
<code>context.mode: static</code> does. Documents are packed best-fit by tokens, or emptiest group first where that is faster;
groups with most work run first. <b>Bins</b>: degrees from a table by length, derived from the profile. <b>Auto</b>: the planner
chooses degree, ranks and micro-batch of every document; it also scores static and bins plans, and so is never worse.</p>
<details><summary>Constants of the hardware profile {escape(c.profile_name)}</summary>
{facts(c.profile.to_dict())}</details>"""

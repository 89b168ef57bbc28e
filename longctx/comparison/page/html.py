"""Page: a comparison as one HTML file that needs nothing else: no network, no script; pictures and numbers are inside.

Every figure is followed by a sentence that says what it shows and how it was computed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from longctx.comparison.baselines import BASELINES
from longctx.comparison.modelled import SPEEDUPS, TITLES, Row, degree_of, most_speedup
from longctx.comparison.page import figures
from longctx.comparison.table import LIMIT, Words, captions, memory_table, missing, plans_table, times
from longctx.planning.cost.hardware_profile import HardwareProfile
from longctx.planning.plan import Plan


@dataclass(frozen=True)
class Comparison:
    """All that a page shows. `rows` are means over the steps; `plans` are those of the first one on `ranks` ranks.

    Attributes:
        source: where the lengths come from, in words.
        about: facts about the run, such as the command, versions and the machine: name → value.
        changed: what was done to documents that do not fit, in words; empty if nothing.
        model: the preset in whose K and V memory is counted, if one was named.
    """

    source: str
    profile_name: str
    profile: HardwareProfile
    ranks: int
    tokens_per_rank: int
    steps: int
    rows: Sequence[Row]
    plans: dict[str, Plan]
    about: dict[str, str]
    model: str | None
    changed: str

    def reference(self) -> list[Row]:
        """The rows of the ranks sweep on `ranks` ranks, in the order of PLANNERS."""
        return [row for row in self.rows if row.sweep == "ranks" and row.ranks == self.ranks]


def render(comparison: Comparison) -> str:
    """The page as HTML text."""
    c = comparison
    sections = [_summary(c), _setting(c), *_at_reference(c), _timelines(c), *_sweeps(c), _documents(c), _method(c)]
    style = files("longctx.comparison.page").joinpath("page.css").read_text(encoding="utf-8")
    title = f"Dynamic against static context parallelism: {c.source}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(sections)
        + "\n</main>\n</body>\n</html>\n"
    )


def _figure(uri: str, title: str, words: str) -> str:
    title, words = escape(title), escape(words)
    return f'<figure><h3>{title}</h3><img src="{uri}" alt="{title}"><figcaption>{words}</figcaption></figure>'


def _table(words: Words) -> str:
    rows = [f"<tr>{''.join(f'<th>{escape(heading)}' for heading in words.headings)}</tr>"]
    for name, *cells in words.lines:
        look = {TITLES["auto"]: " class=ours", LIMIT: " class=bound"}.get(name, "")
        rows.append(f"<tr{look}><th>{escape(name)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    return f"<div class=scroll><table class=numbers>{''.join(rows)}</table></div>"


def _summary(c: Comparison) -> str:
    rows = {row.planner: row for row in c.reference()}
    auto, fixed, static = rows["auto"], rows["fixed-static"], rows["static"]
    cards = []
    if auto.speedup_over_fixed:
        words = f"auto over fixed static: degree {degree_of(fixed)} for all steps, documents packed as they come"
        cards.append((times(auto.speedup_over_fixed), words))
    if auto.speedup_over_best_static:
        words = (
            f"auto over the best static degree of every step (degree {degree_of(static)}), which no trainer knows beforehand"
        )
        cards.append((times(auto.speedup_over_best_static), words))
    if others := [row for row in rows.values() if row.planner in BASELINES and row.speedup_over_fixed]:
        best = max(others, key=lambda row: row.speedup_over_fixed or 0)
        words = f"the best of the other systems here, {TITLES[best.planner]}, over fixed static"
        cards.append((times(best.speedup_over_fixed), words))
    left = (auto.makespan_s or 0) / (auto.tight_bound_s or 1) - 1
    cards.append((f"{left:.1%}", "above a time that no plan of any kind can beat: the most that is left to gain"))
    cards.append((f"{auto.planning_ms:,.0f} ms", "to plan the step, while the one before it trains"))
    lead = (
        "How long would one training step take if every document had the same context-parallel degree, and how long if each "
        f"has its own? Here: {escape(c.source)}; {c.ranks:,} ranks with {c.tokens_per_rank:,} tokens each, hardware profile "
        f"{escape(c.profile_name)}{f'; mean of {c.steps} steps' if c.steps > 1 else ''}. All times are modelled, by the cost "
        "model at the end of this page."
    )
    boxes = "".join(f"<div class=card><b>{value}</b><span>{escape(words)}</span></div>" for value, words in cards)
    return f"<h1>Dynamic against static context parallelism</h1>\n<p class=lead>{lead}</p>\n<div class=cards>{boxes}</div>"


def _setting(c: Comparison) -> str:
    row = next(row for row in c.reference() if row.planner == "auto")
    facts = {
        "documents a step": f"{row.documents:,}, {row.tokens:,} tokens, the longest {row.longest:,}",
        **({"long documents": c.changed} if c.changed else {}),
        **c.about,
    }
    lines = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts.items())
    return f"<table class=facts>{lines}</table>"


def _at_reference(c: Comparison) -> Iterator[str]:
    rows = c.reference()
    yield f"<h2>One step on {c.ranks:,} ranks</h2>"
    yield from _speedup_bars(rows)
    yield _table(plans_table(rows))
    yield _table(memory_table(rows))
    yield "".join(f"<p class=caption>{escape(line)}.</p>" for line in captions(rows, c.model))
    if notes := missing(rows):
        yield f"<p>Not shown, with the reason:</p><ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>"


def _speedup_bars(rows: Sequence[Row]) -> Iterator[str]:
    """A figure of speedups over each static plan that there is, fixed static first."""
    titles = (
        "Speedup of every way of planning over fixed static",
        "Speedup over the best static degree of every step",
    )
    for title, (speedup, planner) in zip(titles, SPEEDUPS.items(), strict=True):
        baseline = next(row for row in rows if row.planner == planner)
        if baseline.makespan_s is not None:
            yield _figure(
                figures.speedup_bars(rows, speedup, most_speedup(rows, speedup) or 0.0),
                title,
                f"Each bar is the time of {TITLES[planner]} (degree {degree_of(baseline)}), {baseline.makespan_s:.3g} s, "
                "divided by the time of this plan, for the same documents and the same cost model. No plan passes the dashed "
                "line, the tight bound: that is proven. The end of this page says what the planners do.",
            )


def _timelines(c: Comparison) -> str:
    named = [(f"Auto (chose {c.plans['auto'].winner})", c.plans["auto"])]
    static = next((planner for planner in SPEEDUPS.values() if planner in c.plans), None)
    words = ""
    if static:
        degree = c.plans[static].winner.removeprefix("static:")
        named.insert(0, (f"{TITLES[static].capitalize()} (degree {degree})", c.plans[static]))
        words = f"under {TITLES[static]} and "
    return "<h2>What the ranks do</h2>" + _figure(
        figures.timelines(named),
        f"Ranks over time in one step, {words}under auto",
        "One row is one rank, time runs to the right on one scale. A block is a document, its colour the number "
        "of ranks it is split over, so a ring is a block across several rows; white is idle time, and a line ends a "
        "micro-batch, at which ranks wait for each other. First step; order inside a micro-batch is for the eye, the cost "
        "model knows only how long a rank is busy.",
    )


def _sweeps(c: Comparison) -> Iterator[str]:
    """How the speedups change with ranks, budget and longest document, as far as these vary."""
    by = {name: [row for row in c.rows if row.sweep == name] for name in ("ranks", "budget", "longest")}
    documents = {row.ranks: row.documents for row in by["ranks"]}
    grow = "the same documents on all" if len(set(documents.values())) == 1 else "the step grows with the ranks"
    counted = ", ".join(f"{documents[ranks]:,} documents on {ranks:,}" for ranks in sorted(documents))
    over, same = "Speedup over fixed static by", f"The same documents on {c.ranks:,} ranks"
    yield "<h2>How the gain moves</h2>"
    if len(documents) > 1:
        few = "The more ranks a long document forces upon short ones, the more dynamic degrees gain."
        words = f"At {c.tokens_per_rank:,} tokens a rank; {grow} ({counted}). {few}"
        yield _figure(figures.lines(by["ranks"], "ranks", "speedup_over_fixed"), f"{over} ranks", words)
        yield _figure(
            figures.lines(by["ranks"], "ranks", "speedup_over_best_static"),
            "Speedup over the best static degree of every step by ranks",
            "The same plans, over the fastest static plan of every step, which is sought among all degrees anew for each.",
        )
    yield _figure(
        figures.lines(by["budget"], "tokens_per_rank", "speedup_over_fixed"),
        f"{over} token budget",
        f"{same}, with a quarter to four times the tokens a rank. A larger budget lets a static plan take a lower degree.",
    )
    yield _figure(
        figures.lines(by["longest"], "max_length", "speedup_over_fixed"),
        f"{over} longest document",
        f"{same}, {c.tokens_per_rank:,} tokens each; longer ones than the number below are cut into pieces of that length, so "
        "that all points hold the same tokens. The degree of fixed static follows from it, unless it was named.",
    )


def _documents(c: Comparison) -> str:
    auto = c.plans["auto"]
    lengths = _figure(
        figures.length_histogram(auto.lengths),
        "How long the documents are",
        "Share of the documents, and of the tokens that they hold, by length (first step). Where the two part, few long "
        "documents hold much of the work, and attention makes them weigh even more: it grows with the square of the length.",
    )
    degrees = _figure(
        figures.degree_histogram(auto),
        "Which degrees auto gives them",
        f"Share of the same documents and tokens by the number of ranks that auto splits them over ({escape(auto.winner)}).",
    )
    return f"<h2>Documents and degrees</h2>{lengths}{degrees}"


def _method(c: Comparison) -> str:
    baselines = "".join(f"<li><b>{escape(b.title)}</b>. {escape(b.about)}</li>" for b in BASELINES.values())
    constants = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in c.profile.to_dict().items()
    )
    return f"""<h2>How it was computed</h2>
<p>Every way of planning gets the same documents, ranks and token budget, and its plan is checked: each document stands in one
micro-batch, and no rank holds more tokens than the budget. All plans are then scored by one cost model, with attention a ring
exchange that is hidden behind attention as far as the profile says, whatever the system would use itself:</p>
<pre>rank       = linear · tokens + Σ attention · s² / degree / efficiency(s / (1 + penalty · (degree − 1)))
             + max(0, exchange − overlap · attention)
exchange   = latency + max(bytes inside the node / bandwidth, bytes across nodes / bandwidth)
step       = fixed + Σ over micro-batches (launch + slowest rank)
lower      = fixed + launch · fewest micro-batches + all work at its best efficiency / ranks
tight      = fixed + launch · fewest micro-batches + the least M that does for both: every document has
             a degree at which it alone takes at most M, and all work at these degrees is at most M a rank</pre>
<p>Not modelled: pipeline bubbles, jitter, stragglers, the data loader, and what other systems gain or lose by their own kernels
and exchange. So this page compares planning, not whole systems. Modelled times are as good as the profile: measure your own
machine before you trust seconds; ratios are less sensitive.</p>
<p><b>Fixed static</b>: one degree for all steps, what trainers without dynamic degrees run. Unless one was named, it is the
smallest power of two that divides the ranks and holds the longest document of the data set, of a mix of the steps shown (all
ranks, where none does). Documents are packed next-fit in the order in which they are drawn, and the last packs are split until
every group has one in every micro-batch, as dp_balanced does, the baseline of the dynamic context parallelism benchmark of
Megatron. <b>Best static</b>: the best of all degrees, not of powers of two alone, sought anew for every step: an oracle, which
no trainer has. Documents are packed best-fit by tokens, or emptiest group first where that is faster; groups with most work run
first. <b>Bins</b>: degrees from a table by length, derived from the profile. <b>Auto</b>: the planner chooses degree, ranks and
micro-batch of every document; it also scores static and bins, and so is never worse.</p>
<ul>{baselines}</ul>
<details><summary>Constants of the hardware profile {escape(c.profile_name)}</summary>
<table class=facts>{constants}</table></details>"""

"""Page: a comparison as one HTML file that needs nothing else: no network, no script; pictures and numbers are inside.

Every figure is followed by a sentence that says what it shows and how it was computed, and all its numbers stand in the table
at the end, so that a reader who doubts one can follow it.
"""

from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files

from longctx.comparison.baselines import BASELINES
from longctx.comparison.baselines.megatron_main_branch import unsynchronised_s
from longctx.comparison.modelled import SPEEDUPS, TITLES, Row, degree_of, gibibytes, most_speedup, over_fixed_without_barriers
from longctx.comparison.page import figures
from longctx.comparison.page.parts import Comparison, degree_words, figure, mean_words, plan_cells, times, title_of
from longctx.comparison.page.sweeps import sweeps
from longctx.planning.cost.bounds import tight_bound_s


def render(comparison: Comparison) -> str:
    """The page as HTML text."""
    c = comparison
    sections = [_summary(c), _setting(c), *_at_reference(c), _timelines(c), sweeps(c), _documents(c), _method(c), _all_rows(c)]
    style = files("longctx.comparison.page").joinpath("page.css").read_text(encoding="utf-8")
    title = f"Dynamic against static context parallelism: {c.source}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(sections)
        + "\n</main>\n</body>\n</html>\n"
    )


def _summary(c: Comparison) -> str:
    rows = {row.planner: row for row in c.reference()}
    auto, fixed, static = rows["auto"], rows["fixed-static"], rows["static"]
    cards = []
    if auto.speedup_over_fixed:
        words = f"auto over fixed static: degree {degree_of(fixed)} for all steps, documents packed as they come"
        cards.append((times(auto.speedup_over_fixed), words))
    if auto.speedup_over_best_static:
        words = f"auto over the best static degree of every step ({degree_words(static)}), which no trainer knows beforehand"
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
    auto = next(row for row in rows if row.planner == "auto")
    yield f"<h2>One step on {c.ranks:,} ranks</h2>"
    yield from _speedup_bars(c, rows)
    if (free := over_fixed_without_barriers(rows)) is not None:
        yield (
            "<p>The cost model has ranks wait for each other at the end of every micro-batch, as they do where weights are "
            "gathered in it. Where every rank keeps all weights for the step, the groups of fixed static, which never change, "
            f"wait only at its end: auto is then {times(free)} as fast as fixed static.</p>"
        )
    yield figure(
        figures.time_bars(rows),
        "Where the time of the step goes under every plan",
        "Seconds of the step, averaged over ranks, by what a rank does in them: it computes; waits for K and V that "
        "attention could not hide; waits for the slowest rank of its micro-batch; or launches micro-batches and runs the "
        "optimizer. A bar's parts add up to the time of the step. Splitting short documents shows up twice: as exchange, "
        "and as longer work, because attention on short chunks is less efficient.",
    )
    yield _reference_table(rows, c.model)
    if megatron := c.plans.get("megatron-main"):
        groups_s = unsynchronised_s(c.profile, megatron.lengths, ranks=megatron.ranks, tokens_per_rank=megatron.tokens_per_rank)
        yield (
            "<p class=caption>Megatron's own runtime runs the documents of a rank one by one and has no barrier inside a "
            "group, so the token budget costs it less than here. With neither budget nor barrier its groups would take "
            f"{groups_s:.3g} s in the first step instead of {megatron.makespan_s:.3g} s, if starting a document cost "
            "nothing.</p>"
        )
    if any(seconds is not None for _, seconds in c.static_curve):
        yield figure(
            figures.static_curve(c.static_curve, c.plans["auto"].makespan_s, tight_bound_s(c.plans["auto"])),
            "Time of the step at every static degree",
            "The same documents with one degree for all (first step). Low degrees cannot hold the longest document, high "
            "ones exchange too much and cut documents too short. The best static plan of the first figure is sought among "
            "all degrees; shown are 2^k, 3·2^k and the number of ranks.",
        )
    missing = [row for row in rows if row.note]
    if missing:
        items = "".join(f"<li><b>{escape(TITLES[row.planner])}</b>: {escape(row.note)}</li>" for row in missing)
        yield f"<p>Not shown, with the reason:</p><ul>{items}</ul>"
    if auto.winner.startswith("static"):
        yield "<p>Here auto's own search found nothing better than the best static plan, and so it chose that one.</p>"


def _speedup_bars(c: Comparison, rows: Sequence[Row]) -> Iterator[str]:
    """A figure of speedups over each static plan that there is, fixed static first."""
    about = {
        "fixed-static": (
            "Speedup of every way of planning over fixed static",
            "Fixed static takes one degree for all steps, the smallest power of two that holds the longest document of the "
            "data set unless one was named, and packs documents in the order in which they are drawn: what trainers without "
            "dynamic degrees run.",
        ),
        "static": (
            "Speedup over the best static degree of every step",
            "The best static plan is the fastest of all degrees, not of powers of two alone, and of two ways of packing, "
            "sought anew for every step: an oracle, which no trainer has.",
        ),
    }
    for speedup, planner in SPEEDUPS.items():
        baseline = next((row for row in rows if row.planner == planner and row.makespan_s), None)
        if baseline is None:
            continue
        title, words = about[planner]
        bound = most_speedup(rows, speedup) or 0.0
        yield figure(
            figures.speedup_bars(rows, speedup, bound),
            title,
            f"Each bar is the time of {title_of(baseline)}, {baseline.makespan_s:.3g} s, divided by the time of this plan, "
            f"for the same documents and the same cost model{mean_words(c)}. {words} The dashed line is the "
            "tight bound at the end of this page: it is proven that no plan passes it.",
        )


def _reference_table(rows: Sequence[Row], model: str | None) -> str:
    head = (
        "<tr><th>planner<th>time of the step<th>over fixed static<th>over best static<th>gap<th>waits for K, V<th>idle"
        "<th>padding<th>micro-batches<th>tokens on a rank<th>tokens of others"
        f"{'<th>their K and V' if model else ''}<th>planning</tr>"
    )
    body = "".join(
        f"<tr{' class=ours' if row.planner == 'auto' else ''}><th>{escape(title_of(row))}</th><td>{row.makespan_s:.3g} s</td>"
        f"{plan_cells(row)}<td>{row.micro_batches}</td><td>{row.most_tokens:,}</td><td>{row.remote_tokens:,}</td>"
        f"{f'<td>{gibibytes(row.remote_kv_bytes)}</td>' if model else ''}"
        f"<td>{row.planning_ms:,.0f} ms</td></tr>"
        for row in rows
        if row.makespan_s is not None
    )
    auto = next(row for row in rows if row.planner == "auto")
    limits = [times(most) if (most := most_speedup(rows, speedup)) else "" for speedup in SPEEDUPS]
    body += (
        f"<tr class=bound><th>no plan can pass</th><td>{auto.tight_bound_s:.3g} s</td><td>{'</td><td>'.join(limits)}</td>"
        f"<td>{auto.unavoidable_gap:.1%}</td>{'<td></td>' * (8 if model else 7)}</tr>"
    )
    in_bytes = (
        f" Their K and V are those of one layer of the preset {model}, in bfloat16; backward holds as many bytes of gradients "
        "beside them, and the setting context.keep_kv holds all layers."
        if model
        else " Give --model to see their K and V in bytes."
    )
    caption = (
        "Over fixed static and over best static are speedups. Gap is the time over the lower bound, which takes the network "
        "for free; the part of it in the last line is unavoidable. Waits and idle are shares of all ranks' time. Padding is "
        "the share of token slots (micro-batches × ranks × tokens a rank) that hold no token: longctx computes nothing for "
        "them, a system with fixed shapes would. Tokens on a rank and tokens of others are the most that any rank holds in a "
        "micro-batch: its own, whose activations it keeps, and those of other ranks whose K and V it holds at once, if it "
        "gathers them in one stage; more stages hold less." + in_bytes
    )
    return f"<div class=scroll><table class=numbers>{head}{body}</table></div><p class=caption>{caption}</p>"


def _timelines(c: Comparison) -> str:
    named = [(f"Auto (chose {c.plans['auto'].winner})", c.plans["auto"])]
    static = next((planner for planner in SPEEDUPS.values() if planner in c.plans), None)
    words = ""
    if static:
        degree = c.plans[static].winner.removeprefix("static:")
        named.insert(0, (f"{TITLES[static].capitalize()} (degree {degree})", c.plans[static]))
        words = f"under {TITLES[static]} and "
    return "<h2>What the ranks do</h2>" + figure(
        figures.timelines(named),
        f"Ranks over time in one step, {words}under auto",
        "One row is one rank, time runs to the right on one scale. A block is a document, its colour the number "
        "of ranks it is split over, so a ring is a block across several rows; white is idle time, and a line ends a "
        "micro-batch, at which ranks wait for each other. First step; order inside a micro-batch is for the eye, the cost "
        "model knows only how long a rank is busy.",
    )


def _documents(c: Comparison) -> str:
    auto = c.plans["auto"]
    lengths = figure(
        figures.length_histogram(auto.lengths),
        "How long the documents are",
        "Share of the documents, and of the tokens that they hold, by length (first step). Where the two part, few long "
        "documents hold much of the work, and attention makes them weigh even more: it grows with the square of the length.",
    )
    degrees = figure(
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
<p><b>Fixed static</b>: one degree for all steps. Unless one was named, it is the smallest power of two that divides the ranks
and holds the longest document of the data set, of a mix of the steps shown (all ranks, where none does). Documents are packed
next-fit in the order in which they are drawn, and the last packs are split until every group has one in every micro-batch, as
dp_balanced does, the baseline of the dynamic context parallelism benchmark of Megatron. <b>Best static</b>: the best of all
degrees, documents packed best-fit by tokens, or emptiest group first where that is faster; groups with most work run first.
<b>Bins</b>: degrees from a table by length, derived from the profile. <b>Auto</b>: the planner chooses degree, ranks and
micro-batch of every document; it also scores static and bins, and so is never worse.</p>
<ul>{baselines}</ul>
<details><summary>Constants of the hardware profile {escape(c.profile_name)}</summary>
<table class=facts>{constants}</table></details>"""


def _all_rows(c: Comparison) -> str:
    head = (
        "<tr><th>varied<th>planner<th>ranks<th>tokens a rank<th>documents<th>longest<th>time<th>lower bound<th>tight bound"
        "<th>over fixed static<th>over best static<th>gap<th>waits<th>idle<th>padding<th>planning</tr>"
    )
    body = "".join(_row(row) for row in c.rows)
    return (
        f"<details><summary>All numbers behind the figures ({len(c.rows)} rows)</summary><div class=scroll><table "
        f"class=numbers>{head}{body}</table></div></details>"
    )


def _row(row: Row) -> str:
    first = (
        f"<tr><th>{row.sweep}</th><th>{escape(title_of(row))}</th><td>{row.ranks:,}</td><td>{row.tokens_per_rank:,}</td>"
        f"<td>{row.documents:,}</td><td>{row.longest:,}</td>"
    )
    if row.makespan_s is None:
        return first + f"<td class=note colspan=10>{escape(row.note)}</td></tr>"
    return (
        f"{first}<td>{row.makespan_s:.4g} s</td><td>{row.lower_bound_s:.4g} s</td><td>{row.tight_bound_s:.4g} s</td>"
        f"{plan_cells(row)}<td>{row.planning_ms:,.0f} ms</td></tr>"
    )

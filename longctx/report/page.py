"""Page: a comparison as one HTML file that needs nothing else: no network, no script; pictures and numbers are inside.

Every figure is followed by a sentence that says what it shows and how it was computed, and all its numbers stand in the table
at the end, so that a reader who doubts one can follow it.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from longctx.planning.baselines import BASELINES
from longctx.planning.bound import tight_bound_s
from longctx.planning.plan import Plan
from longctx.planning.profile import HardwareProfile
from longctx.report import page_figures as figures
from longctx.report.compare import PLANNERS, TITLES, Row, gibibytes


@dataclass(frozen=True)
class Comparison:
    """All that a page shows. `rows` are means over the steps; `plans` and `static_curve` are of the first one on `ranks` ranks.

    Attributes:
        source: where the lengths come from, in words.
        about: facts about the run, such as the command, versions and the machine: name → value.
        changed: what was done to documents that do not fit, in words; empty if nothing.
        static_curve: (degree, makespan in seconds or None if a document does not fit).
        model: the preset in whose K and V memory is counted, if one was named.
        megatron_groups_s: time of the first step if Megatron main's groups were run as they are, without the token budget.
    """

    source: str
    profile_name: str
    profile: HardwareProfile
    ranks: int
    tokens_per_rank: int
    steps: int
    rows: Sequence[Row]
    plans: dict[str, Plan]
    static_curve: Sequence[tuple[int, float | None]]
    megatron_groups_s: float | None
    about: dict[str, str]
    model: str | None = None
    changed: str = ""

    def reference(self) -> list[Row]:
        """The rows of the ranks sweep on `ranks` ranks, in the order of PLANNERS."""
        rows = [row for row in self.rows if row.sweep == "ranks" and row.ranks == self.ranks]
        return sorted(rows, key=lambda row: PLANNERS.index(row.planner))

    def sweep(self, name: str) -> list[Row]:
        return [row for row in self.rows if row.sweep == name]


def render(comparison: Comparison) -> str:
    """The page as HTML text."""
    c = comparison
    sections = [_summary(c), _setting(c), _at_reference(c), _timelines(c), _sweeps(c), _documents(c), _method(c), _all_rows(c)]
    style = files("longctx.report").joinpath("page.css").read_text(encoding="utf-8")
    title = f"Dynamic against static context parallelism: {c.source}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(sections)
        + "\n</main>\n</body>\n</html>\n"
    )


def _summary(c: Comparison) -> str:
    rows = {row.planner: row for row in c.reference()}
    auto, static = rows["auto"], rows.get("static")
    left = (auto.makespan_s or 0) / (auto.tight_bound_s or 1) - 1
    cards = [(f"{left:.1%}", "above a time that no plan of any kind can beat: the most that is left to gain")]
    if static and static.makespan_s and auto.speedup:
        cards.insert(0, (f"{auto.speedup:.2f}×", f"auto over the best static degree ({_winner(static)})"))
        plain = rows.get("plain-static")
        if plain and plain.makespan_s and auto.makespan_s:
            cards.insert(
                1, (f"{plain.makespan_s / auto.makespan_s:.2f}×", "auto over plain static: packed by tokens alone, as usual")
            )
        others = [row for row in rows.values() if row.planner in BASELINES and row.planner != "plain-static" and row.speedup]
        if others:
            best = max(others, key=lambda row: row.speedup or 0)
            cards.append((f"{best.speedup:.2f}×", f"the best of the other systems here, {TITLES[best.planner]}"))
    cards.append((f"{auto.planning_ms:,.0f} ms", "to plan the step, while the one before it trains"))
    lead = (
        "How long would one training step take if every document had the same context-parallel degree, and how long if each "
        f"has its own? Here: {_text(c.source)}; {c.ranks:,} ranks with {c.tokens_per_rank:,} tokens each, hardware profile "
        f"{_text(c.profile_name)}{f'; mean of {c.steps} steps' if c.steps > 1 else ''}. All times are modelled, by the cost "
        "model at the end of this page."
    )
    boxes = "".join(f"<div class=card><b>{value}</b><span>{_text(words)}</span></div>" for value, words in cards)
    return f"<h1>Dynamic against static context parallelism</h1>\n<p class=lead>{lead}</p>\n<div class=cards>{boxes}</div>"


def _setting(c: Comparison) -> str:
    row = next(row for row in c.reference() if row.planner == "auto")
    facts = {
        "documents a step": f"{row.documents:,}, {row.tokens:,} tokens, the longest {row.longest:,}",
        **({"long documents": c.changed} if c.changed else {}),
        **c.about,
    }
    lines = "".join(f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in facts.items())
    return f"<table class=facts>{lines}</table>"


def _at_reference(c: Comparison) -> str:
    rows = c.reference()
    auto = next(row for row in rows if row.planner == "auto")
    static = next((row for row in rows if row.planner == "static" and row.makespan_s), None)
    parts = [f"<h2>One step on {c.ranks:,} ranks</h2>"]
    if static:
        bound = (static.makespan_s or 0) / (static.tight_bound_s or 1)
        parts.append(
            _figure(
                figures.speedup_bars(rows, bound),
                "Speedup of every way of planning over the best static degree",
                f"Each bar is the time of the best static plan ({_winner(static)}, {static.makespan_s:.3g} s) divided by the "
                f"time of this plan, for the same documents and the same cost model{_mean_words(c)}. The best static plan is "
                "the fastest of all degrees, not of powers of two alone, and of two ways of packing. The dashed line is the "
                "tight bound at the end of this page: it is proven that no plan passes it.",
            )
        )
    parts.append(
        _figure(
            figures.time_bars(rows),
            "Where the time of the step goes under every plan",
            "Seconds of the step, averaged over ranks, by what a rank does in them: it computes; waits for K and V that "
            "attention could not hide; waits for the slowest rank of its micro-batch; or launches micro-batches and runs the "
            "optimizer. A bar's parts add up to the time of the step. Splitting short documents shows up twice: as exchange, "
            "and as longer work, because attention on short chunks is less efficient.",
        )
    )
    parts.append(_reference_table(rows, c.model))
    if c.megatron_groups_s is not None and "megatron-main" in c.plans:
        parts.append(
            "<p class=caption>Megatron's own runtime runs the documents of a rank one by one and has no barrier inside a "
            "group, so the token budget costs it less than here. With neither budget nor barrier its groups would take "
            f"{c.megatron_groups_s:.3g} s in the first step instead of {c.plans['megatron-main'].makespan_s:.3g} s, if "
            "starting a document cost nothing.</p>"
        )
    held = [(degree, seconds) for degree, seconds in c.static_curve if seconds is not None]
    if held:
        parts.append(
            _figure(
                figures.static_curve(c.static_curve, c.plans["auto"].makespan_s, tight_bound_s(c.plans["auto"])),
                "Time of the step at every static degree",
                "The same documents with one degree for all (first step). Low degrees cannot hold the longest document, high "
                "ones exchange too much and cut documents too short. The best static plan of the first figure is sought among "
                "all degrees; shown are 2^k, 3·2^k and the number of ranks.",
            )
        )
    missing = [row for row in rows if row.note]
    if missing:
        items = "".join(f"<li><b>{_text(TITLES[row.planner])}</b>: {_text(row.note)}</li>" for row in missing)
        parts.append(f"<p>Not shown, with the reason:</p><ul>{items}</ul>")
    if auto.winner.startswith("static"):
        parts.append("<p>Here auto's own search found nothing better than the best static plan, and so it chose that one.</p>")
    return "\n".join(parts)


def _reference_table(rows: Sequence[Row], model: str | None) -> str:
    head = (
        "<tr><th>planner<th>time of the step<th>speedup<th>gap<th>waits for K, V<th>idle<th>padding<th>micro-batches"
        f"<th>tokens on a rank<th>tokens of others{'<th>their K and V' if model else ''}<th>planning</tr>"
    )
    body = "".join(
        f"<tr{' class=ours' if row.planner == 'auto' else ''}><th>{_text(_name(row))}</th><td>{row.makespan_s:.3g} s</td>"
        f"<td>{_times(row.speedup)}</td><td>{row.gap:.1%}</td><td>{row.exchange_share:.1%}</td><td>{row.idle_share:.1%}</td>"
        f"<td>{row.padding_share:.1%}</td><td>{row.micro_batches}</td><td>{row.most_tokens:,}</td><td>{row.remote_tokens:,}</td>"
        f"{f'<td>{gibibytes(row.remote_kv_bytes)}</td>' if model else ''}"
        f"<td>{row.planning_ms:,.0f} ms</td></tr>"
        for row in rows
        if row.makespan_s is not None
    )
    auto = next(row for row in rows if row.planner == "auto")
    static = next((row for row in rows if row.planner == "static" and row.makespan_s), None)
    limit = _times(static.makespan_s / auto.tight_bound_s) if static and static.makespan_s and auto.tight_bound_s else ""
    body += (
        f"<tr class=bound><th>no plan can pass</th><td>{auto.tight_bound_s:.3g} s</td><td>{limit}</td>"
        f"<td>{auto.unavoidable_gap:.1%}</td>{'<td></td>' * (8 if model else 7)}</tr>"
    )
    in_bytes = (
        f" Their K and V are those of one layer of the preset {model}, in bfloat16; backward holds as many bytes of gradients "
        "beside them, and the setting context.keep_kv holds all layers."
        if model
        else " Give --model to see their K and V in bytes."
    )
    caption = (
        "Gap is the time over the lower bound, which takes the network for free; the part of it in the last line is "
        "unavoidable. Waits and idle are shares of all ranks' time. Padding is the share of token slots (micro-batches × ranks "
        "× tokens a rank) that hold no token: longctx computes nothing for them, a system with fixed shapes would. Tokens on a "
        "rank and tokens of others are the most that any rank holds in a micro-batch: its own, whose activations it keeps, and "
        "those of other ranks whose K and V it holds at once, if it gathers them in one stage; more stages hold less."
        + in_bytes
    )
    return f"<div class=scroll><table class=numbers>{head}{body}</table></div><p class=caption>{caption}</p>"


def _timelines(c: Comparison) -> str:
    named = [(f"Auto (chose {c.plans['auto'].winner})", c.plans["auto"])]
    if "static" in c.plans:
        named.insert(0, (f"Best static degree ({c.plans['static'].winner.removeprefix('static:')})", c.plans["static"]))
    return "<h2>What the ranks do</h2>" + _figure(
        figures.timelines(named),
        "Ranks over time in one step, under the best static degree and under auto",
        "One row is one rank, time runs to the right on the same scale in both. A block is a document, its colour the number "
        "of ranks it is split over, so a ring is a block across several rows; white is idle time, and a line ends a "
        "micro-batch, at which ranks wait for each other. First step; order inside a micro-batch is for the eye, the cost "
        "model knows only how long a rank is busy.",
    )


def _sweeps(c: Comparison) -> str:
    planners = [planner for planner in PLANNERS if planner != "static"]
    parts = ["<h2>How the gain moves</h2>"]
    by_ranks, by_budget, by_longest = c.sweep("ranks"), c.sweep("budget"), c.sweep("longest")
    same = "Speedup over the best static degree of the same setting, which is sought anew for every point"
    if len({row.ranks for row in by_ranks}) > 1:
        documents = {row.ranks: row.documents for row in by_ranks}
        grow = "the same documents on all" if len(set(documents.values())) == 1 else "the step grows with the ranks"
        parts.append(
            _figure(
                figures.lines(by_ranks, lambda r: r.ranks, lambda r: r.speedup, "ranks", "speedup", planners),
                "Speedup by ranks",
                f"{same}, at {c.tokens_per_rank:,} tokens a rank; {grow} "
                f"({', '.join(f'{documents[n]:,} documents on {n:,}' for n in sorted(documents))}){_mean_words(c)}. On few "
                "ranks a static degree cannot waste much; the more ranks a long document forces upon short ones, the more "
                "dynamic degrees gain.",
            )
        )
        unavoidable = [(row.ranks, 100 * row.unavoidable_gap) for row in by_ranks if row.unavoidable_gap is not None]
        parts.append(
            _figure(
                figures.lines(
                    by_ranks,
                    lambda r: r.ranks,
                    lambda r: None if r.gap is None else 100 * r.gap,
                    "ranks",
                    "% above the bound",
                    _near(by_ranks),
                    unavoidable,
                ),
                "Distance to the lower bound by ranks",
                "Time of each plan over the lower bound, less one. That bound takes the network for free, so that part of "
                "the distance no plan can close, above all where one document is a large part of the step: below the dashed "
                "line, the tight bound, there is no plan. Planners further away than the best static degree are left out; the "
                "table has them.",
            )
        )
    if by_budget:
        parts.append(
            _figure(
                figures.lines(
                    by_budget, lambda r: r.tokens_per_rank, lambda r: r.speedup, "tokens a rank", "speedup", planners
                ),
                "Speedup by token budget",
                f"{same}: the same documents on {c.ranks:,} ranks, with a quarter to four times the tokens a "
                f"rank{_mean_words(c)}. A larger budget lets a static plan take a lower degree.",
            )
        )
    if by_longest:
        parts.append(
            _figure(
                figures.lines(
                    by_longest,
                    lambda r: r.max_length or 0,
                    lambda r: r.speedup,
                    "longest document in tokens",
                    "speedup",
                    planners,
                ),
                "Speedup by longest document",
                f"{same}: {c.ranks:,} ranks, {c.tokens_per_rank:,} tokens each, documents longer than the number below cut "
                f"into pieces of that length, so that all points hold the same tokens{_mean_words(c)}.",
            )
        )
    parts.append(_where_behind(c))
    return "\n".join(parts) if len(parts) > 2 else ""


def _near(rows: Sequence[Row]) -> list[str]:
    """Planners that are on average no further above the bound than the best static degree."""
    gaps = {planner: [row.gap for row in rows if row.planner == planner and row.gap is not None] for planner in PLANNERS}
    means = {planner: sum(found) / len(found) for planner, found in gaps.items() if found}
    return [planner for planner, gap in means.items() if gap <= means.get("static", gap)]


def _where_behind(c: Comparison) -> str:
    """Names the settings in which another plan is faster than auto."""
    settings: dict[tuple[object, ...], list[Row]] = {}
    for row in c.rows:
        settings.setdefault((row.sweep, row.ranks, row.tokens_per_rank, row.max_length), []).append(row)
    behind: list[str] = []
    seen: list[float | None] = []
    for rows in settings.values():
        auto = next((row.makespan_s for row in rows if row.planner == "auto"), None)
        if auto in seen:  # figures share points
            continue
        seen.append(auto)
        best = min((row for row in rows if row.makespan_s), key=lambda row: row.makespan_s or 0, default=None)
        if auto and best and best.makespan_s and auto / best.makespan_s > 1.001:
            cut = f", documents of at most {best.max_length:,}" if best.max_length else ""
            behind.append(
                f"<li>{_text(TITLES[best.planner])} by {auto / best.makespan_s - 1:.1%} on {best.ranks:,} ranks with "
                f"{best.tokens_per_rank:,} tokens each{cut}</li>"
            )
    if not behind:
        return f"<p>In all {len(seen)} settings of this page no plan is faster than auto by more than 0.1%.</p>"
    return f"<p>In {len(behind)} of {len(seen)} settings another plan is faster than auto:</p><ul>{''.join(behind)}</ul>"


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
        f"Share of the same documents and tokens by the number of ranks that auto splits them over ({_text(auto.winner)}).",
    )
    return f"<h2>Documents and degrees</h2>{lengths}{degrees}"


def _method(c: Comparison) -> str:
    baselines = "".join(f"<li><b>{_text(b.title)}</b>. {_text(b.about)}</li>" for b in BASELINES.values())
    constants = "".join(
        f"<tr><th>{_text(name)}</th><td>{_text(str(value))}</td></tr>" for name, value in c.profile.to_dict().items()
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
<p><b>Best static</b>: the best of all degrees, documents packed best-fit by tokens, or emptiest group first where that is
faster; groups with most work run first. <b>Bins</b>: degrees from a table by length, derived from the profile. <b>Auto</b>: the
planner chooses degree, ranks and micro-batch of every document; it also scores static and bins, and so is never worse.</p>
<ul>{baselines}</ul>
<details><summary>Constants of the hardware profile {_text(c.profile_name)}</summary>
<table class=facts>{constants}</table></details>"""


def _all_rows(c: Comparison) -> str:
    head = (
        "<tr><th>varied<th>planner<th>ranks<th>tokens a rank<th>documents<th>longest<th>time<th>lower bound<th>tight bound"
        "<th>speedup<th>gap<th>waits<th>idle<th>padding<th>planning</tr>"
    )
    body = "".join(_row(row) for row in c.rows)
    return (
        f"<details><summary>All numbers behind the figures ({len(c.rows)} rows)</summary><div class=scroll><table "
        f"class=numbers>{head}{body}</table></div></details>"
    )


def _row(row: Row) -> str:
    first = (
        f"<tr><th>{row.sweep}</th><th>{_text(_name(row))}</th><td>{row.ranks:,}</td><td>{row.tokens_per_rank:,}</td>"
        f"<td>{row.documents:,}</td><td>{row.longest:,}</td>"
    )
    if row.makespan_s is None:
        return first + f"<td class=note colspan=9>{_text(row.note)}</td></tr>"
    return (
        f"{first}<td>{row.makespan_s:.4g} s</td><td>{row.lower_bound_s:.4g} s</td><td>{row.tight_bound_s:.4g} s</td>"
        f"<td>{_times(row.speedup)}</td><td>{row.gap:.1%}</td><td>{row.exchange_share:.1%}</td><td>{row.idle_share:.1%}</td>"
        f"<td>{row.padding_share:.1%}</td><td>{row.planning_ms:,.0f} ms</td></tr>"
    )


def _figure(uri: str, title: str, words: str) -> str:
    return (
        f'<figure><h3>{_text(title)}</h3><img src="{uri}" alt="{_text(title)}"><figcaption>{_text(words)}</figcaption></figure>'
    )


def _name(row: Row) -> str:
    return f"best static ({_winner(row)})" if row.planner == "static" and row.winner else TITLES[row.planner]


def _winner(row: Row) -> str:
    """`static:8` → `degree 8`."""
    return "degree " + row.winner.removeprefix("static:")


def _mean_words(c: Comparison) -> str:
    return f", mean of {c.steps} steps" if c.steps > 1 else ""


def _times(speedup: float | None) -> str:
    return "" if speedup is None else f"{speedup:.2f}×"


def _text(words: str) -> str:
    return html.escape(words)

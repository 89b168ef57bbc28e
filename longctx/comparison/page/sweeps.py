"""The part of the comparison page that varies ranks, budget and longest document."""

from collections.abc import Iterator, Sequence
from html import escape

from longctx.comparison.modelled import PLANNERS, TITLES, Row
from longctx.comparison.page import figures
from longctx.comparison.page.parts import Comparison, figure, mean_words


def sweeps(c: Comparison) -> str:
    """The part; empty if nothing varies."""
    shown = list(_figures(c))
    return "\n".join(["<h2>How the gain moves</h2>", *shown, _where_behind(c)]) if shown else ""


def _figures(c: Comparison) -> Iterator[str]:
    planners = [planner for planner in PLANNERS if planner != "fixed-static"]
    by_ranks, by_budget, by_longest = ([row for row in c.rows if row.sweep == name] for name in ("ranks", "budget", "longest"))
    same = "Speedup over fixed static in the same setting, whose degree follows from the longest document unless it was named"
    if len({row.ranks for row in by_ranks}) > 1:
        documents = {row.ranks: row.documents for row in by_ranks}
        grow = "the same documents on all" if len(set(documents.values())) == 1 else "the step grows with the ranks"
        yield figure(
            figures.lines(by_ranks, "ranks", "speedup_over_fixed", planners),
            "Speedup over fixed static by ranks",
            f"{same}, at {c.tokens_per_rank:,} tokens a rank; {grow} "
            f"({', '.join(f'{documents[n]:,} documents on {n:,}' for n in sorted(documents))}){mean_words(c)}. On few "
            "ranks a static degree cannot waste much; the more ranks a long document forces upon short ones, the more "
            "dynamic degrees gain.",
        )
        yield figure(
            figures.lines(
                by_ranks, "ranks", "speedup_over_best_static", [planner for planner in PLANNERS if planner != "static"]
            ),
            "Speedup over the best static degree of every step by ranks",
            "The same plans, over the fastest static plan of every step, which is sought among all degrees anew for each.",
        )
        yield figure(
            figures.lines(by_ranks, "ranks", "gap", _near(by_ranks), bound="unavoidable_gap"),
            "Distance to the lower bound by ranks",
            "Time of each plan over the lower bound, less one. That bound takes the network for free, so that part of "
            "the distance no plan can close, above all where one document is a large part of the step: below the dashed "
            "line, the tight bound, there is no plan. Planners further away than the best static degree are left out; the "
            "table has them.",
        )
    if by_budget:
        yield figure(
            figures.lines(by_budget, "tokens_per_rank", "speedup_over_fixed", planners),
            "Speedup over fixed static by token budget",
            f"{same}: the same documents on {c.ranks:,} ranks, with a quarter to four times the tokens a "
            f"rank{mean_words(c)}. A larger budget lets a static plan take a lower degree.",
        )
    if by_longest:
        yield figure(
            figures.lines(by_longest, "max_length", "speedup_over_fixed", planners),
            "Speedup over fixed static by longest document",
            f"{same}: {c.ranks:,} ranks, {c.tokens_per_rank:,} tokens each, documents longer than the number below cut "
            f"into pieces of that length, so that all points hold the same tokens{mean_words(c)}.",
        )


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
                f"<li>{escape(TITLES[best.planner])} by {auto / best.makespan_s - 1:.1%} on {best.ranks:,} ranks with "
                f"{best.tokens_per_rank:,} tokens each{cut}</li>"
            )
    if not behind:
        return f"<p>In all {len(seen)} settings of this page no plan is faster than auto by more than 0.1%.</p>"
    return f"<p>In {len(behind)} of {len(seen)} settings another plan is faster than auto:</p><ul>{''.join(behind)}</ul>"

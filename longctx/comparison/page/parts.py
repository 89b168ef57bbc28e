"""What the parts of the comparison page share: its contents, and how figures and numbers are written."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

from longctx.comparison.modelled import PLANNERS, SPEEDUPS, TITLES, Row, degree_of
from longctx.planning.cost.hardware_profile import HardwareProfile
from longctx.planning.plan import Plan


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


def figure(uri: str, title: str, words: str) -> str:
    return f'<figure><h3>{text(title)}</h3><img src="{uri}" alt="{text(title)}"><figcaption>{text(words)}</figcaption></figure>'


def title_of(row: Row) -> str:
    return f"{TITLES[row.planner]} ({degree_words(row)})" if degree_of(row) else TITLES[row.planner]


def degree_words(row: Row) -> str:
    """`static:8` → `degree 8`."""
    return f"degree {degree_of(row)}"


def speedup_cells(row: Row) -> str:
    return "".join(f"<td>{times(getattr(row, speedup))}</td>" for speedup in SPEEDUPS)


def mean_words(c: Comparison) -> str:
    return f", mean of {c.steps} steps" if c.steps > 1 else ""


def times(speedup: float | None) -> str:
    return "" if speedup is None else f"{speedup:.2f}×"


def text(words: str) -> str:
    return html.escape(words)

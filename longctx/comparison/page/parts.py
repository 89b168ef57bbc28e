"""What the parts of the comparison page share: its contents, and how figures and numbers are written."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from longctx.comparison.modelled import SPEEDUPS, TITLES, Row, degree_of
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
    about: dict[str, str]
    model: str | None
    changed: str

    def reference(self) -> list[Row]:
        """The rows of the ranks sweep on `ranks` ranks, in the order of PLANNERS."""
        return [row for row in self.rows if row.sweep == "ranks" and row.ranks == self.ranks]


def figure(uri: str, title: str, words: str) -> str:
    title, words = escape(title), escape(words)
    return f'<figure><h3>{title}</h3><img src="{uri}" alt="{title}"><figcaption>{words}</figcaption></figure>'


def title_of(row: Row) -> str:
    return f"{TITLES[row.planner]} ({degree_words(row)})" if degree_of(row) else TITLES[row.planner]


def degree_words(row: Row) -> str:
    """`static:8` → `degree 8`."""
    return f"degree {degree_of(row)}"


def plan_cells(row: Row) -> str:
    """Speedups, gap, waits, idle and padding."""
    speedups = "".join(f"<td>{times(getattr(row, speedup))}</td>" for speedup in SPEEDUPS)
    shares = (row.gap, row.exchange_share, row.idle_share, row.padding_share)
    return speedups + "".join(f"<td>{share:.1%}</td>" for share in shares)


def mean_words(c: Comparison) -> str:
    return f", mean of {c.steps} steps" if c.steps > 1 else ""


def times(speedup: float | None) -> str:
    return "" if speedup is None else f"{speedup:.2f}×"

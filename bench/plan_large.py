"""Benchmark of planning many kinds of steps: gap to the lower bound, ranks that idle, documents
that stay whole, processor time and memory.

    python bench/plan_large.py --label after      # four minutes, one thread
    python bench/plan_large.py --label after --only "long tail"

Long tails are log-normal, with a median of 2,000 tokens, up to 1M or 2M. Every plan is checked by
`make_plan`. Memory is the most that Python and NumPy held at once, in a run of its own. Appends to
OUT.csv one row per kind, means over seeds; `label` names the code.
"""

import re
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
from numpy.random import RandomState

from harness import Table, command, facts, markdown, options
from longctx.comparison.mixes import load_mix
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.pipeline import Pipeline
from longctx.planning.plan import Plan
from longctx.planning.planners.planner import make_plan
from longctx.planning.tree import Tree

PROFILE = "h100-nvlink-ib"
MEBI = 1 << 20
COLUMNS = [
    "label",
    "step",
    "documents",
    "ranks",
    "seeds",
    "gap",
    "idle",
    "whole",
    "planning_s",
    "memory_mib",
    "step_s",
]
Draw = Callable[[RandomState], Sequence[float]]


@dataclass(frozen=True)
class Kind:
    """Steps of one kind.

    Attributes:
        name: what they are.
        ranks: of the domain.
        draw: returns lengths.
        options: further arguments of `make_plan`.
        trees: documents of the first that are trees, each a prompt with answers.
    """

    name: str
    ranks: int
    draw: Draw
    options: dict[str, Any] = field(default_factory=dict)
    trees: int = 0
    seeds: int = 2

    def lengths(self, seed: int) -> list[int]:
        drawn = self.draw(RandomState(seed))
        return [max(1, int(length)) for length in drawn]


def log_normal(count: int, *, median: float, sigma: float, longest: int, least: int = 16) -> Draw:
    """Returns a drawing of log-normal lengths within limits, by rejection."""

    def draw(random: RandomState) -> Sequence[float]:
        lengths = np.exp(random.normal(np.log(median), sigma, 4 * count))
        within = (lengths >= least) & (lengths <= longest)
        kept: Sequence[float] = lengths[within][:count].tolist()
        return kept

    return draw


def long_tail(count: int, longest: int) -> Draw:
    return log_normal(count, median=2000, sigma=2.0, longest=longest)


def normal(count: int, *, mean: float, deviation: float) -> Draw:
    return lambda random: random.normal(mean, deviation, count).tolist()


def constant(count: int, length: int) -> Draw:
    return lambda random: [length] * count


def of_mix(mix: str, count: int) -> Draw:
    return lambda random: load_mix(mix).draw(count, int(random.randint(1 << 16)))


KINDS = (
    Kind("long tail", 512, long_tail(4096, MEBI)),
    Kind("long tail", 512, long_tail(8192, MEBI)),
    Kind("long tail", 1024, long_tail(16384, MEBI)),
    Kind("long tail", 4096, long_tail(65536, 2 * MEBI), seeds=1),
    Kind(
        "short",
        1024,
        log_normal(65536, median=400, sigma=1.0, longest=8000),
        seeds=1,
    ),
    Kind("agents' rollouts", 256, log_normal(2048, median=12000, sigma=0.9, longest=131072)),
    Kind("repositories", 512, log_normal(2048, median=8000, sigma=1.8, longest=2 * MEBI)),
    Kind("books", 512, normal(1024, mean=120000, deviation=40000)),
    Kind("all equal at 5,000", 256, constant(4096, 5000)),
    Kind("budget of 2,112", 256, of_mix("wlb_128k", 1024), {"tokens_per_rank": 2112}),
    Kind("97 ranks", 97, of_mix("wlb_128k", 388)),
    Kind("250 ranks", 250, long_tail(2000, MEBI)),
    Kind("trees", 64, of_mix("magi_192k", 256), trees=64),
    Kind("pipeline of 4", 64, of_mix("wlb_128k", 512), {"pipeline": Pipeline(4)}),
    Kind("ten chats", 8, lambda random: [100 * 2**k for k in range(8)] + [14000, 20000]),
)


def tree_of(length: int) -> Tree:
    """Returns a prompt of a quarter of the tokens, with three answers."""
    answer = length // 4
    return Tree((length - 3 * answer, *[answer] * 3), (-1, 0, 0, 0))


def planned(kind: Kind, lengths: Sequence[int], profile: HardwareProfile) -> Plan:
    trees = {document: tree_of(lengths[document]) for document in range(kind.trees)}
    options: dict[str, Any] = {"tokens_per_rank": 16384} | kind.options
    return make_plan(lengths, ranks=kind.ranks, profile=profile, trees=trees, **options)


def measure(kind: Kind, profile: HardwareProfile) -> dict[str, Any]:
    """Returns the means over seeds of what is measured of a kind."""
    plans = []
    seconds = []
    for seed in range(kind.seeds):
        lengths = kind.lengths(seed)
        began_s = time.process_time()
        plans.append(planned(kind, lengths, profile))
        seconds.append(time.process_time() - began_s)
    tracemalloc.start()
    planned(kind, kind.lengths(0), profile)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "step": kind.name,
        "documents": len(plans[0].lengths),
        "ranks": kind.ranks,
        "seeds": kind.seeds,
        "gap": fmean(plan.gap for plan in plans),
        "idle": fmean(plan.cost.idle_share for plan in plans),
        "whole": fmean(plan.degrees.get(1, 0) / len(plan.lengths) for plan in plans),
        "planning_s": fmean(seconds),
        "memory_mib": most_bytes / MEBI,
        "step_s": fmean(plan.makespan_s for plan in plans),
    }


def main() -> None:
    parser = options(__doc__, "plan-large")
    parser.add_argument("--label", default="now", help="name of the code that is measured")
    parser.add_argument("--only", default="", metavar="REGEX", help="only kinds that match")
    given = parser.parse_args()
    profile = HardwareProfile.load(PROFILE)
    about = facts("longctx", "numpy") | {"profile": PROFILE, "command": command()}
    table = Table(given.out.with_suffix(".csv"), COLUMNS, about)
    make_plan([5000, 300, 20000], ranks=4, tokens_per_rank=16384, profile=profile)  # imports
    rows = []
    for kind in KINDS:
        if not re.search(given.only, kind.name):
            continue
        row = {"label": given.label} | measure(kind, profile)
        table.append(row)
        rows.append(row)
        print(markdown(COLUMNS, [_shown(row)], 2)[-1], flush=True)


def _shown(row: dict[str, Any]) -> list[str]:
    return [f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()]


if __name__ == "__main__":
    main()

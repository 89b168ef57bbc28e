"""Table of a plan by bins: the degree of every class of lengths, and the documents of the step in it.

The table is printed as settings of a run, with the figures as comments, so that it can be pasted into a file.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from longctx.planning.cost.model import NANOSECONDS, linear_ns
from longctx.planning.cost.rounds import plan_score
from longctx.planning.plan import Plan


@dataclass(frozen=True)
class Bin:
    """Documents of at most `longest` tokens, and more than in the previous bin, get `degree`.

    `seconds` is their time in linear layers and attention, the mean over all ranks.
    """

    longest: int
    degree: int
    documents: int
    tokens: int
    seconds: float


def fill_bins(plan: Plan, table: Mapping[int, int]) -> list[Bin]:
    """Returns every bin of `table` ({longest: degree}), ascending, with its documents of the plan."""
    lengths = np.array(plan.lengths, dtype=np.int64)
    bounds = sorted(table)
    index = np.minimum(np.searchsorted(bounds, lengths), len(bounds) - 1)  # see derived_degrees
    degrees = np.ones_like(lengths)
    for placement in (p for placements in plan.micro_batches for p in placements):
        degrees[placement.document] = placement.degree
    work = linear_ns(plan.profile, lengths) + degrees * plan_score(plan).attention
    seconds = np.bincount(index, work, len(bounds)) / plan.ranks / NANOSECONDS
    documents, tokens = np.bincount(index, minlength=len(bounds)), np.bincount(index, lengths, len(bounds))
    return [Bin(bound, table[bound], int(documents[i]), int(tokens[i]), float(seconds[i])) for i, bound in enumerate(bounds)]


def print_bins(bins: list[Bin], console: Console) -> None:
    """Prints the table as YAML."""
    lines = [
        "",
        "# {longest document: degree}; time of linear layers and attention, mean over ranks",
        "context:",
        "  mode: bins",
        f"  bins:{'':20}# documents       tokens     time",
    ]
    for row in bins:
        setting = f"    {row.longest}: {row.degree}"
        lines.append(f"{setting:27}# {row.documents:>9,} {row.tokens:>12,} {row.seconds:>8.4g} s")
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)

"""Distance of auto's plans from the optimum of small steps, by an exact solver. Writes
results/optimum.md.

    python bench/optimum.py              # about 8 minutes; needs scipy

scipy's HiGHS solves the integer program of a step: every document on one interval of ranks in one
micro-batch, the sum of the micro-batches' times smallest, tokens within the budget. The network is
free and lengths are multiples of twice all degrees, so that the time of a rank is the sum of its
documents' times and the program is the cost model. Where the time limit ends the search, the
optimum lies between HiGHS's bound and its best plan.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import coo_array

from harness import command, facts, markdown, options
from longctx.comparison.mixes import load_mix
from longctx.comparison.steps import fit
from longctx.planning.assignment import Integers, largest_shards
from longctx.planning.cost.model import NANOSECONDS, alone_ns
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.layout import longest_document
from longctx.planning.planners.planner import make_plan
from plan import PROFILE, TOKENS_PER_RANK, few_long

CASES = (
    ("few_long", 4, 8),
    ("wlb_128k", 4, 8),
    ("wlb_128k", 4, 16),
    ("few_long", 6, 12),
    ("wlb_128k", 6, 12),
    ("few_long", 8, 16),
)
"""Mix, ranks and documents."""
SEEDS = 3


class Choices(NamedTuple):
    """Every possible place of every document (arrays [choices])."""

    document: Integers
    micro_batch: Integers
    first: Integers
    degree: Integers
    seconds: np.ndarray
    tokens: Integers


def main() -> None:
    parser = options(__doc__, "optimum.md")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds per step for the solver")
    given = parser.parse_args()
    free = replace(
        HardwareProfile.load(PROFILE),
        intra_node_bytes_per_s=1e18,
        inter_node_bytes_per_s=1e18,
        latency_s=0.0,
    )
    lines = []
    for mix, ranks, documents in CASES:
        for seed in range(SEEDS):
            lengths = steps_of(mix, ranks, documents, seed)
            plan = make_plan(lengths, ranks=ranks, tokens_per_rank=TOKENS_PER_RANK, profile=free)
            found = solve(free, lengths, ranks, given.limit)
            bound, best = (value + free.step_s for value in (found.mip_dual_bound, found.fun))
            solved = "proven" if found.status == 0 else f"ended at {given.limit:.0f} s"
            shown = [
                f"{plan.makespan_s / time - 1:.2%}" for time in (best, bound, plan.lower_bound_s)
            ]
            lines.append([mix, str(ranks), str(len(lengths)), str(seed), solved, *shown])
            print(*lines[-1], flush=True)
    about = facts("longctx", "numpy", "scipy") | {
        "profile": f"{PROFILE}, free network",
        "command": command(given.out),
    }
    head = [
        "mix",
        "ranks",
        "documents",
        "seed",
        "HiGHS",
        "auto above its best plan",
        "above its bound",
        "above our lower bound",
    ]
    told = ", ".join(f"{name} {value}" for name, value in about.items())
    text = "\n".join(
        [*markdown(head, lines, 1), "", f"{TOKENS_PER_RANK:,} tokens per rank. {told}", ""]
    )
    given.out.write_text(text, encoding="utf-8")


def steps_of(mix: str, ranks: int, documents: int, seed: int) -> list[int]:
    """Draws lengths, rounded down to a multiple of twice every degree."""
    even = 2 * math.lcm(*range(1, ranks + 1))
    drawn = few_long(documents, seed) if mix == "few_long" else load_mix(mix).draw(documents, seed)
    return [
        max(even, length // even * even)
        for length in fit(drawn, longest_document(ranks, TOKENS_PER_RANK))
    ]


def solve(
    profile: HardwareProfile, lengths: Sequence[int], ranks: int, limit_s: float
) -> OptimizeResult:
    """Solves the integer program. The result's times are in seconds, without the fixed cost of a
    step."""
    micro_batches = -(-sum(lengths) // (ranks * TOKENS_PER_RANK)) + 1
    choices = places(profile, lengths, ranks, micro_batches)
    count = len(choices.document)
    rows: list[tuple[Integers, np.ndarray, float, float]] = []  # columns, values, lowest, highest
    for document in range(len(lengths)):
        mine = np.flatnonzero(choices.document == document)
        rows.append((mine, np.ones(len(mine)), 1, 1))
    # Columns after the choices: time of each micro-batch, and whether it is used.
    for k in range(micro_batches):
        for rank in range(ranks):
            here = (
                (choices.micro_batch == k)
                & (choices.first <= rank)
                & (rank < choices.first + choices.degree)
            )
            held = np.flatnonzero(here)
            rows.append(
                (np.append(held, count + k), np.append(choices.seconds[held], -1), -np.inf, 0)
            )
            used = count + micro_batches + k
            rows.append(
                (
                    np.append(held, used),
                    np.append(choices.tokens[held], -TOKENS_PER_RANK),
                    -np.inf,
                    0,
                )
            )
    for k in range(micro_batches - 1):  # longest first: breaks a symmetry
        rows.append((np.array([count + k, count + k + 1]), np.array([1, -1]), 0, np.inf))
    number = np.repeat(np.arange(len(rows)), [len(row[0]) for row in rows])
    matrix = coo_array(
        (
            np.concatenate([row[1] for row in rows]),
            (number, np.concatenate([row[0] for row in rows])),
        )
    )
    cost = np.repeat([0.0, 1.0, profile.launch_s], [count, micro_batches, micro_batches])
    is_time = np.repeat([False, True, False], [count, micro_batches, micro_batches])
    return milp(
        cost,
        constraints=LinearConstraint(
            matrix.tocsr(), [row[2] for row in rows], [row[3] for row in rows]
        ),
        integrality=~is_time,
        bounds=Bounds(0, np.where(is_time, np.inf, 1)),
        options={"time_limit": limit_s, "mip_rel_gap": 1e-4},
    )


def places(
    profile: HardwareProfile, lengths: Sequence[int], ranks: int, micro_batches: int
) -> Choices:
    """Returns every document at every degree, first rank and micro-batch at which it fits the token
    budget."""
    table = [
        (document, k, first, degree)
        for document in range(len(lengths))
        for degree in range(1, ranks + 1)
        for k in range(micro_batches)
        for first in range(ranks - degree + 1)
    ]
    document, micro_batch, first, degree = np.array(table, dtype=np.int64).T
    length = np.array(lengths)[document]
    tokens = largest_shards(length, degree)
    fits = tokens <= TOKENS_PER_RANK
    columns = (
        document,
        micro_batch,
        first,
        degree,
        alone_ns(profile, length, degree) / NANOSECONDS,
        tokens,
    )
    return Choices(*(column[fits] for column in columns))


if __name__ == "__main__":
    main()

"""Plain static: one power-of-two degree for all documents of a step, packed by tokens; the best degree is kept.

Best-fit decreasing over the token budget, packs in the order in which they were made, no cost model. Trainers keep one degree
for all steps and pack in the order drawn (`fixed_static.py`), so this is stronger than what people run.
`make_plan(mode="static")` is stronger still: it tries every degree, balances packs and runs packs of similar time together.
"""

import numpy as np

from longctx.comparison.baselines.groups import RankGroup, fastest, powers_of_two, shards_by_degree, stand_in_rows
from longctx.planning.assignment import Assignment, Integers
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.planners.static import best_fit


def place_plain_static(profile: HardwareProfile, lengths: Integers, ranks: int, tokens_per_rank: int) -> Assignment:
    """Assigns every document at the best power-of-two degree. Raises PlanError if the largest does not hold every document."""
    plans: list[Assignment] = []
    degrees = powers_of_two(ranks)
    for degree, tokens in zip(degrees, shards_by_degree("Plain static", lengths, degrees, tokens_per_rank).T, strict=True):
        if int(tokens.max()) > tokens_per_rank:
            continue
        pack = best_fit(tokens, tokens_per_rank)
        packed = [RankGroup(degree, np.flatnonzero(pack == number).tolist()) for number in range(int(pack.max()) + 1)]
        groups = ranks // degree
        rows = [packed[i : i + groups] for i in range(0, len(packed), groups)]
        plans.append(stand_in_rows(rows, lengths))
    return fastest(profile, lengths, plans, ranks)

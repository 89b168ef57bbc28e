"""ByteScale-like: every document on the fewest ranks that hold it, short ones packed by best fit (hybrid data parallelism).

Our reading of "ByteScale: Efficient Scaling of LLM Training with a 2048K Context Length" (SIGCOMM 2025, arXiv 2502.21231): a
document of more than the budget takes ⌈length / budget⌉ ranks, others are packed into ranks by best fit. Its balance scheduler
runs work of similar time together, so units (a ring, or a packed rank) are taken in descending order of time, and each is
placed into the first micro-batch with enough free ranks.
"""

import numpy as np

from longctx.comparison.baselines.groups import Group, packs, stand_in_rows
from longctx.planning.assignment import Assignment, Integers, largest_shards, least_degrees
from longctx.planning.cost.hardware_profile import HardwareProfile
from longctx.planning.cost.model import alone_ns


def place_bytescale(profile: HardwareProfile, lengths: Integers, ranks: int, tokens_per_rank: int) -> Assignment:
    """Assigns every document to ranks and a micro-batch; every document must fit in the domain."""
    degrees = least_degrees(lengths, ranks, tokens_per_rank)
    time = alone_ns(profile, lengths, degrees).tolist()
    tokens = largest_shards(lengths, degrees)
    short = np.flatnonzero(degrees == 1)
    units = []
    for documents in [[document] for document in np.flatnonzero(degrees > 1).tolist()] + packs(
        short, lengths[short], tokens_per_rank
    ):
        unit = Group(int(degrees[documents[0]]))
        for document in documents:
            unit.add(document, time[document], int(tokens[document]))
        units.append(unit)
    rows: list[list[Group]] = []
    free: list[int] = []
    for unit in sorted(units, key=lambda unit: -unit.time):
        row = next((row for row, ranks_left in enumerate(free) if ranks_left >= unit.degree), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(ranks)
        rows[row].append(unit)
        free[row] -= unit.degree
    return stand_in_rows([sorted(row, key=lambda unit: -unit.degree) for row in rows], lengths)

"""Short documents together: whole ones even out where many share a rank, so they fill
micro-batches of their own, in place of a few in each."""

from collections.abc import Sequence

import numpy as np

from longctx.planning.assignment import Integers
from longctx.planning.planners.finer_slots import on_finer_slots
from longctx.planning.planners.packing import PlacedRings, place, with_targets
from longctx.planning.planners.planning_input import Degrees, PlanningInput

FULL_SHARE = 0.98
"""Share of the free tokens of their micro-batches that short documents take."""
LONGEST_SHARE = 0.5
"""Share of the time of their micro-batches that the longest of them takes."""


def short_together(
    finer: Sequence[PlanningInput], rings: PlacedRings, rows: int, *, share: float, rounds: int
) -> PlacedRings | None:
    """Returns a placement of rings on blocks as one on ranks, in which the shortest documents are
    whole and fill the `rows` micro-batches with most room; None if tokens do not fit.

    The other documents are placed in the other micro-batches first, as by `on_finer_slots` with
    this `share`.
    """
    ranks = finer[-1]
    room = np.maximum(0, rings.most_load - rings.load).sum(axis=1)
    own = np.argsort(-room, kind="stable")[:rows]
    block = 2 ** len(finer)
    short = _shortest(ranks, rings, own, block=block)
    if len(short) == 0:
        return None
    before = _without(rings, short, own)
    if before is None:
        return None
    on_ranks = on_finer_slots(finer, before, share, rounds=rounds)
    if on_ranks is None:
        return None
    placed = place(on_ranks, np.flatnonzero(~on_ranks.placed), rounds=rounds)
    if placed is None:
        return None
    return _with(placed, rings, short, own=own, ranks=ranks, block=block)


def _shortest(ranks: PlanningInput, rings: PlacedRings, own: Integers, *, block: int) -> Integers:
    """Returns the shortest documents that have room on the ranks of the micro-batches `own`."""
    room_ns = block * int(np.maximum(0, rings.most_load[own] - rings.load[own]).sum())
    room_tokens = FULL_SHARE * block * int(rings.free[own].sum())
    rest = np.flatnonzero(~rings.placed)
    rest = rest[np.argsort(ranks.lengths[rest], kind="stable")]
    fits = np.cumsum(ranks.single_ns[rest]) <= room_ns
    fits &= np.cumsum(ranks.single_tokens[rest]) <= room_tokens
    fits &= ranks.single_ns[rest] <= LONGEST_SHARE * rings.target[own].min()
    return rest[fits]


def _without(rings: PlacedRings, short: Integers, own: Integers) -> PlacedRings | None:
    """Returns the placement with short documents as if they were placed, and no room in their
    micro-batches."""
    placed = rings.placed.copy()
    placed[short] = True
    free = rings.free.copy()
    free[own] = 0
    return with_targets(
        Degrees(rings.degree, rings.time, rings.tokens),
        placed=placed,
        micro_batch=rings.micro_batch,
        first_rank=rings.first_rank,
        load=rings.load,
        free=free,
        slowness=rings.slowness,
    )


def _with(
    placed: PlacedRings,
    rings: PlacedRings,
    short: Integers,
    *,
    own: Integers,
    ranks: PlanningInput,
    block: int,
) -> PlacedRings | None:
    """Returns the placement on ranks with short documents not placed, and room for them only in
    their micro-batches."""
    is_placed = placed.placed.copy()
    is_placed[short] = False
    degree = placed.degree.copy()
    time = placed.time.copy()
    tokens = placed.tokens.copy()
    degree[short] = 1
    time[short] = ranks.single_ns[short]
    tokens[short] = ranks.single_tokens[short]
    free = np.zeros_like(placed.free)
    free[own] = ranks.tokens_per_rank
    free[own, : block * rings.ranks] = np.repeat(rings.free[own], block, axis=1)
    return with_targets(
        Degrees(degree, time, tokens),
        placed=is_placed,
        micro_batch=placed.micro_batch,
        first_rank=placed.first_rank,
        load=placed.load,
        free=free,
        slowness=placed.slowness,
    )

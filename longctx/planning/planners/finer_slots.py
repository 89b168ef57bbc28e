"""Finer slots: after rings are in their places in blocks of ranks, shorter documents take half a
block, a quarter, … one rank, so that they are not split more than evenness needs."""

from collections.abc import Iterator, Sequence

import numpy as np

from longctx.planning.assignment import Integers
from longctx.planning.planners.list_scheduling import RULES, Rule
from longctx.planning.planners.packing import PlacedRings, place, with_targets
from longctx.planning.planners.planning_input import Degrees, PlanningInput


def halves(given: PlanningInput) -> list[PlanningInput]:
    """Returns the input with slots of half a block, of a quarter, …, of one rank."""
    found = []
    block = given.block
    while block > 1:
        block //= 2
        found.append(given.in_blocks(block))
    return found


def on_finer_slots(
    finer: Sequence[PlanningInput], rings: PlacedRings, share: float, rounds: int
) -> PlacedRings | None:
    """Returns a placement of rings on blocks as one on ranks, by the `halves` of the blocks; None
    if tokens do not fit.

    A document that is not placed yet takes half a block if it needs there at most `share` of the
    mean time of a slot and of the token budget, then a quarter, and so on. One that would need more
    is placed on a slot of its size, by the first rule with which all fit.
    """
    return next(by_each_rule(finer, rings, share, rounds=rounds), None)


def by_each_rule(
    finer: Sequence[PlanningInput], rings: PlacedRings, share: float, rounds: int
) -> Iterator[PlacedRings]:
    """Yields the placements of `on_finer_slots` by each rule with which all documents fit."""
    for rule in RULES:
        placed = _on_finer_slots(finer, rings, share, rounds=rounds, rule=rule)
        if placed is not None:
            yield placed


def _on_finer_slots(
    finer: Sequence[PlanningInput], rings: PlacedRings, share: float, *, rounds: int, rule: Rule
) -> PlacedRings | None:
    """Returns the placement of `on_finer_slots` by one rule."""
    even_ns = int((rings.degree * rings.time).sum()) // rings.load.size
    most_ns = share * even_ns
    most_tokens = share * finer[0].tokens_per_rank
    finest = rings
    for half in finer:
        rest = np.flatnonzero(~finest.placed)
        long = (half.single_ns[rest] > most_ns) | (half.single_tokens[rest] > most_tokens)
        placed = place(finest, rest[long], rounds, rule=rule)
        if placed is None:
            return None
        halved = _halved(placed, rest[~long], half)
        if halved is None:
            return None
        finest = halved
    return finest


def _halved(rings: PlacedRings, rest: Integers, half: PlanningInput) -> PlacedRings | None:
    """Returns the placement in slots of half the size, of which each of the `rest`, that are not
    placed, takes one; None if their tokens do not fit."""
    degree = 2 * rings.degree
    time = rings.time.copy()
    tokens = rings.tokens.copy()
    degree[rest] = 1
    time[rest] = half.single_ns[rest]
    tokens[rest] = half.single_tokens[rest]
    load = np.zeros((len(rings.load), half.slots), dtype=np.int64)
    free = np.full_like(load, half.tokens_per_rank)  # also of ranks that were in no block
    load[:, : 2 * rings.ranks] = np.repeat(rings.load, 2, axis=1)
    free[:, : 2 * rings.ranks] = np.repeat(rings.free, 2, axis=1)
    return with_targets(
        Degrees(degree, time, tokens),
        placed=rings.placed,
        micro_batch=rings.micro_batch,
        first_rank=2 * rings.first_rank,
        load=load,
        free=free,
        slowness=half.slowness,
    )

"""Search: the planner of mode `auto`. Chooses the number of micro-batches and the degree of every
document.

It plans in blocks of neighbouring ranks, as if a block were one rank: first of a node, then finer
ones, or coarser ones while these are faster. A document takes the smallest degree at which its
ranks finish it within a time limit: one limit for all documents, as a share of the time of evenly
spread work, or with several micro-batches one for each (`shortest_path.py`), whose rings stand side
by side. Placements of rings are ranked by estimated makespan (`packing.py`).

The best are filled with the other documents: in blocks, on parts of a block (`finer_slots.py`), and
with the shortest whole and together (`short_together.py`). Fewer and fewer plans are balanced for
more and more rounds (`local_search.py`), and exact cost decides; of plans that are about as fast,
the one with the fewest splits.
"""

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from longctx.planning.assignment import NEVER, Assignment, Integers, least_degrees
from longctx.planning.cost.model import fixed_ns, nanoseconds
from longctx.planning.cost.rounds import PRICE
from longctx.planning.planners.degree_table import DegreeTable, needs_no_ring
from longctx.planning.planners.finer_slots import by_each_rule
from longctx.planning.planners.list_scheduling import RULES
from longctx.planning.planners.packing import (
    PlacedRings,
    even_out,
    fillings,
    place_rings,
    place_side_by_side,
)
from longctx.planning.planners.planning_input import Candidate, Degrees, PlanningInput
from longctx.planning.planners.settings import SearchSettings
from longctx.planning.planners.short_together import short_together
from longctx.planning.planners.shortest_path import LimitGraph

MOST_EMPTY = 1 / 32
"""Largest share of the ranks that blocks may leave over."""


class Filled(NamedTuple):
    """An assignment of all documents to slots.

    Attributes:
        makespan_ns: its makespan by `PlanningInput.score`.
        given: the slots.
        rings: what was placed first, and the targets that balancing aims at.
        plan: all documents.
    """

    makespan_ns: int
    given: PlanningInput
    rings: PlacedRings
    plan: Assignment

    @classmethod
    def of(cls, given: PlanningInput, rings: PlacedRings, plan: Assignment) -> "Filled":
        makespan_ns = given.score(given.on_ranks(plan)).makespan_ns
        return cls(makespan_ns, given, rings, plan)


def search(given: PlanningInput, settings: SearchSettings | None = None) -> Candidate:
    """Returns the best plan found, by the settings for its size if none are given. Every document
    must fit at some degree."""
    return list(refine(given, settings))[-1]


def refine(given: PlanningInput, settings: SearchSettings | None = None) -> Iterator[Candidate]:
    """Yields the best plan so far: the first is found in a fraction of the time, the last is that
    of `search`.

    Plans in blocks of `first_block` ranks, then in finer ones and in coarser ones while these are
    faster, until the plan is good. Compares plans with the rounds of their exchange.
    """
    settings = settings or given.settings
    priced = replace(given, round_price=PRICE)
    good_ns = (1 + settings.good_gap) * given.step_bound_ns()
    found: list[Candidate] = []
    best: Candidate | None = None
    for blocks, worst_gap in _directions(priced, settings):
        for block in blocks:
            below = NEVER if best is None else best.makespan_ns
            candidate = search_in_blocks(priced.in_blocks(block), settings, below)
            if candidate is None:
                break
            found.append(candidate)
            best = with_fewest_splits(found, settings.same_gap)
            yield best
            if best.makespan_ns <= good_ns:
                return
            if candidate.makespan_ns > (1 + worst_gap) * below:
                break


def _directions(
    given: PlanningInput, settings: SearchSettings
) -> Iterator[tuple[Sequence[int], float]]:
    """Yields sizes of blocks that are tried in turn, each time with the gap from the best plan at
    which no further ones are."""
    possible = [block for block in settings.blocks if is_possible(given, block)]
    finer = [block for block in possible if block <= settings.first_block]
    coarser = [block for block in possible if block > settings.first_block]
    if needs_no_ring(given):
        yield [1], math.inf
        finer = [block for block in finer if block > 1]
    yield finer, settings.finer_gap
    yield coarser[::-1], 0.0


def is_possible(given: PlanningInput, block: int) -> bool:
    """Returns whether blocks of this size leave few ranks over, and hold every document."""
    if block == 1:
        return True
    blocks, empty = divmod(given.ranks, block)
    if blocks < 2 or empty > MOST_EMPTY * given.ranks:
        return False
    return bool(least_degrees(given.lengths, blocks, given.tokens_per_rank, block).all())


def search_in_blocks(
    given: PlanningInput, settings: SearchSettings, below: int = NEVER
) -> Candidate | None:
    """Returns the best plan found with rings of whole blocks; None if no placement is likely
    to have a makespan below `below`."""
    table = DegreeTable(given, settings)
    micro_batches = given.fewest_micro_batches
    uneven = int(table.quickest.max(initial=0)) * micro_batches * given.slots > table.work
    own: list[PlacedRings] = []
    if len(table.long) and (uneven or micro_batches >= settings.several):
        own = _with_own_limits(table)
    plans = _filled(table, own, below)
    only_own = _is_good(table, own) or (uneven and micro_batches >= settings.many)
    if own and only_own and (plans or below < NEVER):
        return _best_filled(table, plans) if plans else None
    while True:
        for placements in _placements_by_number(table, micro_batches):
            fastest_ns = min([below, *(plan.makespan_ns for plan in plans)])
            plans += _filled(table, placements, fastest_ns)
        if plans or below < NEVER:
            break
        micro_batches += 2 + micro_batches // 8
    return _best_filled(table, plans) if plans else None


def _is_good(table: DegreeTable, placements: Sequence[PlacedRings]) -> bool:
    """Returns whether the first of these placements is near evenly spread work."""
    if not placements:
        return False
    given = table.given
    even_ns = fixed_ns(given.profile, given.fewest_micro_batches) + table.work // given.slots
    return _estimate_ns(given, placements[0]) <= (1 + table.settings.good_own_gap) * even_ns


class Shortlist:
    """The most promising placements of rings for one number of micro-batches, by estimated
    makespan."""

    def __init__(self, table: DegreeTable, micro_batches: int) -> None:
        self.table = table
        self.given = table.given
        self.settings = table.settings
        self.micro_batches = micro_batches
        self.best: list[PlacedRings] = []

    def add(self, degrees: Degrees, stop: int) -> None:
        """Adds the placement of these degrees with rings in micro-batches before `stop`, unless its
        work alone shows that `settings.filled` others are better."""
        filled = self.settings.filled
        if len(self.best) >= filled:
            worst = self.best[filled - 1]
            if degrees.work >= worst.estimate_ns * self.given.slots:
                return
        rings = place_rings(self.given, degrees, self.micro_batches, stop=stop)
        if rings is not None:
            bisect.insort(self.best, rings, key=lambda rings: rings.estimate_ns)

    def add_everywhere(self, degrees: Degrees) -> None:
        """Adds placements with rings in as few micro-batches as possible, and in all
        micro-batches."""
        of_rings = int(degrees.degree[degrees.degree > 1].sum())
        fewest = max(1, -(-of_rings // self.given.slots))
        for stop in sorted({min(self.micro_batches, fewest), self.micro_batches}):
            self.add(degrees, stop)

    def add_one_limit(self) -> None:
        """Adds placements with one limit for all documents."""
        table = self.table
        even_ns = table.even_ns(self.micro_batches)
        seen = set()
        for share in self.settings.shares:
            index = table.smallest_degrees_within(share * even_ns // 32)
            if index.tobytes() not in seen:
                seen.add(index.tobytes())
                self.add_everywhere(table.with_degrees(index))


def _placements_by_number(table: DegreeTable, micro_batches: int) -> list[list[PlacedRings]]:
    """Returns the best placements with `micro_batches` and with one more, where there are any."""
    given = table.given
    settings = table.settings
    fewest = Shortlist(table, micro_batches)
    more = Shortlist(table, micro_batches + 1)
    budget = micro_batches * given.slots * given.tokens_per_rank
    roomy = int(given.single_tokens.sum()) < settings.tight * budget
    fewest.add_one_limit()
    if roomy and fewest.best:
        for rings in fewest.best[: settings.promising]:
            more.add_everywhere(given.with_degrees(rings.degree))
    else:
        more.add_one_limit()
    most = 2 * settings.filled
    return [shortlist.best[:most] for shortlist in (fewest, more) if shortlist.best]


def _with_own_limits(table: DegreeTable) -> list[PlacedRings]:
    """Returns placements with a separate limit for every micro-batch, the most promising first."""
    given = table.given
    launch_ns = nanoseconds(given.profile.launch_s)
    graph = LimitGraph.of(
        table.time,
        table.tokens,
        table.degrees,
        ranks=given.slots,
        tokens_per_rank=given.tokens_per_rank,
        ns_per_token=table.short_ns_per_token,
        launch_ns=launch_ns,
    )
    found: list[PlacedRings] = []
    seen = set()
    best_ns = NEVER
    for price in table.settings.prices:
        index, number = graph.shortest_path(price / 32)
        key = index.tobytes(), number.tobytes()
        if key in seen:
            continue
        seen.add(key)
        its = _in_own_micro_batches(table, table.with_degrees(index), number)
        found += its
        its_ns = min((_estimate_ns(given, rings) for rings in its), default=NEVER)
        if its_ns > (1 + table.settings.price_gap) * best_ns:
            break
        best_ns = min(best_ns, its_ns)
    return sorted(found, key=lambda rings: _estimate_ns(given, rings))


def _in_own_micro_batches(
    table: DegreeTable, degrees: Degrees, number: Integers
) -> list[PlacedRings]:
    """Returns placements of each long document in the micro-batch of its `number`, with as few
    micro-batches as that allows and with one more."""
    given = table.given
    micro_batches = max(given.fewest_micro_batches, int(number.max()) + 1)
    fewest, more = (
        place_side_by_side(given, degrees, count, documents=table.long, numbers=number)
        for count in (micro_batches, micro_batches + 1)
    )
    return [rings for rings in (fewest, more) if rings is not None]


def _filled(table: DegreeTable, placements: Sequence[PlacedRings], below: int) -> list[Filled]:
    """Returns plans of the first `settings.filled` placements with room for all documents: in
    blocks, and with short documents on half a block or less.

    Skips placements that would not be faster than `below`, or the fastest plan before, if all their
    targets were met.
    """
    found: list[Filled] = []
    count = 0
    for rings in placements:
        if count == table.settings.filled:
            break
        filled = False
        for given, placed in _variants(table, rings):
            if _estimate_ns(given, placed) >= (1 + table.settings.same_gap) * below:
                filled = True
                continue
            for plan in fillings(placed):
                found.append(Filled.of(given, placed, plan))
                below = min(below, found[-1].makespan_ns)
                filled = True
        count += filled
    return found


def _variants(
    table: DegreeTable, rings: PlacedRings
) -> Iterator[tuple[PlanningInput, PlacedRings]]:
    """Yields a placement in blocks, and with more and with fewer short documents split."""
    yield table.given, rings
    if not table.halves:
        return
    rules = 1
    if len(rings.load) < table.settings.several:
        rules = len(RULES)  # as few micro-batches do not even out the errors of one
    for share in table.settings.finer_shares:
        found = by_each_rule(table.halves, rings, share, rounds=table.settings.evened_early)
        for finer in itertools.islice(found, rules):
            yield table.halves[-1], finer
    for rows in range(1, 1 + len(rings.load) // table.settings.together_every):
        together = short_together(
            table.halves,
            rings,
            rows,
            share=table.settings.finer_shares[0],
            rounds=table.settings.evened_early,
        )
        if together is not None:
            yield table.halves[-1], together


def _best_filled(table: DegreeTable, plans: list[Filled]) -> Candidate:
    """Balances the best of these plans, compares those that are about as fast with the rounds of
    their exchange, and returns the one with the fewest splits."""
    settings = table.settings
    best, *others = _balanced(plans, settings)
    limit = (1 + 2 * settings.same_gap) * best.makespan_ns
    finalists = [best, *(each for each in others if each.makespan_ns <= limit)]
    exact = replace(table.given.in_blocks(1), round_price=0.0)
    candidates = [
        exact.candidate("search", filled.given.on_ranks(filled.plan))
        for filled in finalists[: settings.compared]
    ]
    return with_fewest_splits(candidates, settings.same_gap)


def _balanced(plans: list[Filled], settings: SearchSettings) -> list[Filled]:
    """Returns the plans, the fastest first, after ever more rounds of balancing of ever fewer of
    them."""

    def makespan_ns(filled: Filled) -> int:
        return filled.makespan_ns

    best = sorted(plans, key=makespan_ns)
    left: list[Filled] = []
    for kept, rounds in settings.evened:
        lowest = best[0].makespan_ns
        for i, filled in enumerate(best):
            if _estimate_ns(filled.given, filled.rings) >= lowest:
                continue  # it cannot become the best
            plan = even_out(filled.rings, filled.plan, rounds)
            even = Filled.of(filled.given, filled.rings, plan)
            if even.makespan_ns < filled.makespan_ns:
                best[i] = even
                lowest = min(lowest, even.makespan_ns)
        best = sorted(best, key=makespan_ns)
        left += best[kept:]
        best = best[:kept]
    return best + sorted(left, key=makespan_ns)


def _estimate_ns(given: PlanningInput, rings: PlacedRings) -> int:
    """Returns the makespan with these rings if all targets are met."""
    return fixed_ns(given.profile, len(rings.load)) + rings.estimate_ns


def with_fewest_splits(candidates: Sequence[Candidate], gap: float) -> Candidate:
    """Returns, of the candidates that take at most a share `gap` more time than the fastest, the
    one that splits documents over the fewest ranks."""
    limit = (1 + gap) * min(candidate.makespan_ns for candidate in candidates)
    quick = [candidate for candidate in candidates if candidate.makespan_ns <= limit]
    return min(quick, key=lambda candidate: (candidate.splits, candidate.makespan_ns))

"""Search: the planner of mode `auto`. Chooses the number of micro-batches and the degree of every
document.

It plans in blocks of 32, 16, … 1 neighbouring ranks, as if a block were one rank: with few
documents per rank these are more even if they share the ranks of a block, and a step of few blocks
is planned quickly. A document takes the smallest degree at which its ranks finish it within a time
limit: one limit for all documents, as a share of the time of evenly spread work, or one per
micro-batch if the longest document exceeds that time on all ranks (`shortest_path.py`). Placements
of rings are ranked by estimated makespan (`packing.py`). The best few per number of micro-batches
are filled with documents of degree 1; then fewer and fewer of them are balanced for more and more
rounds (`local_search.py`), and exact cost decides.
"""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from longctx.planning.assignment import NEVER, Assignment, least_degrees
from longctx.planning.cost.model import fixed_ns, nanoseconds
from longctx.planning.cost.rounds import PRICE
from longctx.planning.planners.degree_table import DegreeTable
from longctx.planning.planners.packing import PlacedRings, even_out, fill, place_rings
from longctx.planning.planners.planning_input import Candidate, Degrees, PlanningInput
from longctx.planning.planners.settings import DEFAULT, SearchSettings
from longctx.planning.planners.shortest_path import LimitGraph

Filled = tuple[PlacedRings, Assignment]
"""Rings in their places, and an assignment of all documents with these rings."""


MOST_EMPTY = 1 / 32
"""Largest share of the ranks that blocks may leave over."""


def search(given: PlanningInput, settings: SearchSettings = DEFAULT) -> Candidate:
    """Returns the best plan found. Every document must fit at some degree."""
    return list(refine(given, settings))[-1]


def refine(given: PlanningInput, settings: SearchSettings = DEFAULT) -> Iterator[Candidate]:
    """Yields the best plan so far: the first is found in a fraction of the time, the last is that
    of `search`.

    Plans in blocks of neighbouring ranks, coarse to fine, and compares them with the rounds of
    their exchange. Skips blocks so coarse that splitting every document costs too much, and stops
    once the plan is good or finer blocks take too long. Prefers finer blocks where times hardly
    differ.
    """
    priced = replace(given, round_price=PRICE)
    bound = given.step_bound_ns()
    # Pipelines are planned at several budgets.
    micro_batches = given.fewest_micro_batches if given.pipeline.ranks > 1 else 1
    best: Candidate | None = None
    quickest = NEVER
    for block in settings.blocks:
        if block > 1 and not _worthwhile(given, block, settings, bound):
            continue
        blocks = replace(priced, slots=given.slots // block, block=block)
        effort = len(given.lengths) * blocks.slots * micro_batches
        if best is not None and effort > settings.max_effort:
            break
        assignment, makespan = search_in_blocks(blocks, settings)
        candidate = given.candidate("search", assignment)
        quickest = min(quickest, candidate.makespan_ns)
        if best is None or candidate.makespan_ns <= (1 + settings.finer_gap) * quickest:
            best = candidate
        yield best
        if makespan <= (1 + settings.good_gap(effort)) * bound:
            break


def _worthwhile(given: PlanningInput, block: int, settings: SearchSettings, bound: int) -> bool:
    """Returns whether blocks of this size waste few ranks and little time over the lower bound."""
    many = len(given.lengths) > settings.few_per_rank * given.slots
    if many and block > settings.coarsest_of_many:
        return False
    blocks, empty = divmod(given.slots, block)
    if blocks < 2 or empty > MOST_EMPTY * given.slots:
        return False
    least = least_degrees(given.lengths, blocks, given.tokens_per_rank, block)
    if not least.all():  # a document fits no whole blocks
        return False
    limit = (1 + settings.max_split_loss) * bound
    return given.even_work_bound_ns(least * block) <= limit


def search_in_blocks(given: PlanningInput, settings: SearchSettings) -> tuple[Assignment, int]:
    """Returns the best assignment found with whole blocks for each document, and its makespan by
    `PlanningInput.score`."""
    table = DegreeTable(given, settings)
    micro_batches = given.fewest_micro_batches
    uneven = int(table.quickest.max(initial=0)) * micro_batches * given.slots > table.work
    with_own_limits = _plans_with_own_limits(table) if uneven else []
    plans = with_own_limits if micro_batches >= settings.many else []
    while not plans:
        plans = _plans_by_number(table, micro_batches) + with_own_limits
        micro_batches += 2 + micro_batches // 8
    return _best_filled(table, plans)


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


def _plans_by_number(table: DegreeTable, micro_batches: int) -> list[Filled]:
    """Returns the best plans with `micro_batches` and with one more."""
    given, settings = table.given, table.settings
    fewest, more = Shortlist(table, micro_batches), Shortlist(table, micro_batches + 1)
    budget = micro_batches * given.slots * given.tokens_per_rank
    roomy = int(given.single_tokens.sum()) < settings.tight * budget
    fewest.add_one_limit()
    if roomy and fewest.best:
        for rings in fewest.best[: settings.promising]:
            more.add_everywhere(given.with_degrees(rings.degree))
    else:
        more.add_one_limit()
    most = 2 * settings.filled
    return [
        *_filled(fewest.best[:most], settings.filled),
        *_filled(more.best[:most], settings.filled),
    ]


def _plans_with_own_limits(table: DegreeTable) -> list[Filled]:
    """Returns the best plans with a separate limit for every micro-batch."""
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
    plans: list[tuple[int, PlacedRings]] = []
    seen = set()
    for price in table.settings.prices:
        index, number = graph.shortest_path(price)
        key = index.tobytes(), number.tobytes()
        if key in seen:
            continue
        seen.add(key)
        degrees = table.with_degrees(index)
        start = np.zeros_like(given.lengths)
        start[table.long] = number
        fewest = max(given.fewest_micro_batches, int(number.max()) + 1)
        for micro_batches, dense in itertools.product((fewest, fewest + 1), (False, True)):
            stop = np.full_like(given.lengths, micro_batches)
            stop[table.long] = number + 1
            rings = place_rings(given, degrees, micro_batches, start=start, stop=stop, dense=dense)
            if rings is not None:
                plans.append((rings.estimate_ns + micro_batches * launch_ns, rings))
    by_estimate = sorted(plans, key=lambda plan: plan[0])
    return _filled([rings for _, rings in by_estimate], table.settings.filled)


def _filled(placements: Sequence[PlacedRings], count: int) -> list[Filled]:
    """Fills placements with the remaining documents and returns the first `count` that fit."""
    found: list[Filled] = []
    for rings in placements:
        plan = fill(rings)
        if plan is not None:
            found.append((rings, plan))
        if len(found) == count:
            break
    return found


class _Scored(NamedTuple):
    """A plan with its makespan in nanoseconds; of equal ones the first `number` is best."""

    makespan_ns: int
    number: int
    rings: PlacedRings
    plan: Assignment

    @property
    def order(self) -> tuple[int, int]:
        return self.makespan_ns, self.number


def _best_filled(table: DegreeTable, plans: list[Filled]) -> tuple[Assignment, int]:
    """Balances the best of these plans and returns the best assignment with its makespan in
    nanoseconds."""
    given = table.given

    def makespan(plan: Assignment) -> int:
        return given.score(given.on_ranks(plan)).makespan_ns

    best = [
        _Scored(makespan(plan), number, rings, plan) for number, (rings, plan) in enumerate(plans)
    ]
    best.sort(key=lambda scored: scored.order)
    for kept, rounds in table.settings.evened:
        lowest = best[0].makespan_ns
        for i, scored in enumerate(best):
            fixed = fixed_ns(given.profile, scored.plan.micro_batches)
            if fixed + scored.rings.estimate_ns >= lowest:
                continue  # it cannot become the best
            even = even_out(scored.rings, scored.plan, rounds)
            after = makespan(even)
            if after < scored.makespan_ns:
                best[i] = scored._replace(makespan_ns=after, plan=even)
                lowest = min(lowest, after)
        best = sorted(best, key=lambda scored: scored.order)[:kept]
    return given.on_ranks(best[0].plan), best[0].makespan_ns

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

import numpy as np

from longctx.planning.assignment import NEVER, Assignment, Integers, least_degrees
from longctx.planning.cost.bounds import even_work_bound_ns, step_bound_ns
from longctx.planning.cost.model import fixed_ns, nanoseconds
from longctx.planning.cost.rounds import PRICE
from longctx.planning.planners.degree_table import DegreeTable
from longctx.planning.planners.packing import PlacedRings, even_out, fill, place_rings
from longctx.planning.planners.settings import DEFAULT, SearchSettings
from longctx.planning.planners.shortest_path import LimitGraph
from longctx.planning.planners.step import Candidate, Degrees, Step

Filled = tuple[PlacedRings, Assignment]
"""Rings in their places, and an assignment of all documents with these rings."""


def search(step: Step, settings: SearchSettings = DEFAULT) -> Candidate:
    """Returns the best plan found. Every document must fit at some degree."""
    return list(finer_and_finer(step, settings))[-1]


def finer_and_finer(step: Step, settings: SearchSettings = DEFAULT) -> Iterator[Candidate]:
    """Yields the best plan so far: the first is found in a fraction of the time, the last is that
    of `search`.

    Plans in blocks of neighbouring ranks, coarse to fine, and compares them with the rounds of
    their exchange. Skips blocks so coarse that splitting every document costs too much, and stops
    once the plan is good or finer blocks take too long. Prefers finer blocks where times hardly
    differ.
    """
    priced = replace(step, round_price=PRICE)
    best: Candidate | None = None
    quickest = NEVER
    bound = step_bound_ns(
        step.profile, step.lengths, step.places, step.tokens_per_rank, step.pipeline, *step.whole
    )
    few = len(step.lengths) <= settings.few * step.places
    # Pipelines are planned at several budgets.
    micro_batches = step.fewest_micro_batches if step.pipeline.ranks > 1 else 1
    for block in settings.blocks:
        blocks = replace(priced, places=step.places // block, block=block)
        effort = len(step.lengths) * blocks.places * micro_batches
        if block > 1 and (
            (block > settings.coarse and not few)
            or not _worthwhile(step, block, (1 + settings.lost) * bound)
        ):
            continue
        if best is not None and effort > settings.most:
            break
        assignment, makespan = search_in_blocks(blocks, settings)
        candidate = step.candidate("search", assignment)
        quickest = min(quickest, candidate.makespan_ns)
        best = (
            candidate
            if best is None or candidate.makespan_ns <= (1 + settings.finer) * quickest
            else best
        )
        yield best
        if makespan <= (1 + max(gap for least, gap in settings.enough if effort >= least)) * bound:
            break


def _worthwhile(step: Step, block: int, limit: float) -> bool:
    """Whether few ranks are left over when the domain is cut into blocks, and whole blocks for
    every document cost little."""
    blocks, empty = divmod(step.places, block)
    if blocks < 2 or empty * 32 > step.places:
        return False
    least, tokens_per_rank = (
        least_degrees(step.lengths, blocks, step.tokens_per_rank, block),
        step.tokens_per_rank,
    )
    return (
        bool(least.all())
        and even_work_bound_ns(
            step.profile, step.lengths, least * block, step.places, tokens_per_rank, *step.whole
        )
        <= limit
    )


def search_in_blocks(step: Step, settings: SearchSettings) -> tuple[Assignment, int]:
    """Returns the best assignment found with whole blocks for each document, and its makespan by
    `Step.score`."""
    table = DegreeTable(step, settings)
    micro_batches = step.fewest_micro_batches
    uneven = int(table.quickest.max(initial=0)) * micro_batches * step.places > table.work
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
        self.table, self.step, self.settings, self.micro_batches = (
            table,
            table.step,
            table.settings,
            micro_batches,
        )
        self.best: list[PlacedRings] = []

    def add(self, degrees: Degrees, start: Integers | int, stop: Integers | int) -> None:
        """Adds the placement of these degrees, unless its work alone shows that `settings.filled`
        others are better."""
        filled = self.settings.filled
        if (
            len(self.best) >= filled
            and degrees.work >= self.best[filled - 1].estimate_ns * self.step.places
        ):
            return
        if rings := place_rings(self.step, degrees, self.micro_batches, start, stop):
            bisect.insort(self.best, rings, key=lambda rings: rings.estimate_ns)

    def add_everywhere(self, degrees: Degrees) -> None:
        """Adds placements with rings in as few micro-batches as possible, and in all
        micro-batches."""
        fewest = max(1, -(-int(degrees.degree[degrees.degree > 1].sum()) // self.step.places))
        for stop in sorted({min(self.micro_batches, fewest), self.micro_batches}):
            self.add(degrees, 0, stop)

    def add_one_limit(self) -> None:
        """Adds placements with one limit for all documents."""
        table = self.table
        even_ns = table.even_ns(self.micro_batches * self.step.places)
        seen = set()
        for share in self.settings.shares:
            index = table.smallest_degrees_within(share * even_ns // 32)
            if index.tobytes() not in seen:
                seen.add(index.tobytes())
                self.add_everywhere(table.with_degrees(index))


def _plans_by_number(table: DegreeTable, micro_batches: int) -> list[Filled]:
    """Returns the best plans with `micro_batches` and with one more."""
    step, settings = table.step, table.settings
    fewest, more = Shortlist(table, micro_batches), Shortlist(table, micro_batches + 1)
    roomy = (
        int(step.single_tokens.sum())
        < settings.tight * micro_batches * step.places * step.tokens_per_rank
    )
    fewest.add_one_limit()
    if roomy and fewest.best:
        for rings in fewest.best[: settings.promising]:
            more.add_everywhere(step.with_degrees(rings.degree))
    else:
        more.add_one_limit()
    return [
        plan
        for shortlist in (fewest, more)
        for plan in _filled(shortlist.best[: 2 * settings.filled], settings.filled)
    ]


def _plans_with_own_limits(table: DegreeTable) -> list[Filled]:
    """Returns the best plans with a separate limit for every micro-batch."""
    step, launch_ns = table.step, nanoseconds(table.step.profile.launch_s)
    documents = table.time, table.tokens, table.degrees
    graph = LimitGraph.of(
        *documents, step.places, step.tokens_per_rank, table.short_ns_per_token, launch_ns
    )
    plans: list[tuple[int, PlacedRings]] = []
    seen = set()
    for index, number in map(graph.shortest_path, table.settings.prices):
        if (key := (index.tobytes(), number.tobytes())) in seen:
            continue
        seen.add(key)
        most = max(step.fewest_micro_batches, int(number.max()) + 1)
        for micro_batches, dense in itertools.product((most, most + 1), (False, True)):
            start, stop = np.zeros_like(step.lengths), np.full_like(step.lengths, micro_batches)
            start[table.long], stop[table.long] = number, number + 1
            if rings := place_rings(
                step, table.with_degrees(index), micro_batches, start, stop, dense=dense
            ):
                plans.append((rings.estimate_ns + micro_batches * launch_ns, rings))
    return _filled(
        [rings for _, rings in sorted(plans, key=lambda each: each[0])], table.settings.filled
    )


def _filled(placements: Sequence[PlacedRings], count: int) -> list[Filled]:
    """Fills placements with the remaining documents and returns the first `count` that fit."""
    attempts = ((rings, fill(rings)) for rings in placements)
    return list(
        itertools.islice(((rings, plan) for rings, plan in attempts if plan is not None), count)
    )


def _best_filled(table: DegreeTable, plans: list[Filled]) -> tuple[Assignment, int]:
    """Balances the best of these plans and returns the best assignment with its makespan in
    nanoseconds."""
    step = table.step

    def makespan(plan: Assignment) -> int:
        return step.score(step.on_ranks(plan)).makespan_ns

    best = sorted(
        ((makespan(plan), i, rings, plan) for i, (rings, plan) in enumerate(plans)),
        key=lambda item: item[:2],
    )
    for kept, rounds in table.settings.evened:
        lowest = best[0][0]
        for place, (before, i, rings, plan) in enumerate(best):
            # Otherwise it cannot become the best.
            if fixed_ns(step.profile, plan.micro_batches) + rings.estimate_ns < lowest:
                even = even_out(rings, plan, rounds)
                if (after := makespan(even)) < before:
                    best[place] = after, i, rings, even
                    lowest = min(lowest, after)
        best = sorted(best, key=lambda item: item[:2])[:kept]
    return step.on_ranks(best[0][3]), best[0][0]

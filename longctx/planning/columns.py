"""Columns: the planner of mode `auto`. It chooses how many micro-batches a step has and the degree of every document.

A layout is known by K, the number of micro-batches, and by a limit: a document takes the smallest degree at which its ranks are
done with it within the limit. Limits are chosen so that all rings together are as wide as the domain, or a multiple or fraction
of it: then they stand side by side as columns of like height and fill whole micro-batches. A lower limit makes more and finer
pieces, which pack better but lose kernel efficiency, and no document takes a degree that wastes more than a given share of its
work on inefficiency and exposed exchange. Layouts are ranked by their estimated makespan (`shelves.py`), the best few are
filled with the documents of degree 1, the best of these are evened out (`balance.py`), and the exact cost decides.
"""

import itertools
from collections.abc import Iterator

import numpy as np

from longctx.planning.assignment import Assignment, Integers, largest_shards
from longctx.planning.bins import derived_degrees
from longctx.planning.cost import alone_ns, nanoseconds, score
from longctx.planning.request import least_degrees
from longctx.planning.shelves import NEVER, Rings, Step, even_out, fill, place_rings

LAYERS = (0.0, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
"""Widths of all rings together, in domains."""
WASTE = (1.1, 1.25, 4.0)
"""Work of a document over all its ranks, as a multiple of the least of any degree, that a layout allows."""
FLOORS = (2, 4, 8)
"""Least degrees of all documents that are tried where there are few of them: fine pieces for want of small documents."""
FEW = 2
"""Documents a rank."""
SHORT = 0.3
"""Documents that take less of the ideal height than this are left on one rank."""
TIGHT = 0.9
"""Share of the token budget from which one more micro-batch is searched as thoroughly as the fewest."""
IMPROVED = 2
"""How many of the best layouts are evened out."""
BRIEFLY, THOROUGHLY = 24, 128
"""Rounds of evening out: to choose between layouts, and for the one that was chosen."""


def plan_columns(step: Step) -> tuple[Assignment, int]:
    """The best packing found and its makespan in nanoseconds. Every document must fit at some degree."""
    menu = Menu(step)
    choices = list(_degree_choices(step, menu))
    micro_batches = step.fewest_micro_batches
    while True:
        layouts = _layouts(step, choices, micro_batches)
        roomy = int(step.lengths.sum()) < TIGHT * micro_batches * step.ranks * step.tokens_per_rank
        promising = sorted(layouts, key=lambda rings: rings.estimate_ns)[:IMPROVED]
        again = [rings.degree for rings in promising] if roomy and promising else choices
        layouts += _layouts(step, again, micro_batches + 1)
        best = _best_filled(step, layouts)
        if best is not None:
            return best
        micro_batches += 2 + micro_batches // 8


def _degree_choices(step: Step, menu: "Menu") -> Iterator[Integers]:
    """Degrees of all documents, by what they may waste and by the width that rings shall have together."""
    seen = set()
    yield derived_degrees(step.profile, step.lengths, step.ranks, step.tokens_per_rank)
    for waste in WASTE:
        for layers in LAYERS:
            degrees = menu.degrees(int(layers * step.ranks), waste)
            if degrees.tobytes() not in seen:
                seen.add(degrees.tobytes())
                yield degrees
    if len(step.lengths) <= FEW * step.ranks:
        degrees = menu.degrees(step.ranks, max(WASTE))
        yield from (np.maximum(degrees, floor) for floor in FLOORS if floor <= step.ranks)


def _layouts(step: Step, choices: list[Integers], micro_batches: int) -> list[Rings]:
    """Ring layouts for that many micro-batches: rings in as few of them as they fill, and in all."""
    found = []
    for degrees in choices:
        width = int(degrees[degrees > 1].sum())
        for ring_shelves in {min(micro_batches, max(1, -(-width // step.ranks))), micro_batches}:
            rings = place_rings(step, degrees, micro_batches, ring_shelves)
            if rings is not None:
                found.append(rings)
    return found


def _best_filled(step: Step, layouts: list[Rings]) -> tuple[Assignment, int] | None:
    """Fills the most promising layouts, evens out the best of them, and returns the best of all with its makespan."""

    def makespan(plan: Assignment) -> int:
        return score(step.profile, step.lengths, plan, step.ranks).makespan_ns

    launch_ns = nanoseconds(step.profile.launch_s)
    layouts = sorted(layouts, key=lambda rings: rings.estimate_ns + len(rings.height) * launch_ns)
    enough = max(3, min(20, 4096 // len(step.lengths)))
    attempts = ((rings, fill(rings, step.ranks)) for rings in layouts[: 2 * enough])
    filled = list(itertools.islice(((rings, plan) for rings, plan in attempts if plan is not None), enough))
    if not filled:
        return None
    filled.sort(key=lambda item: makespan(item[1]))
    plans = [(rings, even_out(rings, plan, BRIEFLY)) for rings, plan in filled[:IMPROVED]]
    rings, plan = min(plans, key=lambda item: makespan(item[1]))
    plan = min(plan, even_out(rings, plan, THOROUGHLY), key=makespan)
    return plan, makespan(plan)


class Menu:
    """What every document that may need a ring would cost at every degree worth looking at."""

    def __init__(self, step: Step) -> None:
        least = least_degrees(step.lengths, step.ranks, step.tokens_per_rank)
        self.documents = len(step.lengths)
        height = int(step.single_ns.sum()) // (step.ranks * (step.fewest_micro_batches + 1))
        self.long = np.flatnonzero((step.single_ns > SHORT * height) | (least > 1))
        self.options = _degree_options(step.ranks, least)
        length, degree = np.broadcast_arrays(step.lengths[self.long][:, None], self.options)
        fits = largest_shards(length, degree) <= step.tokens_per_rank
        self.cost = np.where(fits, alone_ns(step.profile, length, degree), NEVER)
        work = np.where(fits, self.cost * self.options.astype(np.float64), np.inf)
        self.excess = work / work.min(axis=1, keepdims=True)

    def degrees(self, width: int, waste: float) -> Integers:
        """Degrees by the lowest limit at which all rings together are at most `width` ranks wide.

        No document wastes more than `waste` allows, which may keep the rings narrower.
        """
        degrees = np.ones(self.documents, dtype=np.int64)
        if not len(self.long):
            return degrees
        cost = np.where(self.excess <= waste, self.cost, NEVER)
        quickest = cost.min(axis=1)
        low, high = 0, int(quickest.max(initial=0)) + int(self.cost[:, 0][self.cost[:, 0] < NEVER].max(initial=0))
        chosen = self._within(cost, np.maximum(quickest, high))
        for _ in range(16):
            middle = (low + high) // 2
            options = self._within(cost, np.maximum(quickest, middle))
            if int(options[options > 1].sum()) <= width:
                high, chosen = middle, options
            else:
                low = middle
        degrees[self.long] = chosen
        return degrees

    def _within(self, cost: Integers, limits: Integers) -> Integers:
        """The smallest degree of every long document whose time is within its limit."""
        result: Integers = self.options[(cost <= limits[:, None]).argmax(axis=1)]
        return result


def _degree_options(ranks: int, least: Integers) -> Integers:
    """Every degree up to 64, then steps of about 3 %, N, and the smallest degree of each document."""
    steps = [1]
    while steps[-1] < ranks:
        steps.append(min(ranks, steps[-1] + max(1, steps[-1] // 32)))
    return np.unique(np.concatenate([np.array(steps, dtype=np.int64), least]))

"""Columns: the planner of mode `auto`. It chooses how many micro-batches a step has and the degree of every document.

A layout is known by K, the number of micro-batches, and by limits: a document takes the smallest degree at which its ranks are
done with it within its limit. Limits are chosen so that rings together are as wide as the domain, or a multiple or fraction of
it: then they stand side by side as columns of like height and fill whole micro-batches. All documents may have one limit, or the
longest have a higher one and some tall micro-batches for themselves: a long document is then split no further than its like. A
lower limit makes more and finer pieces, which pack better but lose kernel efficiency, and no document takes a degree that wastes
more than a given share of its work on inefficiency and exposed exchange. Layouts are ranked by their estimated makespan
(`shelves.py`), the best few are filled with the documents of degree 1, the best of these are evened out (`balance.py`), and the
exact cost decides.
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
LOWER_LAYERS = (0.5, 0.75, 1.0)
"""Widths of the rings below the tall micro-batches, in domains."""
WASTE = (1.1, 1.25, 4.0)
"""Work of a document over all its ranks, as a multiple of the least of any degree, that a layout allows."""
FLOORS = (2, 4, 8)
"""Least degrees of all documents that are tried where there are few of them: fine pieces for want of small documents."""
FEW = 2
"""Documents a rank."""
SHORT = 0.3
"""Documents that take less of the ideal height than this are left on one rank."""
TALL_SHARES = (0.75, 0.875, 1.0)
"""Widths of the rings there, as shares of what is there."""
TALL = 2
"""Most micro-batches that the longest documents have for themselves."""
LEADS = 3
"""How many ways to choose these documents are looked at closely."""
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
        layouts += _tall_layouts(step, menu, micro_batches) + _tall_layouts(step, menu, micro_batches + 1)
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


def _tall_layouts(step: Step, menu: "Menu", micro_batches: int) -> list[Rings]:
    """Layouts in which the longest documents have the first micro-batches for themselves, with a limit of their own."""
    leads = []
    for tall in range(1, min(TALL, micro_batches - 1) + 1):
        for share in TALL_SHARES:
            width = int(share * tall * step.ranks)
            for lead in _some(menu.most_on(width)):
                leads.append((_tall_estimate_ns(step, menu, micro_batches, tall, width, lead), tall, width, lead))
    found, seen = [], set()
    for _, tall, width, lead in sorted(leads)[:LEADS]:
        top = menu.degrees(width, max(WASTE), stop=lead)
        for layers in LOWER_LAYERS:
            degrees = np.maximum(top, menu.degrees(int(layers * step.ranks), max(WASTE), start=lead))
            if (key := (tall, lead, degrees.tobytes())) in seen:
                continue
            seen.add(key)
            rings = place_rings(step, degrees, micro_batches, micro_batches, lead, tall)
            if rings is not None:
                found.append(rings)
    return found


def _some(most: int) -> list[int]:
    """Numbers from 1 to `most`, about 10 % apart."""
    numbers = [1]
    while numbers[-1] < most:
        numbers.append(min(most, numbers[-1] + max(1, numbers[-1] // 10)))
    return numbers if most else []


def _tall_estimate_ns(step: Step, menu: "Menu", micro_batches: int, tall: int, within: int, lead: int) -> int:
    """Height of all shelves if the `lead` longest documents stand on the first `tall` ones, everything else being a fluid."""
    limit, index = menu.within(within, max(WASTE), 0, lead)
    width, time = menu.options[index], menu.cost[np.arange(lead), index]
    rate = menu.short_ns_per_token
    room = np.minimum(limit - time, (step.tokens_per_rank - step.lengths[menu.long[:lead]] // width) * rate)
    beside = tall * step.ranks - int(width.sum())
    if beside < 0:
        return NEVER
    taken = int((width * (time + room)).sum()) + beside * min(limit, int(step.tokens_per_rank * rate))
    lower = step.ranks * (micro_batches - tall)
    rest = menu.cost[lead:]
    height = max(0, menu.least_work + int((width * time - menu.work[:lead].min(axis=1)).sum()) - taken) // lower
    if len(rest):
        height = max(height, int(rest.min(axis=1).max()))
        within = (rest <= height).argmax(axis=1)
        loss = menu.work[lead:][np.arange(len(rest)), within] - menu.work[lead:].min(axis=1)
        height += int(loss.sum()) // lower
    return tall * limit + (micro_batches - tall) * height


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
    """What every document that may need a ring would cost at every degree worth looking at, longest document first."""

    def __init__(self, step: Step) -> None:
        least = least_degrees(step.lengths, step.ranks, step.tokens_per_rank)
        self.documents = len(step.lengths)
        height = int(step.single_ns.sum()) // (step.ranks * (step.fewest_micro_batches + 1))
        is_long = (step.single_ns > SHORT * height) | (least > 1)
        long, short = np.flatnonzero(is_long), np.flatnonzero(~is_long)
        self.long = long[np.argsort(-step.lengths[long], kind="stable")]
        self.options = _degree_options(step.ranks, least)
        length, degree = np.broadcast_arrays(step.lengths[self.long][:, None], self.options)
        fits = largest_shards(length, degree) <= step.tokens_per_rank
        self.cost = np.where(fits, alone_ns(step.profile, length, degree), NEVER)
        self.work = np.where(fits, self.cost * self.options.astype(np.float64), np.inf)
        self.excess = self.work / self.work.min(axis=1, keepdims=True)
        short_ns = int(step.single_ns[short].sum())
        self.least_work = short_ns + int(self.work.min(axis=1).sum())
        self.short_ns_per_token = short_ns / max(1, int(step.lengths[short].sum()))
        self.width = np.where(self.options > 1, self.options, 0)
        self.steps: dict[float, tuple[Integers, Integers, Integers]] = {}

    def most_on(self, width: int) -> int:
        """How many of the longest documents fit side by side on that many ranks."""
        narrowest = self.width[(self.cost < NEVER).argmax(axis=1)]
        return int(np.searchsorted(np.cumsum(np.maximum(1, narrowest)), width, side="right"))

    def degrees(self, width: int, waste: float, start: int = 0, stop: int | None = None) -> Integers:
        """Degrees by the lowest limit at which the rings of long documents `start` to `stop` are at most `width` ranks wide.

        No document wastes more than `waste` allows, which may keep the rings narrower. The others get degree 1.
        """
        degrees = np.ones(self.documents, dtype=np.int64)
        stop = len(self.long) if stop is None else stop
        degrees[self.long[start:stop]] = self.options[self.within(width, waste, start, stop)[1]]
        return degrees

    def within(self, width: int, waste: float, start: int, stop: int) -> tuple[int, Integers]:
        """That limit, and the index of every document's option by it."""
        height, wider, row = self._steps(waste)
        here = np.flatnonzero((row >= start) & (row < stop))
        over = np.cumsum(wider[here]) > width
        limit = int(height[here[over.argmax()]]) if over.any() else 0
        cost = np.where(self.excess[start:stop] <= waste, self.cost[start:stop], NEVER)
        limit = min(limit, int(cost[cost < NEVER].max(initial=0)))  # rings are wider than asked for if they must be
        limits = np.maximum(limit, cost.min(axis=1))
        return int(limits.max(initial=0)), (cost <= limits[:, None]).argmax(axis=1)

    def _steps(self, waste: float) -> tuple[Integers, Integers, Integers]:
        """As the limit falls, documents take ever higher degrees: at which limit, how many ranks more, and whose row."""
        if waste not in self.steps:
            cost = np.where(self.excess <= waste, self.cost, NEVER)
            before = np.minimum.accumulate(cost, axis=1)[:, :-1]
            row, option = np.nonzero(cost[:, 1:] < before)
            wider = self.width[option + 1].copy()
            again = row[1:] == row[:-1]
            wider[1:][again] -= self.width[option[:-1] + 1][again]
            order = np.argsort(-before[row, option], kind="stable")
            self.steps[waste] = before[row, option][order], wider[order], row[order]
        return self.steps[waste]


def _degree_options(ranks: int, least: Integers) -> Integers:
    """Every degree up to 64, then steps of about 3 %, N, and the smallest degree of each document."""
    steps = [1]
    while steps[-1] < ranks:
        steps.append(min(ranks, steps[-1] + max(1, steps[-1] // 32)))
    return np.unique(np.concatenate([np.array(steps, dtype=np.int64), least]))

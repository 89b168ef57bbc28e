"""Columns: the planner of mode `auto`. It chooses how many micro-batches a step has and the degree of every document.

A document takes the smallest degree at which its ranks are done with it within a limit. Limits come from three families:
- shares of the height that micro-batches have if all work is spread evenly: a lower limit makes more and finer pieces, which
  pack better but lose kernel efficiency;
- a higher limit for the longest documents, which have some tall micro-batches for themselves and are split no further than
  their like; a closed form says how many documents these should be;
- a limit for each micro-batch, where even on all ranks the longest document takes longer than such a height (`stairs.py`).
Where there are few documents for each rank, some more layouts let them share groups of ranks (`groups.py`).
Layouts are ranked by their estimated makespan (`shelves.py`). The best few for each number of micro-batches are filled with the
documents of degree 1, ever fewer of them are evened out for ever more rounds (`balance.py`), and the exact cost decides.
"""

import bisect
import itertools
import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from longctx.planning.assignment import NEVER, Assignment, Integers, largest_shards, least_degrees
from longctx.planning.cost.model import alone_ns, nanoseconds, score
from longctx.planning.planners.auto.packing import Degrees, Rings, Step, even_out, fill, place_rings
from longctx.planning.planners.auto.shared_rings import grouped_rings
from longctx.planning.planners.auto.shortest_path import Stairs

SHARES = range(44, 10, -2)
"""Limits as shares of the height that micro-batches have if all work is spread evenly, in 32nds; the highest give least work,
and once these are placed others need not be."""
LOWER_SHARES = (1.2, 1.0, 0.8)
"""The same below the tall micro-batches."""
WASTE = (1.1, 1.25, math.inf)
"""Work of a document over all its ranks, as a multiple of the least of any degree, that a layout allows."""
FEW = 4
"""Up to so many documents a rank, groups are tried as well."""
NARROWEST = (1, 2, 4)
"""How many ranks each of these groups has at least."""
SHORT = 0.3
"""Documents that take less of the ideal height than this, and at most half a token budget, are left on one rank."""
TALL = 2
"""Most micro-batches that the longest documents have for themselves."""
LEADS = 3
"""How many ways to choose these documents are looked at closely."""
PRICES = (1, 0.75, 0.5, 0.25, 0)
"""What room for short documents may be worth where every micro-batch has its own limit."""
MANY = 12
"""From so many micro-batches on, these layouts are taken alone if there are any."""
TIGHT = 0.9
"""Share of the token budget from which one more micro-batch is searched as thoroughly as the fewest."""
PROMISING = 2
"""How many of the best layouts are tried with one more micro-batch where the tokens leave room for fewer."""
FILLED = 3
"""How many of the best layouts for each number of micro-batches are filled."""
EVENED = ((2, 8), (1, 24), (1, 48))
"""How many of the best plans are evened out, and for how many rounds, in turn."""

Filled = tuple[Rings, Assignment]
"""A layout, and a plan with all documents in it."""


def search(step: Step) -> tuple[Assignment, int]:
    """The best packing found and its makespan in nanoseconds. Every document must fit at some degree."""
    menu = Menu(step)
    micro_batches = step.fewest_micro_batches
    uneven = int(menu.quickest.max(initial=0)) * micro_batches * step.ranks > menu.work
    by_stairs = _plans_by_stairs(step, menu) if uneven else []
    plans = by_stairs if micro_batches >= MANY else []
    while not plans:
        plans = _plans_by_number(step, menu, micro_batches) + by_stairs
        micro_batches += 2 + micro_batches // 8
    return _best_filled(step, plans)


class Layouts:
    """The most promising ring layouts for one number of micro-batches, by their estimated makespan."""

    def __init__(self, step: Step, micro_batches: int) -> None:
        self.step, self.micro_batches = step, micro_batches
        self.best: list[Rings] = []

    def add(self, split: Degrees, start: Integers | int, stop: Integers | int) -> None:
        """Places the rings, unless their work alone says that FILLED others are better."""
        if len(self.best) >= FILLED and split.work >= self.best[FILLED - 1].estimate_ns * self.step.ranks:
            return
        if rings := place_rings(self.step, split, self.micro_batches, start, stop):
            bisect.insort(self.best, rings, key=lambda rings: rings.estimate_ns)


def _plans_by_number(step: Step, menu: "Menu", micro_batches: int) -> list[Filled]:
    """The best plans of that many micro-batches and of one more."""
    fewest, more = Layouts(step, micro_batches), Layouts(step, micro_batches + 1)
    roomy = int(step.lengths.sum()) < TIGHT * micro_batches * step.ranks * step.tokens_per_rank
    for layouts in (fewest, more):
        _tall_layouts(layouts, menu)
        if layouts is more and roomy and fewest.best:
            for promising in fewest.best[:PROMISING]:
                _add_even(layouts, step.split(promising.degree))
        else:
            _even_layouts(layouts, menu)
    plans = _filled(fewest.best[: 2 * FILLED]) + _filled(more.best[: 2 * FILLED])
    if micro_batches == 1 and len(step.lengths) <= FEW * step.ranks:
        for narrowest in (width for width in NARROWEST if width <= step.ranks):
            if rings := grouped_rings(step, menu.even_height(step.ranks), narrowest):
                plans.append((rings, Assignment.alternating(rings.micro_batch, rings.first_rank, rings.degree)))
    return plans


def _plans_by_stairs(step: Step, menu: "Menu") -> list[Filled]:
    """The best plans in which every micro-batch has a limit of its own."""
    launch_ns = nanoseconds(step.profile.launch_s)
    stairs = Stairs.of(
        menu.cost, menu.shard, menu.options, step.ranks, step.tokens_per_rank, menu.short_ns_per_token, launch_ns
    )
    found: list[tuple[int, Rings]] = []
    seen = set()
    for option, number in map(stairs.shortest, PRICES):
        if (key := (option.tobytes(), number.tobytes())) in seen:
            continue
        seen.add(key)
        most = max(step.fewest_micro_batches, int(number.max()) + 1)
        for micro_batches, dense in itertools.product((most, most + 1), (False, True)):
            start, stop = np.zeros_like(step.lengths), np.full_like(step.lengths, micro_batches)
            start[menu.long], stop[menu.long] = number, number + 1
            if rings := place_rings(step, menu.split(option), micro_batches, start, stop, dense=dense):
                found.append((rings.estimate_ns + micro_batches * launch_ns, rings))
    return _filled([rings for _, rings in sorted(found, key=lambda each: each[0])])


def _filled(layouts: Sequence[Rings]) -> list[Filled]:
    """The first FILLED of these layouts that hold all documents, with them in."""
    attempts = ((rings, fill(rings)) for rings in layouts)
    return list(itertools.islice(((rings, plan) for rings, plan in attempts if plan is not None), FILLED))


def _even_layouts(layouts: Layouts, menu: "Menu") -> None:
    """Adds layouts by one limit for all documents."""
    step = layouts.step
    height = menu.even_height(layouts.micro_batches * step.ranks)
    seen = set()
    for cost, share in itertools.product(menu.costs, SHARES):
        options = menu.below(share * height // 32, cost)
        if options.tobytes() not in seen:
            seen.add(options.tobytes())
            _add_even(layouts, menu.split(options))


def _add_even(layouts: Layouts, split: Degrees) -> None:
    """Adds layouts with rings in as few micro-batches as they fill, and in all."""
    fewest = max(1, -(-int(split.degree[split.degree > 1].sum()) // layouts.step.ranks))
    for shelves in sorted({min(layouts.micro_batches, fewest), layouts.micro_batches}):
        layouts.add(split, 0, shelves)


def _tall_layouts(layouts: Layouts, menu: "Menu") -> None:
    """Adds layouts in which the longest documents have the first micro-batches for themselves, with a limit of their own."""
    step, micro_batches = layouts.step, layouts.micro_batches
    leads = []
    for tall in range(1, min(TALL, micro_batches - 1) + 1):
        for lead in _some(menu.most_on(tall * step.ranks)):
            leads.append((*_tall_estimate_ns(step, menu, micro_batches, tall, lead), tall, lead))
    seen = set()
    for _, height, tall, lead in sorted(leads)[:LEADS]:
        top = menu.within(tall * step.ranks, lead)[1]
        start, stop = np.full_like(step.lengths, tall), np.full_like(step.lengths, micro_batches)
        start[menu.long[:lead]], stop[menu.long[:lead]] = 0, tall
        for share in LOWER_SHARES:
            options = np.append(top, menu.below(int(share * height), menu.cost)[lead:])
            if (key := (tall, lead, options.tobytes())) not in seen:
                seen.add(key)
                layouts.add(menu.split(options), start, stop)


def _some(most: int) -> list[int]:
    """Numbers from 1 to `most`, about 15 % apart."""
    numbers = [1]
    while numbers[-1] < most:
        numbers.append(min(most, numbers[-1] + 1 + numbers[-1] // 7))
    return numbers if most else []


def _tall_estimate_ns(step: Step, menu: "Menu", micro_batches: int, tall: int, lead: int) -> tuple[int, int]:
    """Height of all shelves, and of each below the tall ones, if the `lead` longest documents stand on the first `tall`.

    Everything else is a fluid: short documents stand beside the rings and on top of them up to the limit, or until tokens are
    used up.
    """
    limit, index = menu.within(tall * step.ranks, lead)
    degree, time = menu.options[index], menu.cost[np.arange(lead), index]
    beside = tall * step.ranks - int(degree.sum())
    if beside < 0:
        return NEVER, 0
    full = time + ((step.tokens_per_rank - step.lengths[menu.long[:lead]] // degree) * menu.short_ns_per_token).astype(np.int64)
    taken = int((degree * np.minimum(limit, full)).sum())
    taken += beside * min(limit, int(step.tokens_per_rank * menu.short_ns_per_token))
    lower = step.ranks * (micro_batches - tall)
    lost = int((degree * time).sum()) - int(menu.least_work[:lead].sum())
    height = max(0, menu.work + lost - taken) // lower
    if lead < len(menu.long):
        height = max(height, int(menu.quickest[lead:].max()))
        within = (menu.cost[lead:] <= height).argmax(axis=1)
        rest = menu.options[within] * menu.cost[np.arange(lead, len(menu.long)), within]
        height += int(rest.sum() - menu.least_work[lead:].sum()) // lower
    return tall * limit + (micro_batches - tall) * height, height


def _best_filled(step: Step, plans: list[Filled]) -> tuple[Assignment, int]:
    """Evens out the best of these plans, and returns the best of all with its makespan."""

    def makespan(plan: Assignment) -> int:
        return score(step.profile, step.lengths, plan, step.ranks).makespan_ns

    fixed_ns, launch_ns = nanoseconds(step.profile.step_s), nanoseconds(step.profile.launch_s)
    best = sorted(((makespan(plan), i, rings, plan) for i, (rings, plan) in enumerate(plans)), key=lambda item: item[:2])
    for kept, rounds in EVENED:
        lowest = best[0][0]
        for place, (before, i, rings, plan) in enumerate(best):
            if fixed_ns + plan.micro_batches * launch_ns + rings.estimate_ns < lowest:  # else it will not be the best
                even = even_out(rings, plan, rounds)
                if (after := makespan(even)) < before:
                    best[place] = after, i, rings, even
                    lowest = min(lowest, after)
        best = sorted(best, key=lambda item: item[:2])[:kept]
    return best[0][3], best[0][0]


class Menu:
    """What every document that may need a ring would cost at every degree worth looking at, longest document first."""

    def __init__(self, step: Step) -> None:
        least = least_degrees(step.lengths, step.ranks, step.tokens_per_rank)
        self.step = step
        height = int(step.single_ns.sum()) // (step.ranks * (step.fewest_micro_batches + 1))
        is_long = (step.single_ns > SHORT * height) | (2 * step.lengths > step.tokens_per_rank)
        long, short = np.flatnonzero(is_long), np.flatnonzero(~is_long)
        self.long = long[np.argsort(-step.lengths[long], kind="stable")]
        self.options = _degree_options(step.ranks, least, step.profile.ranks_per_node)
        length, degree = np.broadcast_arrays(step.lengths[self.long][:, None], self.options)
        self.shard = largest_shards(length, degree)
        fits = self.shard <= step.tokens_per_rank
        self.cost = np.where(fits, alone_ns(step.profile, length, degree), NEVER)
        work = np.where(fits, self.cost * self.options.astype(np.float64), np.inf)
        least_work = work.min(axis=1)
        self.costs = [np.where(work <= waste * least_work[:, None], self.cost, NEVER) for waste in WASTE]
        self.quickest, self.least_work = self.cost.min(axis=1), least_work.astype(np.int64)
        short_ns = int(step.single_ns[short].sum())
        self.work = short_ns + int(self.least_work.sum())
        self.short_ns_per_token = short_ns / max(1, int(step.lengths[short].sum()))
        self.width = np.where(self.options > 1, self.options, 0)

    def most_on(self, width: int) -> int:
        """How many of the longest documents fit side by side on that many ranks."""
        narrowest = self.width[(self.cost < NEVER).argmax(axis=1)]
        return int(np.searchsorted(np.cumsum(np.maximum(1, narrowest)), width, side="right"))

    def split(self, index: Integers) -> Degrees:
        """Long documents on these options, the others on one rank."""
        row = np.arange(len(self.long))
        degree, time, tokens = np.ones_like(self.step.lengths), self.step.single_ns.copy(), self.step.lengths.copy()
        degree[self.long], time[self.long], tokens[self.long] = (
            self.options[index],
            self.cost[row, index],
            self.shard[row, index],
        )
        return Degrees(degree, time, tokens)

    def even_height(self, slots: int) -> int:
        """The least height of a slot that holds an even share of all work, and no document that takes longer."""
        low, high = self.work // slots, int(self.quickest.max(initial=0)) + 2 * self.work // slots
        while high - low > low // 256:
            middle = (low + high) // 2
            index = self.below(middle, self.cost)
            time = self.cost[np.arange(len(index)), index]
            enough = self.work + int((self.options[index] * time - self.least_work).sum()) <= slots * middle
            low, high = (low, middle) if enough and int(time.max(initial=0)) <= middle else (middle + 1, high)
        return high

    def below(self, limit: int, cost: Integers) -> Integers:
        """The first option of every long document by which it takes no longer than that, or its quickest."""
        result: Integers = (cost <= np.maximum(limit, cost.min(axis=1))[:, None]).argmax(axis=1)
        return result

    def within(self, width: int, stop: int) -> tuple[int, Integers]:
        """The lowest limit at which the `stop` longest documents are at most `width` ranks wide together, and their options."""
        height, wider, row = self._steps
        here = np.flatnonzero(row < stop)
        over = np.cumsum(wider[here]) > width
        limit = int(height[here[over.argmax()]]) if over.any() else 0
        cost = self.cost[:stop]
        limit = min(limit, int(cost[cost < NEVER].max(initial=0)))  # rings are wider than asked for if they must be
        limits = np.maximum(limit, cost.min(axis=1))
        return int(limits.max(initial=0)), (cost <= limits[:, None]).argmax(axis=1)

    @cached_property
    def _steps(self) -> tuple[Integers, Integers, Integers]:
        """As the limit falls, documents take ever higher degrees: at which limit, how many ranks more, and whose row."""
        before = np.minimum.accumulate(self.cost, axis=1)[:, :-1]
        row, option = np.nonzero(self.cost[:, 1:] < before)
        wider = self.width[option + 1].copy()
        again = row[1:] == row[:-1]
        wider[1:][again] -= self.width[option[:-1] + 1][again]
        order = np.argsort(-before[row, option], kind="stable")
        return before[row, option][order], wider[order], row[order]


def _degree_options(ranks: int, least: Integers, node: int) -> Integers:
    """Every degree up to 32, then whole nodes or steps of about 3 %, N, and the smallest degree of each document.

    A ring beyond its node waits for the network where it has fewest mates in the node: whole nodes are best.
    """
    steps = [1]
    while steps[-1] < ranks:
        nodes = steps[-1] + max(1, steps[-1] // 32)
        if nodes > 32 and node < nodes:
            nodes = -(-nodes // node) * node
        steps.append(min(ranks, nodes))
    return np.unique(np.concatenate([np.array(steps, dtype=np.int64), least]))

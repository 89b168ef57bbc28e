"""Exchange stages: into how many stages every document splits its exchange of K and V, and what the exchange then costs.

Messages of a stage travel while the stage before it is computed. In a single stage, a rank's own rows alone hide those of
other ranks; with two exchange levels they hide the way to the relay, and rows of the rank's node hide the way on. Nothing but
queries hides the gradients of the last stage. The waits are predicted from the order in which `ring_pass` posts messages and
waits for them. More stages hide more, but each reads and writes the outputs and the gradients of queries once more, and calls
more kernels, which is their price.

Planners search with `cost.model.score`, which estimates what stages leave, and compare what they find by `staged`. Without that
estimate `score` is a lower bound: all of attention hides the exchange. Plans are predicted to take what `staged` says.
"""

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from longctx.planning.assignment import Assignment, Integers, remote_tokens, spread
from longctx.planning.cost.hardware_profile import HardwareProfile
from longctx.planning.cost.model import Floats, Score, attention_ns, gather_ns, linear_ns, mate_ns, ring_parts, score
from longctx.planning.plan import Plan

PRICE = 0.02
"""Price of a stage as a share of the linear time of a rank's tokens in rings. For an 8B model on an H100: about 135 kB for each
token and layer, with outputs added up in float32, at 2.4 of 3.35 TB/s."""
CHOICES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Numbers of stages that are tried."""
FORWARD_ATTENTION, FORWARD_LINEAR, PASSES = 2 / 7, 1 / 3, 3
"""Shares of the forward pass, and passes of rows: forward, again in backward, and their gradients."""


@dataclass(frozen=True)
class _Load:
    """What ranks compute and receive in micro-batches of as many stages as `rest` has, in nanoseconds.

    Arrays [micro-batches, ranks], of `rest` [stages, micro-batches, ranks]; or [ranks] and [stages, ranks].

    Attributes:
        queries: computation of queries that hides the exchange.
        own: attention to the rank's own rows, and to all rows of documents that are not split.
        node: attention to rows of its node in rings that are exchanged in two levels, and receiving these rows.
        far: attention to rows of other nodes in these rings, and receiving them from their nodes and from relays.
        rest: attention to rows of other ranks in all other rings, and receiving them inside the node and across.
    """

    queries: Floats
    own: Floats
    node: Floats
    node_inside: Floats
    far: Floats
    far_across: Floats
    far_inside: Floats
    rest: Floats
    rest_inside: Floats
    rest_across: Floats

    @property
    def stages(self) -> Integers:
        """Stages on every rank: those of its own rings, of which two-level rings have one more, for their own node."""
        rest = (self.rest_inside > 0) | (self.rest_across > 0)
        result: Integers = np.where(self.far_across > 0, len(rest) + 1, rest.sum(axis=0))
        return result

    def on(self, ranks: NDArray[np.bool_], stages: int) -> "_Load":
        """Returns the load on some ranks, without stages that they do not have."""
        parts = {each.name: getattr(self, each.name)[..., ranks] for each in fields(self)}
        return _Load(**{name: part[:stages] if part.ndim > 1 else part for name, part in parts.items()})


def staged(
    profile: HardwareProfile, lengths: Integers, a: Assignment, timed: Score, max_remote_tokens: int | None = None
) -> tuple[Integers, Score]:
    """Returns the number of exchange stages of every document, and the times of the assignment with them.

    `timed` is its score by `cost.model.score`. Stages are enough that none has more than about `max_remote_tokens` remote
    tokens on any rank (at most the largest degree - 1), and more while that makes the micro-batch faster: of its rings across
    nodes, or else of all its rings.
    """
    stages = np.ones_like(lengths)
    if not (a.degree > 1).any():
        return stages, timed
    least = np.ones(len(timed.time), dtype=np.int64)
    if max_remote_tokens is not None:
        np.maximum.at(least, a.micro_batch, a.degree - 1)
        remote = remote_tokens(lengths, a, timed.time.shape).max(axis=1)
        least = np.clip(-(-remote // max_remote_tokens), 1, least)
    exchange = _Exchange(profile, lengths, a, timed)
    chosen = fewest = exchange.possible(least[exchange.row])
    most, time = exchange.most(exchange.possible(CHOICES[-1])), exchange.time(fewest)
    better = time.max(axis=1) > exchange.busy.max(axis=1)  # where more stages may be faster
    for count in CHOICES:
        more = np.maximum(fewest, exchange.possible(count))
        before, here = fewest, better & (least < count) & (count <= most)
        better &= ~here
        for own in (np.where(exchange.inside, fewest, more), more):
            rows, before = np.flatnonzero(here & exchange.in_rows(own != before)), own
            if len(rows):
                found = exchange.time_of(rows, own, count)
                faster = found.max(axis=1) < time[rows].max(axis=1)
                rows, found = rows[faster], found[faster]
                better[rows], here[rows], time[rows] = True, False, found
                chosen = np.where(np.isin(exchange.row, rows), own, chosen)
    stages[exchange.rings] = chosen
    return stages, exchange.score(timed, time)


def plan_score(plan: Plan) -> Score:
    """Returns the predicted times of a plan."""
    lengths, a = np.array(plan.lengths, dtype=np.int64), Assignment.of(plan)
    timed = score(plan.profile, lengths, a, plan.ranks, plan.pipeline)
    exchange = _Exchange(plan.profile, lengths, a, timed)
    stages = np.ones_like(lengths)
    for p in (p for placements in plan.micro_batches for p in placements):
        stages[p.document] = p.stages
    return exchange.score(timed, exchange.time(exchange.possible(stages[exchange.rings])))


class _Exchange:
    """The exchange of an assignment; arrays [micro-batches, ranks] in nanoseconds, others by ring.

    `busy` is the time without the exchange, and `exposed` what is not hidden in `cost.model.score`. All two-level rings of a
    micro-batch have the same number of stages, and no other ring has more.
    """

    def __init__(self, profile: HardwareProfile, lengths: Integers, a: Assignment, timed: Score) -> None:
        self.profile, self.shape = profile, timed.time.shape
        self.busy, self.exposed = timed.time - timed.exposed, timed.exposed
        attention = attention_ns(profile, lengths, a.degree)
        total = spread(attention, a.micro_batch, a.first_rank, a.first_rank + a.degree, self.shape)
        self.rings = rings = np.flatnonzero(a.degree > 1)
        self.row, self.first, self.degree = a.micro_batch[rings], a.first_rank[rings], a.degree[rings]
        self.tokens = -(-lengths[rings] // self.degree)
        nodes = (self.first + self.degree - 1) // profile.ranks_per_node - self.first // profile.ranks_per_node + 1
        self.inside = nodes == 1
        self.crosses = crosses = (nodes > 1) & (nodes < self.degree) & (profile.exchange_levels == 2)
        work = attention[rings]
        self.rest = np.where(crosses, 0, work * (self.degree - 1) // self.degree)
        intra_ns, inter_ns = mate_ns(profile, lengths[rings], self.degree)
        self.parts: list[tuple[Integers, Integers, Integers, Integers]] = []  # of rings in one level: ranks, and exchanges
        sums = [np.zeros(self.shape, dtype=np.float64) for _ in range(5)]
        for start, stop, here in ring_parts(profile, a, rings):
            inside, across = gather_ns(profile, self.degree, here, intra_ns, inter_ns)
            near = (here - 1) * intra_ns
            loads = work * (here - 1) // self.degree, near, work * (self.degree - here) // self.degree, across, inside - near
            for sum_, values in zip(sums, loads, strict=True):
                sum_ += spread(np.where(crosses, values, 0), self.row, start, stop, self.shape)
            self.parts.append((start, stop, np.where(crosses, 0, inside), np.where(crosses, 0, across)))
        hides = profile.overlap
        node, self.node_inside, far, self.far_across, self.far_inside = sums
        self.node, self.far = hides * node, hides * far
        self.queries: Floats = hides * profile.query_share * (self.busy - total).astype(np.float64)
        self.own: Floats = hides * (total - node - far - self._on_ring(self.rest))

    def possible(self, stages: Integers | int) -> Integers:
        """Returns the stages of every ring if so many are wanted; rings in two levels have as many between nodes."""
        result: Integers = np.where(self.crosses, stages, np.minimum(stages, self.degree - 1))
        return result

    def most(self, own: Integers) -> Integers:
        """Returns the largest of the numbers of stages in every micro-batch."""
        most = np.ones(len(self.busy), dtype=np.int64)
        np.maximum.at(most, self.row, own)
        return most

    def in_rows(self, rings: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Returns whether every micro-batch has one of these rings."""
        return np.bincount(self.row[rings], minlength=len(self.busy)) > 0

    def score(self, timed: Score, time: Integers) -> Score:
        """Returns a score with other times."""
        return replace(timed, time=time, exposed=time - self.busy)

    def time(self, own: Integers) -> Integers:
        """Returns the times with so many stages of every ring. They are never below those of `cost.model.score`."""
        result, most = np.empty_like(self.busy), self.most(own)
        for count in np.unique(most).tolist():
            rows = np.flatnonzero(most == count)
            result[rows] = self.time_of(rows, own, count)
        return result

    def time_of(self, rows: Integers, own: Integers, most: int) -> Integers:
        """Returns the times of some micro-batches with so many stages of every ring, `most` of those in two levels."""
        waits = np.maximum(self.exposed[rows], _waits(self.load(rows, own, most), self.profile.exchange_levels == 2))
        price = PRICE * linear_ns(self.profile, self._on_ring(self.tokens * (own - 1))[rows])
        result: Integers = self.busy[rows] + np.rint(waits + price).astype(np.int64)
        return result

    def load(self, rows: Integers, own: Integers, stages: int) -> _Load:
        """Returns the loads of some micro-batches; see `time_of`."""
        rest, rest_inside, rest_across = np.zeros((3, stages, len(rows), self.shape[1]))
        for stage in range(stages if self.rest.any() else 0):
            here = own > stage
            if stage and not (own == stage).any():  # no ring had its last stage before this one
                for sums in (rest, rest_inside, rest_across):
                    sums[stage] = sums[stage - 1]
                continue
            rest[stage] = self.profile.overlap * self._on_ring(here * self.rest // own)[rows]
            for start, stop, inside, across in self.parts:
                for sums, values in ((rest_inside, inside), (rest_across, across)):
                    sums[stage] += spread(here * values // own, self.row, start, stop, self.shape)[rows]
        return _Load(
            queries=self.queries[rows],
            own=self.own[rows],
            node=self.node[rows],
            node_inside=self.node_inside[rows],
            far=self.far[rows],
            far_across=self.far_across[rows],
            far_inside=self.far_inside[rows],
            rest=rest,
            rest_inside=rest_inside,
            rest_across=rest_across,
        )

    def _on_ring(self, values: Integers) -> Integers:
        """Adds the values of all rings on each of their ranks."""
        return spread(values, self.row, self.first, self.first + self.degree, self.shape)


class _Links:
    """When the links of every rank are free: inside its node, and to other nodes."""

    def __init__(self, like: Floats) -> None:
        self.inside, self.across = np.zeros_like(like), np.zeros_like(like)

    def post(self, now: Floats, inside: Floats, across: Floats) -> Floats:
        """Posts messages that take so long, after those posted before. Returns when they have arrived."""
        self.inside = np.where(inside > 0, np.maximum(self.inside, now) + inside, self.inside)
        self.across = np.where(across > 0, np.maximum(self.across, now) + across, self.across)
        there = np.maximum(np.where(inside > 0, self.inside, now), np.where(across > 0, self.across, now))
        result: Floats = there
        return result


def _waits(load: _Load, two_levels: bool) -> Floats:
    """Returns the time that every rank waits for messages, of all passes."""
    waits, stages = np.zeros_like(load.own), load.stages
    for count in range(1, len(load.rest) + 2):
        if (ranks := stages == count).any():
            part = load.on(ranks, count)
            waits[ranks] = _pass_ns(part, two_levels, FORWARD_ATTENTION, forward=True)
            waits[ranks] += _pass_ns(part, two_levels, 1 - FORWARD_ATTENTION, forward=False)
    return waits


def _pass_ns(load: _Load, two_levels: bool, share: float, *, forward: bool) -> Floats:
    """Returns the waits of ranks with equally many stages, of all layers in one direction: `RingPass.steps` and `give_back`.

    A stage has first hops, attention and second hops. Rings in one level have their rows in the first stages, rings in two
    levels those of the own node in the first stage, and the others in all stages after it.
    """
    zero, stages = np.zeros_like(load.own), len(load.rest)
    parts, crossing = PASSES * stages, bool(load.far_across.any())
    inside = [rest / PASSES for rest in load.rest_inside] + [zero] * crossing
    across = [rest / PASSES for rest in load.rest_across] + [zero] * crossing
    work = [*load.rest, *[zero] * crossing]
    relayed = [zero] * (stages + crossing)
    if crossing:
        inside[0], work[0] = inside[0] + load.node_inside / PASSES, work[0] + load.node
        for stage in range(1, stages + 1):
            across[stage] = across[stage] + load.far_across / parts
            relayed[stage], work[stage] = load.far_inside / parts, work[stage] + load.far / stages
    count, links = len(work), _Links(zero)
    queries = load.queries * (FORWARD_LINEAR if forward else 1 - FORWARD_LINEAR)
    there = {stage: links.post(zero, inside[stage], across[stage]) for stage in range(min(count, 1 + two_levels))}
    now = share * load.own + (queries if forward else 0)
    returning: list[tuple[Floats, int | None]] = []  # when the gradients of a stage arrive, and the stage if a hop is left

    def advanced(now: Floats) -> tuple[Floats, list[tuple[Floats, int | None]]]:
        posted: list[tuple[Floats, int | None]] = []
        for arrives, stage in returning:
            now = np.maximum(now, arrives)
            posted += [] if stage is None else [(links.post(now, inside[stage], across[stage]), None)]
        return now, posted

    for step in range(1, count + 1):
        if step < count and two_levels:
            second = relayed[step] > 0
            now = np.where(second, np.maximum(now, there[step]), now)
            there[step] = np.where(second, links.post(now, relayed[step], zero), there[step])
        if step + two_levels < count:
            there[step + two_levels] = links.post(now, inside[step + two_levels], across[step + two_levels])
        stage = step - 1
        now = np.maximum(now, there[stage]) + share * work[stage]
        if not forward:
            direct = stage == 0 or not two_levels
            first = links.post(now, inside[stage], across[stage]) if direct else links.post(now, relayed[stage], zero)
            now, left = advanced(now)
            returning = [(first, None if direct else stage), *left]
    if not forward:
        end = now
        while returning:  # beside the queries' own backward
            end, returning = advanced(end)
        now = np.maximum(now + queries, end)
    result: Floats = now - queries - share * (load.own + sum(work))
    return result

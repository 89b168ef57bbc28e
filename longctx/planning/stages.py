"""Exchange stages: into how many stages every micro-batch splits its exchange of K and V, and what the exchange then costs.

Messages of a stage travel while the stage before it is computed. In a single stage, a rank's own rows alone hide those of
other ranks; with two exchange levels they hide the way to the relay, and rows of the rank's node hide the way on. Nothing but
queries hides the gradients of the last stage. The waits are predicted from the order in which `ring_pass` posts messages and
waits for them. More stages hide more, but each reads and writes the outputs and the gradients of queries once more, and calls
more kernels, which is their price.

Planners search with `cost.model.score`, in which all of attention hides the exchange, and compare what they find by `staged`,
which is never lower. Plans are predicted to take the latter.
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
    """What a rank computes and receives in a micro-batch, in nanoseconds; arrays [micro-batches, ranks].

    Attributes:
        queries: computation of queries that hides the exchange.
        own: attention to the rank's own rows, and to all rows of documents that are not split.
        node: attention to rows of its node in rings that are exchanged in two levels, and receiving these rows.
        far: attention to rows of other nodes in these rings, and receiving them from their nodes and from relays.
        rest: attention to rows of other ranks in all other rings, and receiving them inside the node and across.
        price: price of one more stage.
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
    price: Floats

    def of(self, micro_batches: Integers) -> "_Load":
        return _Load(*(getattr(self, field.name)[micro_batches] for field in fields(self)))


def staged(
    profile: HardwareProfile, lengths: Integers, a: Assignment, timed: Score, max_remote_tokens: int | None = None
) -> tuple[tuple[int, ...], Score]:
    """Returns the number of exchange stages of every micro-batch, and the times of the assignment with them.

    `timed` is its score by `cost.model.score`. Stages are enough that none has more than about `max_remote_tokens` remote
    tokens on any rank (at most the largest degree - 1), and more while that makes the micro-batch faster.
    """
    stages = np.ones(len(timed.time), dtype=np.int64)
    if not (a.degree > 1).any():
        return tuple(stages.tolist()), timed
    if max_remote_tokens is not None:
        np.maximum.at(stages, a.micro_batch, a.degree - 1)
        remote = remote_tokens(lengths, a, timed.time.shape).max(axis=1)
        stages = np.clip(-(-remote // max_remote_tokens), 1, stages)
    exchange = _Exchange.of(profile, lengths, a, timed)
    least, most, time = stages.copy(), exchange.most(a), exchange.time(stages)
    better = time.max(axis=1) > exchange.busy.max(axis=1)  # where more stages may be faster
    for count in CHOICES:
        rows = np.flatnonzero(better & (least < count) & (count <= most))
        if len(rows):
            found = exchange.rows(rows).time(np.full(len(rows), count))
            better[rows] = faster = found.max(axis=1) < time[rows].max(axis=1)
            stages[rows[faster]], time[rows[faster]] = count, found[faster]
    return tuple(stages.tolist()), exchange.score(timed, time)


def plan_score(plan: Plan) -> Score:
    """Returns the predicted times of a plan."""
    lengths, a = np.array(plan.lengths, dtype=np.int64), Assignment.of(plan)
    timed = score(plan.profile, lengths, a, plan.ranks, plan.pipeline)
    exchange = _Exchange.of(plan.profile, lengths, a, timed)
    return exchange.score(timed, exchange.time(np.array(plan.stages)))


@dataclass(frozen=True)
class _Exchange:
    """The exchange of an assignment, and the times without it; arrays [micro-batches, ranks] in nanoseconds."""

    profile: HardwareProfile
    load: _Load
    busy: Integers
    exposed: Integers

    @classmethod
    def of(cls, profile: HardwareProfile, lengths: Integers, a: Assignment, timed: Score) -> "_Exchange":
        busy = timed.time - timed.exposed
        return cls(profile, _load(profile, lengths, a, busy), busy, timed.exposed)

    def rows(self, micro_batches: Integers) -> "_Exchange":
        return _Exchange(self.profile, self.load.of(micro_batches), self.busy[micro_batches], self.exposed[micro_batches])

    def most(self, a: Assignment) -> Integers:
        """Returns the largest number of stages that the exchange of every micro-batch can have."""
        most = np.ones(len(self.busy), dtype=np.int64)
        np.maximum.at(most, a.micro_batch, np.where(_two_level(self.profile, a), CHOICES[-1], a.degree - 1))
        return most

    def score(self, timed: Score, time: Integers) -> Score:
        """Returns a score with other times."""
        return replace(timed, time=time, exposed=time - self.busy)

    def time(self, stages: Integers) -> Integers:
        """Returns the times with so many stages in every micro-batch. They are never below those of `cost.model.score`."""
        result = np.empty_like(self.busy)
        for count in np.unique(stages).tolist():
            (rows,) = np.nonzero(stages == count)
            load = self.load.of(rows)
            waits = np.maximum(self.exposed[rows], _waits(load, count, self.profile.exchange_levels == 2))
            result[rows] = self.busy[rows] + np.rint(waits + (count - 1) * load.price).astype(np.int64)
        return result


def _two_level(profile: HardwareProfile, a: Assignment) -> NDArray[np.bool_]:
    """Returns whether the ring of every document is exchanged in two levels."""
    node = profile.ranks_per_node
    nodes = (a.first_rank + a.degree - 1) // node - a.first_rank // node + 1
    crosses: NDArray[np.bool_] = (nodes > 1) & (nodes < a.degree) & (profile.exchange_levels == 2)
    return crosses


def _load(profile: HardwareProfile, lengths: Integers, a: Assignment, busy: Integers) -> _Load:
    """Returns the loads of all ranks, which compute for `busy` in all. Only what hides the exchange counts as attention."""
    shape = (a.micro_batches, busy.shape[1])
    attention = attention_ns(profile, lengths, a.degree)
    total = spread(attention, a.micro_batch, a.first_rank, a.first_rank + a.degree, shape)
    rings = np.flatnonzero(a.degree > 1)
    row, first, degree = a.micro_batch[rings], a.first_rank[rings], a.degree[rings]
    work, crosses = attention[rings], _two_level(profile, a)[rings]
    intra_ns, inter_ns = mate_ns(profile, lengths[rings], degree)
    zeros: list[Floats] = [np.zeros(shape, dtype=np.float64) for _ in range(8)]
    node, far, node_inside, far_inside, far_across, rest, rest_inside, rest_across = zeros
    for start, end, here in ring_parts(profile, a, rings):
        inside, across = gather_ns(profile, degree, here, intra_ns, inter_ns)
        near = np.where(crosses, (here - 1) * intra_ns, 0)

        def add(total: Floats, values: Integers, start: Integers = start, end: Integers = end) -> None:
            total += spread(values, row, start, end, shape)

        add(node, np.where(crosses, work * (here - 1) // degree, 0))
        add(far, np.where(crosses, work * (degree - here) // degree, 0))
        add(rest, np.where(crosses, 0, work * (degree - 1) // degree))
        add(node_inside, near)
        add(far_inside, np.where(crosses, inside - near, 0))
        add(far_across, np.where(crosses, across, 0))
        add(rest_inside, np.where(crosses, 0, inside))
        add(rest_across, np.where(crosses, 0, across))
    hides = profile.overlap
    queries: Floats = hides * profile.query_share * (busy - total).astype(np.float64)
    own: Floats = hides * (total - node - far - rest)
    tokens = spread(-(-lengths[rings] // degree), row, first, first + degree, shape)
    price = np.multiply(linear_ns(profile, tokens), PRICE, dtype=np.float64)
    hidden = (hides * node, node_inside, hides * far, far_across, far_inside, hides * rest, rest_inside, rest_across)
    return _Load(queries, own, *hidden, price)


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


def _waits(load: _Load, stages: int, two_levels: bool) -> Floats:
    """Returns the time that every rank waits for messages, of all passes."""
    forward = _pass_ns(load, stages, two_levels, FORWARD_ATTENTION, forward=True)
    return forward + _pass_ns(load, stages, two_levels, 1 - FORWARD_ATTENTION, forward=False)


def _pass_ns(load: _Load, stages: int, two_levels: bool, share: float, *, forward: bool) -> Floats:
    """Returns the waits of all layers in one direction: `RingPass.steps`, and `give_back` in backward.

    A stage has first hops, attention and second hops. Rings in one level have their rows in all stages but the last, rings in
    two levels those of the own node in the first stage, and the others in the stages after it.
    """
    zero, parts = np.zeros_like(load.own), PASSES * stages
    crossing = bool(load.far_across.any())
    inside = [load.rest_inside / parts] * stages + [zero] * crossing
    across = [load.rest_across / parts] * stages + [zero] * crossing
    work = [load.rest / stages] * stages + [zero] * crossing
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
        now, returning = advanced(now) if two_levels else (now, returning)
        now = now + queries
        while returning:
            now, returning = advanced(now)
    return now - queries - share * (load.own + sum(work))

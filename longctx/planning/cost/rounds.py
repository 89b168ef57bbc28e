"""Exchange rounds: into how many rounds every document splits its exchange of K and V, and what the
exchange then costs.

Messages of a round travel during attention to the rows of the round before. With one round,
attention to the rank's own rows is the only work that overlaps the fetch. With two exchange levels
it overlaps the hop to a relay in the node, and attention to the rows of the node overlaps the hop
from there. Only the backward of queries overlaps the gradients of the last round. More rounds hide
more, but each reads and writes the outputs and the gradients of queries once more, and calls more
kernels.

`choose_rounds` compares numbers of rounds by the waits of a rank in closed form. The search uses
the coarser estimate in `cost.model.score`, and compares and reports the plans that it finds by
`choose_rounds`.
"""

from dataclasses import replace

import numpy as np

from longctx.planning.assignment import Assignment, Integers, remote_tokens
from longctx.planning.cost.model import (
    StepTimes,
    keys_of,
    linear_ns,
    mate_ns,
    ring_parts,
    score,
    states_ns,
)
from longctx.planning.cost.slow_ranks import usual_ns
from longctx.planning.cost.tower import EncodingTimes
from longctx.planning.cost.work_overrides import NO_OVERRIDES, Floats, WorkOverrides
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.plan import Plan

PRICE = 0.02
"""Price of a round as a share of the linear time of a rank's tokens in rings. For an 8B model on an
H100: about 135 kB for each token and layer, with outputs added up in float32, at 2.4 of 3.35
TB/s."""
CHOICES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Numbers of rounds that are compared."""
FORWARD_ATTENTION, FORWARD_LINEAR, PASSES = 2 / 7, 1 / 3, 3
"""Shares of the forward pass, and passes of rows: forward, again in backward, and their
gradients."""


def choose_rounds(
    profile: HardwareProfile,
    lengths: Integers,
    a: Assignment,
    timed: StepTimes,
    max_remote_tokens: int | None = None,
    overrides: WorkOverrides = NO_OVERRIDES,
) -> tuple[Integers, StepTimes]:
    """Returns the number of exchange rounds of every document, and the times of the assignment with
    them.

    `timed` is its score by `cost.model.score`. Rounds are enough that none has more than about
    `max_remote_tokens` remote tokens on any rank (at most the largest degree - 1), and more where
    that makes the micro-batch faster: of its rings across nodes, or of all its rings.
    """
    rounds = np.ones_like(lengths)
    if not (a.degree > 1).any():
        return rounds, timed
    fewest = np.ones(len(timed.time), dtype=np.int64)
    if max_remote_tokens is not None:
        np.maximum.at(fewest, a.micro_batch, a.degree - 1)
        remote = remote_tokens(lengths, a, timed.time.shape).max(axis=1)
        fewest = np.clip(-(-remote // max_remote_tokens), 1, fewest)
    exchange = _ExchangeTimes(profile, lengths, a, timed, overrides=overrides)
    least = exchange.possible(fewest[exchange.runs.row])
    chosen, time = least, exchange.time(least)
    for count in CHOICES:
        more = np.maximum(least, exchange.possible(count))
        for candidate in (np.where(exchange.in_a_node, least, more), more):
            if (candidate == chosen).all():
                continue
            its_time = exchange.time(candidate)
            faster = its_time.max(axis=1) < time.max(axis=1)
            chosen = np.where(faster[exchange.runs.row], candidate, chosen)
            time = np.where(faster[:, None], its_time, time)
    rounds[exchange.rings] = chosen
    return rounds, exchange.score(timed, time)


def plan_score(plan: Plan) -> StepTimes:
    """Returns the predicted times of a plan."""
    lengths, a = np.array(plan.lengths, dtype=np.int64), Assignment.of(plan)
    overrides = WorkOverrides.of(lengths, plan.trees, plan.sources, plan.parts)
    timed = score(
        plan.profile,
        lengths,
        a,
        ranks=plan.ranks,
        pipeline=plan.pipeline,
        overrides=overrides,
        encoding=EncodingTimes(plan.images),
    )
    exchange = _ExchangeTimes(plan.profile, lengths, a, timed, overrides=overrides)
    rounds = np.ones_like(lengths)
    for p in (p for placements in plan.micro_batches for p in placements):
        rounds[p.document] = p.rounds
    return exchange.score(timed, exchange.time(exchange.possible(rounds[exchange.rings])))


class _ExchangeTimes:
    """The exchange of an assignment; arrays [micro-batches, ranks] in nanoseconds, others by ring.

    Attributes:
        rings: documents of degree > 1.
        runs: their ranks; row i is micro-batch i.
        in_a_node: whether a ring is inside one node.
        two_levels: whether it is exchanged in two levels.
        busy: time without the exchange.
        states: `states_ns`.
        exposed: what else is not hidden in `cost.model.score`.
        attention: attention that hides messages.
        remote: the part of it that is attention to rows of other ranks.
        node: the part of it that is attention to rows of the own node in rings that are exchanged
            in two levels.
        queries: computation of queries that hides messages.
        whole: messages of a pass in one round: see `messages`.
    """

    def __init__(
        self,
        profile: HardwareProfile,
        lengths: Integers,
        a: Assignment,
        timed: StepTimes,
        overrides: WorkOverrides = NO_OVERRIDES,
    ) -> None:
        self.profile, self.shape = profile, timed.time.shape
        self.busy = timed.time - timed.exposed
        self.states = states_ns(profile, lengths, a, self.shape)
        self.exposed = timed.exposed - self.states

        self.rings = rings = np.flatnonzero(a.degree > 1)
        self.degree = a.degree[rings]
        self.runs = a[rings].runs(self.shape)
        self.tokens = -(-lengths[rings] // self.degree)
        node = profile.ranks_per_node
        nodes = (self.runs.stop - 1) // node - self.runs.start // node + 1
        self.in_a_node = nodes == 1
        self.two_levels = (nodes > 1) & (nodes < self.degree) & (profile.exchange_levels == 2)
        self.parts = ring_parts(profile, self.runs)
        self.mate_ns = mate_ns(profile, keys_of(lengths, overrides)[rings], self.degree)

        hides = profile.overlap
        self.attention = hides * a.runs(self.shape).spread(timed.attention)
        other_work = hides * (usual_ns(profile, self.busy) - timed.encoding) - self.attention
        self.queries: Floats = profile.query_share * other_work
        of_rings = timed.attention[rings]
        self.ring_work = of_rings * (self.degree - 1) // self.degree
        self.remote = hides * self.runs.spread(self.ring_work)
        self.node: Floats = np.zeros(self.shape)
        for part, inside in self.parts:
            work = np.where(self.two_levels, of_rings * (inside - 1) // self.degree, 0)
            self.node += hides * part.spread(work)
        self.whole = self.messages(np.ones_like(self.degree))

    def possible(self, rounds: Integers | int) -> Integers:
        """Returns the rounds of every ring if so many are wanted; rings in two levels have as many
        between nodes."""
        result: Integers = np.where(self.two_levels, rounds, np.minimum(rounds, self.degree - 1))
        return result

    def score(self, timed: StepTimes, time: Integers) -> StepTimes:
        return replace(timed, time=time, exposed=time - self.busy)

    def time(self, rounds: Integers) -> Integers:
        """Returns the times with so many rounds of every ring. They are never below those of
        `cost.model.score`."""
        price = PRICE * linear_ns(self.profile, self.runs.spread(self.tokens * (rounds - 1)))
        waits = np.rint(np.maximum(self.exposed, self.waits(rounds)) + price).astype(np.int64)
        result: Integers = self.busy + waits + self.states
        return result

    def messages(self, rounds: Integers) -> tuple[Floats, Floats, Floats]:
        """Returns the time of the first round's messages of a pass: inside the node, across nodes,
        and inside from relays."""
        intra_ns, inter_ns = self.mate_ns
        inside, across, relayed = np.zeros((3, *self.shape), dtype=np.int64)
        for part, mates in self.parts:
            near, elsewhere = mates - 1, self.degree - mates
            # In two levels, messages inside the node are all in the first round.
            its_rounds = np.where(self.two_levels, 1, rounds)
            inside += part.spread(near * intra_ns // its_rounds)
            senders = np.where(self.two_levels, mates * rounds, rounds)
            across += part.spread(elsewhere * inter_ns // senders)
            from_relays = near * elsewhere * intra_ns // (mates * rounds)
            relayed += part.spread(np.where(self.two_levels, from_relays, 0))
        return inside / PASSES, across / PASSES, relayed / PASSES

    def waits(self, rounds: Integers) -> Floats:
        """Returns the time that every rank waits for messages, of all passes, with so many rounds
        of every ring.

        A pass waits for its first messages unless attention to own rows hides them. Then it waits
        for the second ones (in two levels also from relays) unless the attention before them does,
        or for all further ones where links are slower than attention. Backward ends with the
        gradients of the last round, beside the queries' own backward.
        """
        inside, across, relayed = self.messages(rounds)
        all_inside, all_across, all_relayed = self.whole
        first = np.maximum(inside, across)
        further = np.maximum(all_inside + all_relayed, all_across) - first
        two_levels = self.runs.spread(self.two_levels.astype(np.int64)) > 0
        second = np.where(
            two_levels, np.maximum(relayed, np.minimum(across, all_across - across)), 0
        )
        # Attention to the rows of all rounds, and of the last one, of rings that have more than
        # one.
        overlap, several = self.profile.overlap, rounds > 1
        every = overlap * self.runs.spread(np.where(several, self.ring_work, 0))
        last = overlap * self.runs.spread(np.where(several, self.ring_work // rounds, 0))
        own_ns = self.attention - self.remote
        before_second = np.where(relayed > 0, self.node, last)
        forward_queries = FORWARD_LINEAR * self.queries
        backward_queries = (1 - FORWARD_LINEAR) * self.queries

        share = FORWARD_ATTENTION
        more = np.maximum(second - share * before_second, further - share * (every - last))
        forward = np.maximum(0, first - share * own_ns - forward_queries) + np.maximum(0, more)

        share = 1 - FORWARD_ATTENTION
        # Links are idle between the second fetch and the first gradients, and before the last
        # gradients.
        idle = np.where(two_levels, 0, np.maximum(0, share * last - first))
        more = np.maximum(
            second - share * before_second, 2 * (further + idle) - second - share * every
        )
        backward = (
            np.maximum(0, first - share * own_ns)
            + np.maximum(0, more)
            + np.maximum(0, first + second - backward_queries)
        )
        result: Floats = forward + backward
        return result

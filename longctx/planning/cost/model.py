"""Cost model: the time of a step under an assignment, in integer nanoseconds.

`score` compares the plans of all planners. Every float comes from single IEEE operations (no
library logarithm, no sum of floats); costs are rounded up and lower bounds down to whole
nanoseconds. So all ranks agree bit by bit on any machine, and a makespan is never below its bound.
Every rank of a ring pays for attention, even if it gets no token of a short document.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from longctx.planning.assignment import Assignment, Integers, Runs, largest_shards, tokens_on_ranks
from longctx.planning.cost.slow_ranks import slowed_ns
from longctx.planning.cost.tower import NO_ENCODING, EncodingTimes
from longctx.planning.cost.work_overrides import NO_OVERRIDES, Floats, WorkOverrides
from longctx.planning.hardware_profile import BESIDE, EfficiencyTable, HardwareProfile
from longctx.planning.pipeline import NO_PIPELINE, Pipeline

NANOSECONDS = 1_000_000_000


def nanoseconds(seconds: float) -> int:
    """Converts seconds to whole nanoseconds, rounded up."""
    return math.ceil(seconds * NANOSECONDS)


def fixed_ns(profile: HardwareProfile, micro_batches: int) -> int:
    return nanoseconds(profile.step_s) + micro_batches * nanoseconds(profile.launch_s)


def efficiency(table: EfficiencyTable, tokens: Floats) -> Floats:
    """Returns the attention kernel's efficiency for documents of `tokens`, interpolated linearly in
    log2(tokens)."""
    points = log2(np.array([row[0] for row in table], dtype=np.float64))
    values = np.array([row[1] for row in table], dtype=np.float64)
    if len(points) == 1:
        return np.full(np.shape(tokens), values[0])
    x = np.clip(log2(tokens), points[0], points[-1])
    i = np.clip(np.searchsorted(points, x, side="right") - 1, 0, len(points) - 2)
    share = (x - points[i]) / (points[i + 1] - points[i])
    result: Floats = values[i] * (1 - share) + values[i + 1] * share
    return result


def equivalent_length(lengths: Floats, degrees: Floats, split_penalty: float) -> Floats:
    """Returns the length of an unsplit document with the same attention efficiency as a split one:
    s / (1 + κ (d - 1)).

    In a ring, each kernel call works on one chunk of queries and many keys, so it loses far less
    efficiency than a document as short as the chunk. The split penalty κ is near 0 for kernels that
    fill the device with few queries, larger for others.
    """
    result: Floats = lengths / (1 + split_penalty * (degrees - 1))
    return result


def log2(x: Floats) -> Floats:
    """Computes log2 from IEEE operations alone: libraries differ in the last bit, and ranks would
    make different plans."""
    mantissa, exponent = np.frexp(x)
    z = (mantissa - math.sqrt(0.5)) / (mantissa + math.sqrt(0.5))
    square = z * z
    series = np.zeros_like(z)
    for power in range(19, 0, -2):
        series = series * square + 1 / power
    result: Floats = exponent - 0.5 + (2 / 0.6931471805599453) * (z * series)
    return result


def attention_ns(
    profile: HardwareProfile, lengths: Integers, degrees: Integers, pairs: Floats | None = None
) -> Integers:
    """Returns the attention time per rank in nanoseconds for documents of `lengths` at `degrees`;
    `pairs` as below."""
    result: Integers = np.ceil(
        whole_ring_attention_ns(profile, lengths, degrees, pairs) / degrees
    ).astype(np.int64)
    return result


def whole_ring_attention_ns(
    profile: HardwareProfile, lengths: Integers, degrees: Integers, pairs: Floats | None = None
) -> Floats:
    """Returns the attention time summed over the ranks of each ring, in nanoseconds, unrounded.

    `pairs`: attention area of every document (see `WorkOverrides`); None: its length squared.
    """
    s = lengths.astype(np.float64)
    area = s * s if pairs is None else pairs
    whole = equivalent_length(s, degrees.astype(np.float64), profile.attention_split_penalty)
    result: Floats = (
        profile.attention_s_per_token2
        * NANOSECONDS
        * area
        / efficiency(profile.attention_efficiency, whole)
    )
    return result


def linear_ns(profile: HardwareProfile, tokens: Integers | Floats) -> Integers:
    """Returns the time in nanoseconds of everything except attention for `tokens` on one rank."""
    result: Integers = np.ceil(profile.linear_s_per_token * NANOSECONDS * tokens).astype(np.int64)
    return result


def beyond_ns(
    profile: HardwareProfile, overrides: WorkOverrides, degrees: Integers
) -> Integers | int:
    """Returns the time in nanoseconds, per rank of each ring, of matrices that lengths do not show;
    it may be negative."""
    return 0 if overrides.products is None else linear_ns(profile, overrides.products / degrees)


def keys_of(lengths: Integers, overrides: WorkOverrides) -> Integers | Floats:
    """Returns the tokens whose K and V each document exchanges."""
    return lengths if overrides.keys is None else overrides.keys


def mate_ns(
    profile: HardwareProfile, lengths: Integers | Floats, degrees: Integers
) -> tuple[Integers, Integers]:
    """Returns the time to exchange K and V of a document with one peer of its ring: in the same
    node, in another node."""
    size = lengths / degrees * profile.kv_bytes_per_token * NANOSECONDS
    intra = np.ceil(size / profile.intra_node_bytes_per_s).astype(np.int64)
    return intra, np.ceil(size / profile.inter_node_bytes_per_s).astype(np.int64)


def state_ns(profile: HardwareProfile) -> tuple[int, int]:
    """Returns the time to exchange states of linear attention with one peer of a ring: in the same
    node, in another node."""
    intra, inter = profile.intra_node_bytes_per_s, profile.inter_node_bytes_per_s
    return nanoseconds(profile.state_bytes / intra), nanoseconds(profile.state_bytes / inter)


def latency_ns(profile: HardwareProfile) -> tuple[int, int]:
    """Returns the latency of a micro-batch's exchange that computation may hide, and the one that
    it does not.

    With linear attention it hides none: its layers, mostly more than those of softmax attention,
    wait for every message.
    """
    latency = nanoseconds(profile.latency_s)
    return (0, latency) if profile.state_bytes else (latency, 0)


def split_ns(profile: HardwareProfile, tokens: Integers) -> Integers:
    """Returns the time that scans of linear attention take more for `tokens` of split documents on
    one rank."""
    result: Integers = np.ceil(profile.split_s_per_token * NANOSECONDS * tokens).astype(np.int64)
    return result


def received_ns(profile: HardwareProfile, lengths: Integers, degrees: Integers) -> Integers:
    """Returns the time in which each rank of a ring computes K and V from the latents of all
    others."""
    tokens = lengths * ((degrees - 1) / degrees)
    result: Integers = np.ceil(profile.received_s_per_token * NANOSECONDS * tokens).astype(np.int64)
    return result


def alone_ns(
    profile: HardwareProfile,
    lengths: Integers,
    degrees: Integers,
    offset: Integers | None = None,
    *,
    round_price: float = 0.0,
    overrides: WorkOverrides = NO_OVERRIDES,
    encoding: Integers | None = None,
) -> Integers:
    """Returns the time of a ring's busiest rank if the ranks hold no other document.

    The ring starts at rank `offset` of a node, by default where its worst rank has the most peers
    in its own node. A rank with several documents takes at most the sum of their times.
    `round_price`: see `exposed_ns`; `encoding`: nanoseconds of the images on the rank that has most
    of them.
    """
    attention = attention_ns(profile, lengths, degrees, overrides.pairs)
    shards = largest_shards(lengths, degrees)
    linear = linear_ns(profile, shards) + beyond_ns(profile, overrides, degrees)

    fewest, most = node_parts(degrees, profile.ranks_per_node, offset)
    mates = mate_ns(profile, keys_of(lengths, overrides), degrees)
    inside, _ = gather_ns(profile, degrees, inside=most, mates=mates)
    _, across = gather_ns(profile, degrees, inside=fewest, mates=mates)
    latency, waited = latency_ns(profile)
    exchange = latency + np.maximum(inside, across)
    exposed = exposed_ns(profile, attention, linear, exchange, round_price=round_price)

    near, far = state_ns(profile)
    exposed += waited + np.maximum((most - 1) * near, (degrees - fewest) * far)
    exposed += split_ns(profile, shards) + received_ns(profile, lengths, degrees)
    exposed += nanoseconds(profile.split_document_s)
    result: Integers = linear + attention + np.where(degrees > 1, exposed, 0)
    return result if encoding is None else result + encoding


def gather_ns(
    profile: HardwareProfile,
    degrees: Integers,
    *,
    inside: Integers,
    mates: tuple[Integers, Integers],
) -> tuple[Integers, Integers]:
    """Returns the time of a rank's exchange inside its node and across nodes, with `inside` ranks
    of the ring in its node.

    `mates`: the times for one peer (`mate_ns`). With two exchange levels, the ranks of a node share
    the rows that come from other nodes and pass them on to each other.
    """
    intra_ns, inter_ns = mates
    near, far = inside - 1, degrees - inside
    if profile.exchange_levels == 1:
        return near * intra_ns, far * inter_ns
    relayed = -(-(near * degrees * intra_ns) // inside)
    shared = -(-(far * inter_ns) // inside)
    return relayed, shared


def node_parts(degrees: Integers, node: int, offset: Integers | None) -> tuple[Integers, Integers]:
    """Returns the smallest and the largest number of ranks that a ring has on one of its nodes."""
    # On as few nodes as possible, with equal parts on the first and the last node.
    if offset is None:
        ends = np.where(degrees % node == 0, 2 * node, degrees % node + node)
        first = np.where(degrees <= node, degrees, ends // 2)
    else:
        first = np.minimum(degrees, node - offset)
    rest = degrees - first
    last = np.where(rest > 0, (rest - 1) % node + 1, first)
    return np.minimum(first, last), np.where(rest > last, node, np.maximum(first, last))


def exposed_ns(
    profile: HardwareProfile,
    attention: Integers,
    linear: Integers,
    exchange: Integers,
    *,
    round_price: float = 0.0,
) -> Integers:
    """Returns the part of a rank's exchange that its attention and its queries do not hide, all in
    nanoseconds.

    K and V are fetched while the queries are computed, and their gradients return during the
    queries' own backward; but nothing of it hides the fetch in between, so queries hide at most two
    of the three passes. Neither attention nor linear work hides more than it takes: with more of
    either, a rank is never faster.

    An exchange in few rounds leaves more: the queries' backward alone, two thirds of their time,
    hides the gradients that the last of n rounds returns, a third of the exchange / n. Where a
    round costs a share `round_price` of the linear time, what is left of that third without rounds
    and the price of n - 1 rounds are at least 2·√(price · left) - price. `rounds` has the waits;
    this is their estimate for searches.
    """
    queries = np.floor(profile.overlap * profile.query_share * linear).astype(np.int64)
    hidden = np.floor(profile.overlap * attention).astype(np.int64) + np.minimum(
        queries, 2 * exchange // 3
    )
    result: Integers = np.maximum(0, exchange - hidden)
    if round_price:
        price, left = round_price * linear, np.maximum(0, exchange / 3 - 2 * queries / 3)
        least = np.where(left > price, 2 * np.sqrt(price * left) - price, left)
        result = np.maximum(result, least.astype(np.int64))
    return result


@dataclass(frozen=True)
class StepTimes:
    """Times of an assignment in integer nanoseconds; arrays are [micro-batches, ranks] if not said
    otherwise.

    Attributes:
        time: time of every rank in every micro-batch: linear, attention and exposed exchange.
        exposed: part of `time` that the exchange costs: waits for K and V, the price of its rounds,
            and `states_ns`.
        attention: attention of every document on each of its ranks [documents].
        encoding: part of `time` that encodes images; every rank of a ring counts as the one with
            most.
        launch_ns, step_ns: fixed cost per micro-batch and per step.
    """

    time: Integers
    exposed: Integers
    attention: Integers
    encoding: Integers
    launch_ns: int
    step_ns: int
    pipeline: Pipeline = NO_PIPELINE

    @property
    def micro_batch_ns(self) -> Integers:
        """Time of each micro-batch on its slowest rank, without the launch."""
        result: Integers = self.time.max(axis=1)
        return result

    @property
    def bubble_ns(self) -> int:
        """Time that a pipeline adds for filling, draining and empty micro-batches."""
        empty = self.pipeline.runs(len(self.time)) - len(self.time)
        return empty * self.launch_ns + self.pipeline.bubble_ns(
            self.launch_ns + int(self.micro_batch_ns.max())
        )

    @property
    def makespan_ns(self) -> int:
        return (
            self.step_ns
            + len(self.time) * self.launch_ns
            + int(self.micro_batch_ns.sum())
            + self.bubble_ns
        )

    @property
    def exposed_share(self) -> float:
        """Share of the makespan that the exchange costs the slowest rank of every micro-batch."""
        slowest = self.time.argmax(axis=1)
        return int(self.exposed[np.arange(len(slowest)), slowest].sum()) / max(1, self.makespan_ns)

    @property
    def idle_share(self) -> float:
        """Share of all ranks' time spent waiting for the slowest rank of the micro-batch."""
        waits = int((self.micro_batch_ns[:, None] - self.time).sum())
        return waits / float(self.time.shape[1] * max(1, self.makespan_ns))


def score(
    profile: HardwareProfile,
    lengths: Integers,
    assignment: Assignment,
    ranks: int,
    pipeline: Pipeline = NO_PIPELINE,
    *,
    round_price: float = 0.0,
    overrides: WorkOverrides = NO_OVERRIDES,
    encoding: EncodingTimes = NO_ENCODING,
) -> StepTimes:
    """Returns the modelled times of an assignment of documents of `lengths`. `round_price`: see
    `exposed_ns`."""
    shape = assignment.micro_batches, ranks
    runs = assignment.runs(shape)
    of_documents = attention_ns(profile, lengths, assignment.degree, overrides.pairs)
    attention = runs.spread(of_documents)
    linear = linear_ns(profile, tokens_on_ranks(lengths, assignment, shape))
    if overrides.products is not None:
        linear += runs.spread(np.asarray(beyond_ns(profile, overrides, assignment.degree)))
    exchange = exchange_ns(profile, keys_of(lengths, overrides), assignment, shape)
    exposed = exposed_ns(profile, attention, linear, exchange, round_price=round_price)
    exposed += states_ns(profile, lengths, assignment, shape)
    images = runs.spread(encoding.ring_ns(np.arange(len(lengths)), assignment.degree))
    busy = slowed_ns(profile, linear + attention + images)
    return StepTimes(
        time=busy + exposed,
        exposed=exposed,
        attention=of_documents,
        encoding=images,
        launch_ns=nanoseconds(profile.launch_s),
        step_ns=nanoseconds(profile.step_s),
        pipeline=pipeline,
    )


def exchange_ns(
    profile: HardwareProfile, lengths: Integers | Floats, a: Assignment, shape: tuple[int, int]
) -> Integers:
    """Returns the time of every rank's exchange of K and V in every micro-batch, an array of
    `shape` in nanoseconds."""
    rings = np.flatnonzero(a.degree > 1)
    degree = a.degree[rings]
    mates = mate_ns(profile, lengths[rings], degree)
    latency, _ = latency_ns(profile)

    def times(inside: Integers) -> tuple[Integers, Integers]:
        return gather_ns(profile, degree, inside=inside, mates=mates)

    return _exchanged(profile, a[rings].runs(shape), times, latency=latency)


def states_ns(
    profile: HardwareProfile, lengths: Integers, a: Assignment, shape: tuple[int, int]
) -> Integers:
    """Returns what split documents cost every rank beside K and V: states of linear attention,
    received latents, and their number; an array of `shape` in nanoseconds.

    The exchange of states takes as long for any document, and nothing hides it. They go directly to
    every rank that needs them, also with two exchange levels. Scans of split documents take more.
    """
    result = np.zeros(shape, dtype=np.int64)
    if not any(getattr(profile, name) for name in BESIDE):
        return result
    rings = np.flatnonzero(a.degree > 1)
    runs = a[rings].runs(shape)
    if profile.state_bytes:
        result += _states_exchanged(profile, runs, a.degree[rings])
    if profile.split_s_per_token:
        split_lengths = np.where(a.degree > 1, lengths, 0)
        result += split_ns(profile, tokens_on_ranks(split_lengths, a, shape))
    if profile.received_s_per_token:
        result += a.runs(shape).spread(received_ns(profile, lengths, a.degree))
    if profile.split_document_s:
        price = nanoseconds(profile.split_document_s)
        result += runs.spread(np.full_like(rings, price))
    return result


def _states_exchanged(profile: HardwareProfile, rings: Runs, degrees: Integers) -> Integers:
    """Returns the time of every rank's exchange of states of linear attention."""
    near, far = state_ns(profile)
    _, latency = latency_ns(profile)

    def times(inside: Integers) -> tuple[Integers, Integers]:
        return (inside - 1) * near, (degrees - inside) * far

    return _exchanged(profile, rings, times, latency=latency)


def _exchanged(
    profile: HardwareProfile,
    rings: Runs,
    times: Callable[[Integers], tuple[Integers, Integers]],
    *,
    latency: int,
) -> Integers:
    """Returns the time of every rank's messages inside its node and across nodes, whichever is
    longer, after `latency`.

    `times` returns both for every ring of a rank with so many of the ring's ranks in its node.
    """
    intra = np.zeros(rings.shape, dtype=np.int64)
    inter = np.zeros(rings.shape, dtype=np.int64)
    for part, mates in ring_parts(profile, rings):
        inside, across = times(mates)
        intra += part.spread(inside)
        inter += part.spread(across)
    in_ring = rings.spread(np.ones_like(rings.start)) > 0
    result: Integers = np.where(in_ring, latency + np.maximum(intra, inter), 0)
    return result


def ring_parts(profile: HardwareProfile, rings: Runs) -> tuple[tuple[Runs, Integers], ...]:
    """Splits rings at node boundaries into their first node, full nodes and last node.

    Returns the ranks of each of the three parts, and the number of the ring's ranks on each of its
    nodes.
    """
    node = profile.ranks_per_node
    first, stop = rings.start, rings.stop
    head_stop = np.minimum(stop, (first // node + 1) * node)
    tail_start = np.maximum(head_stop, (stop - 1) // node * node)
    return (
        (rings._replace(stop=head_stop), head_stop - first),
        (rings._replace(start=head_stop, stop=tail_start), np.full_like(first, node)),
        (rings._replace(start=tail_start), np.maximum(1, stop - tail_start)),
    )

"""Loads: the rows that plans place on every rank and move between ranks, using the exchange rounds
of the real schedules."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from longctx.attention.ring_schedule import round_of, rounds_between
from longctx.config import Config
from longctx.planning.assignment import least_degrees
from longctx.planning.cost.ulysses import swaps_heads
from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.layout import Placement, largest_shard, longest_document
from longctx.planning.plan import Plan
from longctx.training.run_profile import run_profile

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Load:
    """Rows (tokens) that a rank holds, receives and sends in a micro-batch.

    Attributes:
        remote: rows of K and V received from other ranks, over all exchange rounds.
        sent: rows of K and V sent to other ranks; a row sent to two ranks counts twice.
        held: maximum remote rows of consecutive exchange rounds that are in memory at once.
        fullest: remote rows of the largest round, which is the most that a kernel works on at a
            time.
        swapped: rows of documents whose heads are swapped for tokens (Ulysses).
        kv_copies: ranks that have a copy of each KV head of these rows.
        source: rows of `tokens` that an encoder reads.
        first: whether this is the first micro-batch of the step, before which there are no
            gradients.
    """

    tokens: int
    remote: int
    sent: int
    held: int
    fullest: int
    micro_batches: int
    swapped: int = 0
    kv_copies: int = 1
    source: int = 0
    first: bool = False


def loads(plans: Iterable[Plan], config: Config) -> set[Load]:
    """Returns the heaviest loads of all ranks in all micro-batches of `plans`, with the exchange
    settings of `config.context`."""
    found = {
        load
        for plan in plans
        for number in range(len(plan.micro_batches))
        for load in micro_batch_loads(plan, number, config)
    }
    return set(heaviest(found))


def heaviest(given: Iterable[Load]) -> list[Load]:
    """Returns the loads of which no other has as many rows of each kind: one of them needs the most
    memory."""
    alike = defaultdict(list)
    for load in given:
        kind = load.micro_batches, load.kv_copies, load.first
        alike[kind].append(load)
    found: list[Load] = []
    for group in alike.values():
        found.extend(_heaviest_of(group))
    return found


def _heaviest_of(group: Sequence[Load]) -> Iterator[Load]:
    rows = np.array([_rows(load) for load in group])
    # In this order no load has as many rows as one before it.
    order = np.lexsort(rows.T[::-1])[::-1]
    kept = np.empty_like(rows)
    count = 0
    for place in order:
        exceeded = kept[:count] >= rows[place]
        if exceeded.all(axis=1).any():
            continue
        kept[count] = rows[place]
        count += 1
        yield group[place]


def _rows(load: Load) -> tuple[float, ...]:
    """Returns what memory grows with: rows of each kind, and the share of the remote ones that is
    held at once. Rows that are not swapped make attention run twice, and those that no encoder
    reads are a decoder's."""
    at_once = load.held / load.remote if load.remote else 0.0
    return (
        load.tokens,
        load.remote,
        load.sent,
        load.held,
        load.fullest,
        load.swapped,
        load.tokens - load.swapped,
        load.source,
        load.tokens - load.source,
        at_once,
    )


def full_loads(config: Config, ranks: int, profile: HardwareProfile | None = None) -> set[Load]:
    """Returns the loads of full ranks with a share of the longest document only; for estimates
    without a store.

    Includes the ranks of the ring that receive and send the most. `profile` overrides the
    configured one for the node size.
    """
    budget = config.batch.tokens_per_rank
    context = config.context
    domain = config.domain(ranks)
    degree = context.degree if context.mode == "static" else None
    if degree is None:
        degree = int(least_degrees(np.array([config.max_length(ranks)]), domain, budget)[0])
    remote = (degree - 1) * budget
    most = context.max_remote_tokens
    rounds = 1 if most is None else max(1, min(degree - 1, -(-remote // most)))
    length = longest_document(degree, budget)
    plan = Plan(
        mode="static",
        winner="static",
        ranks=domain,
        tokens_per_rank=budget,
        lengths=(length,),
        micro_batches=((Placement(0, 0, degree, rounds=rounds),),),
        profile=profile or run_profile(config, ranks).profile,
    )
    count = -(-config.batch.global_tokens // (budget * domain))
    first_loads = [
        replace(load, micro_batches=count, first=count == 1) for load in loads([plan], config)
    ]
    return {
        max(first_loads, key=lambda load: (load.tokens, load.remote)),
        max(first_loads, key=lambda load: (load.tokens, load.sent)),
    }


@dataclass(frozen=True)
class ExchangeSettings:
    """How the rows of split documents travel.

    Attributes:
        per_node: ranks of a node, if rows cross the network once per node; None: from rank to rank.
        swapping: Ulysses degree.
        copies: ranks that have a copy of each KV head where heads are swapped for tokens.
    """

    per_node: int | None
    swapping: int
    copies: int

    @classmethod
    def of(cls, plan: Plan, config: Config) -> "ExchangeSettings":
        per_node = None
        if config.context.two_level_exchange:
            per_node = plan.profile.ranks_per_node
        swapping = config.context.ulysses_degree
        kv_heads = config.model_source().spec.largest_layer.num_key_value_heads
        copies = swapping * config.parallel.tensor_parallel_size // kv_heads
        return cls(per_node, swapping, copies=max(1, copies))

    def rings(self, placement: Placement, length: int) -> int:
        """Returns how many rings exchange the rows of a document: as many as the Ulysses degree if
        its heads are swapped. Each then has chunks as many times as long, with a share of the width
        per row, or a whole KV head."""
        if swaps_heads(length, placement.first_rank, placement.degree, self.swapping):
            return self.swapping
        return 1


class RowsOfRanks:
    """Rows of every rank of a domain in one micro-batch, added up document by document."""

    def __init__(self, ranks: int, rounds: int) -> None:
        self.tokens = np.zeros(ranks, dtype=np.int64)
        self.swapped = np.zeros(ranks, dtype=np.int64)
        self.sources = np.zeros(ranks, dtype=np.int64)
        self.sent = np.zeros(ranks)
        self.received = np.zeros((ranks, rounds + 1))

    def hold(self, placement: Placement, length: int, *, swapped: bool) -> None:
        """Adds the tokens of a document to its ranks."""
        ring = _slice_of(placement)
        own = largest_shard(length, placement.degree)
        self.tokens[ring] += own
        if swapped:
            self.swapped[ring] += own

    def encode(self, placement: Placement, source: int) -> None:
        """Adds the rows of a document that an encoder reads, which `hold` has counted too."""
        ring = _slice_of(placement)
        self.sources[ring] += largest_shard(source, placement.degree)

    def exchange(
        self, placement: Placement, length: int, *, rings: int, by: ExchangeSettings
    ) -> None:
        """Adds the rows that a document's ranks receive and send."""
        degree = placement.degree
        if degree <= rings:
            return  # each rank has all rows of its heads
        rows = length / (2 * degree)
        if rings > 1:
            rows *= by.copies
        ring = np.array(placement.ring)
        for first in range(rings):
            members = ring[first::rings]
            if placement.reversed:
                members = members[::-1]
            nodes = _nodes(members, by.per_node)
            received, sent = _exchanged_chunks(len(members), nodes, placement.rounds)
            self.received[members, : placement.rounds + 1] += received * rows
            self.sent[members] += sent * rows

    def held(self, rounds: int) -> Floats:
        """Returns the maximum remote rows of `rounds` consecutive rounds, by rank."""
        at_once = min(rounds, self.received.shape[1])
        windows = sliding_window_view(self.received, at_once, axis=1)
        most: Floats = windows.sum(axis=-1).max(axis=1)
        return most


def micro_batch_loads(plan: Plan, number: int, config: Config) -> Iterator[Load]:
    """Yields the load of every rank of the domain, in order, in micro-batch `number`."""
    placements = plan.micro_batches[number]
    exchange = ExchangeSettings.of(plan, config)
    rows = RowsOfRanks(plan.ranks, max(placement.rounds for placement in placements))
    for placement in placements:
        length = plan.lengths[placement.document]
        rings = exchange.rings(placement, length)
        rows.hold(placement, length, swapped=rings > 1)
        if plan.sources:
            rows.encode(placement, plan.sources[placement.document])
        rows.exchange(placement, length, rings=rings, by=exchange)
    # One round is computed while the next one is in flight; with two levels, so is the first hop of
    # the round after that.
    held = rows.held(3 if exchange.per_node else 2)
    for rank in range(plan.ranks):
        yield Load(
            tokens=int(rows.tokens[rank]),
            remote=round(rows.received[rank].sum()),
            sent=round(rows.sent[rank]),
            held=round(held[rank]),
            fullest=round(rows.received[rank].max()),
            micro_batches=len(plan.micro_batches),
            swapped=int(rows.swapped[rank]),
            kv_copies=exchange.copies,
            source=int(rows.sources[rank]),
            first=number == 0,
        )


def _slice_of(placement: Placement) -> slice:
    return slice(placement.first_rank, placement.first_rank + placement.degree)


def _nodes(members: np.ndarray[Any, np.dtype[np.int64]], per_node: int | None) -> tuple[int, ...]:
    """Returns the number of ring members on each node, by ring index; empty if rows go directly
    from rank to rank."""
    if per_node is None:
        return ()
    changes = np.flatnonzero(np.diff(members // per_node)) + 1
    counts = tuple(map(len, np.split(members, changes)))
    if 1 < len(counts) < len(members):
        return counts
    return ()


@lru_cache(maxsize=64)
def _exchanged_chunks(degree: int, nodes: tuple[int, ...], rounds: int) -> tuple[Floats, Floats]:
    """Returns the chunks that each ring index receives in each round [degree, rounds + 1] and sends
    in total [degree].

    Follows `longctx.attention.ring_schedule` with a causal mask. Relayed rows count as sent by
    their owner, which gives the same sum over a ring.
    """
    target, source = np.meshgrid(np.arange(degree), np.arange(degree), indexing="ij")
    chunks = np.where(source < target, 1.0, 2.0) * (source != target)
    if nodes:
        node = np.repeat(np.arange(len(nodes)), nodes)
        later = [rounds_between(distance, len(nodes), rounds) for distance in range(1, len(nodes))]
        rounds_of_parts = np.array([[0] * len(later[0]), *later])[
            (node[target] - node[source]) % len(nodes)
        ]
    else:
        later = [[round_of(distance, degree, rounds)] for distance in range(1, degree)]
        rounds_of_parts = np.array([[0], *later])[(target - source) % degree]
    received = np.zeros((degree, rounds + 1))
    parts = rounds_of_parts.shape[-1]
    np.add.at(received, (target[..., None], rounds_of_parts), chunks[..., None] / parts)
    return received, chunks.sum(axis=0)

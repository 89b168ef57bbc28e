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


def micro_batch_loads(plan: Plan, number: int, config: Config) -> Iterator[Load]:
    """Yields the load of every rank of the domain, in order, in micro-batch `number`."""
    per_node = plan.profile.ranks_per_node if config.context.two_level_exchange else None
    spec = config.model_source().spec
    swapping = config.context.ulysses_degree
    copies = max(
        1, swapping * config.parallel.tensor_parallel_size // spec.largest_layer.num_key_value_heads
    )
    tokens, swapped, sources = np.zeros((3, plan.ranks), dtype=np.int64)
    most = max(placement.rounds for placement in plan.micro_batches[number])
    sent = np.zeros(plan.ranks)
    received = np.zeros((plan.ranks, most + 1))
    for placement in plan.micro_batches[number]:
        length = plan.lengths[placement.document]
        degree = placement.degree
        ring = slice(placement.first_rank, placement.first_rank + degree)
        tokens[ring] += largest_shard(length, degree)
        sources[ring] += (
            largest_shard(plan.sources[placement.document], degree) if plan.sources else 0
        )
        # With Ulysses degree u there are u rings of chunks u times as long, with 1/u of the width
        # per row, or a whole KV head.
        rings = swapping if swaps_heads(length, placement.first_rank, degree, swapping) else 1
        if rings > 1:
            swapped[ring] += largest_shard(length, degree)
        for first in range(rings if degree > rings else 0):
            members = np.array(placement.ring)[first::rings][:: -1 if placement.reversed else 1]
            chunks = _exchanged_chunks(len(members), _nodes(members, per_node), placement.rounds)
            rows = length / (2 * degree) * (copies if rings > 1 else 1)
            received[members, : placement.rounds + 1] += chunks[0] * rows
            sent[members] += chunks[1] * rows
    # One round is computed while the next one is in flight; with two levels, so is the first hop of
    # the round after that.
    at_once = min(3 if per_node else 2, received.shape[1])
    held = sliding_window_view(received, at_once, axis=1).sum(axis=-1).max(axis=1)
    for rank in range(plan.ranks):
        yield Load(
            tokens=int(tokens[rank]),
            remote=round(received[rank].sum()),
            sent=round(sent[rank]),
            held=round(held[rank]),
            fullest=round(received[rank].max()),
            micro_batches=len(plan.micro_batches),
            swapped=int(swapped[rank]),
            kv_copies=copies,
            source=int(sources[rank]),
            first=number == 0,
        )


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

"""Schedule: the kernel calls and messages of one rank in one micro-batch, a pure function of layout
and mask.

Only rows that some query of the receiver sees are sent: with a causal mask, ring index r receives
the head chunks of lower ring indices (for all its queries) and the head and tail chunks of higher
ones (for the queries of its tail). A round covers a range of ring distances: one round gathers
everything at once, and degree - 1 rounds are the classic ring. Every document has its own number of
rounds, and round i of a rank holds round i of all its documents. Both ends of a message derive its
content from the same cut points, in the same order of documents, so no metadata is sent.

With two-level exchange, rows cross the network once per node instead of once per rank: round 0
gathers inside the node, later rounds gather from other nodes in two hops, first to a relay in the
node and then to the ranks that need the rows. They cover ranges of distances between nodes; if
there are more rounds than distances, each takes a part of every rank's rows.

In cross-attention, queries and keys of a document have their own lengths, rings and degrees
(`CrossLayout`). The ranks from the first to the last that may hold either are then the ring, and
each has the chunks of its queries and those of its keys.

Kernel calls compute the areas of the mask (`masks`) cut to the available chunks of queries and keys
(`segment_builder`).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from longctx.attention.masks import CAUSAL, Mask
from longctx.attention.segment_builder import (
    BandPart,
    Call,
    RowSet,
    SpanRows,
    gathered_calls,
    gathering_parts,
    local_calls,
    local_parts,
    whole_parts,
)
from longctx.attention.segments import Segment
from longctx.planning.layout import CrossLayout, Layout, Shard, Span, head_span, tail_span


@dataclass(frozen=True)
class Hop:
    """Messages that a rank posts at once, by ascending peer; a round has one hop, or two over
    nodes.

    Attributes:
        sends: (peer, rows to send). The first hop of a round sends rows of the local buffer, the
            second hop rows that the first one received.
        receives: (peer, number of rows); received rows are stored in this order.
    """

    sends: tuple[tuple[int, RowSet], ...]
    receives: tuple[tuple[int, int], ...]

    @cached_property
    def received_rows(self) -> int:
        return sum(rows for _, rows in self.receives)

    @cached_property
    def sent_rows(self) -> int:
        return sum(len(rows) for _, rows in self.sends)

    def to(self, device: torch.device) -> "Hop":
        return replace(self, sends=tuple((peer, rows.to(device)) for peer, rows in self.sends))


@dataclass(frozen=True)
class ExchangeRound:
    """Messages and kernel calls of one exchange round. The calls index the rows received by its one
    or two hops, in order; `keys` are their documents and positions."""

    hops: tuple[Hop, ...]
    calls: tuple[Call, ...]
    keys: tuple[tuple[int, SpanRows], ...]

    @cached_property
    def received_rows(self) -> int:
        return sum(hop.received_rows for hop in self.hops)

    def to(self, device: torch.device) -> "ExchangeRound":
        hops = tuple(hop.to(device) for hop in self.hops)
        calls = tuple(call.to(device) for call in self.calls)
        return replace(self, hops=hops, calls=calls)


@dataclass(frozen=True)
class RingSchedule:
    """All calls and messages of a rank in one micro-batch: calls on `local` keys, then the
    rounds."""

    layout: Layout | CrossLayout
    local: tuple[Call, ...]
    rounds: tuple[ExchangeRound, ...]
    two_levels: bool = False
    """Whether rounds after the first may have two hops, on any rank."""

    @cached_property
    def received_rows(self) -> int:
        return sum(round_.received_rows for round_ in self.rounds)

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """All kernel calls of a pass."""
        return *self.local, *(call for round_ in self.rounds for call in round_.calls)

    @cached_property
    def bands(self) -> bool:
        """Whether kernels must support bands, not only dense and plain causal segments."""
        return any(
            not (segment.dense or segment.causal)
            for call in self.calls
            for segment in call.segments
        )

    @classmethod
    def build(
        cls,
        layout: Layout | CrossLayout,
        mask: Mask = CAUSAL,
        ranks_per_node: int | None = None,
    ) -> "RingSchedule":
        """Builds the schedule of a layout, with index tensors on the CPU.

        With `ranks_per_node`, rings that cross nodes of that many consecutive ranks exchange in two
        levels.
        """
        documents = list[_HeldDocument]()
        parts = list[list[BandPart]]()
        for queries, keys in layout.pairs:
            # Most documents; only the others have messages.
            on_one_rank = queries is keys and queries.degree == 1 and queries.rounds > 0
            if on_one_rank and queries.tree is None:
                parts.append(whole_parts(mask.areas(keys.document, keys.length), keys.offset))
                continue
            document = _HeldDocument.of(
                queries, keys, rank=layout.rank, mask=mask, ranks_per_node=ranks_per_node
            )
            documents.append(document)
            parts_of = local_parts if queries.is_sequence else gathering_parts
            of_document = parts_of(document.own_queries, document.own_keys, document.areas)
            parts.append(of_document)
        count = max((document.rounds for document in documents), default=0)
        return cls(
            layout=layout,
            local=local_calls(parts),
            rounds=tuple(_round(documents, number) for number in range(count)),
            two_levels=bool(ranks_per_node),
        )

    def to(self, device: torch.device) -> "RingSchedule":
        """Returns the same schedule with index tensors on `device`."""
        if device.type == "cpu":
            return self
        local = tuple(call.to(device) for call in self.local)
        rounds = tuple(round_.to(device) for round_ in self.rounds)
        return replace(self, local=local, rounds=rounds)


def round_of(distance: int, degree: int, rounds: int) -> int:
    """Returns the round of messages over `distance` ring indices, 1 ≤ distance < degree; distances
    are spread evenly."""
    return (distance - 1) * min(rounds, degree - 1) // (degree - 1)


def rounds_between(distance: int, nodes: int, rounds: int) -> list[int]:
    """Returns the rounds, from 1 on, of equal parts of all messages over `distance` nodes of a
    ring, 1 ≤ distance < nodes."""
    parts = -(-rounds // (nodes - 1))
    return [
        1 + round_of((distance - 1) * parts + part + 1, (nodes - 1) * parts + 1, rounds)
        for part in range(parts)
    ]


class _Parts(NamedTuple):
    """Parts [first, stop) of `total` equal parts of every span."""

    first: int = 0
    stop: int = 1
    total: int = 1

    def of(self, span: Span) -> Span:
        begin, end = span
        length = end - begin
        return begin + length * self.first // self.total, begin + length * self.stop // self.total


ALL = _Parts()


@dataclass(frozen=True)
class _Message:
    """Positions of one document that belong to seat `source` and are sent in a hop; `peer` is the
    other rank."""

    hop: int
    incoming: bool
    peer: int
    source: int
    spans: list[Span]


@dataclass(frozen=True)
class _HeldDocument:
    """This rank's part of one document: shards of queries and keys, the mask's areas, and this
    rank's tokens.

    Seats number the ranks that hold the document: they are the ring indices, or in cross-attention
    the ranks from the first to the last of both rings. `nodes` lists the seats on every node with
    two-level exchange; otherwise it is empty. The shard of the queries says in how many rounds keys
    are exchanged.
    """

    queries: Shard
    keys: Shard
    ranks: Sequence[int]
    """Rank of every seat."""
    seat: int
    """Seat of this rank."""
    areas: list[Segment]
    nodes: list[list[int]]

    @classmethod
    def of(
        cls,
        queries: Shard,
        keys: Shard,
        *,
        rank: int,
        mask: Mask,
        ranks_per_node: int | None,
    ) -> "_HeldDocument":
        if queries.rounds < 1:
            raise ValueError(
                f"rounds is {queries.rounds}: must be at least 1, which gathers everything at once"
            )
        if queries is keys:
            ranks = list(map(keys.rank_of, range(keys.degree)))
            seat = keys.ring_index
            areas = _areas(mask, keys)
        else:
            ends = [
                shard.rank_of(index) for shard in (queries, keys) for index in (0, shard.degree - 1)
            ]
            ranks = list(range(min(ends), max(ends) + 1))
            seat = rank - min(ends)
            areas = [Segment(0, queries.length, 0, keys.length)]
        document = cls(queries, keys, ranks=ranks, seat=seat, areas=areas, nodes=[])
        if ranks_per_node is None:
            return document
        nodes: dict[int, list[int]] = defaultdict(list)
        for other, its_rank in enumerate(ranks):
            # Other ranks take no part in the document.
            if document.query_spans[other] or document.key_spans[other]:
                nodes[its_rank // ranks_per_node].append(other)
        crosses = 1 < len(nodes) < sum(map(len, nodes.values()))
        return replace(document, nodes=list(nodes.values())) if crosses else document

    @property
    def own_queries(self) -> list[SpanRows]:
        return _held_rows(self.queries, self.query_spans[self.seat])

    @property
    def own_keys(self) -> list[SpanRows]:
        return _held_rows(self.keys, self.key_spans[self.seat])

    @cached_property
    def query_spans(self) -> list[list[Span]]:
        """Spans of queries on every seat."""
        return [_spans_on(self.queries, rank) for rank in self.ranks]

    @cached_property
    def key_spans(self) -> list[list[Span]]:
        if self.queries is self.keys:
            return self.query_spans
        return [_spans_on(self.keys, rank) for rank in self.ranks]

    @property
    def rounds(self) -> int:
        """Number of exchange rounds of the document; with two levels one more is for its own
        node."""
        if self.nodes:
            return 1 + self.queries.rounds
        return min(self.queries.rounds, len(self.ranks) - 1)

    def needed(self, source: int, targets: Sequence[int], parts: _Parts = ALL) -> list[Span]:
        """Returns the positions of seat `source` that queries of `targets` see: disjoint spans,
        ascending.

        Only those in these parts of every span of the seat.
        """
        spans = []
        for held in self.key_spans[source]:
            begin, end = parts.of(held)
            for start, stop in self._seen_by(tuple(targets)):
                if start < end and begin < stop and begin < end:
                    spans.append((max(begin, start), min(end, stop)))
        return spans

    def _seen_by(self, targets: tuple[int, ...]) -> list[Span]:
        """Returns all positions that queries of `targets` see; many messages have the same
        targets."""
        if targets not in self._seen:
            queries = _union(span for target in targets for span in self.query_spans[target])
            everything = 0, self.keys.length
            self._seen[targets] = _union(
                area.seen(span, everything) for span in queries for area in self.areas
            )
        return self._seen[targets]

    @cached_property
    def _seen(self) -> dict[tuple[int, ...], list[Span]]:
        return {}

    def messages(self, number: int) -> Iterator[_Message]:
        """Yields all messages that this rank sends and receives in a round."""
        if not self.nodes:
            yield from self._direct(range(len(self.ranks)), number)
            return
        node = self._node_of(self.seat)
        if number == 0:
            yield from self._direct(self.nodes[node], number)
            return
        for peer in range(len(self.nodes)):
            sent = self._parts_in(number, (peer - node) % len(self.nodes))
            if sent is not None:
                yield from self._sent_to_node(peer, sent)
            received = self._parts_in(number, (node - peer) % len(self.nodes))
            if received is not None:
                yield from self._received_from_node(peer, node, received)

    def _direct(self, others: Iterable[int], number: int) -> Iterator[_Message]:
        """Yields the messages of a round between this rank and other seats; in two levels all of
        them are in round 0."""
        seats, mine = len(self.ranks), self.seat
        for other in others:
            for incoming, source, target in ((False, mine, other), (True, other, mine)):
                distance = (target - source) % seats
                if not distance:
                    continue
                if self.nodes or number == round_of(distance, seats, self.queries.rounds):
                    spans = self.needed(source, [target])
                    yield _Message(0, incoming, peer=self.ranks[other], source=source, spans=spans)

    def _node_of(self, seat: int) -> int:
        return next((i for i, members in enumerate(self.nodes) if seat in members), 0)

    def _parts_in(self, number: int, distance: int) -> _Parts | None:
        """Returns the parts of messages over a distance between nodes that are in a round; None:
        none."""
        if not distance:
            return None
        rounds = rounds_between(distance, len(self.nodes), self.queries.rounds)
        parts = [part for part, its_round in enumerate(rounds) if its_round == number]
        return _Parts(parts[0], parts[-1] + 1, len(rounds)) if parts else None

    def _sent_to_node(self, node: int, parts: _Parts) -> Iterator[_Message]:
        """Yields this rank's message to its relay in another node; relays alternate by source."""
        targets = self.nodes[node]
        relay = self.ranks[targets[self.seat % len(targets)]]
        spans = self.needed(self.seat, targets, parts)
        yield _Message(0, False, peer=relay, source=self.seat, spans=spans)

    def _received_from_node(self, source_node: int, node: int, parts: _Parts) -> Iterator[_Message]:
        """Yields this rank's messages of rows of another node: from relays, or as a relay."""
        mine, ranks, targets = self.seat, self.ranks, self.nodes[node]
        for source in self.nodes[source_node]:
            relay = targets[source % len(targets)]
            if relay != mine:
                spans = self.needed(source, [mine], parts)
                yield _Message(1, True, peer=ranks[relay], source=source, spans=spans)
                continue
            spans = self.needed(source, targets, parts)
            yield _Message(0, True, peer=ranks[source], source=source, spans=spans)
            for target in targets:
                if target != mine:
                    spans = self.needed(source, [target], parts)
                    yield _Message(1, False, peer=ranks[target], source=source, spans=spans)


def _areas(mask: Mask, shard: Shard) -> list[Segment]:
    if shard.tree is None:
        return mask.areas(shard.document, shard.length)
    return mask.tree_areas(shard.document, shard.tree)


def _held_rows(shard: Shard, spans: Iterable[Span]) -> list[SpanRows]:
    """Returns spans of a shard's positions with their buffer rows."""
    return [SpanRows(start, stop, (shard.rows(start, stop),)) for start, stop in spans]


def chunks(shard: Shard, ring_index: int) -> list[Span]:
    """Returns the non-empty spans of a ring index: head and tail, joined if they are adjacent."""
    head = head_span(shard.length, shard.degree, ring_index)
    tail = tail_span(shard.length, shard.degree, ring_index)
    spans = [(head[0], tail[1])] if head[1] == tail[0] else [head, tail]
    return [span for span in spans if span[0] < span[1]]


def _spans_on(shard: Shard, rank: int) -> list[Span]:
    """Returns the non-empty spans of a document on a domain rank."""
    ring_index = shard.index_of(rank)
    return [] if ring_index is None else chunks(shard, ring_index)


def _union(spans: Iterable[Span]) -> list[Span]:
    """Returns disjoint, ascending, non-empty spans that cover the same positions."""
    union: list[Span] = []
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(stop, union[-1][1])
        else:
            union.append((start, stop))
    return union


def _round(documents: Sequence[_HeldDocument], number: int) -> ExchangeRound:
    """Builds the hops of a round and the calls on the received rows.

    Both ends of a message order its rows by document, source and position: if rank 0 sends
    positions [0, 4) of document 0 and [8, 10) of document 2 to rank 1, the message has these six
    rows in that order.
    """
    messages = [
        (i, message)
        for i, document in enumerate(documents)
        for message in document.messages(number)
    ]
    messages.sort(key=lambda item: (item[1].peer, item[0], item[1].source))
    keys: list[list[SpanRows]] = [[] for _ in documents]  # received keys of each document
    hops: list[Hop] = []
    row = 0
    for hop in range(1 + max((message.hop for _, message in messages), default=0)):
        sends: dict[int, list[range]] = defaultdict(list)
        receives: dict[int, int] = defaultdict(int)
        for i, message in messages:
            if message.hop != hop:
                continue
            for start, stop in message.spans:
                if message.incoming:
                    rows = range(row, row + stop - start)
                    keys[i].append(SpanRows(start, stop, (rows,)))
                    receives[message.peer] += len(rows)
                    row += len(rows)
                elif hop == 0:
                    sends[message.peer].append(documents[i].keys.rows(start, stop))
                else:  # a relay passes on rows from the first hop
                    held = next(run for run in keys[i] if run.start <= start and stop <= run.stop)
                    sends[message.peer] += held.part(start, stop)
        outgoing = tuple((peer, RowSet.of(ranges, "cpu")) for peer, ranges in sends.items())
        hops.append(Hop(sends=outgoing, receives=tuple(receives.items())))
    documents_here = []
    received = []
    for document, runs in zip(documents, keys, strict=True):
        documents_here.append((document.own_queries, runs, document.areas))
        received += [(document.keys.document, run) for run in runs]
    calls = gathered_calls(documents_here)
    return ExchangeRound(tuple(hops), calls=calls, keys=tuple(received))

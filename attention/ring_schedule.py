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

import torch

from longctx.attention.masks import CAUSAL, Mask
from longctx.attention.segment_builder import (
    BandPart,
    Call,
    RowSet,
    SpanRows,
    gathered_calls,
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


@dataclass(frozen=True)
class ExchangeRound:
    """Messages and kernel calls of one exchange round. The calls index the rows received by its one
    or two hops, in order."""

    hops: tuple[Hop, ...]
    calls: tuple[Call, ...]

    @cached_property
    def received_rows(self) -> int:
        return sum(hop.received_rows for hop in self.hops)


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
        device: torch.device | str = "cpu",
        mask: Mask = CAUSAL,
        ranks_per_node: int | None = None,
    ) -> "RingSchedule":
        """Builds the schedule of a layout. Index tensors are on `device`.

        With `ranks_per_node`, rings that cross nodes of that many consecutive ranks exchange in two
        levels.
        """
        documents, parts = list[_HeldDocument](), list[list[BandPart]]()
        for queries, keys in layout.pairs:
            # Most documents; only the others have messages.
            if (
                queries is keys
                and queries.degree == 1
                and queries.tree is None
                and queries.rounds > 0
            ):
                parts.append(whole_parts(mask.areas(keys.document, keys.length), keys.offset))
            else:
                documents.append(
                    document := _HeldDocument.of(queries, keys, layout.rank, mask, ranks_per_node)
                )
                parts.append(local_parts(document.own_queries, document.own_keys, document.areas))
        local = local_calls(parts)
        count = max((document.rounds for document in documents), default=0)
        return cls(
            layout,
            local,
            tuple(_round(documents, number, device) for number in range(count)),
            bool(ranks_per_node),
        )


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
        cls, queries: Shard, keys: Shard, rank: int, mask: Mask, ranks_per_node: int | None
    ) -> "_HeldDocument":
        if queries.rounds < 1:
            raise ValueError(
                f"rounds is {queries.rounds}: must be at least 1, which gathers everything at once"
            )
        if queries is keys:
            ranks, seat = list(map(keys.rank_of, range(keys.degree))), keys.ring_index
            areas = (
                mask.areas(keys.document, keys.length)
                if keys.tree is None
                else mask.tree_areas(keys.document, keys.tree)
            )
        else:
            ends = [
                shard.rank_of(index) for shard in (queries, keys) for index in (0, shard.degree - 1)
            ]
            ranks, seat = list(range(min(ends), max(ends) + 1)), rank - min(ends)
            areas = [Segment(0, queries.length, 0, keys.length)]
        document = cls(queries, keys, ranks, seat, areas, [])
        nodes: dict[int, list[int]] = defaultdict(list)
        for other in range(len(ranks) if ranks_per_node else 0):
            # Other ranks take no part in the document.
            if document.query_spans[other] or document.key_spans[other]:
                nodes[ranks[other] // (ranks_per_node or 1)].append(other)
        crosses = 1 < len(nodes) < sum(map(len, nodes.values()))
        return replace(document, nodes=list(nodes.values())) if crosses else document

    @property
    def own_queries(self) -> list[SpanRows]:
        return [
            SpanRows(*span, (self.queries.rows(*span),)) for span in self.query_spans[self.seat]
        ]

    @property
    def own_keys(self) -> list[SpanRows]:
        return [SpanRows(*span, (self.keys.rows(*span),)) for span in self.key_spans[self.seat]]

    @cached_property
    def query_spans(self) -> list[list[Span]]:
        """Spans of queries on every seat."""
        return [_spans_on(self.queries, rank) for rank in self.ranks]

    @cached_property
    def key_spans(self) -> list[list[Span]]:
        return (
            self.query_spans
            if self.queries is self.keys
            else [_spans_on(self.keys, rank) for rank in self.ranks]
        )

    @property
    def rounds(self) -> int:
        """Number of exchange rounds of the document; with two levels one more is for its own
        node."""
        return (
            1 + self.queries.rounds if self.nodes else min(self.queries.rounds, len(self.ranks) - 1)
        )

    def needed(
        self, source: int, targets: Sequence[int], first: int = 0, stop: int = 1, parts: int = 1
    ) -> list[Span]:
        """Returns the positions of seat `source` that queries of `targets` see: disjoint spans,
        ascending.

        Only those in parts [first, stop) of `parts` equal parts of every span of the seat.
        """
        cut = [
            (begin + (end - begin) * first // parts, begin + (end - begin) * stop // parts)
            for begin, end in self.key_spans[source]
        ]
        seen = self._seen_by(tuple(targets))
        return [
            (max(a, c), min(b, d)) for a, b in cut for c, d in seen if a < d and c < b and a < b
        ]

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
        seats, mine, rounds = len(self.ranks), self.seat, self.queries.rounds
        node = self._node_of(mine)
        for other in self.nodes[node] if self.nodes else range(seats):
            for incoming, source, target in ((False, mine, other), (True, other, mine)):
                distance = (target - source) % seats
                if distance and number == (0 if self.nodes else round_of(distance, seats, rounds)):
                    yield _Message(
                        0, incoming, self.ranks[other], source, self.needed(source, [target])
                    )
        for peer_node in range(len(self.nodes) if number else 0):
            for incoming, source_node, target_node in (
                (False, node, peer_node),
                (True, peer_node, node),
            ):
                distance = (target_node - source_node) % len(self.nodes)
                round_of_part = (
                    rounds_between(distance, len(self.nodes), rounds) if distance else []
                )
                if parts := [
                    part for part, its_round in enumerate(round_of_part) if its_round == number
                ]:
                    cut = parts[0], parts[-1] + 1, len(round_of_part)
                    yield from self._relayed(source_node, target_node, cut, incoming=incoming)

    def _node_of(self, seat: int) -> int:
        return next((i for i, members in enumerate(self.nodes) if seat in members), 0)

    def _relayed(
        self, source_node: int, target_node: int, cut: tuple[int, int, int], *, incoming: bool
    ) -> Iterator[_Message]:
        """Yields this rank's messages of some parts between two nodes; relays alternate by
        source."""
        mine, ranks, targets = self.seat, self.ranks, self.nodes[target_node]
        for source in self.nodes[source_node] if incoming else [mine]:
            relay = targets[source % len(targets)]
            if not incoming:
                yield _Message(0, False, ranks[relay], source, self.needed(source, targets, *cut))
            elif relay != mine:
                yield _Message(1, True, ranks[relay], source, self.needed(source, [mine], *cut))
            else:
                yield _Message(0, True, ranks[source], source, self.needed(source, targets, *cut))
                others = [target for target in targets if target != mine]
                yield from (
                    _Message(1, False, ranks[target], source, self.needed(source, [target], *cut))
                    for target in others
                )


def chunks(shard: Shard, ring_index: int) -> list[Span]:
    """Returns the non-empty spans of a ring index: head and tail, joined if they are adjacent."""
    head, tail = (span(shard.length, shard.degree, ring_index) for span in (head_span, tail_span))
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


def _round(
    documents: Sequence[_HeldDocument], number: int, device: torch.device | str
) -> ExchangeRound:
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
    messages.sort(key=lambda each: (each[1].peer, each[0], each[1].source))
    keys: list[list[SpanRows]] = [[] for _ in documents]  # received keys of each document
    hops: list[Hop] = []
    row = 0
    for number in range(1 + max((message.hop for _, message in messages), default=0)):
        sends: dict[int, list[range]] = defaultdict(list)
        receives: dict[int, int] = defaultdict(int)
        spans = (
            (i, message, *span)
            for i, message in messages
            if message.hop == number
            for span in message.spans
        )
        for i, message, start, stop in spans:
            if message.incoming:
                keys[i].append(SpanRows(start, stop, (range(row, row + stop - start),)))
                receives[message.peer] += stop - start
                row += stop - start
            elif number == 0:
                sends[message.peer].append(documents[i].keys.rows(start, stop))
            else:  # a relay passes on rows from the first hop
                held = next(run for run in keys[i] if run.start <= start and stop <= run.stop)
                sends[message.peer] += held.part(start, stop)
        hops.append(
            Hop(
                tuple((peer, RowSet.of(ranges, device)) for peer, ranges in sends.items()),
                tuple(receives.items()),
            )
        )
    documents_here = (
        (document.own_queries, runs, document.areas)
        for document, runs in zip(documents, keys, strict=True)
    )
    return ExchangeRound(tuple(hops), gathered_calls(documents_here, device))

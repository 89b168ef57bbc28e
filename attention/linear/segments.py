"""RankSegments: what a rank holds of each document as runs of consecutive positions, and the
messages between them.

Layers that carry a state along a document, and convolutions, need what comes before a segment. Ring
index r of a document holds its head and its tail, each a segment, or one segment if they are
adjacent. So a document of degree n is a chain of up to 2n segments, which all ranks of its ring
derive from its length. In a tree every node begins a new segment, and the segment before it is the
last one of its parent. Both ends of a message order its content by document and position.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from longctx.attention.ring_schedule import Hop, chunks
from longctx.attention.segment_builder import RowSet
from longctx.planning.layout import Layout, Shard
from longctx.planning.tree import ROOT, Tree


@dataclass(frozen=True)
class Link:
    """One segment of a document's chain: the ring index that holds it, its tokens, and the place of
    the segment before it."""

    ring_index: int
    start: int
    stop: int
    before: int


@dataclass(frozen=True)
class RankSegment:
    """One segment of this rank: buffer rows [row, row + stop - start) are tokens [start, stop) of a
    document.

    `place` is its number in the chain of the document; only the first has no segment before it.
    `carried` tells whether others follow, which need the state at its end. `document` numbers this
    rank's documents.
    """

    document: int
    place: int
    carried: bool
    start: int
    stop: int
    row: int

    @classmethod
    def alone(cls, document: int, *, tokens: int, row: int) -> "RankSegment":
        """Returns the only segment of a document."""
        return cls(document, place=0, carried=False, start=0, stop=tokens, row=row)

    @property
    def rows(self) -> range:
        return range(self.row, self.row + self.stop - self.start)


@dataclass(frozen=True)
class RankSegments:
    """The segments of a buffer.

    Attributes:
        shards: the documents of this rank, in an order that all ranks share.
        chains: the segments of each of them on all ranks, in the order of the document.
        own: this rank's segments, which cover all rows; by row.
    """

    shards: tuple[Shard, ...]
    chains: tuple[tuple[Link, ...], ...]
    own: tuple[RankSegment, ...]

    @classmethod
    def of(cls, layout: Layout, rows: int) -> "RankSegments":
        """Returns the segments of a layout in a buffer of `rows` rows; those after its tokens are a
        document of their own.

        Raises ValueError if the buffer has fewer rows than the layout.
        """
        if rows < layout.tokens:
            raise ValueError(
                f"the input has {rows} tokens, but the layout of micro-batch "
                f"{layout.micro_batch}, rank {layout.rank} has {layout.tokens}: use the layout "
                "that it was packed with"
            )
        chains = tuple(map(chain_of, layout.shards))
        held = []
        for document, (shard, chain) in enumerate(zip(layout.shards, chains, strict=True)):
            followed = {link.before for link in chain}
            for place, link in enumerate(chain):
                if link.ring_index != shard.ring_index:
                    continue
                segment = RankSegment(
                    document,
                    place=place,
                    carried=place in followed,
                    start=link.start,
                    stop=link.stop,
                    row=shard.rows(link.start, link.stop).start,
                )
                held.append(segment)
        padding = rows - layout.tokens
        if padding:
            held.append(RankSegment.alone(len(chains), tokens=padding, row=layout.tokens))
        return cls(layout.shards, chains, tuple(held))

    @classmethod
    def alone(cls, rows: int) -> "RankSegments":
        """Returns segments of which each is a document of one token."""
        own = tuple(RankSegment.alone(row, tokens=1, row=row) for row in range(rows))
        return cls((), (), own)


def chain_of(shard: Shard) -> tuple[Link, ...]:
    """Returns all segments of a document that have tokens, in order."""
    tree = shard.tree or Tree((shard.length,), (ROOT,))
    tree.check_linear()
    links: list[Link] = []
    last = {ROOT: ROOT}  # place of the last segment of every node
    spans = sorted(
        (span, ring_index)
        for ring_index in range(shard.degree)
        for span in chunks(shard, ring_index)
    )
    for (start, stop), index in spans:
        node = tree.node_of(start)
        while start < stop:
            end = min(stop, tree.nodes[node].stop)
            before = last[node if node in last else tree.parents[node]]
            last[node] = len(links)
            links.append(Link(index, start, end, before))
            start, node = end, node + 1
    return tuple(links)


def before(chain: Sequence[Link], place: int) -> list[int]:
    """Returns the places of all segments before one, in order."""
    places = []
    while (place := chain[place].before) != ROOT:
        places.append(place)
    return places[::-1]


Item = tuple[int, int]
"""What a rank needs of another: (document, number), numbered along the document: a position, or a
place in the chain."""


@dataclass(frozen=True)
class Messages:
    """What a rank sends to and receives from the others of its rings, before a layer's segments can
    go on.

    Attributes:
        hop: peers, the rows that go to them, and the numbers of rows that come from them.
        received: the received row of every item that this rank receives.
    """

    hop: Hop
    received: dict[Item, int]

    @classmethod
    def build(
        cls,
        shards: Sequence[Shard],
        needs: Callable[[int, int], Iterable[tuple[int, int]]],
        row: Callable[[Item], int],
        device: torch.device | str,
    ) -> "Messages":
        """Builds the messages of one exchange.

        Args:
            shards: this rank's shards, in an order that all ranks share.
            needs: function of document and ring index that returns (owner's ring index, number) of
                all items that this ring index needs of the document; ascending by number.
            row: function of an own item that returns its row.
            device: device of index tensors.
        """
        sends: dict[int, list[range]] = defaultdict(list)
        receives: dict[int, list[Item]] = defaultdict(list)
        for document, shard in enumerate(shards):
            for target in range(shard.degree):
                for source, number in needs(document, target):
                    if target == shard.ring_index and source != target:
                        receives[shard.rank_of(source)].append((document, number))
                    elif source == shard.ring_index and target != source:
                        at = row((document, number))
                        sends[shard.rank_of(target)].append(range(at, at + 1))
        arriving = [item for peer in sorted(receives) for item in receives[peer]]
        hop = Hop(
            sends=tuple((peer, RowSet.of(sends[peer], device)) for peer in sorted(sends)),
            receives=tuple((peer, len(receives[peer])) for peer in sorted(receives)),
        )
        return cls(hop, {item: place for place, item in enumerate(arriving)})


def halo_messages(segments: RankSegments, width: int, device: torch.device | str) -> Messages:
    """Returns the messages that bring each segment the `width` rows before it; items are
    positions."""

    def needs(document: int, target: int) -> list[tuple[int, int]]:
        chain = segments.chains[document]
        mine = [link for link in chain if link.ring_index == target]
        halo = {
            position
            for link in mine
            for position in segments.shards[document].before(link.start, width)
        }
        return [
            (link.ring_index, position)
            for link in chain
            if link.ring_index != target
            for position in sorted(halo)
            if link.start <= position < link.stop
        ]

    def row(item: Item) -> int:
        document, position = item
        return segments.shards[document].rows(position, position + 1).start

    return Messages.build(segments.shards, needs, row, device)


def state_messages(segments: RankSegments, device: torch.device | str) -> Messages:
    """Returns the messages that bring each rank the states of all segments before its own; items
    are places in the chain.

    Rows are numbered as in `carried_rows`.
    """
    rows = carried_rows(segments)

    def needs(document: int, target: int) -> list[tuple[int, int]]:
        chain = segments.chains[document]
        mine = (place for place, link in enumerate(chain) if link.ring_index == target)
        needed = sorted({other for place in mine for other in before(chain, place)})
        return [
            (chain[place].ring_index, place)
            for place in needed
            if chain[place].ring_index != target
        ]

    return Messages.build(segments.shards, needs, rows.__getitem__, device)


def carried_rows(segments: RankSegments) -> dict[Item, int]:
    """Returns the row of the state of each own segment that others follow, by (document, place)."""
    carried = [(segment.document, segment.place) for segment in segments.own if segment.carried]
    return {item: row for row, item in enumerate(carried)}

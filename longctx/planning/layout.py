"""Layout: the tokens of each document that a rank holds in one micro-batch, a pure function of the
plan.

A document of L tokens at degree n is cut at ⌊i·L/2n⌋, i = 0..2n. Ring index r holds chunk r (its
head) and chunk 2n-1-r (its tail), which balances causal attention. L and n can be any numbers:
nothing has to divide and nothing is padded; a rank with two empty chunks takes no part in the
document. This is the zigzag placement of Llama 3 (§3.3.2) for any length.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from longctx.arguments import Rule, checked, kind, sequence_of, whole
from longctx.errors import UserError
from longctx.planning.tree import NO_TREES, Tree, Trees

Span = tuple[int, int]
"""Half-open range of token positions inside a document."""


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number of ranks, ascending."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of a document in a micro-batch: ranks `first_rank … first_rank + degree - 1` of the
    domain.

    Attributes:
        reversed: whether ring indices are numbered from the last rank.
        rounds: number of exchange rounds, ≥ 1; rounds that its ring cannot have are left out (see
            `ring_schedule`).
    """

    document: int
    first_rank: int
    degree: int
    reversed: bool = False
    rounds: int = 1

    @property
    def ring(self) -> range:
        return range(self.first_rank, self.first_rank + self.degree)

    def ring_index(self, rank: int) -> int:
        index = rank - self.first_rank
        return self.degree - 1 - index if self.reversed else index


def head_span(length: int, degree: int, ring_index: int) -> Span:
    """Returns the positions of chunk `ring_index`, the earlier of the two chunks of this ring
    index."""
    return ring_index * length // (2 * degree), (ring_index + 1) * length // (2 * degree)


def tail_span(length: int, degree: int, ring_index: int) -> Span:
    """Returns the positions of chunk `2·degree - 1 - ring_index`, the later of the two chunks of
    this ring index."""
    return head_span(length, degree, 2 * degree - 1 - ring_index)


def shard_tokens(length: int, degree: int, ring_index: int) -> int:
    """Returns the number of a document's tokens that one ring index holds."""
    head = head_span(length, degree, ring_index)
    tail = tail_span(length, degree, ring_index)
    return head[1] - head[0] + tail[1] - tail[0]


def largest_shard(length: int, degree: int) -> int:
    """Returns the tokens on the fullest rank of a ring: at most 2·⌈length/2degree⌉.

    Ring index r holds f((r+1)x) - f(rx) tokens, with x = length/2degree and f(y) = ⌊y⌋ + ⌈y⌉.
    """
    if length % (2 * degree) == 0:
        return length // degree
    return max(shard_tokens(length, degree, ring_index) for ring_index in range(degree))


def longest_document(degree: int, tokens_per_rank: int) -> int:
    """Returns a length up to which every document fits on `degree` ranks of `tokens_per_rank`
    tokens; 0 if none fits.

    The head and the tail of a shard are each rounded up to a token, so an odd budget loses one
    token per rank.
    """
    if degree == 1:
        return tokens_per_rank
    return degree * (tokens_per_rank - tokens_per_rank % 2)


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's shard of one document: rows [offset, offset + tokens) of the rank's buffer are
    [head; tail].

    `head` and `tail` are ranges of positions in the document.
    """

    document: int
    length: int
    degree: int
    first_rank: int
    reversed: bool
    ring_index: int
    head: Span
    tail: Span
    offset: int
    rounds: int = 1
    """Number of exchange rounds; see `Placement`."""
    stride: int = 1
    """Distance between neighbouring ranks of the ring."""
    tree: Tree | None = None
    """Shape of a document that is a tree."""

    @property
    def head_tokens(self) -> int:
        return self.head[1] - self.head[0]

    @property
    def tail_tokens(self) -> int:
        return self.tail[1] - self.tail[0]

    @property
    def tokens(self) -> int:
        return self.head_tokens + self.tail_tokens

    @property
    def is_sequence(self) -> bool:
        """Whether every token sees the ones before it, as in a document that is no tree."""
        return self.tree is None

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence: of a tree its longest path."""
        return self.length if self.tree is None else self.tree.longest

    def positions(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the position ids of tokens [start, stop): in a tree, the number of tokens before
        each on its path."""
        return np.arange(start, stop) if self.tree is None else self.tree.positions[start:stop]

    def before(self, token: int, count: int) -> Sequence[int]:
        """Returns the last `count` tokens before a token in its sequence, in order; fewer at the
        start."""
        if self.tree is None:
            return range(max(0, token - count), token)
        return self.tree.before(token, count)

    def rows(self, start: int, stop: int) -> range:
        """Returns the buffer rows of positions [start, stop), which are in one chunk, or in both if
        the chunks are adjacent."""
        before = self.tail[0] - self.head[1] if start >= self.tail[0] else 0
        first = self.offset + start - self.head[0] - before
        return range(first, first + stop - start)

    def rank_of(self, ring_index: int) -> int:
        place = self.degree - 1 - ring_index if self.reversed else ring_index
        return self.first_rank + self.stride * place

    def index_of(self, rank: int) -> int | None:
        """Returns the ring index of a domain rank; None if it is outside the ring."""
        place, between = divmod(rank - self.first_rank, self.stride)
        if between or not 0 <= place < self.degree:
            return None
        return self.degree - 1 - place if self.reversed else place

    def at(self, ring_index: int, degree: int) -> "Shard":
        """Returns a copy with the chunks of another ring index and degree; `offset` is
        unchanged."""
        return replace(
            self,
            degree=degree,
            ring_index=ring_index,
            head=head_span(self.length, degree, ring_index),
            tail=tail_span(self.length, degree, ring_index),
        )


@dataclass(frozen=True)
class Layout:
    """The shards of one rank of the domain in one micro-batch, by ascending first rank, then
    document.

    Documents of which the rank holds no token are left out. `tokens` is the length of the rank's
    buffer without padding.
    """

    micro_batch: int
    rank: int
    shards: tuple[Shard, ...]

    @classmethod
    def of(
        cls,
        placements: Iterable[Placement],
        lengths: Sequence[int],
        micro_batch: int,
        rank: int,
        trees: Trees = NO_TREES,
    ) -> "Layout":
        """Builds the layout of `rank` from the placements of a micro-batch; `lengths` are tokens by
        document."""
        shards: list[Shard] = []
        offset = 0
        for placement in sorted(placements, key=lambda p: (p.first_rank, p.document)):
            document = placement.document
            shard = _shard(
                placement, lengths[document], rank, offset=offset, tree=trees.get(document)
            )
            if shard.tokens:
                shards.append(shard)
                offset += shard.tokens
        return cls(micro_batch, rank, tuple(shards))

    @property
    def tokens(self) -> int:
        return self.shards[-1].offset + self.shards[-1].tokens if self.shards else 0

    @property
    def key_tokens(self) -> int:
        return self.tokens

    @property
    def pairs(self) -> Sequence[tuple[Shard, Shard]]:
        """Shards with the queries and with the keys of each document: the same."""
        return [(shard, shard) for shard in self.shards]


class LayoutError(UserError):
    """Placements and lengths that are not those of one micro-batch."""


_PLACEMENTS = sequence_of("placements of a micro-batch of a plan", kind("a Placement", Placement))
_LENGTHS = sequence_of("lengths", whole(least=0))
CROSS_RULES: dict[str, Rule] = {
    "targets": _PLACEMENTS,
    "target_lengths": _LENGTHS,
    "sources": _PLACEMENTS,
    "source_lengths": _LENGTHS,
    "micro_batch": whole(least=0),
    "rank": whole(least=0),
}


@dataclass(frozen=True)
class CrossLayout:
    """The shards of one rank whose tokens see other sequences: the target of each document sees its
    source.

    Every target and every source has its own length, ring and degree.

    Attributes:
        targets, sources: layouts of the queries and of the keys.
        pairs: shards of the target and of the source of each document of which the rank holds a
            token, by ascending first rank of the target, then document. A shard may be without
            tokens, or the rank outside its ring.
    """

    targets: Layout
    sources: Layout
    pairs: tuple[tuple[Shard, Shard], ...]

    @classmethod
    @checked(LayoutError, **CROSS_RULES)
    def of(
        cls,
        targets: Sequence[Placement],
        target_lengths: Sequence[int],
        sources: Sequence[Placement],
        source_lengths: Sequence[int],
        micro_batch: int,
        rank: int,
    ) -> "CrossLayout":
        """Builds the layout of `rank` from the placements of a micro-batch, of the same documents
        in any order.

        Raises LayoutError if the documents of targets and sources differ, or if one has no token.
        """
        for name, placements, lengths in (
            ("target", targets, target_lengths),
            ("source", sources, source_lengths),
        ):
            if missing := [p.document for p in placements if p.document >= len(lengths)]:
                raise LayoutError(
                    f"document {missing[0]} has no {name} length: {name}_lengths has "
                    f"{len(lengths)} elements"
                )
        by_document = {source.document: source for source in sources}
        if sorted(by_document) != sorted(target.document for target in targets):
            raise LayoutError(
                f"targets are of documents {sorted(target.document for target in targets)}, "
                f"sources of {sorted(by_document)}: place target and source of a document in one "
                "micro-batch"
            )
        target_layout = Layout.of(targets, target_lengths, micro_batch, rank)
        source_layout = Layout.of(sources, source_lengths, micro_batch, rank)
        held_targets = {shard.document: shard for shard in target_layout.shards}
        held_sources = {shard.document: shard for shard in source_layout.shards}
        pairs = []
        for target in sorted(targets, key=lambda p: (p.first_rank, p.document)):
            document = target.document
            target_length = target_lengths[document]
            source_length = source_lengths[document]
            if min(target_length, source_length) < 1:
                raise LayoutError(
                    f"document {document} has {source_length} source and {target_length} target "
                    "tokens: needs one or more of each"
                )
            if document not in held_targets and document not in held_sources:
                continue
            source = by_document[document]
            queries = held_targets.get(document) or _shard(target, target_length, rank)
            keys = held_sources.get(document) or _shard(source, source_length, rank)
            pairs.append((queries, keys))
        return cls(target_layout, source_layout, tuple(pairs))

    @property
    def micro_batch(self) -> int:
        return self.targets.micro_batch

    @property
    def rank(self) -> int:
        return self.targets.rank

    @property
    def tokens(self) -> int:
        return self.targets.tokens

    @property
    def key_tokens(self) -> int:
        return self.sources.tokens


def _shard(
    placement: Placement, length: int, rank: int, *, offset: int = 0, tree: Tree | None = None
) -> Shard:
    """Returns the shard of a rank; its ring index is out of range and it has no token if the rank
    is outside the ring."""
    degree = placement.degree
    ring_index = placement.ring_index(rank)
    head = tail = (0, 0)
    if rank in placement.ring:
        head = head_span(length, degree, ring_index)
        tail = tail_span(length, degree, ring_index)
    return Shard(
        document=placement.document,
        length=length,
        degree=degree,
        first_rank=placement.first_rank,
        reversed=placement.reversed,
        ring_index=ring_index,
        head=head,
        tail=tail,
        offset=offset,
        rounds=placement.rounds,
        tree=tree,
    )

"""Exchange of rows between the ranks that have drawn documents and the ranks that hold them: tokens
there, values back."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from longctx.attention.host_to_device import copy_to
from longctx.hf.vision import ImagePlace
from longctx.parallel.all_to_all import exchange_rows
from longctx.planning.layout import Layout, Span
from longctx.planning.tree import Tree


class DocumentInfo(NamedTuple):
    """What all ranks know of a document.

    Attributes:
        rank: the rank that has drawn it.
        drawn_index: its place among the documents of that rank.
        length: number of its tokens, of source and target together.
        targets: number of its labels.
        tree: its branches, if sequences were merged.
        places: where its images are.
        pixels: the kind of its images' pixels, an empty tensor; None without images.
        source: tokens that the encoder of an encoder-decoder reads.
        hidden: spans of its target that attention skips.
    """

    rank: int
    drawn_index: int
    length: int
    targets: int
    tree: Tree | None = None
    places: tuple[ImagePlace, ...] = ()
    pixels: torch.Tensor | None = None
    source: int = 0
    hidden: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Side:
    """Rows of one side of an exchange: `size` rows, of which `rows` travel, `counts` of them to or
    from each rank, in order."""

    size: int
    rows: torch.Tensor
    counts: list[int]

    @classmethod
    def of(cls, size: int, by_rank: Sequence[Sequence[torch.Tensor]]) -> "Side":
        none = torch.zeros(0, dtype=torch.int64)
        rows = [torch.cat([none, *spans]) for spans in by_rank]
        return cls(size, torch.cat(rows), list(map(len, rows)))


@dataclass(frozen=True)
class RowExchange:
    """The rows that a rank exchanges for a plan, and nothing else.

    Attributes:
        own: rows of the rank's own documents, one after the other.
        held: rows of its micro-batches, one after the other, without padding.
        places: first held row of every span, by document of the plan and start of the span.
    """

    own: Side
    held: Side
    places: dict[tuple[int, int], int]

    @classmethod
    def of(
        cls,
        layouts: Sequence[Sequence[Layout]],
        documents: Sequence[DocumentInfo],
        rank: int,
        lengths: Sequence[int],
    ) -> "RowExchange":
        """Returns the exchange of a rank.

        Args:
            layouts: [rank][micro-batch].
            documents: the plan's.
            rank: this rank.
            lengths: rows of every document that this rank drew, planned or not.
        """
        own: list[list[torch.Tensor]] = [[] for _ in layouts]
        held: list[list[torch.Tensor]] = [[] for _ in layouts]
        places: dict[tuple[int, int], int] = {}
        first_rows = [0, *itertools.accumulate(lengths)]
        held_rows = 0
        for holder, holder_layouts in enumerate(layouts):
            for index, (start, stop) in _spans(holder_layouts):
                document = documents[index]
                if document.rank == rank:
                    own[holder].append(first_rows[document.drawn_index] + torch.arange(start, stop))
                if holder == rank:
                    places[index, start] = held_rows
                    following = held_rows + stop - start
                    held[document.rank].append(torch.arange(held_rows, following))
                    held_rows = following
        return cls(Side.of(first_rows[-1], own), Side.of(held_rows, held), places)

    def to_holders(self, rows: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """Returns the held rows of [own rows, ..] of all ranks. Collective, differentiable."""
        return _moved(rows, self.own, self.held, group)

    def to_owners(self, rows: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """Returns the own rows of [held rows, ..] of all ranks; 0 where nothing is planned.
        Collective, differentiable."""
        held = replace(self.held, rows=copy_to(self.held.rows, rows.device))
        own = replace(self.own, rows=copy_to(self.own.rows, rows.device))
        return _moved(rows, held, own, group)


def _moved(rows: torch.Tensor, before: Side, after: Side, group: Any) -> torch.Tensor:
    rows = rows[before.rows]
    if group is not None:
        rows = exchange_rows(rows, before.counts, after.counts, group)
    return rows.new_zeros(after.size, *rows.shape[1:]).index_copy(0, after.rows, rows)


def _spans(layouts: Sequence[Layout]) -> list[tuple[int, Span]]:
    """Returns the spans of documents that a rank holds, in the order of its micro-batches."""
    return [
        (shard.document, span)
        for layout in layouts
        for shard in layout.shards
        for span in (shard.head, shard.tail)
    ]

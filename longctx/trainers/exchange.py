"""Exchange of rows between the ranks that have drawn documents and the ranks that hold them: tokens
there, values back."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from longctx.attention.host_to_device import copy_to
from longctx.hf.vision import ImagePlace
from longctx.parallel.all_to_all import exchange_rows
from longctx.planning.layout import Layout, Span
from longctx.planning.tree import Tree


@dataclass(frozen=True)
class Known:
    """What all ranks know of a document: the rank that has drawn it, its place among that rank's
    documents, sizes and shape.

    Of one with images also their places, and the kind of their pixels, an empty tensor. Of a record
    with a source the length of that, and the hidden spans of its target.
    """

    rank: int
    number: int
    length: int
    targets: int
    tree: Tree | None
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
        documents: Sequence[Known],
        rank: int,
        lengths: Sequence[int],
    ) -> "RowExchange":
        """`layouts` are those of every rank and micro-batch, `documents` those of the plan,
        `lengths` those of all documents of this rank, also ones that are not planned."""
        starts = [0, *torch.tensor([0, *lengths]).cumsum(0)[1:].tolist()]
        own: list[list[torch.Tensor]] = [[] for _ in layouts]
        held: list[list[torch.Tensor]] = [[] for _ in layouts]
        places, at = {}, 0
        for holder, of_holder in enumerate(layouts):
            for number, (start, stop) in _spans(of_holder):
                document = documents[number]
                if document.rank == rank:
                    own[holder].append(starts[document.number] + torch.arange(start, stop))
                if holder == rank:
                    held[document.rank].append(torch.arange(at, at + stop - start))
                    places[number, start], at = at, at + stop - start
        return cls(Side.of(starts[-1], own), Side.of(at, held), places)

    def to_holders(self, rows: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """Returns the held rows of [own rows, ..] of all ranks. Collective, differentiable."""
        return _moved(rows, self.own, self.held, group)

    def to_owners(self, rows: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """Returns the own rows of [held rows, ..] of all ranks; 0 where nothing is planned.
        Collective, differentiable."""
        held, own = (
            replace(side, rows=copy_to(side.rows, rows.device)) for side in (self.held, self.own)
        )
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

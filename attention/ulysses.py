"""Ulysses: u neighbouring ranks swap heads for tokens around ring attention (DeepSpeed Ulysses,
Jacobs et al., 2023).

Each rank then holds the chunks of all u ranks for its share of the heads, so a ring of degree d
becomes u parallel rings of degree d/u: far fewer keys move, and segments are longer. In exchange,
queries and outputs move between neighbours. u divides the KV heads, or is a multiple of them that
divides the query heads: then u / KV heads ranks have a copy of each KV head. Documents keep their
own degrees: rings that do not consist of whole groups of u ranks, or that leave a rank without a
token, run as plain rings.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longctx.attention import operator
from longctx.attention.exchange import Exchange, Routes
from longctx.attention.expansion import Compressed
from longctx.attention.host_to_device import copy_to
from longctx.attention.inputs import (
    AttentionInputError,
    CheckedAttention,
    Queries,
    computed,
    unmarked,
)
from longctx.attention.keeping import kept
from longctx.attention.ring import RingAttention
from longctx.attention.ring_pass import NO_LAYER, layer_name
from longctx.attention.segment_builder import row_index
from longctx.planning.cost.ulysses import swaps_heads, ulysses_degrees
from longctx.planning.layout import CrossLayout, Layout, Shard, shard_tokens


def packed_attention(
    layout: Layout | CrossLayout, ulysses_degree: int = 1, **options: Any
) -> "RingAttention | HybridAttention":
    """Builds the attention for one micro-batch, with or without Ulysses; `options` as in
    `RingAttention`."""
    if ulysses_degree == 1:
        return RingAttention(layout, **options)
    assert isinstance(layout, Layout)  # cross-attention has no Ulysses
    return HybridAttention(layout, ulysses_degree, **options)


class HybridAttention(CheckedAttention):
    """`RingAttention` with Ulysses among groups of `ulysses_degree` neighbouring ranks; same call
    signature."""

    def __init__(
        self,
        layout: Layout,
        ulysses_degree: int,
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        exchange: Callable[[dist.ProcessGroup | None, str], Exchange] = Exchange,
        **options: Any,
    ) -> None:
        """Builds the schedules of swapped and plain rings; `options` as in `RingAttention`."""
        super().__init__(layout, group, device)
        self.ulysses_degree = ulysses_degree
        swapped: list[Shard] = []
        others: list[Shard] = []
        for shard in layout.shards:
            if swaps_heads(shard.length, shard.first_rank, shard.degree, ulysses_degree):
                swapped.append(shard)
            else:
                others.append(shard)
        wide = _widened(swapped, layout.rank, ulysses_degree)
        options |= {"group": group, "device": device, "exchange": exchange}
        self.plain = RingAttention(replace(layout, shards=tuple(others)), **options)
        self.wide = RingAttention(replace(layout, shards=tuple(wide)), **options)
        self.mixed = bool(swapped) and bool(others)
        self.swap: HeadSwap | None = None
        if swapped:
            self.swap = HeadSwap(
                layout,
                swapped,
                ulysses_degree,
                group=group,
                device=device,
                exchange=exchange,
            )

    @property
    def last(self) -> str:
        """Layer and pass that this rank entered last, for error messages."""
        return self.wide.last if self.swap else self.plain.last

    def attend(
        self,
        queries: Queries,
        k: Tensor,
        v: Tensor,
        *,
        layer: int | None,
        sink_logits: Tensor | None,
        compressed: Compressed | None = None,
    ) -> Tensor:
        """As in the base class. Swapped heads travel expanded: a head's share of K and V is not one
        of what they come from."""
        if self.swap is None:
            return self.plain.attend(
                queries, k, v, layer=layer, sink_logits=sink_logits, compressed=compressed
            )
        q = queries(unmarked)
        self._check_heads(q, k)
        layer = NO_LAYER if layer is None else layer
        handles = {"swap_handle": self.swap.handle, "layer": layer}
        u = self.ulysses_degree
        copies = max(1, u // k.shape[1])
        wide_k, wide_v = _repeated(k, copies), _repeated(v, copies)
        packed = torch.cat([_shares(x, u) for x in (q, wide_k, wide_v)], dim=2)
        widths = [x.shape[1] * x.shape[2] // u for x in (q, wide_k, wide_v)]
        of_q, of_k, of_v = gather_tokens(packed, None, **handles).split(widths, dim=1)
        own_logits = None
        if sink_logits is not None:
            own_logits = sink_logits.unflatten(0, (u, -1))[self.layout.rank % u]
        out: Tensor = self.wide.attend(
            computed(of_q.unflatten(1, (-1, q.shape[2]))),
            of_k.unflatten(1, (-1, k.shape[2])),
            of_v.unflatten(1, (-1, v.shape[2])),
            layer=layer,
            sink_logits=own_logits,
        )
        swapped, ticket = gather_heads(out.flatten(1), len(q), u, **handles)
        out = swapped.view(len(q), q.shape[1], v.shape[2])
        if not self.mixed:
            return out
        return out + self.plain.attend(
            computed(q),
            k,
            v,
            layer=layer,
            sink_logits=sink_logits,
            after=ticket,
            compressed=compressed,
        )

    def _check_heads(self, q: Tensor, k: Tensor) -> None:
        """Raises AttentionInputError if the ranks of a group cannot share heads out evenly."""
        degrees = ulysses_degrees(q.shape[1], k.shape[1])
        if self.ulysses_degree not in degrees:
            raise AttentionInputError(
                f"ulysses_degree is {self.ulysses_degree}, but {q.shape[1]} query heads and "
                f"{k.shape[1]} KV heads per rank can only be shared over "
                f"{', '.join(map(str, degrees))} ranks: use one of these"
            )


def _repeated(x: Tensor, copies: int) -> Tensor:
    """Returns so many copies of each head of x [tokens, heads, dim]."""
    return x.repeat_interleave(copies, dim=1) if copies > 1 else x


def _shares(x: Tensor, ranks: int) -> Tensor:
    """Returns the heads of x [tokens, heads, dim] by rank, as [tokens, ranks, width]."""
    return x.reshape(len(x), ranks, x.shape[1] * x.shape[2] // ranks)


def _widened(shards: list[Shard], rank: int, ulysses_degree: int) -> list[Shard]:
    """Returns the shards of a group of ranks: the same documents at degree d/u, on every u-th
    rank."""
    wide, offset = [], 0
    for shard in shards:
        combined = shard.at(shard.ring_index // ulysses_degree, shard.degree // ulysses_degree)
        combined = replace(
            combined,
            first_rank=shard.first_rank + rank % ulysses_degree,
            stride=ulysses_degree,
            offset=offset,
        )
        wide.append(combined)
        offset += combined.tokens
    return wide


class HeadSwap:
    """Swaps heads for tokens and back among the u = `ulysses_degree` ranks of a group.

    Takes a rank's rows as [rows, u, width], where [:, i] goes to the i-th rank of the group.
    Returns [rows of the group, width], document by document, with all heads and then all tails in
    order of position.
    """

    def __init__(
        self,
        layout: Layout,
        shards: list[Shard],
        ulysses_degree: int,
        *,
        group: dist.ProcessGroup | None,
        device: torch.device | str,
        exchange: Callable[[dist.ProcessGroup | None, str], Exchange],
    ) -> None:
        first = layout.rank - layout.rank % ulysses_degree
        self.mates = range(first, first + ulysses_degree)
        self.me = layout.rank - first
        self.device = torch.device(device)
        rows = [range(shard.offset, shard.offset + shard.tokens) for shard in shards]
        self._rows_on_host = row_index(rows, "cpu")
        self.counts = [
            sum(shard_tokens(s.length, s.degree, _ring_index(s, mate)) for s in shards)
            for mate in self.mates
        ]
        self._order_on_host = row_index(_chunk_order(shards, self.mates), "cpu")
        self.group = group
        self.exchange = exchange
        self.where = f"micro-batch {layout.micro_batch}"
        self.routes: Routes = {}
        self.handle = operator.register(self)

    # On the device, copied when a layer first needs them (see `RingAttention.schedule`).

    @cached_property
    def rows(self) -> Tensor:
        return copy_to(self._rows_on_host, self.device)

    @cached_property
    def order(self) -> Tensor:
        return copy_to(self._order_on_host, self.device)

    @cached_property
    def back(self) -> Tensor:
        return copy_to(torch.argsort(self._order_on_host), self.device)

    def run(self, parts: list[Tensor], counts: list[int], width: int, layer: int) -> list[Tensor]:
        """Sends parts[i] to the i-th rank of the group and returns the received parts, counts[i]
        rows from rank i."""
        others = [i for i in range(len(self.mates)) if i != self.me]
        incoming = parts[self.me].new_empty(sum(counts[i] for i in others), width)
        exchange = self.exchange(self.group, f"{self.where}, {layer_name(layer)}, Ulysses exchange")
        exchange.routes = self.routes
        outgoing = [(self.mates[i], parts[i].contiguous()) for i in others if len(parts[i])]
        rows = [(self.mates[i], counts[i]) for i in others if counts[i]]
        arrived = exchange.start(outgoing, incoming, rows).wait()
        received = list(arrived.split([counts[i] for i in others]))
        received.insert(self.me, parts[self.me])
        return received


def _ring_index(shard: Shard, rank: int) -> int:
    place = (rank - shard.first_rank) // shard.stride
    return shard.degree - 1 - place if shard.reversed else place


def _chunk_order(shards: list[Shard], mates: range) -> list[range]:
    """Returns the rows of each document's chunks in the received parts (rank by rank), in the order
    of the wide shard."""
    places: list[dict[int, tuple[range, range]]] = [{} for _ in shards]
    row = 0
    for mate in mates:
        for i, shard in enumerate(shards):
            part = shard.at(_ring_index(shard, mate), shard.degree)
            middle, stop = row + part.head_tokens, row + part.tokens
            places[i][part.ring_index] = range(row, middle), range(middle, stop)
            row = stop
    order = []
    for parts in places:
        chunks = [parts[ring_index] for ring_index in sorted(parts)]
        order += [head for head, _ in chunks] + [tail for _, tail in reversed(chunks)]
    return order


@torch.library.custom_op("longctx::gather_tokens", mutates_args=())
@kept
def gather_tokens(x: Tensor, after: Tensor | None, *, swap_handle: int, layer: int) -> Tensor:
    """Turns this rank's [rows, u, width] into [rows of the group, width] of its heads, by a
    `HeadSwap`.

    `after`: as in `operator.begin`.
    """
    swap: HeadSwap = operator.find(swap_handle)
    mine = x.index_select(0, swap.rows)
    received = swap.run(list(mine.unbind(1)), swap.counts, x.shape[2], layer)
    return torch.cat(received).index_select(0, swap.order)


@torch.library.custom_op("longctx::gather_heads", mutates_args=())
@kept
def gather_heads(
    x: Tensor, rows: int, ranks: int, *, swap_handle: int, layer: int
) -> tuple[Tensor, Tensor]:
    """Turns [rows of the group, width] into [rows, ranks, width]; rows of documents that are not
    swapped are 0.

    The second output is a ticket, for exchanges that must come after this one.
    """
    swap: HeadSwap = operator.find(swap_handle)
    parts = list(x.index_select(0, swap.back).split(swap.counts))
    received = swap.run(parts, [len(swap.rows)] * len(parts), x.shape[1], layer)
    out = x.new_zeros(rows, len(parts), x.shape[1])
    out[swap.rows] = torch.stack(received, dim=1)
    return out, x.new_empty(0)


@gather_tokens.register_fake
def _(x: Tensor, after: Tensor | None, **handles: Any) -> Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(), x.shape[2])


@gather_heads.register_fake
def _(x: Tensor, rows: int, ranks: int, **handles: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(rows, ranks, x.shape[1]), x.new_empty(0)


def _remember(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: operator.Handles, output: Any
) -> None:
    ctx.shape = inputs[0].shape
    ctx.handles = keyword_only_inputs
    ctx.alive = operator.find(keyword_only_inputs["swap_handle"])


def _heads_back(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    rows, ranks, _ = ctx.shape
    dx, _ = gather_heads(gradient.contiguous(), rows, ranks, **ctx.handles)
    return dx, None


def _tokens_back(ctx: Any, gradient: Tensor, later: Tensor) -> tuple[Tensor | None, ...]:
    dx = gather_tokens(gradient.contiguous(), later, **ctx.handles)
    return dx, None, None


gather_tokens.register_autograd(_heads_back, setup_context=_remember)
gather_heads.register_autograd(_tokens_back, setup_context=_remember)

OPERATORS = [*operator.OPERATORS, gather_tokens._opoverload, gather_heads._opoverload]
"""Operators whose outputs selective recomputation keeps, so that no exchange is repeated."""

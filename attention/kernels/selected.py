"""Attention in which every query sees only keys that were selected for it.

Of documents with a selection, all scores of a block of queries are computed, and those of other
keys are hidden: exact on any device, and no faster than dense attention. Other documents are left
to a dense kernel.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from longctx.attention.kernels.contract import Computes, Gradients, Options
from longctx.attention.segments import Segment, Segments, visible

BLOCK_QUERIES = 128
BLOCK_BYTES = 256 << 20
"""Most queries of a block, and most bytes of its scores, unless those of one query and one KV head
are more."""


class _Block(NamedTuple):
    """Some queries of a segment in some heads.

    Attributes:
        rows, columns: of its queries, and of its keys.
        heads, kv_heads: of its queries, and of its keys.
        q, k: in the dtype of scores; keys of every query head.
        scores: [heads, queries, keys]; -inf: not seen.
    """

    rows: slice
    columns: slice
    heads: slice
    kv_heads: slice
    q: Tensor
    k: Tensor
    scores: Tensor

    def values(self, v: Tensor) -> Tensor:
        """Returns the values of its keys [keys, heads, v_dim]."""
        of_heads: Tensor = v[self.columns, self.kv_heads].to(self.q.dtype)
        return of_heads.repeat_interleave(self.q.shape[1] // of_heads.shape[1], dim=1)

    def summed(self, gradient: Tensor) -> Tensor:
        """Sums over the query heads of each KV head: [keys, heads, dim] → [keys, kv_heads, dim]."""
        groups = self.kv_heads.stop - self.kv_heads.start
        of_groups: Tensor = gradient.unflatten(1, (groups, -1))
        return of_groups.sum(2)


def workspace(queries: int, *, keys: int, heads: int, head_dim: int) -> int:
    """Returns the bytes that `SelectedKernel.backward` allocates, of float32: gradients and delta,
    three matrices of a block's scores, which keys it sees, and the keys and values of its heads."""
    seen = BLOCK_QUERIES * keys
    scores = 4 * seen
    rows = 4 * keys * head_dim
    at_once = max(1, BLOCK_BYTES // scores)
    at_once = min(heads, at_once)
    of_head = 3 * scores + 4 * rows
    gradients = 4 * heads * head_dim * (3 * queries + 2 * keys)
    return gradients + at_once * of_head + 2 * seen


@dataclass(frozen=True)
class SelectedKernel:
    """Both passes of `contract` for one call; queries that see none of its keys get the lowest lse,
    not -inf, so that results of calls add up.

    Attributes:
        selected: [queries, most] positions of the keys in the document of each query, in any order;
            below 0: none.
        positions: [keys] positions of the call's keys in their documents, below `longest`.
        has_selection: whether the keys of a segment's queries were selected.
        dense: returns the kernel of the other segments.
    """

    selected: Tensor
    positions: Tensor
    longest: int
    has_selection: Callable[[Segment], bool]
    dense: Callable[[], Computes]

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        segments: Segments,
        options: Options,
    ) -> tuple[Tensor, Tensor]:
        """Implements `contract`."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        others = [segment for segment in segments if not self.has_selection(segment)]
        if others:
            out, lse = self.dense().forward(q, k, v, segments=others, options=options)
        else:
            rows, heads, _ = q.shape
            out = q.new_zeros(rows, heads, v.shape[2], dtype=dtype)
            lse = q.new_full((rows, heads), float("-inf"), dtype=dtype)
        lowest = torch.finfo(dtype).min / 2
        for block in self._blocks(q, k, segments, options):
            total = block.scores.logsumexp(-1)
            total.clamp_(min=lowest)
            weights = block.scores - total.unsqueeze(-1)
            weights.exp_()
            found = torch.einsum("hqk,khd->qhd", weights, block.values(v))
            out[block.rows, block.heads] = found.to(out.dtype)
            lse[block.rows, block.heads] = total.T
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        segments: Segments,
        options: Options,
    ) -> Gradients:
        """Implements `contract`; all gradients have the dtype of lse."""
        dtype = lse.dtype
        others = [segment for segment in segments if not self.has_selection(segment)]
        if others:
            found = self.dense().backward(
                dout,
                q,
                k,
                v,
                out=out,
                lse=lse,
                segments=others,
                options=options,
            )
            dq, dk, dv = (gradient.to(dtype) for gradient in found)
        else:
            dq = torch.zeros_like(q, dtype=dtype)
            dk = torch.zeros_like(k, dtype=dtype)
            dv = torch.zeros_like(v, dtype=dtype)
        delta = dout.to(dtype) * out.to(dtype)
        delta = delta.sum(-1)
        for block in self._blocks(q, k, segments, options):
            queries = block.rows, block.heads
            keys = block.columns, block.kv_heads
            total = lse[queries].T
            weights = block.scores - total.unsqueeze(-1)
            weights.exp_()
            gradient = dout[queries].to(dtype)
            of_values = torch.einsum("hqk,qhd->khd", weights, gradient)
            dv[keys] += block.summed(of_values)
            products = torch.einsum("qhd,khd->hqk", gradient, block.values(v))
            of_query = delta[queries].T
            products -= of_query.unsqueeze(-1)
            dscores = weights.mul_(products)
            dscores *= options.scale
            dq[queries] += torch.einsum("hqk,khd->qhd", dscores, block.k)
            of_keys = torch.einsum("hqk,qhd->khd", dscores, block.q)
            dk[keys] += block.summed(of_keys)
        return dq, dk, dv

    def _blocks(
        self,
        q: Tensor,
        k: Tensor,
        segments: Segments,
        options: Options,
    ) -> Iterator[_Block]:
        """Yields the blocks of queries whose keys were selected, with what they see. Raises
        ValueError for a soft cap."""
        if options.softcap:
            raise ValueError(f"softcap is {options.softcap}: selected keys are supported without")
        dtype = torch.promote_types(q.dtype, torch.float32)
        kv_heads = k.shape[1]
        group = q.shape[1] // kv_heads
        for segment in filter(self.has_selection, segments):
            keys = segment.k_start, segment.k_stop
            of_query = dtype.itemsize * group * (keys[1] - keys[0])
            count = BLOCK_BYTES // of_query
            count = min(BLOCK_QUERIES, max(1, count))
            at_once = max(1, BLOCK_BYTES // (of_query * count))
            for start in range(segment.q_start, segment.q_stop, count):
                part = segment.cut((start, start + count), keys)
                hidden = ~self._seen(part)
                for first in range(0, kv_heads, at_once):
                    last = min(kv_heads, first + at_once)
                    heads = slice(group * first, group * last)
                    of_q = q[part.queries, heads].to(dtype)
                    of_k = k[part.keys, first:last].to(dtype)
                    of_k = of_k.repeat_interleave(group, dim=1)
                    scores = torch.einsum("qhd,khd->hqk", of_q, of_k)
                    scores *= options.scale
                    scores.masked_fill_(hidden, float("-inf"))
                    yield _Block(
                        part.queries,
                        part.keys,
                        heads=heads,
                        kv_heads=slice(first, last),
                        q=of_q,
                        k=of_k,
                        scores=scores,
                    )

    def _seen(self, part: Segment) -> Tensor:
        """Returns [queries, keys]: whether each query sees each key, which was selected for it."""
        wanted = self.selected[part.queries].long()
        # One more place takes what is no position.
        wanted = wanted.masked_fill(wanted < 0, self.longest)
        chosen = torch.zeros(
            len(wanted),
            self.longest + 1,
            dtype=torch.bool,
            device=wanted.device,
        )
        chosen.scatter_(1, wanted, True)
        positions = self.positions[part.keys]
        chosen = chosen.index_select(1, positions)
        return chosen & visible(part, wanted.device)

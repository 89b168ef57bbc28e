"""Recurrence: linear attention and short convolutions of one micro-batch, over documents split over
ranks."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from longctx.attention.exchange import Exchange
from longctx.attention.linear.convolution import Halo, convolve
from longctx.attention.linear.scan import Scan, linear_attention
from longctx.attention.linear.segments import RankSegments
from longctx.attention.linear.sending import MakeExchange
from longctx.attention.uncompiled import not_compiled
from longctx.planning.layout import Layout


class Recurrence:
    """Layers that carry something along a document, for one micro-batch; every rank of the domain
    must call them alike.

    Every head or tail of a document is a segment. Its convolution needs the last rows of the
    segments before it, and its state begins with theirs: both are sent by the ranks that hold them,
    in forward, and their gradients back in backward.
    """

    def __init__(
        self,
        layout: Layout | None,
        *,
        group: dist.ProcessGroup | None = None,
        exchange: Callable[[dist.ProcessGroup | None, str], Exchange] = Exchange,
    ) -> None:
        """
        Args:
            layout: `plan.layout(micro_batch, rank)`; None: every row is a document of its own.
            group: process group of the domain, ranks in order; None: the default group. Not used
                if no document is split.
            exchange: class that moves the rows.
        """
        self._segments_of = (
            RankSegments.alone if layout is None else partial(RankSegments.of, layout)
        )
        self._name = "" if layout is None else f"micro-batch {layout.micro_batch}, "
        self._group, self._exchange = group, exchange
        self.last = "before the first layer"
        """Layer that this rank entered last, for error messages."""
        self._segments: dict[int, RankSegments] = {}
        self._halos: dict[tuple[int, int, torch.device], Halo] = {}
        self._scans: dict[tuple[int, torch.device], Scan] = {}

    @not_compiled
    def convolve(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        layer: int | None = None,
    ) -> Tensor:
        """Returns the causal convolution [tokens, channels] of x [tokens, channels] with `weight`
        [channels, kernel].

        Output t of a document is the sum of weight[:, kernel - 1 - i] · x[t - i] over its tokens t
        - i, plus `bias` [channels].
        """
        width = weight.shape[1] - 1
        key = len(x), width, x.device
        if key not in self._halos:
            self._halos[key] = Halo.build(self._segments_with(len(x)), width, x.device)
        make = self._make("convolution", layer)
        return convolve(x, weight, bias, halo=self._halos[key], make=make)

    @not_compiled
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor | None = None,
        layer: int | None = None,
    ) -> Tensor:
        """Returns linear attention [tokens, heads, v_dim]; see `longctx.attention.linear.scan`."""
        key = len(q), q.device
        if key not in self._scans:
            self._scans[key] = Scan.build(self._segments_with(len(q)), q.device)
        make = self._make("linear attention", layer)
        return linear_attention(q, k, v, decay=decay, beta=beta, scan=self._scans[key], make=make)

    def _segments_with(self, rows: int) -> RankSegments:
        if rows not in self._segments:
            self._segments[rows] = self._segments_of(rows)
        return self._segments[rows]

    def _make(self, kind: str, layer: int | None) -> MakeExchange:
        place = f"{kind} of {'an unknown layer' if layer is None else f'layer {layer}'}"

        def make(name: str) -> Exchange:
            self.last = f"{place}, {name} pass"
            return self._exchange(self._group, f"{self._name}{self.last}")

        return make

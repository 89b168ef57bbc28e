"""One pass of ring attention on one rank: messages of K and V and of their gradients, and the keys
of every kernel call."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from longctx.attention.exchange import Exchange, Routes
from longctx.attention.expansion import Expanding
from longctx.attention.kernels import Options, choose_kernel
from longctx.attention.kernels.contract import Computes, KernelRequest, request_of
from longctx.attention.ring_schedule import ExchangeRound, Hop, RingSchedule
from longctx.attention.segment_builder import Call, RowSet

NO_LAYER = -1
Choose = Callable[[KernelRequest, Call], Computes]
"""Returns the kernel of a call. Raises KernelError if none supports it."""


def choose_by_name(name: str, request: KernelRequest, _: Call) -> Computes:
    """Returns the kernel called `name`, or for `auto` the first one that supports the call."""
    return choose_kernel(name, request)


class Ring(Protocol):
    """The attributes of `RingAttention` that its passes use."""

    @property
    def schedule(self) -> RingSchedule: ...

    exchange: Callable[[dist.ProcessGroup | None, str], Exchange]
    watch: Callable[[str], AbstractContextManager[object]]
    group: dist.ProcessGroup | None
    across: tuple[dist.ProcessGroup, int] | None
    routes: Routes
    scale: float | None
    softcap: float
    choose: Choose
    keep_kv: bool
    deterministic: bool
    begun: dict[int, Any]
    last: str


def layer_name(layer: int) -> str:
    """Formats a layer number for messages."""
    return "an unknown layer" if layer == NO_LAYER else f"layer {layer}"


class RingPass:
    """One forward or backward pass of one layer on this rank: its exchange, and the keys of each
    call.

    `k` and `v` are what travels: K and V, or the two tensors of which `expanding` makes received K
    and V.
    """

    expanding: Expanding | None = None

    def __init__(self, ring: Ring, layer: int, *, name: str, k: Tensor, v: Tensor) -> None:
        self.ring = ring
        self.schedule = ring.schedule
        ring.last = f"{layer_name(layer)}, {name} pass"
        where = f"micro-batch {ring.schedule.layout.micro_batch}, {ring.last}"
        self.exchange = ring.exchange(ring.group, where)
        self.exchange.across = ring.across
        self.exchange.routes = ring.routes
        self.in_flight = 0  # exchanges that were started and not waited for
        self.k_shape = k.shape[1:]
        self.v_shape = v.shape[1:]
        self.width = self.k_shape.numel() + self.v_shape.numel()
        self.sum_dtype = torch.promote_types(k.dtype, torch.float32)

    def options(self, q: Tensor) -> Options:
        """Returns the options of a kernel call now."""
        scale = q.shape[-1] ** -0.5 if self.ring.scale is None else self.ring.scale
        return Options(
            scale,
            softcap=self.ring.softcap,
            deterministic=self.ring.deterministic,
            overlapped=self.in_flight > 0,
        )

    def widened(self, x: Tensor) -> Tensor:
        """Returns `x` in the accumulation dtype if anything will be added to it."""
        return x.to(self.sum_dtype) if len(self.schedule.calls) > 1 or self.schedule.rounds else x

    def zeros(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Returns zeros of these shapes in the accumulation dtype."""
        return [x.new_zeros(x.shape, dtype=self.sum_dtype) for x in like]

    def zeros_for(self, received: Tensor, calls: tuple[Call, ...]) -> Tensor:
        """Returns zeros for the gradients of received rows; in the accumulation dtype if several
        calls may add to a row."""
        several = any(call.again for call in calls)
        return torch.zeros_like(received, dtype=self.sum_dtype if several else received.dtype)

    def keys(
        self, k: Tensor, v: Tensor, *, received: Tensor | None, call: Call
    ) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of a call: this rank's own or some of them, or those selected
        from the received rows [rows, width]."""
        if call.rows is None:
            return k, v
        if received is None:
            return call.rows.read(k), call.rows.read(v)
        first, second = self._rows(received, call.rows)
        return (first, second) if self.expanding is None else self.expanding.keys(first, second)

    def _rows(self, received: Tensor, rows: RowSet) -> tuple[Tensor, Tensor]:
        """Returns both tensors of received rows [rows, width]."""
        k, v = rows.read(received).split([self.k_shape.numel(), self.v_shape.numel()], dim=1)
        return k.unflatten(1, self.k_shape), v.unflatten(1, self.v_shape)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, received: Tensor | None, call: Call
    ) -> tuple[Tensor, Tensor]:
        """Returns out and lse of a kernel call. Raises KernelError if no kernel supports it."""
        k, v = self.keys(k, v, received=received, call=call)
        kernel = self._kernel(q, k, v, call)
        return kernel.forward(q, k, v, call.segments, self.options(q))

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        out: Tensor,
        lse: Tensor,
        received: Tensor | None,
        call: Call,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns dq, dk and dv of a kernel call; of received rows the gradients of what
        travelled."""
        if self.expanding is None or call.rows is None or received is None:
            k, v = self.keys(k, v, received=received, call=call)
            return self._backward(dout, q, k, v, out=out, lse=lse, call=call)
        first, second = self._rows(received, call.rows)
        rows = first.detach().requires_grad_(), second.detach().requires_grad_()
        with self.expanding.differentiable():
            k, v = self.expanding.keys(rows[0], rows[1])
        dq, dk, dv = self._backward(dout, q, k.detach(), v.detach(), out=out, lse=lse, call=call)
        dfirst, dsecond = self.expanding.gradients(rows, (k, v), dk, dv)
        return dq, dfirst, dsecond

    def _backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        out: Tensor,
        lse: Tensor,
        call: Call,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kernel = self._kernel(q, k, v, call)
        return kernel.backward(dout, q, k, v, out, lse, call.segments, self.options(q))

    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Computes:
        ring, bands = self.ring, self.schedule.bands
        request = request_of(
            q,
            k,
            v,
            call.segments,
            bands=bands,
            softcap=bool(ring.softcap),
            deterministic=ring.deterministic,
        )
        return ring.choose(request, call)

    def steps(
        self, k: Tensor, v: Tensor, kept_rows: Tensor, *, fetch: bool
    ) -> Iterator[tuple[Tensor | None, tuple[Call, ...]]]:
        """Yields (None, calls on local keys), then for each round (received rows, its calls).

        The messages of each step are posted before the previous step is computed, so that
        computation hides them. With keep_kv, rows are received into `kept_rows`; without `fetch`,
        they are already there.
        """
        rounds = self.schedule.rounds
        if not fetch or not rounds:
            yield None, self.schedule.local
            for rows, round_ in zip(self._by_round(kept_rows), rounds, strict=True):
                yield rows, round_.calls
            return
        kv = torch.cat([k.flatten(1), v.flatten(1)], dim=1)
        buffers = self._by_round(kept_rows) if self.ring.keep_kv else [None] * len(rounds)
        under_way = {}
        for number, (round_, buffer) in enumerate(zip(rounds, buffers, strict=True)):
            under_way[number] = self._fetch(round_, buffer, kv)
        two_levels = self.schedule.two_levels
        for number in range(len(rounds) + 1):
            # All ranks post first hops at the same point, whatever documents they hold, so that
            # messages match in order.
            if number < len(rounds) and (
                number == 0 or not two_levels or len(rounds[number].hops) > 1
            ):
                next(under_way[number])
            if number + 1 < len(rounds) and two_levels:
                next(under_way[number + 1])
            if number == 0:
                yield None, self.schedule.local
            else:
                yield next(under_way.pop(number - 1)), rounds[number - 1].calls

    def _by_round(self, received: Tensor) -> list[Tensor]:
        """Returns the rows that each round receives."""
        return list(received.split([round_.received_rows for round_ in self.schedule.rounds]))

    def _fetch(
        self, round_: ExchangeRound, buffer: Tensor | None, kv: Tensor
    ) -> Iterator[Tensor | None]:
        """Posts the first hop, then the second hop if one exists, and finally yields the received
        rows."""
        incoming = kv.new_empty(round_.received_rows, self.width) if buffer is None else buffer
        parts = incoming.split([hop.received_rows for hop in round_.hops])
        source = kv
        for hop, part in zip(round_.hops, parts, strict=True):
            # Only `pending` holds copies of sent rows, so they are freed once the messages have
            # arrived.
            pending = self.exchange.start(
                [(peer, rows.read(source)) for peer, rows in hop.sends], part, hop.receives
            )
            self.in_flight += 1
            yield None
            source = pending.wait()
            self.in_flight -= 1
        yield incoming

    def send_back(
        self, number: int, gradients: Tensor, *, dk: Tensor, dv: Tensor
    ) -> Iterator[None]:
        """Sends the gradients of a round's rows of K and V back to their owners, and adds those
        that return here to dk and dv.

        Posts one hop per step: the last hop immediately, the first hop one step later if two hops
        are possible. Several gradients of one row are added in ascending order of peers.
        """
        round_ = self.schedule.rounds[number]
        if self.schedule.two_levels and number > 0 and len(round_.hops) == 1:
            yield
        parts = list(gradients.split([hop.received_rows for hop in round_.hops]))
        while parts:
            hop = round_.hops[len(parts) - 1]
            part = parts.pop()
            peers = [peer for peer, _ in hop.receives]
            messages = part.split([count for _, count in hop.receives])
            outgoing = list(zip(peers, messages, strict=True))
            incoming = part.new_empty(hop.sent_rows, part.shape[1])
            rows = [(peer, len(sent)) for peer, sent in hop.sends]
            pending = self.exchange.start(outgoing, incoming, rows)
            self.in_flight += 1
            yield
            returned = pending.wait()
            self.in_flight -= 1
            if parts:
                self.exchange.hold(gradients)  # no message holds it if the rank only passes rows on
                total = parts[-1].to(self.sum_dtype)
                self._add(hop, returned, total)
                parts[-1] = total.to(part.dtype)
            else:
                width = self.k_shape.numel()
                self._add(hop, returned[:, :width], dk.flatten(1))
                self._add(hop, returned[:, width:], dv.flatten(1))

    def _add(self, hop: Hop, returned: Tensor, total: Tensor) -> None:
        """Adds returned gradients to the rows of `total` that were sent, in place."""
        parts = returned.split([len(rows) for _, rows in hop.sends])
        for (_, rows), part in zip(hop.sends, parts, strict=True):
            rows.add(total, part.to(total.dtype))

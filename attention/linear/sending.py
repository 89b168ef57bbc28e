"""Sending: rows that move between ranks in forward, and their gradients, which move back in
backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longctx.attention.exchange import Exchange
from longctx.attention.ring_schedule import Hop

MakeExchange = Callable[[str], Exchange]
"""Makes the exchange of a pass, from its name."""


def receive(
    x: Tensor, through: Tensor, hop: Hop, make: MakeExchange
) -> tuple[Tensor, Tensor, Tensor]:
    """Sends rows of x [rows, width] to the peers of `hop`. Returns x, `through` and the received
    rows [received, width].

    The loss must depend on the returned `through` on every rank, so that backward comes here also
    on ranks that send and have no use for x themselves: others wait for them. Received rows are in
    the order of `hop.receives`.
    """
    if not hop.sends and not hop.receives:
        return x, through, x[:0]
    out: tuple[Tensor, ...] = _Receive.apply(x, through, hop, make)  # type: ignore[no-untyped-call]  # torch's own
    return out[0], out[1], out[2]


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, through: Tensor, hop: Hop, make: MakeExchange
    ) -> tuple[Tensor, ...]:
        ctx.hop = hop
        ctx.make = make
        incoming = x.new_empty(hop.received_rows, x.shape[1])
        outgoing = [(peer, rows.read(x).contiguous()) for peer, rows in hop.sends]
        received = make("forward").start(outgoing, incoming, hop.receives).wait()
        return x.view_as(x), through.view_as(through), received

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dthrough: Tensor, dreceived: Tensor) -> tuple[Any, ...]:
        hop: Hop = ctx.hop
        incoming = dx.new_empty(hop.sent_rows, dx.shape[1])
        outgoing = []
        if hop.receives:
            parts = dreceived.contiguous().split([rows for _, rows in hop.receives])
            outgoing = [(peer, part) for (peer, _), part in zip(hop.receives, parts, strict=True)]
        returning = [(peer, len(rows)) for peer, rows in hop.sends]
        returned = ctx.make("backward").start(outgoing, incoming, returning).wait()
        total = dx.to(torch.promote_types(dx.dtype, torch.float32), copy=True)
        start = 0
        for _, rows in hop.sends:  # peers ascending: two runs add in the same order
            rows.add(total, returned[start : start + len(rows)].to(total.dtype))
            start += len(rows)
        return total.to(dx.dtype), dthrough, None, None

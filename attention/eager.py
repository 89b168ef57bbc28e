"""The operators of ring attention without torch's registry, where neither a compiler nor a mode
looks on.

Plain functions of autograd cost the host half as much, and documents that are whole on this rank
need only one of them.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from longctx.attention import operator
from longctx.attention.expansion import Compressed
from longctx.attention.inputs import Queries
from longctx.attention.keeping import kept


def ring_attention(
    queries: Queries,
    k: torch.Tensor,
    v: torch.Tensor,
    sink_logits: torch.Tensor | None,
    call: int,
    layer: int,
    after: torch.Tensor | None = None,
    compressed: Compressed | None = None,
    exchanges: bool = True,
) -> torch.Tensor:
    """As `operator.ring_attention`; with `exchanges` False, no message is sent.

    Autograd runs the gradient of `begin` last, as its node is the oldest.
    """
    if compressed is not None or not operator.unobserved(k):
        return operator.ring_attention(queries, k, v, sink_logits, call, layer, after, compressed)
    out: torch.Tensor
    if not exchanges and after is None:
        out = Whole.apply(queries(lambda x: x), k, v, sink_logits, call, layer)  # type: ignore[no-untyped-call]
        return out
    begun = Begin.apply(k, v, after, call, layer)  # type: ignore[no-untyped-call]
    out, *_ = Forward.apply(
        queries(lambda x: x), k, v, sink_logits, begun, *operator.PLAIN, call, layer
    )  # type: ignore[no-untyped-call]
    return out


class Begin(torch.autograd.Function):
    """`operator.begin` as an autograd function alone, without torch's registry of operators."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        begun = operator.begin._init_fn(*inputs)
        operator.setup_begin(ctx, inputs, begun)
        return begun

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        return operator.key_gradients(ctx, *gradients)


class Forward(torch.autograd.Function):
    """`operator.forward`, in the same way."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = operator.forward._init_fn(*inputs)
        operator.setup_context(ctx, inputs, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        return *operator.gradients(ctx, *gradients)[:5], *[None] * 6


class Whole(torch.autograd.Function):
    """`begin` and `forward` as one, unobserved and without messages."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = _whole(*inputs)
        operator.setup_context(ctx, (*inputs[:4], None, *operator.PLAIN, *inputs[4:]), output)
        return output[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        q, k, v, sink_logits, out, lse, received_rows = ctx.saved_tensors
        dout, where = dout.contiguous(), (ctx.number, ctx.layer)
        frozen = not any(ctx.needs_input_grad[1:3])
        (dq,) = operator.run(
            operator.backward,
            dout,
            q,
            k,
            v,
            out,
            lse,
            received_rows,
            frozen,
            *operator.PLAIN,
            *where,
        )
        sums = None if frozen else operator.unfinished.pop(where)
        dk, dv = (None, None) if sums is None else (sums.dk.to(k.dtype), sums.dv.to(v.dtype))
        return dq, dk, dv, operator.sink_gradient(sink_logits, dout, out, lse), None, None


@kept
@operator.watched("forward")
def _whole(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink_logits: torch.Tensor | None,
    call: int,
    layer: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Does `begin` and `forward` where no message is sent."""
    return operator.attended(
        operator.BegunForward.on(operator.find(call), k, v, layer), q, k, v, sink_logits
    )

"""The operators of ring attention without torch's dispatcher, where neither a compiler nor a mode
looks on.

Plain functions of autograd cost the host half as much, and documents that are whole on this rank
need only one of them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longctx.attention import operator
from longctx.attention.expansion import Compressed
from longctx.attention.inputs import Queries, unmarked
from longctx.attention.keeping import kept_attention


def ring_attention(
    queries: Queries,
    k: Tensor,
    v: Tensor,
    *,
    sink_logits: Tensor | None,
    attention_handle: int,
    layer: int,
    after: Tensor | None = None,
    compressed: Compressed | None = None,
    exchanges: bool = True,
) -> Tensor:
    """As `operator.ring_attention`; with `exchanges` False, no message is sent.

    Where `queries` is a function, autograd runs the gradient of `begin` last, as its node is the
    oldest. A tensor was computed before it.
    """
    if compressed is not None or not operator.bypasses_dispatcher(k):
        return operator.ring_attention(
            queries,
            k,
            v,
            sink_logits=sink_logits,
            attention_handle=attention_handle,
            layer=layer,
            after=after,
            compressed=compressed,
        )
    out: Tensor
    handles = {"attention_handle": attention_handle, "layer": layer}
    if not exchanges and after is None:
        q = queries(unmarked)
        out = LocalAttention.apply(q, k, v, sink_logits, handles)  # type: ignore[no-untyped-call]  # torch's own
        return out
    ticket = Begin.apply(k, v, after, handles)
    q = queries(unmarked)
    handles = {**handles, **operator.NO_EXPANSION_ARGUMENTS}
    out, _, _ = Forward.apply(q, k, v, sink_logits, ticket, [], [], handles)
    return out


def as_function(
    name: str,
    custom_op: Any,
    setup_context: Callable[..., None],
    gradients: Callable[..., tuple[Any, ...]],
) -> Any:
    """Returns an operator with its gradients as a function of autograd of this name: `apply` takes
    its tensors, and its keyword arguments as a dictionary after them."""

    def forward(ctx: Any, *inputs: Any) -> Any:
        *tensors, handles = inputs
        output = custom_op._init_fn(*tensors, **handles)
        setup_context(ctx, tensors, handles, output)
        return output

    @once_differentiable
    def backward(ctx: Any, *douts: Any) -> Any:
        found = gradients(ctx, *douts)
        # Lists are not seen by autograd: they are empty here.
        return *(None if isinstance(x, list) else x for x in found), None

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), methods)


Begin = as_function(
    "Begin", operator.begin, operator.setup_begin, gradients=operator.begin_gradients
)
Forward = as_function(
    "Forward", operator.forward, operator.setup_forward, gradients=operator.forward_gradients
)


class LocalAttention(torch.autograd.Function):
    """`begin` and `forward` as one, without messages."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        q, k, v, sink_logits, handles = inputs
        output = _local_attention(q, k, v, sink_logits, **handles)
        inputs = (q, k, v, sink_logits, None, [], [])
        operator.setup_forward(ctx, inputs, handles, output)
        return output[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, sink_logits, out, lse, kept_rows = ctx.saved_tensors
        dout = dout.contiguous()
        frozen = not any(ctx.needs_input_grad[1:3])
        (dq,) = operator.run(
            operator.backward,
            dout,
            q=q,
            k=k,
            v=v,
            out=out,
            lse=lse,
            kept_rows=kept_rows,
            frozen=frozen,
            rows=[],
            weights=[],
            **operator.NO_EXPANSION_ARGUMENTS,
            **ctx.handles,
        )
        dk = dv = None
        if not frozen:
            sums = operator.unfinished.pop((ctx.handles["attention_handle"], ctx.handles["layer"]))
            dk, dv = sums.dk.to(k.dtype), sums.dv.to(v.dtype)
        return dq, dk, dv, operator.sink_gradient(sink_logits, dout, out, lse), None


@kept_attention
@operator.watched("forward")
def _local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_logits: Tensor | None,
    *,
    attention_handle: int,
    layer: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Does `begin` and `forward` where no message is sent."""
    ring = operator.find(attention_handle)
    started = operator.BegunForward.on(ring, k, v, layer)
    return operator.attended(started, q, k, v, sink_logits=sink_logits)

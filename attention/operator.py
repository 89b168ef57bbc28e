"""The custom operators of ring attention in one layer, and `ring_attention`, which calls them
around the queries.

    begin     posts the first messages of K and V, which travel while the queries are computed
    forward   computes attention
    backward  computes the gradients of the queries; the gradients of K and V return beside the
              queries' own backward
    finish    waits for the gradients of K and V

They are opaque to torch.compile, and selective recomputation can keep their outputs, so attention
and its exchange never run twice. An operator takes an integer, the handle of the micro-batch's
attention: torch.compile does not guard on it, so all micro-batches share one program.

The first messages of a pass are under way once `begin` returns. Its output, the ticket, is an empty
tensor that stands for them: `forward` takes it, and its gradient tells `finish` that `backward` has
run.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from longctx.attention.expansion import Compressed, Expanding
from longctx.attention.inputs import Queries
from longctx.attention.keeping import kept, kept_attention
from longctx.attention.merge import merge_
from longctx.attention.ring_pass import Ring, RingPass, layer_name
from longctx.attention.segment_builder import Call

_live: WeakValueDictionary[int, Any] = WeakValueDictionary()
_handles = itertools.count()
NO_EXPANSION = -1
"""In place of the handle of an `Expansion`: K and V travel."""


class BegunForward(NamedTuple):
    """A forward pass whose first messages are under way, the buffer for received K and V, and the
    steps that are left."""

    ring_pass: RingPass
    kept_rows: Tensor
    steps: Iterator[tuple[Tensor | None, tuple[Call, ...]]]

    @classmethod
    def on(cls, ring: Ring, k: Tensor, v: Tensor, layer: int) -> "BegunForward":
        ring_pass = RingPass(ring, layer, name="forward", k=k, v=v)
        rows = ring_pass.schedule.received_rows if ring.keep_kv else 0
        kept_rows = k.new_empty(rows, ring_pass.width)
        steps = ring_pass.steps(k, v, kept_rows, fetch=True)
        return cls(ring_pass, kept_rows, itertools.chain([next(steps)], steps))


class Unfinished(NamedTuple):
    """A backward pass whose gradients of K and V, in the accumulation dtype, are complete after
    `end`; None: they are now."""

    ring_pass: RingPass
    dk: Tensor
    dv: Tensor
    end: Callable[[], None] | None


unfinished: dict[tuple[int, int], Unfinished] = {}
"""By attention handle and layer; keeps the attention alive until `finish`."""


def register(what: object) -> int:
    """Returns a handle for `find` while a reference to `what` exists; autograd holds one, except
    under torch.compile."""
    handle = next(_handles)
    _live[handle] = what
    return handle


def find(handle: int) -> Any:
    """Returns the object registered under `handle`; None while torch.compile traces, where the
    handle is symbolic."""
    if not isinstance(handle, int):
        return None
    if handle not in _live:
        raise RuntimeError(
            "the attention of this micro-batch was freed before backward: under torch.compile, "
            "keep a reference to it until backward is done"
        )
    return _live[handle]


def expansion_arguments(compressed: Compressed | None) -> dict[str, Any]:
    """Returns the arguments `rows`, `weights`, `expansion_handle` and `autocast` of an operator."""
    if compressed is None:
        return {"rows": [], "weights": [], **NO_EXPANSION_ARGUMENTS}
    return {
        "rows": [compressed.first, compressed.second],
        "weights": compressed.expansion.weights(),
        "expansion_handle": compressed.expansion.handle,
        "autocast": compressed.autocast,
    }


NO_EXPANSION_ARGUMENTS = {"expansion_handle": NO_EXPANSION, "autocast": False}


def _expanding(expansion_handle: int, autocast: bool) -> Expanding | None:
    """Returns the expansion that these arguments of an operator name."""
    if expansion_handle == NO_EXPANSION:
        return None
    return Expanding(find(expansion_handle), autocast)


def watched(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Runs an operator in the `watch` context of its attention."""

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def watching(*inputs: Any, attention_handle: int, layer: int, **others: Any) -> Any:
            with find(attention_handle).watch(f"attention of {layer_name(layer)}, {name} pass"):
                return run(*inputs, attention_handle=attention_handle, layer=layer, **others)

        return watching

    return decorate


class _Sent(torch.autograd.Function):
    """Returns x and the ticket. Makes `finish` depend on the gradient of x, so that backward runs
    it last.

    Autograd alone would do so too, as the node of `finish` is the oldest, but compilers reorder
    independent operations.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ticket: Tensor) -> tuple[Tensor, Tensor]:
        return x.view_as(x), ticket.view_as(ticket)

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dticket: Tensor) -> tuple[Tensor, Tensor]:
        # A DTensor with tensor parallelism.
        local = dx.to_local() if hasattr(dx, "to_local") else dx
        return dx, local.flatten()[:0]


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
) -> Tensor:
    """Returns attention [tokens, heads, v_dim] of the `queries`, which are computed after K and V
    have been sent.

    In backward dK and dV are awaited after the gradient of the queries' input, whose computation
    hides them. `after`: see `begin`. With `compressed`, this travels in place of K and V.
    """
    first, second = k, v
    if compressed is not None:
        first, second = compressed.first, compressed.second
    ticket = begin(first, second, after, attention_handle=attention_handle, layer=layer)

    def sent(x: Tensor) -> Tensor:
        nonlocal ticket
        if x.requires_grad and ticket.requires_grad:
            x, ticket = _Sent.apply(x, ticket)  # type: ignore[no-untyped-call]  # torch's own
        return x

    q = queries(sent)
    out: Tensor
    out, _, _ = forward(
        q,
        k,
        v,
        sink_logits=sink_logits,
        ticket=ticket,
        **expansion_arguments(compressed),
        attention_handle=attention_handle,
        layer=layer,
    )
    return out


@torch.library.custom_op("longctx::ring_attention_begin", mutates_args=())
@kept
@watched("forward")
def begin(
    k: Tensor, v: Tensor, after: Tensor | None, *, attention_handle: int, layer: int
) -> Tensor:
    """Posts the first messages of K and V, or of what they are computed from. Returns the ticket of
    `forward`, whose gradient stands for theirs.

    `after` is an empty tensor of another exchange that must come before this one, and after it in
    backward, on every rank: compilers move what does not depend on each other.
    """
    ring = find(attention_handle)
    ring.begun[layer] = BegunForward.on(ring, k, v, layer)
    return k.new_empty(0)


@torch.library.custom_op("longctx::ring_attention", mutates_args=())
@kept_attention
@watched("forward")
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_logits: Tensor | None,
    ticket: Tensor,
    rows: list[Tensor],
    weights: list[Tensor],
    *,
    expansion_handle: int,
    autocast: bool,
    attention_handle: int,
    layer: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns out [tokens, heads, v_dim], lse [tokens, heads] and the received K and V [rows,
    width].

    The last one is empty without keep_kv. `ticket` is the output of `begin`. `layer` is NO_LAYER if
    unknown. With an expansion, its `rows` were sent in place of K and V, and its `weights` get
    gradients.
    """
    started: BegunForward = find(attention_handle).begun.pop(layer)
    started.ring_pass.expanding = _expanding(expansion_handle, autocast)
    return attended(started, q, k, v, sink_logits=sink_logits)


def attended(
    started: BegunForward, q: Tensor, k: Tensor, v: Tensor, *, sink_logits: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the results of `forward` once K and V are on their way."""
    ring_pass, kept_rows, steps = started
    result: tuple[Tensor, Tensor] | None = None
    for received, calls in steps:
        for call in calls:
            part, part_lse = ring_pass.forward(q, k, v, received=received, call=call)
            if result is None:
                result = ring_pass.widened(part), part_lse
            else:
                out, lse = result
                merge_(out, lse, part=part, part_lse=part_lse, segments=call.segments)
        del received  # holds at most the rows of this round and the next one
    if result is None:  # this rank has no tokens in this micro-batch
        result = ring_pass.forward(q, k, v, received=None, call=Call(None, ()))
    out, lse = result
    if sink_logits is not None:
        total = torch.logaddexp(lse, sink_logits.to(lse.dtype))
        share = (lse - total).exp_()
        out, lse = out * share.unsqueeze(-1), total
    return out.to(q.dtype), lse, kept_rows


@torch.library.custom_op("longctx::ring_attention_backward", mutates_args=())
@watched("backward")
def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kept_rows: Tensor,
    frozen: bool,
    rows: list[Tensor],
    weights: list[Tensor],
    *,
    expansion_handle: int,
    autocast: bool,
    attention_handle: int,
    layer: int,
) -> list[Tensor]:
    """Returns dq. Runs the calls of the forward pass with the final out and log-sum-exp; `finish`
    returns dk and dv.

    With `frozen` K and V, which need no gradient, it waits for the gradients of other ranks itself:
    `finish` is not called. With an expansion, also returns dk and dv of this rank's own keys and
    the gradients of the weights; `finish` then returns the gradients of the rows that other ranks
    attended to.

    Without a soft cap, P = exp(scale · q kᵀ - lse) and dS = P ∘ (dout vᵀ - Σ dout ∘ out) give dq =
    scale · dS k, dk = scale · dSᵀ q and dv = Pᵀ dout, summed over the calls in the dtype of lse;
    gradients of remote rows travel in q's dtype.
    """
    sent_k, sent_v = rows if rows else (k, v)
    ring_pass = RingPass(find(attention_handle), layer, name="backward", k=sent_k, v=sent_v)
    ring_pass.expanding = _expanding(expansion_handle, autocast)
    sums = list[Tensor]()  # dq, dk and dv of this rank's own keys
    of_rows = ring_pass.zeros(rows)
    round_numbers = itertools.count()
    returning = list[Iterator[None]]()
    steps = ring_pass.steps(sent_k, sent_v, kept_rows, fetch=not ring_pass.ring.keep_kv)
    for received, calls in steps:
        remote = None if received is None else ring_pass.zeros_for(received, calls)
        for call in calls:
            gradients = ring_pass.backward(
                dout, q, k, v, out=out, lse=lse, received=received, call=call
            )
            if not sums and call.in_place:  # local keys come first, if there are any
                sums = [ring_pass.widened(gradient).contiguous() for gradient in gradients]
                continue
            sums = sums or ring_pass.zeros([q, k, v])
            _add_call(sums, gradients, call, remote=remote)
        if remote is not None:
            sums = sums or ring_pass.zeros([q, k, v])  # of a rank that has keys, but no queries
            dk, dv = of_rows or sums[1:]
            back = ring_pass.send_back(next(round_numbers), remote.to(k.dtype), dk=dk, dv=dv)
            # Each computed round advances the returns by one hop: this hides messages and bounds
            # those in flight.
            returning = _advanced([back, *returning])
        del received, remote
    dq, dk, dv = sums or ring_pass.zeros([q, k, v])
    if frozen:
        _finish_all(returning)
    else:
        end = None
        if returning:
            end = ring_pass.exchange.beside(functools.partial(_finish_all, returning), k.device)
        row_dk, row_dv = of_rows or (dk, dv)
        unfinished[attention_handle, layer] = Unfinished(ring_pass, row_dk, row_dv, end)
    if ring_pass.expanding is None:
        return [dq.to(q.dtype)]
    totals = [dq, dk, dv, *ring_pass.expanding.sums_for(weights)]
    return [total.to(x.dtype) for total, x in zip(totals, [q, k, v, *weights], strict=True)]


@torch.library.custom_op("longctx::ring_attention_finish", mutates_args=())
@watched("backward")
def finish(
    ticket: Tensor, k: Tensor, v: Tensor, *, attention_handle: int, layer: int
) -> tuple[Tensor, Tensor]:
    """Returns dk and dv once the gradients from other ranks are added. `ticket`: the ticket's
    gradient."""
    left = unfinished.pop((attention_handle, layer))
    if left.end is not None:
        left.end()
    return left.dk.to(k.dtype), left.dv.to(v.dtype)


def _add_call(
    sums: list[Tensor],
    gradients: tuple[Tensor, Tensor, Tensor],
    call: Call,
    *,
    remote: Tensor | None,
) -> None:
    """Adds a call's dq, dk and dv to `sums`; dk and dv of received rows to `remote` [rows, width]
    instead."""
    dq, dk, dv = gradients
    sums[0] += dq
    if call.rows is None:
        sums[1] += dk
        sums[2] += dv
        return
    if remote is None:
        call.rows.add(sums[1], dk.to(sums[1].dtype))
        call.rows.add(sums[2], dv.to(sums[2].dtype))
        return
    packed = torch.cat([dk.flatten(1), dv.flatten(1)], dim=1).to(remote.dtype)
    if call.again:
        call.rows.add(remote, packed)
    else:
        call.rows.write(remote, packed)


def _advanced(returning: list[Iterator[None]]) -> list[Iterator[None]]:
    """Advances each iterator by one step, in the same order on every rank, and returns the
    unfinished ones."""
    return [hops for hops in returning if next(hops, DONE) is not DONE]


def _finish_all(returning: list[Iterator[None]]) -> None:
    """Posts the hops that are left, and adds what they return to the gradients of K and V."""
    while returning:
        returning = _advanced(returning)


DONE = object()


@begin.register_fake
def _(k: Tensor, v: Tensor, after: Tensor | None, **handles: Any) -> Tensor:
    return k.new_empty(0)


@forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_logits: Tensor | None,
    ticket: Tensor,
    rows: list[Tensor],
    weights: list[Tensor],
    **handles: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    received = torch.library.get_ctx().new_dynamic_size()
    kept_rows = k.new_empty(received, sum(sent.shape[1:].numel() for sent in rows or [k, v]))
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2]), lse, kept_rows


@backward.register_fake
def _(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kept_rows: Tensor,
    frozen: bool,
    rows: list[Tensor],
    weights: list[Tensor],
    **handles: Any,
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in ([q, k, v, *weights] if rows else [q])]


@finish.register_fake
def _(ticket: Tensor, k: Tensor, v: Tensor, **handles: Any) -> tuple[Tensor, Tensor]:
    return k.new_empty(k.shape), v.new_empty(v.shape)


Handles = Mapping[str, Any]
"""The keyword arguments of an operator, which are no tensors: of `forward` and of its `backward`,
and of `begin` and its `finish`, they are the same."""


def setup_begin(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Handles, output: Tensor
) -> None:
    """Saves what `begin_gradients` needs."""
    k, v, _ = inputs
    ctx.handles = keyword_only_inputs
    ctx.save_for_backward(k, v)


def begin_gradients(ctx: Any, dticket: Tensor) -> tuple[Tensor | None, ...]:
    """Returns the gradients of `begin`'s tensors: calls `finish`."""
    k, v = ctx.saved_tensors
    dk, dv = run(finish, dticket, k, v, **ctx.handles)
    return dk, dv, dk[:0].flatten() if ctx.needs_input_grad[2] else None


def setup_forward(
    ctx: Any,
    inputs: tuple[Any, ...],
    keyword_only_inputs: Handles,
    output: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Saves what `forward_gradients` needs."""
    q, k, v, sink_logits, _, rows, weights = inputs
    ctx.handles = keyword_only_inputs
    ctx.rows = len(rows)
    saved = [q, k, v, sink_logits, *output, *rows, *weights]
    ctx.save_for_backward(*saved)
    ctx.alive = find(keyword_only_inputs["attention_handle"])
    # Otherwise torch allocates zero gradients as large as the kept K and V.
    ctx.set_materialize_grads(False)


def forward_gradients(ctx: Any, dout: Tensor, dlse: None, dkept: None) -> tuple[Any, ...]:
    """Returns the gradients of `forward`'s tensors: calls `backward`."""
    q, k, v, sink_logits, out, lse, kept_rows, *others = ctx.saved_tensors
    rows, weights = others[: ctx.rows], others[ctx.rows :]
    dout = dout.contiguous()
    dq, *gradients = run(
        backward,
        dout,
        q=q,
        k=k,
        v=v,
        out=out,
        lse=lse,
        kept_rows=kept_rows,
        frozen=not ctx.needs_input_grad[4],
        rows=rows,
        weights=weights,
        **ctx.handles,
    )
    dticket = dq[:0].flatten().to(k.dtype)  # of dq, so that no compiler moves `finish` before
    dsink = sink_gradient(sink_logits, dout, out, lse)
    dk, dv, *of_weights = gradients or (None, None)
    return dq, dk, dv, dsink, dticket, [None] * len(rows), of_weights


begin.register_autograd(begin_gradients, setup_context=setup_begin)
forward.register_autograd(forward_gradients, setup_context=setup_forward)


def sink_gradient(
    sink_logits: Tensor | None, dout: Tensor, out: Tensor, lse: Tensor
) -> Tensor | None:
    if sink_logits is None:
        return None
    shares = (sink_logits.to(lse.dtype) - lse).exp()
    return -(shares * (dout * out).sum(-1, dtype=lse.dtype)).sum(0).to(sink_logits.dtype)


def bypasses_dispatcher(x: Tensor) -> bool:
    """Returns whether torch's dispatcher can be skipped: not compiling, no dispatch mode, a plain
    tensor."""
    return (
        not torch.compiler.is_compiling()
        and type(x) is Tensor
        and _get_current_dispatch_mode() is None
    )


def run(operator: Any, first: Tensor, *others: Any, **named: Any) -> Any:
    """Runs an operator, without torch's dispatcher if `first` bypasses it."""
    function = operator._init_fn if bypasses_dispatcher(first) else operator
    return function(first, *others, **named)


OPERATORS = [
    torch.ops.longctx.ring_attention_begin.default,
    torch.ops.longctx.ring_attention.default,
]
"""The operators that exchange messages in forward."""

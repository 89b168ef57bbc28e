"""The custom operators of ring attention in one layer, and `ring_attention`, which calls them
around the queries.

    begin     posts the first messages of K and V, which travel while the queries are computed
    forward   computes attention
    backward  computes the gradients of the queries; those of K and V return beside the
              queries' own backward
    finish    waits for them

They are opaque to torch.compile, and selective recomputation can keep their outputs, so attention
and its exchange never run twice. Schedule, communicator and kernel of a micro-batch are looked up
by a number, because an integer passes through compilation without a guard on the micro-batch.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from longctx.attention.expansion import Compressed, Expanding
from longctx.attention.inputs import Queries
from longctx.attention.keeping import kept
from longctx.attention.merge import merge_
from longctx.attention.ring_pass import Ring, RingPass, layer_name
from longctx.attention.segment_builder import Call

_live: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = itertools.count()
NO_EXPANSION = -1
"""In place of the number of an `Expansion`: K and V travel."""
PLAIN: tuple[Any, ...] = [], [], NO_EXPANSION, False
"""Arguments of `forward` without an expansion."""


class BegunForward(NamedTuple):
    """A forward pass whose first messages are under way, the buffer for received K and V, and the
    steps that are left."""

    this: RingPass
    kept: Tensor
    steps: Iterator[tuple[Tensor | None, tuple[Call, ...]]]

    @classmethod
    def on(cls, ring: Ring, k: Tensor, v: Tensor, layer: int) -> "BegunForward":
        this = RingPass(ring, layer, "forward", k, v)
        kept = k.new_empty(this.schedule.received_rows if ring.keep_kv else 0, this.width)
        steps = this.steps(k, v, kept, fetch=True)
        return cls(this, kept, itertools.chain([next(steps)], steps))


class Unfinished(NamedTuple):
    """A backward pass whose gradients of K and V, in the accumulation dtype, are complete after
    `end`; None: they are now."""

    this: RingPass
    dk: Tensor
    dv: Tensor
    end: Callable[[], None] | None


unfinished: dict[tuple[int, int], Unfinished] = {}
"""By number and layer; keeps the attention alive until `finish`."""


def register(what: object) -> int:
    """Returns a number for `find` while a reference to `what` exists; autograd holds one, except
    under torch.compile."""
    number = next(_numbers)
    _live[number] = what
    return number


def find(number: int) -> Any:
    """Returns the object registered under `number`; None while torch.compile traces, where the
    number is symbolic."""
    if not isinstance(number, int):
        return None
    if number not in _live:
        raise RuntimeError(
            "the attention of this micro-batch was freed before backward: under torch.compile, "
            "keep a reference to it until "
            "backward is done"
        )
    return _live[number]


def watched(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Runs an operator in the `watch` context of its attention."""

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def watching(*arguments: Any) -> Any:
            call, layer = arguments[-2:]
            with find(call).watch(f"attention of {layer_name(layer)}, {name} pass"):
                return run(*arguments)

        return watching

    return decorate


class _Sent(torch.autograd.Function):
    """Returns x and `begun`. Makes `finish` depend on the gradient of x, so that backward runs it
    last.

    Autograd alone would do so too, as the node of `finish` is the oldest, but compilers reorder
    independent operations.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, begun: Tensor) -> tuple[Tensor, Tensor]:
        return x.view_as(x), begun.view_as(begun)

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dbegun: Tensor) -> tuple[Tensor, Tensor]:
        # A DTensor with tensor parallelism.
        local = dx.to_local() if hasattr(dx, "to_local") else dx
        return dx, local.flatten()[:0]


def ring_attention(
    queries: Queries,
    k: Tensor,
    v: Tensor,
    sink_logits: Tensor | None,
    call: int,
    layer: int,
    after: Tensor | None = None,
    compressed: Compressed | None = None,
) -> Tensor:
    """Returns attention [tokens, heads, v_dim] of the `queries`, which are computed after K and V
    have been sent.

    Backward waits for the gradients of K and V after that of the input of `queries`. `after`: see
    `begin`. With `compressed`, this travels in place of K and V.
    """
    begun = begin(*((k, v) if compressed is None else compressed[:2]), after, call, layer)

    def sent(x: Tensor) -> Tensor:
        nonlocal begun
        if x.requires_grad and begun.requires_grad:
            x, begun = _Sent.apply(x, begun)  # type: ignore[no-untyped-call]  # torch's own
        return x

    q = queries(sent)
    how = PLAIN
    if compressed is not None:
        expansion, sent_rows = compressed.expansion, [*compressed[:2]]
        how = sent_rows, expansion.weights(), expansion.number, compressed.autocast
    out: Tensor = forward(q, k, v, sink_logits, begun, *how, call, layer)[0]
    return out


@torch.library.custom_op("longctx::ring_attention_begin", mutates_args=())
@kept
@watched("forward")
def begin(k: Tensor, v: Tensor, after: Tensor | None, call: int, layer: int) -> Tensor:
    """Posts the first messages of K and V, or of what they are computed from. Returns an empty
    tensor, whose gradient in `forward` stands for theirs.

    `after` is an empty tensor of another exchange that must come before this one, and after it in
    backward, on every rank: compilers move what does not depend on each other.
    """
    ring = find(call)
    ring.begun[layer] = BegunForward.on(ring, k, v, layer)
    return k.new_empty(0)


@torch.library.custom_op("longctx::ring_attention", mutates_args=())
@kept
@watched("forward")
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_logits: Tensor | None,
    begun: Tensor,
    rows: list[Tensor],
    weights: list[Tensor],
    expansion: int,
    autocast: bool,
    call: int,
    layer: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns out [tokens, heads, v_dim], lse [tokens, heads] and the received K and V [rows,
    width].

    The last one is empty without keep_kv. `begun` is the output of `begin`. `layer` is NO_LAYER if
    unknown. With the number of an `expansion`, its `rows` were sent in place of K and V, and its
    `weights` get gradients.
    """
    started: BegunForward = find(call).begun.pop(layer)
    started.this.expanding = (
        None if expansion == NO_EXPANSION else Expanding(find(expansion), autocast)
    )
    return attended(started, q, k, v, sink_logits)


def attended(
    started: BegunForward, q: Tensor, k: Tensor, v: Tensor, sink_logits: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the results of `forward` once K and V are on their way."""
    this, received_rows, steps = started
    result: tuple[Tensor, Tensor] | None = None
    for received, calls in steps:
        for part in calls:
            partial = this.forward(q, k, v, received, part)
            if result is None:
                result = this.widened(partial[0]), partial[1]
            else:
                merge_(*result, *partial, part.segments)
        del received  # holds at most the rows of this round and the next one
    if result is None:  # this rank has no tokens in this micro-batch
        result = this.forward(q, k, v, None, Call(None, ()))
    out, lse = result
    if sink_logits is not None:
        total = torch.logaddexp(lse, sink_logits.to(lse.dtype))
        out, lse = out * (lse - total).exp_().unsqueeze(-1), total
    return out.to(q.dtype), lse, received_rows


@torch.library.custom_op("longctx::ring_attention_backward", mutates_args=())
@watched("backward")
def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kept: Tensor,
    frozen: bool,
    rows: list[Tensor],
    weights: list[Tensor],
    expansion: int,
    autocast: bool,
    call: int,
    layer: int,
) -> list[Tensor]:
    """Returns dq. Runs the calls of the forward pass with the final out and log-sum-exp; `finish`
    returns dk and dv.

    With `frozen` K and V, which need no gradient, it waits for the gradients of other ranks itself:
    `finish` is not called. With an `expansion`, also returns dk and dv of this rank's own keys and
    the gradients of the weights; `finish` then returns those of the rows that other ranks attended
    to.

    Without a soft cap, P = exp(scale · q kᵀ - lse) and dS = P ∘ (dout vᵀ - Σ dout ∘ out) give dq =
    scale · dS k, dk = scale · dSᵀ q and dv = Pᵀ dout, summed over the calls in the dtype of lse;
    those of remote rows travel in q's dtype.
    """
    sent = (rows[0], rows[1]) if rows else (k, v)
    this = RingPass(find(call), layer, "backward", *sent)
    this.expanding = None if expansion == NO_EXPANSION else Expanding(find(expansion), autocast)
    sums, of_rows = list[Tensor](), this.zeros(*rows)
    round_numbers, returning = itertools.count(), list[Iterator[None]]()
    for received, calls in this.steps(*sent, kept, fetch=not this.ring.keep_kv):
        remote = None if received is None else this.zeros_for(received, calls)
        for part in calls:
            gradients = this.backward(dout, q, k, v, out, lse, received, part)
            if not sums and remote is None:  # local keys come first, if there are any
                sums = [this.widened(gradient).contiguous() for gradient in gradients]
                continue
            sums = sums or this.zeros(q, k, v)
            _add_call(sums, remote, part, *gradients)
        if remote is not None:
            sums = sums or this.zeros(q, k, v)  # of a rank that has keys, but no queries
            # Each computed round advances the returns by one hop: this hides messages and bounds
            # those in flight.
            returning = _advanced(
                [
                    this.send_back(next(round_numbers), remote.to(k.dtype), *(of_rows or sums[1:])),
                    *returning,
                ]
            )
        del received, remote
    dq, dk, dv = sums or this.zeros(q, k, v)
    if frozen:
        _finish_all(returning)
    else:
        end = (
            this.exchange.beside(functools.partial(_finish_all, returning), k.device)
            if returning
            else None
        )
        own_rows = (of_rows[0], of_rows[1]) if of_rows else (dk, dv)
        unfinished[call, layer] = Unfinished(this, *own_rows, end)
    if this.expanding is None:
        return [dq.to(q.dtype)]
    summed = zip([dq, dk, dv, *this.expanding.sums_for(weights)], [q, k, v, *weights], strict=True)
    return [total.to(each.dtype) for total, each in summed]


@torch.library.custom_op("longctx::ring_attention_finish", mutates_args=())
@watched("backward")
def finish(begun: Tensor, k: Tensor, v: Tensor, call: int, layer: int) -> tuple[Tensor, Tensor]:
    """Returns dk and dv once those of other ranks are added. `begun` is the gradient of what
    `begin` returns."""
    left = unfinished.pop((call, layer))
    if left.end is not None:
        left.end()
    return left.dk.to(k.dtype), left.dv.to(v.dtype)


def _add_call(
    sums: list[Tensor], remote: Tensor | None, part: Call, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """Adds a call's gradients to `sums` of dq, dk and dv; dk and dv of received rows to `remote`
    [rows, width] instead."""
    sums[0] += dq
    if remote is None or part.rows is None:
        sums[1] += dk
        sums[2] += dv
        return
    packed = torch.cat([dk.flatten(1), dv.flatten(1)], dim=1).to(remote.dtype)
    if part.again:
        part.rows.add(remote, packed)
    else:
        part.rows.write(remote, packed)


def _advanced(returning: list[Iterator[None]]) -> list[Iterator[None]]:
    """Advances each iterator by one step, in the same order on every rank, and returns those that
    are not finished."""
    return [hops for hops in returning if next(hops, DONE) is not DONE]


def _finish_all(returning: list[Iterator[None]]) -> None:
    """Posts the hops that are left, and adds the gradients that they return to those of K and V."""
    while returning:
        returning = _advanced(returning)


DONE = object()


@begin.register_fake
def _(k: Tensor, v: Tensor, after: Tensor | None, call: int, layer: int) -> Tensor:
    return k.new_empty(0)


@forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_logits: Tensor | None,
    begun: Tensor,
    rows: list[Tensor],
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    received = torch.library.get_ctx().new_dynamic_size()
    kept = k.new_empty(received, sum(each.shape[1:].numel() for each in rows or [k, v]))
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2]), lse, kept


@backward.register_fake
def _(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    kept: Tensor,
    *others: Any,
) -> list[Tensor]:
    _, rows, weights, *_ = others
    return [each.new_empty(each.shape) for each in ([q, k, v, *weights] if rows else [q])]


@finish.register_fake
def _(begun: Tensor, k: Tensor, v: Tensor, call: int, layer: int) -> tuple[Tensor, Tensor]:
    return k.new_empty(k.shape), v.new_empty(v.shape)


def setup_begin(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    k, v, _, ctx.number, ctx.layer = inputs
    ctx.save_for_backward(k, v)


def key_gradients(ctx: Any, begun: Tensor) -> tuple[Tensor | None, ...]:
    """Gradient of `begin`: calls `finish`."""
    dk, dv = run(finish, begun, *ctx.saved_tensors, ctx.number, ctx.layer)
    return dk, dv, dk[:0].flatten() if ctx.needs_input_grad[2] else None, None, None


begin.register_autograd(key_gradients, setup_context=setup_begin)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, sink_logits, _, rows, weights, *ctx.expansion, ctx.number, ctx.layer = inputs
    ctx.rows = len(rows)
    ctx.save_for_backward(q, k, v, sink_logits, *output, *rows, *weights)
    ctx.alive = find(ctx.number)
    # Otherwise torch allocates zero gradients as large as the kept K and V.
    ctx.set_materialize_grads(False)


def gradients(ctx: Any, dout: Tensor, dlse: None, dkept: None) -> tuple[Any, ...]:
    q, k, v, sink_logits, out, lse, kept, *others = ctx.saved_tensors
    rows, weights = others[: ctx.rows], others[ctx.rows :]
    dout, how = dout.contiguous(), (rows, weights, *ctx.expansion, ctx.number, ctx.layer)
    dq, *gradients = run(backward, dout, q, k, v, out, lse, kept, not ctx.needs_input_grad[4], *how)
    begun = dq[:0].flatten().to(k.dtype)  # of dq, so that no compiler moves `finish` before
    dsink = sink_gradient(sink_logits, dout, out, lse)
    dk, dv, *of_weights = gradients or (None, None)
    return dq, dk, dv, dsink, begun, [None] * len(rows), of_weights, None, None, None, None


forward.register_autograd(gradients, setup_context=setup_context)


def sink_gradient(
    sink_logits: Tensor | None, dout: Tensor, out: Tensor, lse: Tensor
) -> Tensor | None:
    if sink_logits is None:
        return None
    shares = (sink_logits.to(lse.dtype) - lse).exp()
    return -(shares * (dout * out).sum(-1, dtype=lse.dtype)).sum(0).to(sink_logits.dtype)


def unobserved(x: Tensor) -> bool:
    """Returns whether nothing needs the registered operators: no compiler, no mode that sees
    operations, no kind of tensor."""
    return (
        not torch.compiler.is_compiling()
        and type(x) is Tensor
        and _get_current_dispatch_mode() is None
    )


def run(operator: Any, *arguments: Any) -> Any:
    """Runs an operator, without torch's registry if it is `unobserved`."""
    return operator._init_fn(*arguments) if unobserved(arguments[0]) else operator(*arguments)


OPERATORS = [
    torch.ops.longctx.ring_attention_begin.default,
    torch.ops.longctx.ring_attention.default,
]
"""Those that exchange messages in forward."""

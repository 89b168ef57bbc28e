"""The custom operator `longctx::ring_attention` and its backward: ring attention of one layer.

It is opaque to torch.compile, and selective recomputation can keep its outputs, so attention and its exchange never run twice.
Schedule, communicator and kernel of a micro-batch are looked up by a number, because an integer passes through compilation
without a guard on the micro-batch.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from longctx.attention.exchange import Exchange
from longctx.attention.kernels import Kernel, Mode, Request, choose_kernel
from longctx.attention.merge import merge_
from longctx.attention.ring_schedule import ExchangeStage, Hop, Schedule
from longctx.attention.segment_builder import Call


class Ring(Protocol):
    """The attributes of `RingAttention` that the operator uses."""

    schedule: Schedule
    exchange: Callable[[dist.ProcessGroup | None, str], Exchange]
    watch: Callable[[str], AbstractContextManager[object]]
    group: dist.ProcessGroup | None
    scale: float | None
    softcap: float
    kernel: str
    keep_kv: bool
    deterministic: bool
    last: str


_live: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = itertools.count()
NO_LAYER = -1


def layer_name(layer: int) -> str:
    """Formats a layer number for messages."""
    return "an unknown layer" if layer == NO_LAYER else f"layer {layer}"


def register(what: object) -> int:
    """Returns a number for `find` while a reference to `what` exists; autograd holds one, except under torch.compile."""
    number = next(_numbers)
    _live[number] = what
    return number


def find(number: int) -> Any:
    """Returns the object registered under `number`; None while torch.compile traces, where the number is symbolic."""
    if not isinstance(number, int):
        return None
    if number not in _live:
        raise RuntimeError(
            "the attention of this micro-batch was freed before backward: under torch.compile, keep a reference to it until "
            "backward is done"
        )
    return _live[number]


def _watched(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Runs an operator in the `watch` context of its attention."""

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def watched(*arguments: Any) -> Any:
            call, layer = arguments[-2:]
            with find(call).watch(f"attention of {layer_name(layer)}, {name} pass"):
                return run(*arguments)

        return watched

    return decorate


@torch.library.custom_op("longctx::ring_attention", mutates_args=())
@_watched("forward")
def forward(
    q: Tensor, k: Tensor, v: Tensor, sink_logits: Tensor | None, call: int, layer: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns out [tokens, heads, v_dim], lse [tokens, heads] and the received K and V [rows, width].

    The last one is empty without keep_kv. `layer` is for messages, NO_LAYER if unknown.
    """
    this = _Pass(find(call), layer, "forward", q, k, v)
    kept = k.new_empty(this.schedule.received_rows if this.call.keep_kv else 0, this.width)
    result: tuple[Tensor, Tensor] | None = None
    for received, calls in this.steps(k, v, kept, fetch=True):
        for part in calls:
            partial = this.kernel.forward(
                q, *this.keys(k, v, received, part), part.segments, this.scale, this.call.softcap, this.mode
            )
            if result is None:
                result = this.widened(partial[0]), partial[1]
            else:
                merge_(*result, *partial, part.segments)
        del received  # holds at most the rows of this stage and the next one
    if result is None:  # this rank has no tokens in this micro-batch
        result = this.kernel.forward(q, k, v, (), this.scale, mode=this.mode)
    out, lse = result
    if sink_logits is not None:
        total = torch.logaddexp(lse, sink_logits.to(lse.dtype))
        out, lse = out * (lse - total).exp_().unsqueeze(-1), total
    return out.to(q.dtype), lse, kept


@torch.library.custom_op("longctx::ring_attention_backward", mutates_args=())
@_watched("backward")
def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: Tensor, call: int, layer: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq, dk and dv. Runs the calls of the forward pass with the final out and log-sum-exp.

    Without a soft cap, P = exp(scale · q kᵀ - lse) and dS = P ∘ (dout vᵀ - Σ dout ∘ out) give dq = scale · dS k,
    dk = scale · dSᵀ q and dv = Pᵀ dout, summed over the calls in the dtype of lse. Gradients of remote rows return to their
    owners in the compute dtype.
    """
    this = _Pass(find(call), layer, "backward", q, k, v)
    sums: list[Tensor] = []
    stage_numbers = itertools.count()
    returning: list[Iterator[None]] = []
    for received, calls in this.steps(k, v, kept, fetch=not this.call.keep_kv):
        remote = None if received is None else this.zeros_for(received, calls)
        for part in calls:
            gradients = this.kernel.backward(
                dout, q, *this.keys(k, v, received, part), out, lse, part.segments, this.scale, this.call.softcap, this.mode
            )
            if sums:
                _add_call(sums, remote, part, *gradients)
            else:  # every rank with tokens has local keys, which come first
                sums = [this.widened(gradient).contiguous() for gradient in gradients]
        if remote is not None:
            # Each computed stage advances the returns by one hop: this hides messages and bounds those in flight.
            returning = _advanced([this.give_back(next(stage_numbers), remote.to(k.dtype), *sums[1:]), *returning])
        del received, remote
    while returning:
        returning = _advanced(returning)
    if not sums:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    return sums[0].to(q.dtype), sums[1].to(k.dtype), sums[2].to(v.dtype)


def _add_call(sums: list[Tensor], remote: Tensor | None, part: Call, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Adds a call's gradients to `sums` of dq, dk and dv; dk and dv of received rows to `remote` [rows, width] instead."""
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
    """Advances each iterator by one step, in the same order on every rank, and returns those that are not finished."""
    return [hops for hops in returning if next(hops, DONE) is not DONE]


DONE = object()


class _Pass:
    """One forward or backward pass of one layer on this rank: its exchange, and the keys of each call."""

    def __init__(self, call: Ring, layer: int, name: str, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.call, self.schedule = call, call.schedule
        call.last = f"{layer_name(layer)}, {name} pass"
        self.exchange = call.exchange(call.group, f"micro-batch {call.schedule.layout.micro_batch}, {call.last}")
        self.in_flight = 0  # exchanges that were started and not waited for
        request = Request(
            q.device.type,
            q.dtype,
            q.shape[-1],
            v.shape[-1],
            bands=self.schedule.bands,
            softcap=bool(call.softcap),
            deterministic=call.deterministic,
        )
        self.kernel: Kernel = choose_kernel(call.kernel, request)
        self.scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
        self.k_shape, self.v_shape = k.shape[1:], v.shape[1:]
        self.width = self.k_shape.numel() + self.v_shape.numel()
        self.sum_dtype = torch.promote_types(q.dtype, torch.float32)

    @property
    def mode(self) -> Mode:
        """How a kernel call runs now."""
        return Mode(self.call.deterministic, overlapped=self.in_flight > 0)

    def widened(self, x: Tensor) -> Tensor:
        """Returns `x` in the accumulation dtype if anything will be added to it."""
        return x.to(self.sum_dtype) if len(self.schedule.calls) > 1 or self.schedule.stages else x

    def zeros_for(self, received: Tensor, calls: tuple[Call, ...]) -> Tensor:
        """Returns zeros for the gradients of received rows; in the accumulation dtype if several calls may add to a row."""
        several = any(part.again for part in calls)
        return torch.zeros_like(received, dtype=self.sum_dtype if several else received.dtype)

    def keys(self, k: Tensor, v: Tensor, received: Tensor | None, part: Call) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of a call: this rank's own, or those selected from the received rows [rows, width]."""
        if part.rows is None or received is None:
            return k, v
        k, v = part.rows.read(received).split([self.k_shape.numel(), self.v_shape.numel()], dim=1)
        return k.unflatten(1, self.k_shape), v.unflatten(1, self.v_shape)

    def steps(self, k: Tensor, v: Tensor, kept: Tensor, *, fetch: bool) -> Iterator[tuple[Tensor | None, tuple[Call, ...]]]:
        """Yields (None, calls on local keys), then for each stage (received rows, its calls).

        The messages of each step are posted before the previous step is computed, so that computation hides them. With keep_kv,
        rows are received into `kept`; without `fetch`, they are already there.
        """
        stages = self.schedule.stages
        if not fetch or not stages:
            yield None, self.schedule.local
            yield from zip(kept.split([stage.received_rows for stage in stages]), (s.calls for s in stages), strict=True)
            return
        kv = torch.cat([k.flatten(1), v.flatten(1)], dim=1)
        buffers = kept.split([stage.received_rows for stage in stages]) if self.call.keep_kv else [None] * len(stages)
        under_way = {n: self._fetch(*each, kv) for n, each in enumerate(zip(stages, buffers, strict=True))}
        two_levels = self.schedule.two_levels
        for number in range(len(stages) + 1):
            # All ranks post first hops at the same point, whatever documents they hold, so that messages match in order.
            if number < len(stages) and (number == 0 or not two_levels or len(stages[number].hops) > 1):
                next(under_way[number])
            if number + 1 < len(stages) and two_levels:
                next(under_way[number + 1])
            if number == 0:
                yield None, self.schedule.local
            else:
                yield next(under_way.pop(number - 1)), stages[number - 1].calls

    def _fetch(self, stage: ExchangeStage, buffer: Tensor | None, kv: Tensor) -> Iterator[Tensor | None]:
        """Posts the first hop, then the second hop if one exists, and finally yields the received rows."""
        incoming = kv.new_empty(stage.received_rows, self.width) if buffer is None else buffer
        parts = incoming.split([hop.received_rows for hop in stage.hops])
        source = kv
        for hop, part in zip(stage.hops, parts, strict=True):
            # Only `pending` holds copies of sent rows, so they are freed once the messages have arrived.
            pending = self.exchange.start([(peer, rows.read(source)) for peer, rows in hop.sends], part, hop.receives)
            self.in_flight += 1
            yield None
            source = pending.wait()
            self.in_flight -= 1
        yield incoming

    def give_back(self, number: int, gradients: Tensor, dk: Tensor, dv: Tensor) -> Iterator[None]:
        """Sends the gradients of a stage's received rows back the same way, and adds the returned gradients to dk and dv.

        Posts one hop per step: the last hop immediately, the first hop one step later if two hops are possible. Several
        gradients of one row are added in ascending order of peers.
        """
        stage = self.schedule.stages[number]
        if self.schedule.two_levels and number > 0 and len(stage.hops) == 1:
            yield
        parts = list(gradients.split([hop.received_rows for hop in stage.hops]))
        while parts:
            hop, part = stage.hops[len(parts) - 1], parts.pop()
            outgoing = list(zip((peer for peer, _ in hop.receives), part.split([n for _, n in hop.receives]), strict=True))
            rows = [(peer, len(sent)) for peer, sent in hop.sends]
            pending = self.exchange.start(outgoing, part.new_empty(hop.sent_rows, part.shape[1]), rows)
            self.in_flight += 1
            yield
            returned = pending.wait()
            self.in_flight -= 1
            if parts:
                total = parts[-1].to(self.sum_dtype)
                self._add(hop, returned, total)
                parts[-1] = total.to(part.dtype)
            else:
                width = self.k_shape.numel()
                self._add(hop, returned[:, :width], dk.flatten(1))
                self._add(hop, returned[:, width:], dv.flatten(1))

    def _add(self, hop: Hop, returned: Tensor, total: Tensor) -> None:
        """Adds returned gradients to the rows of `total` that were sent, in place."""
        for (_, rows), part in zip(hop.sends, returned.split([len(rows) for _, rows in hop.sends]), strict=True):
            rows.add(total, part.to(total.dtype))


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sink_logits: Tensor | None, call: int, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    rows = torch.library.get_ctx().new_dynamic_size()
    kept = k.new_empty(rows, k.shape[1] * (k.shape[2] + v.shape[2]))
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2]), lse, kept


@backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kept: Tensor, call: int, layer: int
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, sink_logits, ctx.number, ctx.layer = inputs
    ctx.save_for_backward(q, k, v, sink_logits, *output)
    ctx.alive = find(ctx.number)
    ctx.set_materialize_grads(False)  # otherwise torch allocates zero gradients as large as the kept K and V


def _gradients(ctx: Any, dout: Tensor, dlse: None, dkept: None) -> tuple[Tensor | None, ...]:
    q, k, v, sink_logits, out, lse, kept = ctx.saved_tensors
    dout = dout.contiguous()
    dq, dk, dv = backward(dout, q, k, v, out, lse, kept, ctx.number, ctx.layer)
    dsink = None
    if sink_logits is not None:
        shares = (sink_logits.to(lse.dtype) - lse).exp()
        dsink = -(shares * (dout * out).sum(-1, dtype=lse.dtype)).sum(0).to(sink_logits.dtype)
    return dq, dk, dv, dsink, None, None


forward.register_autograd(_gradients, setup_context=_setup_context)

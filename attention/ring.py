"""Ring attention: exact causal attention over packed documents, each split over as many ranks as its degree says.

One local causal call, then for every exchange stage two dense calls on received keys, whatever the degrees are (design §5);
partial results are merged by log-sum-exp in float32. Backward repeats the calls with the final merged output and log-sum-exp,
fetches K and V again, and returns the gradients of remote rows to their owners, who add them in a fixed order: two runs
are bit-identical. The scheme is that of Ring Attention (Liu et al., 2023) with the placement of Llama 3 (§3.3.2).
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from longctx.attention.exchange import Exchange, Pending
from longctx.attention.kernels import Kernel, Request, choose_kernel
from longctx.attention.merge import merge_
from longctx.attention.schedule import Schedule, Stage
from longctx.errors import UserError
from longctx.planning.layout import Layout


class AttentionInputError(UserError):
    """Tensors, layout and group that do not belong together."""


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    *,
    group: dist.ProcessGroup | None = None,
    scale: float | None = None,
    kernel: str = "auto",
    stages: int | None = None,
) -> torch.Tensor:
    """Causal attention of every document to itself. Every rank of the domain calls it, with its own layout.

    Args:
        q: [tokens, q_heads, head_dim], rows in the order of `layout`; rows beyond `layout.tokens` are padding.
        k, v: [tokens, kv_heads, head_dim]; kv_heads divides q_heads. v may have another head size.
        layout: `plan.layout(micro_batch, rank)`.
        group: the ranks of the domain in order; None takes the default group. Not used if no document is split.
        scale: factor of the scores, 1/√head_dim if None.
        kernel: auto, cpu or reference.
        stages: exchange stages, the plan's if None. More stages hold less of K and V at once.

    Returns [tokens, q_heads, v_head_dim]; padding rows are 0.
    Raises AttentionInputError for tensors that do not fit, ExchangeError if a message fails or does not come in time.
    """
    return RingAttention(layout, group=group, scale=scale, kernel=kernel, stages=stages)(q, k, v)


class RingAttention:
    """`ring_attention` for one micro-batch, its schedule made once for all layers; called as `attention(q, k, v, layer)`."""

    def __init__(
        self,
        layout: Layout,
        *,
        group: dist.ProcessGroup | None = None,
        scale: float | None = None,
        kernel: str = "auto",
        stages: int | None = None,
        device: torch.device | str = "cpu",
        exchange: type[Exchange] = Exchange,
    ) -> None:
        """As `ring_attention`; `device` is where index tensors live, and another `exchange` moves the rows in another way."""
        self.schedule = Schedule.build(layout, stages, device)
        self.exchange = exchange
        self.group, self.scale, self.kernel = group, scale, kernel
        self.last = "before the first layer"
        """Layer and pass that this rank entered last, for error messages."""
        if any(shard.degree > 1 for shard in layout.shards):
            if not dist.is_initialized():
                raise AttentionInputError("a document is split over ranks, but torch.distributed is not initialised")
            if dist.get_rank(group) != layout.rank:
                raise AttentionInputError(
                    f"the layout is of rank {layout.rank}, but this is rank {dist.get_rank(group)} of the group: "
                    "take plan.layout(micro_batch, dist.get_rank(group))"
                )

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int | None = None) -> torch.Tensor:
        self._check(q, k, v)
        out: torch.Tensor = _RingAttention.apply(q, k, v, self, layer)  # type: ignore[no-untyped-call]  # torch's own
        return out

    def _check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        if q.dim() != 3 or k.dim() != 3 or v.dim() != 3:
            raise AttentionInputError(f"q, k and v must be [tokens, heads, head_dim], not {_shapes(q, k, v)}")
        if not q.shape[0] == k.shape[0] == v.shape[0] or k.shape[1] != v.shape[1] or q.shape[2] != k.shape[2]:
            raise AttentionInputError(
                f"q, k and v must agree in tokens, k and v in heads, q and k in head size, not {_shapes(q, k, v)}"
            )
        if q.shape[1] % k.shape[1]:
            raise AttentionInputError(f"{q.shape[1]} query heads are no multiple of {k.shape[1]} kv heads")
        if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
            raise AttentionInputError(
                f"q, k and v must share dtype and device, not {q.dtype}/{k.dtype}/{v.dtype} on {q.device}/{k.device}/{v.device}"
            )
        layout = self.schedule.layout
        if q.shape[0] < layout.tokens:
            raise AttentionInputError(
                f"the layout of micro-batch {layout.micro_batch}, rank {layout.rank} holds {layout.tokens} tokens, q only "
                f"{q.shape[0]}: use the layout of the micro-batch that q was packed with"
            )


def _shapes(*tensors: torch.Tensor) -> str:
    return ", ".join(str(list(tensor.shape)) for tensor in tensors)


class _Pass:
    """One forward or backward pass of one layer on this rank: what it exchanges, and the keys that it then works on."""

    def __init__(self, call: RingAttention, layer: int | None, name: str, k: torch.Tensor, v: torch.Tensor) -> None:
        self.schedule = call.schedule
        call.last = f"layer {layer}, {name} pass"
        self.exchange = call.exchange(call.group, f"micro-batch {call.schedule.layout.micro_batch}, {call.last}")
        self.k_shape, self.v_shape = k.shape[1:], v.shape[1:]
        self.kv = torch.cat([k.flatten(1), v.flatten(1)], dim=1) if self.schedule.stages else k.new_empty(0, 0)

    def keys(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, width] as exchanged → k [rows, kv_heads, dim] and v [rows, kv_heads, v_dim], views."""
        k, v = rows.split([self.k_shape.numel(), self.v_shape.numel()], dim=1)
        return k.unflatten(1, self.k_shape), v.unflatten(1, self.v_shape)

    def steps(self) -> Iterator[tuple[Stage | None, torch.Tensor]]:
        """(None, nothing) for the local call, then each stage with the rows it received.

        The messages of a step are posted before the one before it is computed, so that computing hides them.
        """
        stages = self.schedule.stages
        pending = self._fetch(stages[0]) if stages else None
        yield None, self.kv
        for number, stage in enumerate(stages):
            ahead = self._fetch(stages[number + 1]) if number + 1 < len(stages) else None
            assert pending is not None
            yield stage, pending.wait()
            pending = ahead

    def _fetch(self, stage: Stage) -> Pending:
        outgoing = [(peer, self.kv.index_select(0, rows)) for peer, rows in stage.sends]
        return self.exchange.start(outgoing, self.kv.new_empty(stage.received_rows, self.kv.shape[1]), stage.receives)

    def give_back(self, stage: Stage, gradients: torch.Tensor) -> Pending:
        """Starts returning the gradients of the received rows to their owners, and receiving those of the sent rows."""
        parts = gradients.split([count for _, count in stage.receives]) if stage.receives else ()
        outgoing = [(peer, part) for (peer, _), part in zip(stage.receives, parts, strict=True)]
        rows = [(peer, len(index)) for peer, index in stage.sends]
        incoming = gradients.new_empty(sum(count for _, count in rows), gradients.shape[1])
        return self.exchange.start(outgoing, incoming, rows)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: RingAttention, layer: int | None
    ) -> torch.Tensor:
        kernel = choose_kernel(call.kernel, Request(q.device.type, q.dtype, q.shape[-1], v.shape[-1]))
        scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
        this = _Pass(call, layer, "forward", k, v)
        out = lse = q
        for stage, received in this.steps():
            if stage is None:
                out, lse = kernel.forward(q, k, v, this.schedule.local, scale)
                out = out.to(lse.dtype) if this.schedule.stages else out
                continue
            for part in (stage.lower, stage.upper):
                if part.segments:
                    remote_k, remote_v = this.keys(received.index_select(0, part.rows))
                    merge_(out, lse, *kernel.forward(q, remote_k, remote_v, part.segments, scale), part.segments)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call, ctx.layer, ctx.kernel, ctx.softmax_scale = call, layer, kernel, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        kernel: Kernel = ctx.kernel
        this = _Pass(ctx.call, ctx.layer, "backward", k, v)
        # dQ, dK and dV are summed in float32 (float64 for float64 inputs), the dtype of the log-sum-exp.
        dq = dk = dv = q
        returned: tuple[Stage, Pending] | None = None
        for stage, received in this.steps():
            if stage is None:
                gradients = kernel.backward(dout, q, k, v, out, lse, this.schedule.local, ctx.softmax_scale)
                dq, dk, dv = (gradient.to(lse.dtype) for gradient in gradients)
                continue
            remote_gradients = torch.zeros_like(received)
            for part in (stage.lower, stage.upper):
                if part.segments:
                    remote_k, remote_v = this.keys(received.index_select(0, part.rows))
                    gradients = kernel.backward(dout, q, remote_k, remote_v, out, lse, part.segments, ctx.softmax_scale)
                    dq += gradients[0]
                    remote_gradients[part.rows] = torch.cat([gradient.flatten(1) for gradient in gradients[1:]], dim=1)
            given = this.give_back(stage, remote_gradients)
            # Waiting one stage later hides the messages and keeps no more than two stages of gradients.
            if returned is not None:
                _add_returned(this, returned[0], returned[1].wait(), dk, dv)
            returned = stage, given
        if returned is not None:
            _add_returned(this, returned[0], returned[1].wait(), dk, dv)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _add_returned(this: _Pass, stage: Stage, gradients: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> None:
    """Adds what the ring mates returned to the gradients of this rank's keys, peer after peer in ascending order."""
    start = 0
    for _, rows in stage.sends:
        part_k, part_v = this.keys(gradients[start : start + len(rows)])
        dk.index_add_(0, rows, part_k.to(dk.dtype))
        dv.index_add_(0, rows, part_v.to(dv.dtype))
        start += len(rows)

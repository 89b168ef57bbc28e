"""Ring attention: exact attention over packed documents, each split over a number of ranks, its
degree.

Forward runs kernel calls on local keys, then on the received keys of every exchange round; the
number of calls does not depend on the degrees. Partial results are merged by log-sum-exp in
float32. Backward repeats the calls with the merged output and log-sum-exp; it fetches K and V
again, unless they were kept, and returns gradients of remote rows to their owners, which add them
in a fixed order: with a deterministic kernel, two runs are bitwise identical.

In bfloat16 and float16, the errors of out, dq, dk and dv against float64 have at most twice the
norm of the errors of the same kernel on one device, measured on random documents. The additional
error is rounding: of partial results in the compute dtype, and of gradients sent to their owners.
Single elements can lose more digits if partial results nearly cancel. The scheme is Ring Attention
(Liu et al., 2023) with the placement of Llama 3 (§3.3.2).
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor

from longctx.arguments import Rule, check_arguments, checked, flag, kind, or_none, real, whole
from longctx.attention import eager, operator
from longctx.attention.exchange import Exchange, Routes
from longctx.attention.expansion import Compressed
from longctx.attention.inputs import TENSORS, AttentionInputError, CheckedAttention, Queries
from longctx.attention.masks import CAUSAL, EVERYTHING, Mask
from longctx.attention.ring_pass import NO_LAYER, Choose, choose_by_name
from longctx.attention.ring_schedule import RingSchedule
from longctx.planning.layout import CrossLayout, Layout

RULES: dict[str, Rule] = {
    "layout": kind("plan.layout(micro_batch, rank), or a CrossLayout", Layout, CrossLayout),
    "mask": kind("a Mask of longctx.attention", Mask),
    "scale": or_none(real()),
    "softcap": real(least=0),
    "kernel": kind("auto or the name of a kernel", str),
    "keep_kv": flag,
    "deterministic": flag,
    "ranks_per_node": or_none(whole(least=1)),
}


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout | CrossLayout,
    *,
    group: dist.ProcessGroup | None = None,
    mask: Mask = CAUSAL,
    scale: float | None = None,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    kernel: str = "auto",
    keep_kv: bool = False,
    deterministic: bool = False,
    ranks_per_node: int | None = None,
) -> Tensor:
    """Computes attention within every document. Every rank of the domain must call it, with its own
    layout.

    Args:
        q: [tokens, q_heads, head_dim], rows in the order of `layout`; rows from `layout.tokens` on
            are padding.
        k, v: [tokens, kv_heads, head_dim]; kv_heads must divide q_heads. v may have a different
            head size.
        layout: `plan.layout(micro_batch, rank)`; or a `CrossLayout` for cross-attention, in which
            the queries of a document's target see all keys of its source. q then has the rows of
            `layout.targets`, k and v the rows of `layout.sources`.
        group: process group of the domain, ranks in order; None uses the default group. Not used if
            no document is split. All its ranks must call `longctx.attention.warm_up(group, device)`
            once before, or NCCL may wait forever.
        mask: visibility of tokens inside a document; causal by default. Must be
            `Mask(causal=False)` with a `CrossLayout`.
        scale: factor of the scores; None means 1/√head_dim.
        softcap: scores become softcap · tanh(score / softcap), as in Gemma 2; 0 disables the cap.
        sink_logits: [q_heads], learned logits that take part in every softmax but have no value, as
            in gpt-oss.
        kernel: `auto` or the name of a kernel (`longctx.attention.kernels.KERNELS`).
        keep_kv: keep received K and V until backward instead of fetching them again.
        deterministic: use the slower backward of flash attention libraries of which two runs are
            bitwise identical.
        ranks_per_node: number of consecutive ranks per node for two-level exchange, in which rows
            cross the network once per node and are then passed on inside it. None: rows go directly
            to every rank that needs them.

    Returns [tokens, q_heads, v_head_dim]; padding rows are 0.

    Raises:
        AttentionInputError: for tensors that do not match each other or the layout.
        KernelError: if no kernel supports the tensors.
        ExchangeError: if a message fails or times out on gloo; NCCL's watchdog ends the process
            instead.
    """
    check_arguments(
        AttentionInputError, TENSORS, {"q": q, "k": k, "v": v, "sink_logits": sink_logits}
    )
    attention = RingAttention(
        layout,
        group=group,
        mask=mask,
        scale=scale,
        softcap=softcap,
        kernel=kernel,
        keep_kv=keep_kv,
        deterministic=deterministic,
        ranks_per_node=ranks_per_node,
        device=q.device,
    )
    return attention(q, k, v, sink_logits=sink_logits)


class RingAttention(CheckedAttention):
    """`ring_attention` for one micro-batch, with one schedule for all layers; call it as
    `attention(q, k, v, layer)`.

    Under torch.compile, the caller must keep a reference until backward is done.
    """

    @checked(AttentionInputError, **RULES)
    def __init__(
        self,
        layout: Layout | CrossLayout,
        *,
        group: dist.ProcessGroup | None = None,
        mask: Mask = CAUSAL,
        scale: float | None = None,
        softcap: float = 0.0,
        kernel: str = "auto",
        keep_kv: bool = False,
        deterministic: bool = False,
        ranks_per_node: int | None = None,
        across: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
        exchange: Callable[[dist.ProcessGroup | None, str], Exchange] = Exchange,
        watch: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Builds the schedule. Arguments as in `ring_attention`, and:

        Args:
            across: another group of the same ranks, for messages between nodes if `ranks_per_node`
                is set: on NCCL these then travel beside messages inside a node, not after them.
                None: all messages use `group`.
            device: device of q, k and v.
            exchange: class that moves the rows.
            watch: returns a context manager for the name of a layer's pass, which runs in it.
        """
        if isinstance(layout, CrossLayout) and mask != EVERYTHING:
            raise AttentionInputError(
                f"mask is {mask}, but the tokens of a target see all tokens of its source: give "
                "mask=Mask(causal=False)"
            )
        super().__init__(layout, group, device)
        self._on_host = RingSchedule.build(layout, mask=mask, ranks_per_node=ranks_per_node)
        # A plain truth value, so that torch.compile does not trace the schedule.
        self.exchanges = bool(self._on_host.rounds)
        self.exchange = exchange
        self.watch = watch
        self.group = group
        self.scale = scale
        self.softcap = softcap
        self.kernel = kernel
        self.choose: Choose = partial(choose_by_name, kernel)
        self.keep_kv = keep_kv
        self.deterministic = deterministic
        self.ranks_per_node = ranks_per_node
        self.across: tuple[dist.ProcessGroup, int] | None = None
        if across is not None and ranks_per_node:
            self.across = across, ranks_per_node
        self.routes: Routes = {}
        self.begun: dict[int, operator.BegunForward] = {}
        """Forward passes whose K and V are under way, by layer."""
        self.handle = operator.register(self)
        self.last = "before the first layer"
        """Layer and pass that this rank entered last, for error messages."""

    @cached_property
    def schedule(self) -> RingSchedule:
        """The schedule, with index tensors on the device: copied when a layer first needs them, in
        its stream, though attention may be built long before and by another thread."""
        return self._on_host.to(self.device)

    def choosing(self, choose: Choose) -> "RingAttention":
        """Returns attention with the same schedule and other kernels."""
        other = copy.copy(self)
        other.choose = choose
        other.begun = {}
        other.handle = operator.register(other)
        return other

    def attend(
        self,
        queries: Queries,
        k: Tensor,
        v: Tensor,
        *,
        layer: int | None,
        sink_logits: Tensor | None,
        after: Tensor | None = None,
        compressed: Compressed | None = None,
    ) -> Tensor:
        """As in the base class; `after`: see `operator.begin`."""
        # In this order, or torch.compile would make two programs for K and V.
        compressed = compressed if compressed is None or self.exchanges else None
        return eager.ring_attention(
            queries,
            k,
            v,
            sink_logits=sink_logits,
            attention_handle=self.handle,
            layer=NO_LAYER if layer is None else layer,
            after=after,
            compressed=compressed,
            exchanges=self.exchanges,
        )

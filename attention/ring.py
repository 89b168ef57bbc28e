"""Ring attention: exact attention over packed documents, each split over as many ranks as its degree says.

A call on local keys, then for every exchange stage calls on received keys, as few whatever the degrees are (design §5);
partial results are merged by log-sum-exp in float32. Backward repeats the calls with the final merged output and log-sum-exp,
fetches K and V again or has kept them, and returns the gradients of remote rows to their owners, who add them in a fixed order:
two runs are bit-identical.

In bfloat16 and float16 the errors of out, dq, dk and dv, against float64, have at most twice the norm of those that the same
kernel makes on one device, as measured over random documents. What comes on top is rounding: of each part that a kernel gives
in the compute dtype, and of gradients on the way to their owners. A single number may lose more digits than that, where parts
of it nearly cancel, or where one device happens to hit it exactly. The scheme is that of Ring Attention (Liu et al., 2023)
with the placement of Llama 3 (§3.3.2).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from longctx.attention import operator
from longctx.attention.exchange import Exchange
from longctx.attention.inputs import AttentionInputError, CheckedAttention
from longctx.attention.masks import CAUSAL, Mask
from longctx.attention.ring_schedule import Schedule
from longctx.planning.layout import Layout


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    *,
    group: dist.ProcessGroup | None = None,
    mask: Mask = CAUSAL,
    scale: float | None = None,
    softcap: float = 0.0,
    sink_logits: torch.Tensor | None = None,
    kernel: str = "auto",
    keep_kv: bool = False,
    ranks_per_node: int | None = None,
) -> torch.Tensor:
    """Attention of every document to itself. Every rank of the domain calls it, with its own layout.

    Args:
        q: [tokens, q_heads, head_dim], rows in the order of `layout`; rows beyond `layout.tokens` are padding.
        k, v: [tokens, kv_heads, head_dim]; kv_heads divides q_heads. v may have another head size.
        layout: `plan.layout(micro_batch, rank)`.
        group: the ranks of the domain in order; None takes the default group. Not used if no document is split. With NCCL, all
            its ranks have to have met once before (`dist.barrier(group)`), since few of them may be in the first messages.
        mask: which tokens of a document see which; causal if not given.
        scale: factor of the scores, 1/√head_dim if None.
        softcap: scores become softcap · tanh(score / softcap), as in Gemma 2; 0 leaves them.
        sink_logits: [q_heads], a learned logit that takes its share of every softmax and gives nothing, as in gpt-oss.
        kernel: auto, or the name of a kernel (`longctx.attention.kernels.KERNELS`).
        keep_kv: hold received K and V until backward instead of fetching them again.
        ranks_per_node: rows cross the network once for each node of so many consecutive ranks, and go on inside it; None: they
            go straight to every rank that needs them.

    Returns [tokens, q_heads, v_head_dim]; padding rows are 0.
    Raises AttentionInputError for tensors that do not fit, ExchangeError if a message fails or does not come in time.
    """
    attention = RingAttention(
        layout,
        group=group,
        mask=mask,
        scale=scale,
        softcap=softcap,
        kernel=kernel,
        keep_kv=keep_kv,
        ranks_per_node=ranks_per_node,
        device=q.device,
    )
    return attention(q, k, v, sink_logits=sink_logits)


class RingAttention(CheckedAttention):
    """`ring_attention` for one micro-batch, its schedule made once for all layers; called as `attention(q, k, v, layer)`.

    Under torch.compile, whoever calls it has to hold it until backward is done.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        group: dist.ProcessGroup | None = None,
        mask: Mask = CAUSAL,
        scale: float | None = None,
        softcap: float = 0.0,
        kernel: str = "auto",
        keep_kv: bool = False,
        ranks_per_node: int | None = None,
        device: torch.device | str = "cpu",
        exchange: Callable[[dist.ProcessGroup | None, str], Exchange] = Exchange,
        watch: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """As `ring_attention`; `device` is where index tensors live, and another `exchange` moves the rows in another way.

        Every pass of a layer runs in the context that `watch` gives for its name.
        """
        if softcap < 0:
            raise AttentionInputError(f"softcap is {softcap}: must be positive, or 0 for none")
        if ranks_per_node is not None and ranks_per_node < 1:
            raise AttentionInputError(f"ranks_per_node is {ranks_per_node}: a node holds at least one rank; None for one level")
        super().__init__(layout, group, device)
        self.schedule = Schedule.build(layout, device, mask, ranks_per_node)
        self.exchange, self.watch = exchange, watch
        self.group, self.scale, self.softcap, self.kernel, self.keep_kv = group, scale, softcap, kernel, keep_kv
        self.number = operator.register(self)
        self.last = "before the first layer"
        """Layer and pass that this rank entered last, for error messages."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int | None, sink_logits: torch.Tensor | None
    ) -> torch.Tensor:
        layer = operator.NO_LAYER if layer is None else layer
        out: torch.Tensor = operator.forward(q, k, v, sink_logits, self.number, layer)[0]
        return out

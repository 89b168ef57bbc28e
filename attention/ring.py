"""Ring attention: exact attention over packed documents, each split over as many ranks as its degree says.

A call on local keys, then for every exchange stage calls on received keys, as few whatever the degrees are (design §5);
partial results are merged by log-sum-exp in float32. Backward repeats the calls with the final merged output and log-sum-exp,
fetches K and V again or has kept them, and returns the gradients of remote rows to their owners, who add them in a fixed order:
two runs are bit-identical. The scheme is that of Ring Attention (Liu et al., 2023) with the placement of Llama 3 (§3.3.2).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from longctx.attention import operator
from longctx.attention.exchange import Exchange
from longctx.attention.masks import CAUSAL, Mask
from longctx.attention.schedule import Schedule
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
    mask: Mask = CAUSAL,
    scale: float | None = None,
    softcap: float = 0.0,
    sink_logits: torch.Tensor | None = None,
    kernel: str = "auto",
    stages: int | None = None,
    keep_kv: bool = False,
    ranks_per_node: int | None = None,
) -> torch.Tensor:
    """Attention of every document to itself. Every rank of the domain calls it, with its own layout.

    Args:
        q: [tokens, q_heads, head_dim], rows in the order of `layout`; rows beyond `layout.tokens` are padding.
        k, v: [tokens, kv_heads, head_dim]; kv_heads divides q_heads. v may have another head size.
        layout: `plan.layout(micro_batch, rank)`.
        group: the ranks of the domain in order; None takes the default group. Not used if no document is split.
        mask: which tokens of a document see which; causal if not given.
        scale: factor of the scores, 1/√head_dim if None.
        softcap: scores become softcap · tanh(score / softcap), as in Gemma 2; 0 leaves them.
        sink_logits: [q_heads], a learned logit that takes its share of every softmax and gives nothing, as in gpt-oss.
        kernel: auto, or the name of a kernel (`longctx.attention.kernels.KERNELS`).
        stages: exchange stages, the plan's if None. More stages hold less of K and V at once.
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
        stages=stages,
        keep_kv=keep_kv,
        ranks_per_node=ranks_per_node,
        device=q.device,
    )
    return attention(q, k, v, sink_logits=sink_logits)


class RingAttention:
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
        stages: int | None = None,
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
        self.schedule = Schedule.build(layout, stages, device, mask, ranks_per_node)
        self.exchange, self.watch = exchange, watch
        self.group, self.scale, self.softcap, self.kernel, self.keep_kv = group, scale, softcap, kernel, keep_kv
        self.number = operator.register(self)
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

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: int | None = None,
        *,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.check(q, k, v, sink_logits)
        layer = operator.NO_LAYER if layer is None else layer
        out: torch.Tensor = operator.forward(q, k, v, sink_logits, self.number, layer)[0]
        return out

    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink_logits: torch.Tensor | None) -> None:
        """Raises AttentionInputError for tensors that do not fit each other or the layout."""
        if q.dim() != 3 or k.dim() != 3 or v.dim() != 3:
            raise AttentionInputError(f"q, k and v must be [tokens, heads, head_dim], not {_shapes(q, k, v)}")
        if not q.shape[0] == k.shape[0] == v.shape[0] or k.shape[1] != v.shape[1] or q.shape[2] != k.shape[2]:
            raise AttentionInputError(
                f"q, k and v must agree in tokens, k and v in heads, q and k in head size, not {_shapes(q, k, v)}"
            )
        if 0 in (*q.shape[1:], *k.shape[1:], *v.shape[1:]):
            raise AttentionInputError(f"q, k and v need at least one head of at least one number, not {_shapes(q, k, v)}")
        if q.shape[1] % k.shape[1]:
            raise AttentionInputError(f"{q.shape[1]} query heads are no multiple of {k.shape[1]} kv heads")
        if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
            raise AttentionInputError(
                f"q, k and v must share dtype and device, not {q.dtype}/{k.dtype}/{v.dtype} on {q.device}/{k.device}/{v.device}"
            )
        if not q.dtype.is_floating_point:
            raise AttentionInputError(f"q, k and v are {q.dtype}: attention takes floating-point numbers")
        if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
            raise AttentionInputError(
                f"the last dimension of q, k and v must be contiguous, not with strides {q.stride()}, {k.stride()}, "
                f"{v.stride()}: call .contiguous() on what is not"
            )
        if sink_logits is not None and sink_logits.shape != q.shape[1:2]:
            raise AttentionInputError(
                f"sink_logits must be one number for each of {q.shape[1]} heads, not {_shapes(sink_logits)}"
            )
        layout = self.schedule.layout
        if q.shape[0] < layout.tokens:
            raise AttentionInputError(
                f"the layout of micro-batch {layout.micro_batch}, rank {layout.rank} holds {layout.tokens} tokens, q only "
                f"{q.shape[0]}: use the layout of the micro-batch that q was packed with"
            )


def _shapes(*tensors: torch.Tensor) -> str:
    return ", ".join(str(list(tensor.shape)) for tensor in tensors)

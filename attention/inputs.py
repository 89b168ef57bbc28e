"""Inputs of attention: that tensors, layout, group and device belong together, said before anything is computed or sent."""

import torch
import torch.distributed as dist

from longctx.errors import UserError
from longctx.planning.layout import Layout


class AttentionInputError(UserError):
    """Tensors, layout, group and device that do not belong together."""


class CheckedAttention:
    """Attention of one micro-batch: made, it has checked layout and group; called, it checks the tensors and then attends."""

    def __init__(self, layout: Layout, group: dist.ProcessGroup | None, device: torch.device | str) -> None:
        self.layout, self.device = layout, torch.device(device)
        self.tokens = layout.tokens  # a number, so that torch.compile does not look at the documents
        if all(shard.degree == 1 for shard in layout.shards):
            return
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
        self._check(q, k, v, sink_logits)
        return self.attend(q, k, v, layer, sink_logits)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int | None, sink_logits: torch.Tensor | None
    ) -> torch.Tensor:
        """A call with tensors that fit."""
        raise NotImplementedError

    def _check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink_logits: torch.Tensor | None) -> None:
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
        if q.device.type != self.device.type:
            raise AttentionInputError(
                f"q, k and v are on {q.device}, but this attention was made for {self.device}: make it with device=q.device"
            )
        if _strided(q) or _strided(k) or _strided(v):
            raise AttentionInputError(
                f"the last dimension of q, k and v must be contiguous, not with strides {q.stride()}, {k.stride()}, "
                f"{v.stride()}: call .contiguous() on what is not"
            )
        if sink_logits is not None and (sink_logits.shape != q.shape[1:2] or sink_logits.device != q.device):
            raise AttentionInputError(
                f"sink_logits must be one number for each of {q.shape[1]} heads on {q.device}, not {_shapes(sink_logits)} on "
                f"{sink_logits.device}"
            )
        if q.shape[0] < self.tokens:
            raise AttentionInputError(
                f"the layout of micro-batch {self.layout.micro_batch}, rank {self.layout.rank} holds {self.tokens} tokens, q "
                f"only {q.shape[0]}: use the layout of the micro-batch that q was packed with"
            )


def _strided(x: torch.Tensor) -> bool:
    """Whether the numbers of a head do not lie one after the other; `contiguous` says so for a tensor without any."""
    return x.stride(-1) != 1 and not x.is_contiguous()


def _shapes(*tensors: torch.Tensor) -> str:
    return ", ".join(str(list(tensor.shape)) for tensor in tensors)

"""Input checks: tensors, layout, group and device must match before anything is computed or
sent."""

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from longctx.arguments import Rule, check_arguments, kind, or_none
from longctx.attention.expansion import Compressed
from longctx.errors import UserError
from longctx.planning.layout import CrossLayout, Layout

Queries = Callable[[Callable[[Tensor], Tensor]], Tensor]
"""Function `queries(mark)` that computes the queries [tokens, heads, head_dim]. It calls mark(x),
which returns x, on the input of their projection: this orders backward for compilers, which then
await the gradients of K and V after that of x."""


def unmarked(x: Tensor) -> Tensor:
    """The mark where no compiler needs one."""
    return x


def computed(q: Tensor) -> Queries:
    """Returns queries that are computed already."""
    return lambda mark: q


class AttentionInputError(UserError):
    """Tensors, layout, group and device that do not match."""


_TENSOR = kind("a tensor [tokens, heads, head_dim]", Tensor)
TENSORS: dict[str, Rule] = {
    "q": _TENSOR,
    "k": _TENSOR,
    "v": _TENSOR,
    "sink_logits": or_none(kind("a tensor [q_heads]", Tensor)),
}


class CheckedAttention:
    """Base class for the attention of one micro-batch: checks layout and group when built, and the
    tensors of every call."""

    def __init__(
        self,
        layout: Layout | CrossLayout,
        group: dist.ProcessGroup | None,
        device: torch.device | str,
    ) -> None:
        self.layout = layout
        self.device = torch.device(device)
        # Plain numbers, so that torch.compile does not trace the documents.
        self.tokens = layout.tokens
        self.key_tokens = layout.key_tokens
        self.crosses = isinstance(layout, CrossLayout)
        shards = itertools.chain.from_iterable(layout.pairs)
        if all(shard.degree == 1 and shard.first_rank == layout.rank for shard in shards):
            return
        if not dist.is_initialized():
            raise AttentionInputError(
                "a document is split over ranks, but torch.distributed is not initialized: call "
                "init_process_group first"
            )
        try:
            rank = dist.get_rank(group)
        except (TypeError, ValueError, AttributeError) as error:
            raise AttentionInputError(
                f"group is {group!r}: must be a process group of torch.distributed, or None"
            ) from error
        if rank != layout.rank:
            raise AttentionInputError(
                f"the layout is for rank {layout.rank}, but this is rank {rank} of the group: "
                "use plan.layout(micro_batch, dist.get_rank(group))"
            )

    def __call__(
        self,
        q: Tensor | Queries,
        k: Tensor,
        v: Tensor,
        layer: int | None = None,
        *,
        sink_logits: Tensor | None = None,
        compressed: Compressed | None = None,
    ) -> Tensor:
        """Computes attention. A function `q` is called for the queries once K and V are on their
        way, which hides messages.

        With `compressed`, from which k and v were expanded, this travels in their place.
        """
        if compressed is not None:
            _check_compressed(compressed, k)
        if isinstance(q, Tensor):
            self._check(q, k, v, sink_logits)
            return self.attend(
                computed(q), k, v, layer=layer, sink_logits=sink_logits, compressed=compressed
            )

        def queries(mark: Callable[[Tensor], Tensor]) -> Tensor:
            found = q(mark)
            self._check(found, k, v, sink_logits)
            return found

        return self.attend(
            queries, k, v, layer=layer, sink_logits=sink_logits, compressed=compressed
        )

    def attend(
        self,
        queries: Queries,
        k: Tensor,
        v: Tensor,
        *,
        layer: int | None,
        sink_logits: Tensor | None,
        compressed: Compressed | None = None,
    ) -> Tensor:
        """Computes attention of the queries that the function returns."""
        raise NotImplementedError

    def _check(self, q: Tensor, k: Tensor, v: Tensor, sink_logits: Tensor | None) -> None:
        """Raises AttentionInputError for tensors that do not match each other or the layout."""
        check_arguments(
            AttentionInputError, TENSORS, {"q": q, "k": k, "v": v, "sink_logits": sink_logits}
        )
        _check_shapes(q, k, v)
        if q.shape[0] != k.shape[0] and not self.crosses:
            raise AttentionInputError(
                f"q, k and v must have the same number of tokens, not {_shapes(q, k, v)}: only "
                "cross-attention, with a CrossLayout, has others"
            )
        _check_kinds(q, k, v)
        if q.device.type != self.device.type:
            raise AttentionInputError(
                f"q, k and v are on {q.device}, but this attention was built for {self.device}: "
                "build it with device=q.device"
            )
        if sink_logits is not None:
            _check_sink_logits(sink_logits, q)
        for name, x, tokens in (("q", q, self.tokens), ("k", k, self.key_tokens)):
            if x.shape[0] < tokens:
                raise AttentionInputError(
                    f"{name} has {x.shape[0]} tokens, but the layout of micro-batch "
                    f"{self.layout.micro_batch}, rank {self.layout.rank} has {tokens}: use the "
                    f"layout that {name} was packed with"
                )


def _check_compressed(compressed: Compressed, k: Tensor) -> None:
    for x in (compressed.first, compressed.second):
        if x.shape[0] != k.shape[0] or x.dtype != k.dtype or x.device != k.device:
            raise AttentionInputError(
                f"what travels in place of k and v must share its {k.shape[0]} tokens, dtype and "
                f"device, not {_shapes(compressed.first, compressed.second)}, "
                f"{compressed.first.dtype}/{compressed.second.dtype}: expand k and v from it"
            )


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises AttentionInputError for numbers of dimensions, heads or tokens that do not match."""
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3:
        raise AttentionInputError(
            f"q, k and v must be [tokens, heads, head_dim], not {_shapes(q, k, v)}"
        )
    if k.shape[0] != v.shape[0] or k.shape[1] != v.shape[1] or q.shape[2] != k.shape[2]:
        raise AttentionInputError(
            "k and v must have the same number of tokens and heads, q and k the same head "
            f"size, not {_shapes(q, k, v)}"
        )
    if 0 in (*q.shape[1:], *k.shape[1:], *v.shape[1:]):
        raise AttentionInputError(
            "q, k and v must have at least one head and a head size of 1 or more, not "
            f"{_shapes(q, k, v)}"
        )
    if q.shape[1] % k.shape[1]:
        raise AttentionInputError(
            f"q has {q.shape[1]} heads, which is not a multiple of the {k.shape[1]} kv heads: "
            "use a multiple"
        )


def _check_kinds(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises AttentionInputError for dtypes, devices or strides that kernels cannot take."""
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise AttentionInputError(
            f"q, k and v must share dtype and device, not {q.dtype}/{k.dtype}/{v.dtype} on "
            f"{q.device}/{k.device}/{v.device}"
        )
    if not q.dtype.is_floating_point:
        raise AttentionInputError(
            f"q, k and v are {q.dtype}: they must have a floating-point dtype"
        )
    if _strided(q) or _strided(k) or _strided(v):
        raise AttentionInputError(
            f"the last dimension of q, k and v must be contiguous, not with strides {q.stride()}, "
            f"{k.stride()}, {v.stride()}: call .contiguous() on them"
        )


def _check_sink_logits(sink_logits: Tensor, q: Tensor) -> None:
    if sink_logits.shape != q.shape[1:2] or sink_logits.device != q.device:
        raise AttentionInputError(
            f"sink_logits must have shape [{q.shape[1]}], one number per query head, on "
            f"{q.device}, not {_shapes(sink_logits)} on {sink_logits.device}"
        )


def _strided(x: Tensor) -> bool:
    """Returns whether the last dimension is not contiguous; an empty tensor may be contiguous with
    any strides."""
    return x.stride(-1) != 1 and not x.is_contiguous()


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(list(tensor.shape)) for tensor in tensors)

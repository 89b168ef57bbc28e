"""Pooling: one vector per document from the hidden states of its tokens, which may be split over the ranks of a ring.

    pooled = pool_documents(hidden, batch.layout, len(documents), group=group)  # [documents, hidden], the same on every rank
    loss = loss_of(pooled[rank::ranks])                                         # every document on one rank

for heads of encoders on whole documents: classification, regression, embeddings.
"""

from typing import Any, Literal

import torch
import torch.distributed as dist

from longctx.attention.inputs import AttentionInputError
from longctx.planning.layout import Layout


def pool_documents(
    hidden: torch.Tensor,
    layout: Layout,
    documents: int,
    *,
    how: Literal["mean", "first"] = "mean",
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Returns one vector per document of a plan, [documents, hidden], in float32 or better, the same on every rank.

    Documents of other micro-batches are zero, so that the results of all micro-batches of a step can be added. Backward sums
    the gradients of all ranks. So compute the loss of each document on one rank only, such as that of `pooled[rank::ranks]`,
    and sum gradients of parameters over ranks, as those of any split document. Collective, in forward and in backward: every
    rank calls it for every micro-batch, in the same order.

    Args:
        hidden: hidden states [tokens, hidden] in the order of the layout; rows after `layout.tokens` are padding.
        layout: this rank's share of the micro-batch.
        documents: number of documents of the plan.
        how: mean of all tokens of a document, or its first token.
        group: ranks of the domain (None: all ranks).
    """
    if hidden.dim() != 2 or len(hidden) < layout.tokens:
        raise AttentionInputError(
            f"hidden must be [tokens, hidden] with at least the {layout.tokens} tokens of the layout, not {list(hidden.shape)}"
        )
    states = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    places, vectors = list[int](), [states[:0]]  # so that a rank without tokens takes part in backward
    for shard in layout.shards:
        if shard.document >= documents:
            raise AttentionInputError(
                f"the layout has document {shard.document}, but documents is {documents}: give the length of plan.lengths"
            )
        if shard.tree is not None:
            raise AttentionInputError(
                f"document {shard.document} is a tree, whose sequences share tokens: pool documents without merged prefixes"
            )
        rows = states[shard.offset : shard.offset + shard.tokens]
        if how == "mean":
            vectors.append(rows.sum(0, keepdim=True) / shard.length)
        elif any(start == 0 < stop for start, stop in (shard.head, shard.tail)):
            vectors.append(rows[:1])
        else:
            continue
        places.append(shard.document)
    pooled = states.new_zeros(documents, states.shape[1])
    pooled = pooled.index_add(0, torch.tensor(places, dtype=torch.int64, device=hidden.device), torch.cat(vectors))
    if not dist.is_initialized():
        return pooled
    total: torch.Tensor = _SumOverRanks.apply(pooled, group)  # type: ignore[no-untyped-call]  # torch's own
    return total


class _SumOverRanks(torch.autograd.Function):
    """Sums a tensor over ranks; backward sums the gradients, as every rank's sum contains every rank's part.

    As `torch.distributed.nn` does, which is deprecated.
    """

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None

"""Balance of experts: terms that depend on documents and steps alone, never on micro-batches, ranks
or degrees.

The bias of a router moves once per step by the counts over all its tokens (Wang et al., 2024,
"Auxiliary-loss-free load balancing"). The document loss is DeepSeek-V3's sequence-wise loss
(§2.1.2): Σ over documents of tokens · experts / k · Σ over experts of (share of its tokens sent to
the expert) · (mean score of the expert), over the tokens of the step: 1 where experts are evenly
used. The z-loss is the mean of log²Σexp of the logits (Zoph et al., 2022). Shares of a document
that is split over ranks are summed while other work goes on; scores have no gradient through them,
so each rank adds those of its own tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class RowDocuments:
    """The documents of the rows of a micro-batch.

    Attributes:
        rows: int64 [tokens], index in `lengths` of the document of each row; padding has
            `len(lengths)`.
        lengths: float32 [documents], tokens of each document; those that are split over ranks come
            first, the same on all.
        split: number of documents that are split over ranks.
        tokens: tokens of the step, over all ranks.
    """

    rows: torch.Tensor
    lengths: torch.Tensor
    split: int
    tokens: int


class RouterWatch:
    """Counts the tokens of each expert of a layer in a step, and adds the gradients of the balance
    losses.

    Attributes:
        scores: how scores come from logits: softmax or sigmoid.
        bias: module and name of the buffer with the bias [experts] that only chooses experts; None
            without one.
        begin_sum: starts to sum a tensor over the ranks that documents are split over, in place,
            and returns a function that waits for the sum; None: one process.
        counts: int64 [experts], tokens sent to each expert in backward passes since `clear`; None
            before the first.
        losses: float64 [2], document loss and z-loss of these tokens, without their factors.
    """

    def __init__(
        self, experts: int, per_token: int, scores: str, bias: tuple[nn.Module, str] | None = None
    ) -> None:
        self.experts = experts
        self.per_token = per_token
        self.scores = scores
        self.bias = bias
        self.document_loss = 0.0
        self.z_loss = 0.0
        self.begin_sum: Callable[[torch.Tensor], Callable[[], object]] | None = None
        self.clear()

    def __call__(
        self,
        weights: torch.Tensor,
        logits: torch.Tensor,
        chosen: torch.Tensor,
        documents: RowDocuments | None,
    ) -> torch.Tensor:
        """Returns the `weights` of the experts `chosen`, both [tokens, experts per token]; `logits`
        are [tokens, experts]."""
        if documents is None or not torch.is_grad_enabled():
            return weights
        out: torch.Tensor = _Watched.apply(weights, logits, chosen, documents.rows, documents, self)  # type: ignore[no-untyped-call]  # torch's is untyped
        return out

    def clear(self) -> None:
        """Forgets what was counted."""
        self.counts: torch.Tensor | None = None
        self.losses: torch.Tensor | None = None

    def add(self, counts: torch.Tensor, losses: torch.Tensor) -> None:
        self.counts = counts if self.counts is None else self.counts + counts
        self.losses = losses if self.losses is None else self.losses + losses

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns scores that add up to 1 for every token."""
        if self.scores == "softmax":
            return logits.softmax(1)
        scores = logits.sigmoid()
        return scores / scores.sum(1, keepdim=True)

    @torch.no_grad()
    def move_bias(self, counts: torch.Tensor, rate: float | torch.Tensor) -> None:
        """Adds `rate`, a number or a tensor [], to the bias of experts with fewer tokens than the
        mean of `counts` [experts], subtracts it of others."""
        if self.bias is not None:
            module, name = self.bias
            bias = getattr(module, name)
            wide = counts.to(torch.float64)
            bias += rate * (wide.mean() - wide).sign().to(bias.dtype)


class _Watched(torch.autograd.Function):
    """The identity on weights. Counts of split documents are summed over ranks from forward on.

    Everything else happens in backward, which runs once per micro-batch, also if forward is
    recomputed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weights: torch.Tensor,
        logits: torch.Tensor,
        chosen: torch.Tensor,
        rows: torch.Tensor,
        documents: RowDocuments,
        watch: RouterWatch,
    ) -> torch.Tensor:
        ctx.save_for_backward(logits, rows)
        ctx.documents = documents
        ctx.watch = watch
        ctx.wait = None
        experts = logits.shape[1]
        kinds = len(documents.lengths) + 1
        if not watch.document_loss:
            rows = (rows == len(documents.lengths)).to(torch.int64)
            kinds = 2
        places = rows.unsqueeze(1) * experts + chosen
        counts = torch.zeros(kinds * experts, dtype=torch.int64, device=logits.device)
        counts.scatter_add_(0, places.flatten(), torch.ones_like(places).flatten())
        counts = counts.unflatten(0, (kinds, experts))
        ctx.counts = counts[:-1].sum(0)  # without padding
        if watch.document_loss:
            ctx.shares = counts[:-1].to(torch.float32)
            if watch.begin_sum is not None and documents.split:
                ctx.wait = watch.begin_sum(ctx.shares[: documents.split])
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        watch = ctx.watch
        documents = ctx.documents
        added = None
        saved, rows = ctx.saved_tensors
        losses = torch.zeros(2, dtype=torch.float64, device=gradient.device)
        if watch.document_loss or watch.z_loss:
            if ctx.wait is not None:
                ctx.wait()
            with torch.enable_grad():
                logits = saved.detach().requires_grad_()
                values = _losses(
                    logits,
                    rows,
                    shares=getattr(ctx, "shares", None),
                    documents=documents,
                    watch=watch,
                )
                total = values[0] * watch.document_loss + values[1] * watch.z_loss
                (added,) = torch.autograd.grad(total, logits)
            losses = values.detach().to(torch.float64)
        watch.add(ctx.counts, losses)
        return gradient, added, None, None, None, None


def _losses(
    logits: torch.Tensor,
    rows: torch.Tensor,
    shares: torch.Tensor | None,
    documents: RowDocuments,
    watch: RouterWatch,
) -> torch.Tensor:
    """Returns the document loss and the z-loss of these tokens, [2]; `shares` are counts
    [documents, experts]."""
    real = rows < len(documents.lengths)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    document_loss = logits.sum() * 0
    if shares is not None and len(documents.lengths):
        even = watch.experts / watch.per_token
        of_tokens = (shares * (even / documents.lengths).unsqueeze(1)).index_select(
            0, rows.clamp(max=len(shares) - 1)
        )
        document_loss = (of_tokens * watch.probabilities(logits)).sum(1).where(real, 0).sum()
    z_loss = logits.logsumexp(1).square().where(real, 0).sum()
    return torch.stack([document_loss, z_loss]) / documents.tokens

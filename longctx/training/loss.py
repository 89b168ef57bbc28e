"""Loss: the sum of token losses, computed in chunks so that `[tokens, vocab]` never exists in float32 at once.

The sum is divided by the number of valid targets of the WHOLE step over the whole domain, which is known before the first
forward; so loss and gradients do not depend on how the step is planned (design §7). With tensor parallelism every rank has its
own entries of the vocabulary, and two numbers a token are exchanged.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from longctx.parallel.tensor import VocabularyPart, vocabulary_part

IGNORE = -100
CHUNK_TOKENS = 1024


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes the gradients chunk by chunk in forward, so that no logits are kept for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        divisor: int,
        chunk: int,
        part: VocabularyPart | None,
    ) -> torch.Tensor:
        first = 0 if part is None else part.first
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        needs_gradient = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        hidden_gradient = torch.zeros_like(hidden) if needs_gradient else None
        # Summed over chunks in float32, whatever the dtype of the weight.
        weight_gradient = (
            torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32)) if needs_gradient else None
        )
        for start in range(0, hidden.shape[0], chunk):
            rows = slice(start, start + chunk)
            valid = labels[rows] != IGNORE
            targets = (labels[rows] - first).where(valid, 0).unsqueeze(-1)
            # The target is an entry of exactly one rank; elsewhere entry 0 is read, and nothing is made of it.
            here = valid.unsqueeze(-1) if part is None else (targets >= 0) & (targets < weight.shape[0])
            targets = targets.where(here, 0)
            logits = F.linear(hidden[rows], weight)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            log_total, target_logits = logits.logsumexp(-1), logits.gather(1, targets).where(here, 0).squeeze(1)
            if part is not None:
                everyones = part.gather(torch.stack([log_total, target_logits]))
                log_total, target_logits = everyones[:, 0].logsumexp(0), everyones[:, 1].sum(0)
            losses = (log_total - target_logits).where(valid, 0)
            total += losses.sum(dtype=torch.float64)
            if hidden_gradient is not None and weight_gradient is not None:
                gradient = (logits - log_total.unsqueeze(-1)).exp_()
                gradient.scatter_add_(1, targets, -here.to(gradient.dtype))
                gradient = gradient.where(valid.unsqueeze(-1), 0).div_(divisor).to(hidden.dtype)
                hidden_gradient[rows] = gradient @ weight
                weight_gradient += gradient.T @ hidden[rows]
        if hidden_gradient is not None and weight_gradient is not None:
            ctx.save_for_backward(hidden_gradient, weight_gradient.to(weight.dtype))
        return (total / divisor).to(torch.promote_types(hidden.dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        return (
            hidden_gradient * gradient.to(hidden_gradient.dtype),
            weight_gradient * gradient.to(weight_gradient.dtype),
            None,
            None,
            None,
            None,
        )


def cross_entropy_sum(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, divisor: int = 1, chunk_tokens: int = CHUNK_TOKENS
) -> torch.Tensor:
    """Sum over valid targets of -log p(target), divided by `divisor`, a scalar in float32 (float64 for float64 inputs).

    The divisor is the number of targets of the whole step. It is applied here, in float32: dividing the result would multiply
    bfloat16 gradients by a factor that is rounded to bfloat16, and so scale all of them by up to 0.4 %.

    hidden [tokens, hidden], weight [vocab, hidden], labels [tokens] with -100 where nothing is predicted. No valid target, or
    no token at all, gives 0 with zero gradients. At most `chunk_tokens` rows of logits exist at a time. Where tensor
    parallelism has split the weight by entries and hidden by tokens, every rank gives all labels and gets the whole loss.
    """
    part = None
    if isinstance(weight, DTensor):
        hidden, weight, part = vocabulary_part(hidden, weight)
    loss: torch.Tensor = _ChunkedCrossEntropy.apply(hidden, weight, labels, divisor, chunk_tokens, part)  # type: ignore[no-untyped-call]  # torch's own
    return loss

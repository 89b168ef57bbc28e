"""Loss: the sum of token losses, computed in chunks so that float32 logits `[tokens, vocab]` never
exist as a whole.

The sum is divided by the number of valid targets of the WHOLE step over the whole domain, which is
known before the first forward, so that loss and gradients do not depend on the plan. With tensor
parallelism every rank has a part of the vocabulary, and two numbers per token are exchanged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from longctx.data import IGNORED_LABEL
from longctx.model.protocol import Projection
from longctx.parallel.tensor import VocabularyPart, vocabulary_part

CHUNK_TOKENS = 1024
FEW_LABELS = 0.5
"""Logits are computed only for tokens with a label if their share is smaller than this."""
Rows = slice | torch.Tensor


def tokens_at_once(compiled: bool) -> int:
    """Returns the default number of rows of logits in memory at a time: more if what follows is
    fused."""
    if compiled:
        return 4 * CHUNK_TOKENS
    return CHUNK_TOKENS


def _scores(logits: torch.Tensor) -> torch.Tensor:
    """Returns the logits in float32 or better."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _log_total(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the log-sum-exp of every row and the logit of its target [rows, 1], both [rows]."""
    scores = _scores(logits)
    return scores.logsumexp(-1), scores.gather(1, targets).squeeze(1)


def _gradient(
    logits: torch.Tensor,
    log_total: torch.Tensor,
    targets: torch.Tensor,
    is_own: torch.Tensor,
    counts: torch.Tensor,
    divisor: torch.Tensor,
) -> torch.Tensor:
    """Returns the gradient of Σ counts · -log p / divisor with respect to the logits, in their
    dtype."""
    gradient = (_scores(logits) - log_total.unsqueeze(-1)).exp_()
    if torch.compiler.is_compiling():  # can be fused with the other operations, unlike a scatter
        entries = torch.arange(logits.shape[1], device=logits.device)
        gradient = torch.where(is_own & (entries == targets), gradient - 1, gradient)
    else:
        gradient.scatter_add_(1, targets, -is_own.to(gradient.dtype))
    gradient = gradient.where(counts.unsqueeze(-1) != 0, 0).mul_(counts.unsqueeze(-1))
    return gradient.div_(divisor).to(logits.dtype)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def _run(function: Callable[..., Any], compiled: bool, *arguments: Any) -> Any:
    """Calls a function of one chunk, compiled for any number of rows if that is wanted; torch
    treats 0 and 1 as constants."""
    if not compiled or len(arguments[0]) < 2:
        return function(*arguments)
    for each in arguments:
        if isinstance(each, torch.Tensor) and each.dim():
            torch._dynamo.maybe_mark_dynamic(each, 0)
    return _compiled(function)(*arguments)


@dataclass
class _Chunk:
    """One chunk of the loss: logits [rows, entries of this rank], their log-sum-exp and the
    targets' scores [rows]."""

    logits: torch.Tensor
    """In the dtype of the hidden states."""
    log_total: torch.Tensor
    target_logits: torch.Tensor
    targets: torch.Tensor
    is_own: torch.Tensor
    """bool [rows, 1]: True where the target is one of this rank's entries."""

    @classmethod
    def of(
        cls,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        part: VocabularyPart | None,
        compiled: bool = False,
    ) -> "_Chunk":
        first = 0 if part is None else part.first
        valid = labels != IGNORED_LABEL
        targets = (labels - first).where(valid, 0).unsqueeze(-1)
        # The target is an entry of exactly one rank; other ranks read entry 0 and discard it.
        if part is None:
            is_own = valid.unsqueeze(-1)
        else:
            is_own = (targets >= 0) & (targets < weight.shape[0])
        targets = targets.where(is_own, 0)
        logits = F.linear(hidden, weight)
        log_total, target_logits = _run(_log_total, compiled, logits, targets)
        target_logits = target_logits.where(is_own.squeeze(1), 0)
        if part is not None:
            gathered = part.gather(torch.stack([log_total, target_logits]))
            log_total = gathered[:, 0].logsumexp(0)
            target_logits = gathered[:, 1].sum(0)
        return cls(logits, log_total, target_logits=target_logits, targets=targets, is_own=is_own)

    def gradient(self, counts: torch.Tensor, divisor: torch.Tensor, compiled: bool) -> torch.Tensor:
        """Returns the gradient of Σ counts · -log p / divisor with respect to the logits."""
        arguments = self.logits, self.log_total, self.targets, self.is_own, counts, divisor
        result: torch.Tensor = _run(_gradient, compiled, *arguments)
        return result


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes the gradients in forward, chunk by chunk, so that no logits are kept for
    backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        counts: torch.Tensor,
        divisor: float | torch.Tensor,
        chunks: Sequence[Rows],
        part: VocabularyPart | None,
        compiled: bool,
    ) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for_hidden, for_weight, *_ = ctx.needs_input_grad
        hidden_gradient = torch.zeros_like(hidden) if for_hidden else None
        # Summed over chunks in float32, whatever the dtype of the weight.
        if for_weight:
            weight_gradient = torch.zeros_like(
                weight, dtype=torch.promote_types(weight.dtype, torch.float32)
            )
        else:
            weight_gradient = None
        if isinstance(divisor, torch.Tensor):
            divided_by = divisor.to(counts)
        else:
            divided_by = counts.new_full((), divisor)
        for rows in chunks:
            chunk = _Chunk.of(
                hidden[rows], weight, labels=labels[rows], part=part, compiled=compiled
            )
            counted = counts[rows]
            losses = (chunk.log_total - chunk.target_logits).where(counted != 0, 0) * counted
            total += losses.sum(dtype=torch.float64)
            if not (for_hidden or for_weight):
                continue
            gradient = chunk.gradient(counted, divided_by, compiled)
            if hidden_gradient is not None:
                hidden_gradient[rows] = gradient @ weight
            if weight_gradient is not None:
                _add_product(weight_gradient, gradient.T, hidden[rows])
        ctx.save_for_backward(
            hidden_gradient, None if weight_gradient is None else weight_gradient.to(weight.dtype)
        )
        return (total / divisor).to(torch.promote_types(hidden.dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # In place, as that of the weight may be gigabytes; torch then refuses a second backward.
        gradients = (
            None if saved is None else saved.mul_(gradient.to(saved.dtype))
            for saved in ctx.saved_tensors
        )
        return (*gradients, *[None] * 7)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Adds a · b to a sum in float32 or better. Only CPUs, which lack the operation, keep a product
    in bfloat16 in memory."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.device.type == "cuda":
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def cross_entropy_sum(
    hidden: torch.Tensor,
    weight: Projection,
    labels: torch.Tensor,
    divisor: float | torch.Tensor = 1,
    chunk_tokens: int | None = None,
    weights: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    compiled: bool = False,
) -> torch.Tensor:
    """Returns Σ weight · -log p(target) / `divisor` over valid targets, a float32 scalar (float64
    for float64 inputs).

    The divisor is a number of the whole step, such as its valid targets. It is applied here in
    float32, because dividing the result would multiply bfloat16 gradients by a factor rounded to
    bfloat16, an error of up to 0.4 %.

    Args:
        hidden: hidden states [tokens, hidden].
        weight: output weight [vocab, hidden], or a function from hidden states to logits, which
            backward calls again for every chunk. If tensor parallelism splits the weight by entries
            and hidden by tokens, every rank passes all labels and gets the whole loss.
        labels: int64 [tokens], -100 where nothing is predicted. Without valid targets the loss and
            its gradients are 0.
        chunk_tokens: maximum number of rows of logits in memory at a time (None: `tokens_at_once`).
        weights: weights of the tokens [tokens] (None: 1).
        rows: rows with a label, see `rows_with_labels`; logits are computed for these rows only
            (None: for all rows).
        compiled: compile what follows the product with an output weight, so that its operations on
            the logits are fused.
    """
    if not isinstance(weight, torch.Tensor):
        return _sum_by_projection(
            hidden,
            weight,
            labels=labels,
            divisor=divisor,
            chunk_tokens=chunk_tokens or CHUNK_TOKENS,
            weights=weights,
            rows=rows,
        )
    hidden, weight, part = vocabulary_part(hidden, weight)
    counts = (labels != IGNORED_LABEL).to(torch.promote_types(hidden.dtype, torch.float32))
    if weights is not None:
        counts = counts * weights.to(counts.dtype).where(labels != IGNORED_LABEL, 0)
    chunks = _chunks(len(labels), rows, chunk_tokens or tokens_at_once(compiled))
    arguments = hidden, weight, labels, counts, divisor, chunks, part, compiled
    loss: torch.Tensor = _ChunkedCrossEntropy.apply(*arguments)  # type: ignore[no-untyped-call]  # torch's own
    return loss


def _sum_by_projection(
    hidden: torch.Tensor,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    labels: torch.Tensor,
    divisor: float | torch.Tensor,
    chunk_tokens: int,
    weights: torch.Tensor | None,
    rows: torch.Tensor | None,
) -> torch.Tensor:
    def part(hidden: torch.Tensor, rows: Rows) -> torch.Tensor:
        logits = logits_of(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(logits, labels[rows], ignore_index=IGNORED_LABEL, reduction="none")
        if weights is None:
            return losses.sum() / divisor
        return (
            losses * weights[rows].to(losses.dtype).where(labels[rows] != IGNORED_LABEL, 0)
        ).sum() / divisor

    total = torch.zeros((), device=hidden.device)
    for chunk in _chunks(len(labels), rows, chunk_tokens):
        part_loss: torch.Tensor = checkpoint(
            part, hidden[chunk], chunk, use_reentrant=False, preserve_rng_state=False
        )
        total = total + part_loss
    return total.to(torch.promote_types(hidden.dtype, torch.float32))


def labelled_rows(labels: torch.Tensor) -> torch.Tensor:
    """Returns the rows with a label, int64 [rows]; pass labels in host memory, as the host would
    wait for a GPU's."""
    return (labels != IGNORED_LABEL).nonzero()[:, 0]


def rows_with_labels(labels: torch.Tensor) -> torch.Tensor | None:
    """Returns the rows with a label, int64 [rows], if few tokens have one, as in conversations;
    otherwise None.

    Skipping the other rows pays: the head costs as much as several layers of a small model.
    """
    rows = labelled_rows(labels)
    if len(rows) < FEW_LABELS * len(labels):
        return rows
    return None


def _chunks(tokens: int, rows: torch.Tensor | None, chunk_tokens: int) -> Sequence[Rows]:
    """Returns the rows of every chunk; at least one chunk, so that a rank without labels has a
    graph too."""
    if rows is not None:
        return list(rows.split(chunk_tokens))
    return [slice(start, start + chunk_tokens) for start in range(0, max(1, tokens), chunk_tokens)]


@torch.no_grad()
def log_probabilities(
    hidden: torch.Tensor,
    weight: Projection,
    labels: torch.Tensor,
    chunk_tokens: int = CHUNK_TOKENS,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns log p of every label [tokens], in float32 or better, 0 where nothing is predicted.

    Arguments as in `cross_entropy_sum`. Logits are computed only for the `rows` with a label, see
    `labelled_rows` (None: found here, where the host would wait for a GPU).
    """
    part = None
    if isinstance(weight, torch.Tensor):
        hidden, weight, part = vocabulary_part(hidden, weight)
    values = torch.zeros(
        len(labels), dtype=torch.promote_types(hidden.dtype, torch.float32), device=labels.device
    )
    for some in (labelled_rows(labels) if rows is None else rows).split(chunk_tokens):
        if isinstance(weight, torch.Tensor):
            chunk = _Chunk.of(hidden[some], weight, labels[some], part)
            values[some] = chunk.target_logits - chunk.log_total
        else:
            logits = weight(hidden[some]).to(values.dtype).log_softmax(-1)
            values[some] = logits.gather(1, labels[some].unsqueeze(-1))[:, 0]
    return values

"""Multi-token prediction: the loss of a model's further blocks, each for a token one further ahead (DeepSeek-V3, §2.2)."""

from collections.abc import Callable
from functools import partial

import torch

from longctx.attention.host_to_device import copy_to
from longctx.data.packing import MicroBatch
from longctx.model.protocol import Later, Projection
from longctx.training.objectives.loss import rows_with_labels


class MultiTokenLoss:
    """Adds `factor` times the mean over blocks of their losses to the gradients of a step, and sums up its value.

    A block's loss has the divisor and the weights of the main loss, so it does not depend on how documents are split.
    """

    def __init__(self, blocks: int, factor: float) -> None:
        self.blocks, self.factor = blocks, factor
        self._sum: torch.Tensor | None = None

    def later(
        self, micro_batch: MicroBatch, head: Callable[..., torch.Tensor], divisor: float, device: torch.device
    ) -> Later | None:
        """Returns the later tokens of a micro-batch; None without blocks. `head` is the main one, with its own labels."""
        if not self.blocks:
            return None
        heads = []
        for labels in micro_batch.later_labels.unbind(1):
            rows = rows_with_labels(labels)
            arguments = {"labels": copy_to(labels, device), "rows": None if rows is None else copy_to(rows, device)}
            heads.append(partial(self._loss, partial(head, **arguments, divisor=divisor * self.blocks / self.factor)))
        return Later(copy_to(micro_batch.later_tokens, device), heads)

    def _loss(self, head: Callable[..., torch.Tensor], hidden: torch.Tensor, weight: Projection) -> torch.Tensor:
        loss = head(hidden, weight)
        value = loss.detach().double()
        self._sum = value if self._sum is None else self._sum + value
        return loss

    def end_step(self) -> float:
        """Returns this rank's part of the mean loss of the blocks in a step, without its factor."""
        total, self._sum = self._sum, None
        return 0.0 if total is None else float(total) / self.factor

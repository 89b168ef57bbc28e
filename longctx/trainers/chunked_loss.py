"""The loss of `transformers.Trainer` without logits: hidden states times the output layer in
chunks, as `longctx train` has it.

A model's own forward runs, but its output layer returns the loss in place of logits, so memory does
not grow with tokens times vocabulary. A few tokens tell whether a model's loss is that of hidden
states times a matrix; others, such as those that bound their logits, keep all of them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from longctx.attention.host_to_device import copy_to
from longctx.data.packing import MicroBatch
from longctx.hf.exactness import evaluating, replaced
from longctx.trainers.kinds import Traits, is_own
from longctx.trainers.prepared import replaced_method
from longctx.trainers.riders import Rider
from longctx.trainers.router_loss import without_router_loss
from longctx.training.objectives.loss import cross_entropy_sum, rows_with_labels

LOSS = "_loss_function"
"""Attribute that a model's property `loss_function` returns, if it is set."""
PROBED = 16
"""Tokens that are tried."""
LARGER = 16
"""Factor of hidden states, with which bounds and scales of logits show."""


class ChunkedLoss(Rider):
    """Replaces the forward of a model while a loss is computed; for `replaced_method`.

    Attributes:
        rows: rows of the micro-batch that have a label, if they are few; None: all.
    """

    rows: torch.Tensor | None

    def __init__(self, model: Any, device: torch.device) -> None:
        self.head = model.get_output_embeddings()
        self.device = device
        self.rows = None
        self._used = False

    @classmethod
    def of(cls, traits: Traits) -> "ChunkedLoss | None":
        """Returns the loss for a trainer's model, which is not prepared yet; None if the trainer or
        its model needs logits."""
        if traits.kind != "step" or traits.trl_class or traits.args.label_smoothing_factor:
            return None
        if is_own(traits.trainer, "compute_loss") or traits.diffusion:
            return None
        chunked = cls(traits.model, traits.args.device)
        return chunked if chunked._is_exact(traits.model) else None

    def used_by(self, model: Any) -> AbstractContextManager[None]:
        return replaced_method(model, "forward", self)

    def begin(self, batch: MicroBatch, call: int) -> None:
        rows = rows_with_labels(batch.labels)
        self.rows = None if rows is None else copy_to(rows, self.device)

    def during_loss(self) -> AbstractContextManager[None]:
        return replaced(self, "_used", True)

    def __call__(self, own: Callable[..., Any], model: Any, *arguments: Any, **named: Any) -> Any:
        if not self._used:
            return own(model, *arguments, **named)
        labels = named["shift_labels"][0]
        divisor = named["num_items_in_batch"]
        losses: list[torch.Tensor] = []

        def head(hidden: torch.Tensor) -> torch.Tensor:
            """Returns the loss [1, 1, 1]: FSDP may gather the matrix for this call alone, and round
            what it returns."""
            losses.append(self._loss(hidden[0], labels, divisor))
            return losses[-1].view(1, 1, 1)

        def loss(logits: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            same = logits.dtype == losses[0].dtype
            return logits.view(()) if same else losses[0] + 0 * logits.view(())

        with replaced(self.head, "forward", head), replaced(model, LOSS, loss):
            output = own(model, *arguments, **named)
        output["logits"] = None
        return output

    def _loss(
        self, hidden: torch.Tensor, labels: torch.Tensor, divisor: torch.Tensor
    ) -> torch.Tensor:
        """Returns the sum of token losses over a divisor; hidden states are [tokens, hidden]."""
        weight = self.head.weight
        if torch.is_autocast_enabled(hidden.device.type):  # once, not for every chunk
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden = hidden.to(dtype)
            weight = weight.to(dtype)
        return cross_entropy_sum(hidden, weight, labels, divisor, rows=self.rows)

    def _is_exact(self, model: Any) -> bool:
        """Returns whether logits are hidden states times the matrix of the head, and the loss is
        that of transformers."""
        from transformers.loss.loss_utils import ForCausalLMLoss

        if (
            type(self.head) is not nn.Linear
            or self.head.bias is not None
            or model.loss_function is not ForCausalLMLoss
        ):
            return False
        weight = self.head.weight
        logits: list[torch.Tensor] = []
        seen: list[tuple[torch.Tensor, Any, Any]] = []
        labels = torch.arange(PROBED, device=weight.device)[None] % len(weight)

        def larger(hidden: torch.Tensor) -> torch.Tensor:
            logits.append(F.linear(LARGER * hidden, weight))
            return logits[-1]

        def loss(logits: torch.Tensor, *_: Any, **given: Any) -> torch.Tensor:
            seen.append((logits, given.get("shift_labels"), given.get("num_items_in_batch")))
            return torch.ones((), device=logits.device)

        given = {
            "input_ids": labels,
            "labels": labels,
            "shift_labels": labels,
            "num_items_in_batch": 1,
            "use_cache": False,
        }
        with (
            torch.no_grad(),
            evaluating(model),
            without_router_loss(model),
            replaced(self.head, "forward", larger),
            replaced(model, LOSS, loss),
        ):
            output = model(**given)
        if not (len(logits) == len(seen) == 1 and output["loss"] == 1):
            return False
        ((lost, shifted, count),) = seen
        return shifted is labels and count == 1 and torch.equal(lost, logits[0])

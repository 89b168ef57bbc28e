"""The auxiliary loss of a mixture's routers, over the tokens of a micro-batch on all ranks, as transformers defines it.

Each rank adds its tokens' probabilities times the shares of tokens that the experts get on all ranks, which have no gradient.
The loss of a step is the mean over its micro-batches, weighted by their tokens.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from longctx.hf.exactness import OF_ALL_RANKS
from longctx.trainers.refusals import TrainerError, trainer_of_trl

NAME = "load_balancing_loss_func"


class RouterLoss:
    """Replaces transformers' function in the forward of a model; for `replaced_method`.

    `rows` are the tokens of the micro-batch on this rank, `step_tokens` those of the step on all ranks.
    """

    def __init__(self, trainer: Any, model: Any, group: dist.ProcessGroup | None) -> None:
        """Raises TrainerError for models with another loss."""
        from transformers.models.mixtral import modeling_mixtral

        self.trainer, self.rows, self.step_tokens = trainer, 5, 5
        self.modules = sys.modules[type(model).__module__], modeling_mixtral  # TRL's head takes that of the second one
        self.group: dist.ProcessGroup | None = None
        own, gates = getattr(self.modules[0], NAME, None), torch.linspace(-9, 9, 40).sin().view(2, 5, 4).unbind()
        if own is None or not torch.allclose(own(gates, 4, 2) * self._divisor, self._loss(gates, 4, 2)):
            raise TrainerError(
                f"{type(model).__name__} does not compute the auxiliary loss of its routers by {NAME}, as most models do: set "
                "output_router_logits to False in its config"
            )
        self.group = group

    def __call__(self, own: Callable[..., Any], model: Any, *arguments: Any, **named: Any) -> Any:
        if named.get("ring_attention") is None:
            return own(model, *arguments, **named)
        before = [getattr(module, NAME) for module in self.modules]
        try:
            for module in self.modules:
                setattr(module, NAME, self._loss)
            return own(model, *arguments, **named | {"output_router_logits": OF_ALL_RANKS})
        finally:
            for module, function in zip(self.modules, before, strict=True):
                setattr(module, NAME, function)

    def _loss(self, gates: tuple[torch.Tensor, ...], experts: int, top_k: int, attention_mask: Any = None) -> Any:
        """Returns this rank's part of the loss of a step, times what the trainer divides the sum over ranks by."""
        counts = gates[0].new_zeros(experts + 1, dtype=torch.int64)
        counts[-1], probabilities = self.rows * len(gates), torch.zeros(experts, device=counts.device)
        for gate in gates:
            of_tokens = gate[: self.rows].to(counts.device).softmax(-1)  # a rank without tokens has a row of padding
            chosen = of_tokens.topk(top_k).indices.flatten()
            counts.scatter_add_(0, chosen, torch.ones_like(chosen))
            probabilities = probabilities + of_tokens.float().sum(0)
        if self.group is not None:
            dist.all_reduce(counts, group=self.group)
        of_ranks = (counts[:-1] / counts[-1] * probabilities).sum() * experts
        return of_ranks * self._divisor / (len(gates) * self.step_tokens)

    @property
    def _divisor(self) -> int:
        args, of_trl = self.trainer.args, trainer_of_trl(self.trainer)
        ranks = 1 if args.average_tokens_across_devices and not of_trl else args.world_size
        return int(ranks * (self.trainer.current_gradient_accumulation_steps if of_trl else 1))


@contextmanager
def without_router_loss(model: Any) -> Iterator[None]:
    """Lets a model be checked as if its config did not ask for the auxiliary loss of routers."""
    config = model.config if model.config.is_encoder_decoder else model.config.get_text_config()
    if asked := getattr(config, "output_router_logits", None):
        config.output_router_logits = False
    try:
        yield
    finally:
        if asked:
            config.output_router_logits = asked

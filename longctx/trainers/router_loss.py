"""The auxiliary loss of a mixture's routers, as transformers defines it, over tokens that are on
several ranks.

In whole steps it is over the tokens of the step on all ranks: each rank adds its tokens'
probabilities times the shares of tokens that the experts get, which have no gradient. The shares of
a step of several micro-batches are counted before, by a forward pass of them all. Trainers of
sequences have it over the rows of a rank's call, as in plain training, from statistics of every
token.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from longctx.data.packing import MicroBatch
from longctx.hf.exactness import OF_ALL_RANKS, replaced
from longctx.trainers.kinds import Traits
from longctx.trainers.prepared import replaced_method
from longctx.trainers.refusals import TrainerError
from longctx.trainers.riders import Rider

NAME = "load_balancing_loss_func"
TRIED = 5
"""Tokens that the loss of a model is tried on."""


class RouterLoss(Rider):
    """Replaces transformers' function in the forward of a model; for `replaced_method`.

    Attributes:
        rows: tokens of the micro-batch on this rank.
        step_tokens: tokens of the step on all ranks.
        counts: tokens of each expert, and of all, in the step [experts + 1]; None: in the
            micro-batch, which is the step.
        found: counts of micro-batches while they are counted.
    """

    needs_every_document = True
    rows: int
    counts: torch.Tensor | None = None
    found: list[torch.Tensor] | None = None

    def __init__(self, traits: Traits, group: dist.ProcessGroup | None) -> None:
        """Raises TrainerError for models with another loss."""
        from transformers.models.mixtral import modeling_mixtral

        self.traits = traits
        # TRL's head takes the function of the second one.
        self.modules = (sys.modules[type(traits.model).__module__], modeling_mixtral)
        self.rows = self.step_tokens = TRIED
        self.group: dist.ProcessGroup | None = None  # this rank alone tries
        own = getattr(self.modules[0], NAME, None)
        gates = torch.linspace(-9, 9, 2 * TRIED * 4).sin().view(2, TRIED, 4).unbind()
        if own is None or not torch.allclose(
            own(gates, 4, 2) * self._divisor, self._loss(gates, 4, 2)
        ):
            raise TrainerError(
                f"{type(traits.model).__name__} does not compute the auxiliary loss of its "
                f"routers by {NAME}, as most models do: set output_router_logits to False in its "
                "config"
            )
        self.group = group

    def used_by(self, model: Any) -> AbstractContextManager[None]:
        return replaced_method(model, "forward", self)

    def begin(self, batch: MicroBatch, call: int) -> None:
        self.rows = batch.layout.tokens

    def __call__(self, own: Callable[..., Any], model: Any, *arguments: Any, **named: Any) -> Any:
        if named.get("ring_attention") is None:
            return own(model, *arguments, **named)
        named["output_router_logits"] = OF_ALL_RANKS
        with (
            replaced(self.modules[0], NAME, self._loss),
            replaced(self.modules[1], NAME, self._loss),
        ):
            return own(model, *arguments, **named)

    @contextmanager
    def during_step(
        self, batches: Sequence[MicroBatch], tokens: int, run: Callable[[MicroBatch], None]
    ) -> Iterator[None]:
        """Counts the tokens of experts in a step of several micro-batches before its losses are
        computed, by a forward pass of them all, without gradients. Collective."""
        self.step_tokens = tokens
        if len(batches) < 2:
            yield
            return
        found: list[torch.Tensor] = []
        with torch.no_grad(), replaced(self, "found", found):
            for batch in batches:
                run(batch)
        counts = torch.stack(found).sum(0)
        if self.group is not None:
            dist.all_reduce(counts, group=self.group)
        with replaced(self, "counts", counts):
            yield

    def _loss(
        self, gates: tuple[torch.Tensor, ...], experts: int, top_k: int, attention_mask: Any = None
    ) -> Any:
        """Returns this rank's share of the step loss × the trainer's divisor."""
        # A rank without tokens has a row of padding.
        rows = statistics(gates, experts, top_k)[: self.rows]
        probabilities, chosen = rows.sum(0).chunk(2)
        counts = torch.cat([chosen.detach(), chosen.new_full((1,), self.rows)])
        if self.found is not None:
            self.found.append(counts)
            return counts.new_zeros(())
        if self.counts is not None:
            counts = self.counts
        elif self.group is not None:
            dist.all_reduce(counts, group=self.group)
        shares = counts[:-1] / counts[-1]
        loss = (shares * probabilities).sum() * experts
        return loss * self._divisor / self.step_tokens

    @property
    def _divisor(self) -> int:
        """What the trainer divides the sum over ranks by."""
        args = self.traits.args
        if self.traits.trl_class:
            # Set when training begins.
            steps = getattr(self.traits.trainer, "current_gradient_accumulation_steps", 1)
            return int(args.world_size * steps)
        return 1 if args.average_tokens_across_devices else int(args.world_size)


def statistics(
    gates: tuple[torch.Tensor, ...], experts: int, top_k: int, attention_mask: Any = None
) -> torch.Tensor:
    """Returns the experts' probabilities for every token, and 1 for each expert that it chooses, as
    means over layers, float32 [tokens, 2 * experts]."""
    found = torch.zeros(len(gates[0]), 2 * experts, device=gates[0].device)
    for gate in gates:
        probabilities = gate.to(found.device).softmax(-1)
        chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(top_k).indices, 1)
        found = found + torch.cat([probabilities, chosen], 1)
    return found / len(gates)


def loss_of_rows(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns the loss of a batch from the statistics of its tokens, [rows, tokens, 2 * experts], 0
    where `mask` is."""
    probabilities, chosen = (values.sum((0, 1)) / mask.sum()).chunk(2)
    return len(chosen) * (probabilities * chosen.detach()).sum()


def by_token() -> AbstractContextManager[None]:
    """Makes TRL's fused head return `statistics` in place of the loss."""
    from transformers.models.mixtral import modeling_mixtral

    return replaced(modeling_mixtral, NAME, statistics)


def without_router_loss(model: Any) -> AbstractContextManager[None]:
    """Lets a model be checked as if its config did not ask for the auxiliary loss of routers."""
    config = model.config if model.config.is_encoder_decoder else model.config.get_text_config()
    asked = getattr(config, "output_router_logits", False)
    return replaced(config, "output_router_logits", False) if asked else nullcontext()

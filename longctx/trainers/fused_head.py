"""The trainers of TRL whose loss needs whole sequences: DPO, GRPO, RLOO and KTO.

All of them call `model(input_ids=.., attention_mask=.., labels=.., fused_lm_head=True)` and read values per token, of shape
[rows, tokens - 1]. This call is planned: the rows of all ranks are shared like documents of a step, every rank runs its
micro-batches, and a sum over the ranks gives each rank the values of its own rows. Each rank computes its own loss from them,
and DDP or FSDP averages the gradients, as before. A call is balanced, not a step.
"""

import functools
import types
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.nn.functional as differentiable
from torch.utils.checkpoint import checkpoint

from longctx.attention.huggingface import model_inputs
from longctx.data.packing import MicroBatch
from longctx.trainers.documents import rows_of
from longctx.trainers.refusals import TrainerError
from longctx.trainers.step import Share, Sharing

PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""Fields of the head's output with a value per token; those that a trainer did not ask for are None."""


class PlannedHead:
    """Replaces the forward of a model to which TRL has added a fused head; `remove` gives the model its own forward again."""

    def __init__(self, model: Any, sharing: Sharing, ring_options: Mapping[str, Any]) -> None:
        self.model, self.sharing, self.ring_options = model, sharing, ring_options
        self.own = model.forward

        @functools.wraps(type(model).forward)  # `generate` looks at the signature
        def forward(_: Any, *arguments: Any, **named: Any) -> Any:
            if not named.get("fused_lm_head") or "ring_attention" in named:
                return self.own(*arguments, **named)
            return self._values(**named)

        model.forward = types.MethodType(forward, model)

    def remove(self) -> None:
        self.model.forward = self.own

    def _values(
        self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, fused_lm_head: bool = True, **others: Any
    ) -> Any:
        """Returns the head's output for this rank's rows. Collective."""
        from trl.trainer.utils import FusedCausalLMOutput

        if unknown := sorted(name for name, value in others.items() if value is not None and name != "use_cache"):
            raise TrainerError(f"the trainer passes {', '.join(unknown)} to its model, which splitting sequences would lose")
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        rows = rows_of({"input_ids": input_ids, "attention_mask": mask, "labels": labels})
        if any(len(row) != 1 for row in rows):
            raise TrainerError("a row of the trainer's batch has no token: every row must have one sequence")
        share = self.sharing.share([[document for (document,) in rows]])
        values = self._shared(share)
        starts = self._starts(share)
        result: dict[str, Any] = {}
        for name, of_all in values.items():
            padded = of_all.new_zeros(mask.shape)
            for number, (document,) in enumerate(rows):
                if (start := starts.get(number)) is not None:
                    padded[number, mask[number].bool()] = of_all[start : start + len(document.tokens)]
            result[name] = padded[:, :-1]  # a token's label is the next one
        if "is_top1" in result:
            result["is_top1"] = result["is_top1"].bool()
        return FusedCausalLMOutput(label_mask=(labels[:, 1:] != -100) & mask[:, 1:].bool(), **result)

    def _starts(self, share: Share) -> dict[int, int]:
        """Returns where the values of this rank's rows begin among those of all documents of the plan."""
        starts, at = {}, 0
        for document in share.documents:
            if document.rank == self.sharing.rank:
                starts[document.number] = at
            at += document.length
        return starts

    def _shared(self, share: Share) -> dict[str, torch.Tensor]:
        """Returns the values of all tokens of the plan's documents, [tokens], the same on all ranks."""
        assert share.plan is not None  # a batch has a row
        lengths = torch.tensor(share.plan.lengths)
        starts, device = torch.cumsum(lengths, 0) - lengths, self.ring_options["device"]
        # One graph is kept as it is; of several, each keeps only its inputs.
        recompute = len(share.micro_batches) > 1 and torch.is_grad_enabled()
        values: dict[str, torch.Tensor] = {}
        for batch in share.micro_batches:
            places = torch.cat([torch.zeros(0, dtype=torch.int64), *_places(batch, starts)]).to(device)
            computed = checkpoint(self._head, batch, use_reentrant=False) if recompute else self._head(batch)
            for name, of_batch in computed.items():
                everything = values.get(name, torch.zeros(int(lengths.sum()), device=device))
                # A rank without tokens has a padding token, whose value is masked but whose backward every rank must run.
                values[name] = everything.index_add(0, places, of_batch[: len(places)]) + 0 * of_batch.sum()
        if self.sharing.group is None:
            return values
        return {name: _sum(each, self.sharing.group) for name, each in values.items()}

    def _head(self, batch: MicroBatch) -> dict[str, torch.Tensor]:
        """Returns the head's values for the tokens of a micro-batch, float32 [tokens]."""
        inputs = model_inputs(self.model, batch, 1, **self.ring_options)
        output = self.own(fused_lm_head=True, **inputs)
        return {name: value[0].float() for name in PER_TOKEN if (value := getattr(output, name)) is not None}


def _places(batch: MicroBatch, starts: torch.Tensor) -> list[torch.Tensor]:
    """Returns the places of a micro-batch's tokens among those of all documents."""
    spans = ((shard.document, span) for shard in batch.layout.shards for span in (shard.head, shard.tail))
    return [starts[document] + torch.arange(*span) for document, span in spans]


def _sum(values: torch.Tensor, group: Any) -> torch.Tensor:
    if values.requires_grad:
        summed: torch.Tensor = differentiable.all_reduce(values, group=group)
        return summed
    torch.distributed.all_reduce(values, group=group)
    return values

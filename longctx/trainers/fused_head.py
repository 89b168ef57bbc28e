"""The trainers of TRL whose loss needs whole sequences: DPO, GRPO, RLOO and KTO.

All of them call `model(input_ids=.., attention_mask=.., labels=.., fused_lm_head=True)`, with
images if there are any, and read values per token, of shape [rows, tokens - 1]. This call is
planned.
"""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from longctx.data.packing import MicroBatch
from longctx.hf.exactness import OF_ALL_RANKS
from longctx.trainers.documents import Document, rows_of
from longctx.trainers.images import fields_of_images
from longctx.trainers.planned_call import PlannedCall
from longctx.trainers.refusals import TrainerError
from longctx.trainers.router_loss import by_token, loss_of_rows

PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""Fields of the head's output with a value per token; those that a trainer did not ask for are
None."""


@dataclass
class PlannedHead(PlannedCall):
    """Plans the calls of a model to which TRL has added a fused head; for `replaced_method`."""

    def __call__(self, own: Callable[..., Any], model: Any, *arguments: Any, **named: Any) -> Any:
        if not named.get("fused_lm_head") or "ring_attention" in named:
            return own(model, *arguments, **named)
        return self._values(functools.partial(own, model), model, **named)

    def _values(
        self,
        own: Any,
        model: Any,
        input_ids: Any = None,
        attention_mask: Any = None,
        labels: Any = None,
        **others: Any,
    ) -> Any:
        """Returns the head's output for this rank's rows. Collective."""
        from trl.trainer.utils import FusedCausalLMOutput

        vision = self.sharing.vision
        images = {
            name: others.get(name) for name in (() if vision is None else fields_of_images(vision))
        }
        known = {"use_cache", "fused_lm_head", "output_router_logits", *images}
        if unknown := sorted(
            name for name, value in others.items() if value is not None and name not in known
        ):
            raise TrainerError(
                f"the trainer passes {', '.join(unknown)} to its model, which splitting sequences "
                "would lose"
            )
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask

        def read() -> list[Document]:
            rows = rows_of(
                {"input_ids": input_ids, "attention_mask": mask, "labels": labels, **images}, vision
            )
            if any(len(row) != 1 for row in rows):
                raise TrainerError(
                    "a row of the trainer's batch has no token: every row must have one sequence"
                )
            return [document for (document,) in rows]

        # TRL's head would ask for it, too, if the config does.
        balanced = bool(others.get("output_router_logits"))
        in_config = getattr(model.config.get_text_config(), "output_router_logits", False)
        routers = (
            {"output_router_logits": OF_ALL_RANKS if balanced else False}
            if balanced or in_config
            else {}
        )
        names: list[str] = []

        def head(batch: MicroBatch, call: int) -> torch.Tensor:
            """Returns all values for the tokens of a micro-batch, which travel together, float32
            [tokens, values]."""
            with by_token() if balanced else contextlib.nullcontext():
                output = own(
                    fused_lm_head=True, **routers, **self.sharing.inputs(model, batch, call)
                )
            names[:] = [name for name in PER_TOKEN if getattr(output, name) is not None]
            values = torch.stack([getattr(output, name)[0].float() for name in names], -1)
            return torch.cat([values, output.aux_loss], -1) if balanced else values

        values = self.values_of(read, mask, head)
        fields = values[:, :-1, : len(names)]  # a token's label is the next one
        # Calls ask for different fields: sums of a field must not depend on the others in memory,
        # by rounding.
        result: dict[str, Any] = dict(zip(names, fields.movedim(-1, 0).contiguous(), strict=True))
        if balanced:
            result["aux_loss"] = loss_of_rows(values[..., len(names) :], mask)
        if "is_top1" in result:
            result["is_top1"] = result["is_top1"].bool()
        return FusedCausalLMOutput(
            label_mask=(labels[:, 1:] != -100) & mask[:, 1:].bool(), **result
        )

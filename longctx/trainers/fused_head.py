"""The trainers of TRL whose loss needs whole sequences: DPO, GRPO, RLOO and KTO.

All of them call `model(input_ids=.., attention_mask=.., labels=.., fused_lm_head=True)`, with
images if there are any, and read values per token, of shape [rows, tokens - 1]. This call is
planned.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from longctx.data import IGNORED_LABEL
from longctx.data.packing import MicroBatch
from longctx.hf.exactness import OF_ALL_RANKS
from longctx.trainers.expert_replay import RouterReplay
from longctx.trainers.planned_call import Compute, PlannedCall, whole_rows
from longctx.trainers.refusals import TrainerError
from longctx.trainers.router_loss import by_token, loss_of_rows

PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""Fields of the head's output with a value per token; those that a trainer did not ask for are
None."""
KNOWN = ("use_cache", "fused_lm_head", "output_router_logits")
"""Arguments of a call that are read, or change no value."""


@dataclass
class PlannedHead(PlannedCall):
    """Plans the calls of a model to which TRL has added a fused head; for `replaced_method`."""

    carrier: RouterReplay | None = None

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

        self._refuse_unknown(others)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        more_fields = {name: others.get(name) for name in self.exchange.family.fields}
        batch = {"input_ids": input_ids, "attention_mask": mask, "labels": labels, **more_fields}
        balanced = bool(others.get("output_router_logits"))
        routers = _router_arguments(model, balanced)
        names: list[str] = []

        def head(batch: MicroBatch, call: int) -> torch.Tensor:
            """Returns all values for the tokens of a micro-batch, which travel together, float32
            [tokens, values]."""
            inputs = self.exchange.inputs(model, batch, call)
            with by_token() if balanced else contextlib.nullcontext():
                output = own(fused_lm_head=True, **routers, **inputs)
            names[:] = [name for name in PER_TOKEN if getattr(output, name) is not None]
            fields = [getattr(output, name)[0].float() for name in names]
            values = torch.stack(fields, -1)
            return torch.cat([values, output.aux_loss], -1) if balanced else values

        values = self._values_of_rows(batch, mask, head)
        fields = values[:, :-1, : len(names)]  # a token's label is the next one
        # Contiguous: a field's sum must round the same whichever other fields were requested.
        fields = fields.movedim(-1, 0).contiguous()
        result: dict[str, Any] = dict(zip(names, fields, strict=True))
        if balanced:
            result["aux_loss"] = loss_of_rows(values[..., len(names) :], mask)
        if "is_top1" in result:
            result["is_top1"] = result["is_top1"].bool()
        label_mask = (labels[:, 1:] != IGNORED_LABEL) & mask[:, 1:].bool()
        return FusedCausalLMOutput(label_mask=label_mask, **result)

    def _values_of_rows(
        self, batch: Mapping[str, Any], mask: torch.Tensor, compute: Compute
    ) -> torch.Tensor:
        """Returns values of the rows of a batch, with the routing that is replayed. Collective."""
        read = functools.partial(whole_rows, self.exchange.family, batch)
        replay = self.carrier
        if replay is None:
            return self.values_of(read, mask, compute)
        carried = replay.taken(len(mask))
        watched = replay.watched(compute)
        values = self.values_of(read, mask, watched, carried=carried)
        return replay.kept_of(values)

    def _refuse_unknown(self, others: Mapping[str, Any]) -> None:
        """Raises TrainerError for arguments of a call that would be lost."""
        known = {*KNOWN, *self.exchange.family.fields}
        unknown = [
            name for name, value in others.items() if value is not None and name not in known
        ]
        if unknown:
            raise TrainerError(
                f"the trainer passes {', '.join(sorted(unknown))} to its model, which splitting "
                "sequences would lose"
            )


def _router_arguments(model: Any, balanced: bool) -> dict[str, Any]:
    """Returns arguments of a model by which TRL's head computes the loss of routers only if it is
    `balanced`, also where the config asks for it."""
    if balanced:
        return {"output_router_logits": OF_ALL_RANKS}
    in_config = getattr(model.config.get_text_config(), "output_router_logits", False)
    return {"output_router_logits": False} if in_config else {}

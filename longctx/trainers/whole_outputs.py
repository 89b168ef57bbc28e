"""Trainers whose loss is not a sum over tokens: reward models, classification, `compute_loss_func` and losses of subclasses.

While such a trainer runs a step, the base model inside its model is planned: hidden states of all tokens come back to the rank
of their row, and the head, the pooling and the loss run there on whole rows, as in plain training on as many ranks.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from longctx.data import IGNORED_LABEL
from longctx.data.packing import MicroBatch
from longctx.hf.exactness import HARMLESS, evaluating, replaced
from longctx.trainers.documents import Document, rows_of
from longctx.trainers.planned_call import PlannedCall
from longctx.trainers.prepared import replaced_method
from longctx.trainers.refusals import TrainerError

PROBED = 8
"""Tokens that a head is tried on."""
OF_CHOICES = "ForMultipleChoice"
"""End of the names of models that take [rows, choices, tokens], of which they give their base model every choice as a row."""
FIELDS = ("input_ids", "attention_mask", "position_ids", "token_type_ids")
UNUSED = {*HARMLESS, "margin"} - {"output_hidden_states"}
"""Arguments that change no hidden state; `margin` is that of TRL's reward models."""


class WholeOutputs:
    """Mixin before a trainer's class: its steps and predictions call the planned model."""

    outputs: "PlannedBase"

    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        """Weighs the mean that a head of transformers takes over the labels of a batch, for the mean over those of a step.

        Plain training would multiply it by the number of ranks, as if the head divided a sum by `num_items_in_batch`.
        """
        own: Any = super()
        labels, arguments = inputs.get("labels"), (model, inputs, return_outputs, num_items_in_batch)
        if not self.outputs.means or num_items_in_batch is None or labels is None:
            return own.compute_loss(*arguments)
        with replaced(self, "model_accepts_loss_kwargs", False):
            found = own.compute_loss(*arguments)
        count = (labels != IGNORED_LABEL).sum()
        ranks = self.args.world_size if self.args.average_tokens_across_devices else 1
        loss = (found[0] if return_outputs else found).nan_to_num() * (ranks * count / num_items_in_batch)
        return (loss, found[1]) if return_outputs else loss

    def training_step(self: Any, *arguments: Any, **named: Any) -> Any:
        own: Any = super()
        with self.outputs.used():
            return own.training_step(*arguments, **named)

    def prediction_step(self: Any, *arguments: Any, **named: Any) -> Any:
        own: Any = super()
        with self.outputs.used():
            return own.prediction_step(*arguments, **named)


@dataclass
class PlannedBase(PlannedCall):
    """Plans the calls of a base model while it is `used`; for `replaced_method`.

    `means`: the loss is that of a head, a mean over the labels of a batch. `padding`: the token that a head of a causal model
    looks for, to find the last token of a row. `mask`: that of the last call.
    """

    means: bool = False
    padding: int | None = None
    active: bool = False
    mask: torch.Tensor | None = None

    def used(self) -> AbstractContextManager[None]:
        return replaced(self, "active", True)

    def __call__(self, own: Callable[..., Any], base: Any, *arguments: Any, **named: Any) -> Any:
        if not self.active or named.get("ring_attention") is not None:
            return own(base, *arguments, **named)
        given = _by_name(own, base, arguments, named)
        ids = given.get("input_ids")
        set_ones = {name for name, value in given.items() if value is not None and value is not False}
        if ids is None or (lost := sorted(set_ones - {*FIELDS, *UNUSED})):
            what = "no input_ids" if ids is None else ", ".join(lost)
            raise TrainerError(
                f"{type(base).__name__} gets {what}, which splitting rows would lose: pass only {', '.join(FIELDS)}"
            )
        if not isinstance(ids, torch.Tensor):
            raise TrainerError(f"input_ids is a {type(ids).__name__}: return a tensor of [rows, tokens]")
        self.mask = mask = torch.ones_like(ids) if given.get("attention_mask") is None else given["attention_mask"]

        def read() -> list[Document]:
            fields = {name: given.get(name) for name in FIELDS} | {"labels": torch.full_like(ids, IGNORED_LABEL)}
            rows = rows_of(fields | {"attention_mask": mask}, masked=given.get("token_type_ids") is not None)
            if self.padding is not None and bool(((ids != self.padding) & (mask == 0)).any()):
                raise TrainerError(
                    f"rows are padded with other tokens than the config's pad_token_id {self.padding}, by which the head finds "
                    "the last token of a row: set pad_token_id to what the collator pads with"
                )
            return [document for row in rows for document in row]

        kinds: list[Any] = []

        def run(batch: MicroBatch, call: int) -> torch.Tensor:
            inputs = self.sharing.inputs(base, batch, call)
            with without_pooler(base):
                output = own(base, **{name: value for name, value in inputs.items() if not name.endswith("labels")})
            kinds.append(type(output))
            hidden: torch.Tensor = output.last_hidden_state[0]
            return hidden

        hidden = self.values_of(read, mask, run)
        return output_of(base, kinds[0], hidden)

    def without_padding(self, own: Callable[..., Any], head: Any, hidden: torch.Tensor) -> Any:
        """Returns scores of answers as of rows one by one: the lowest on padding; for `replaced_method`."""
        scores = own(head, hidden)
        if not self.active or self.mask is None:
            return scores
        return scores.masked_fill(self.mask[..., None] == 0, torch.finfo(scores.dtype).min)


def _by_name(own: Any, base: Any, arguments: Any, named: Any) -> dict[str, Any]:
    given = dict(inspect.signature(own).bind(base, *arguments, **named).arguments)
    more: dict[str, Any] = given.pop("kwargs", {})
    return {name: value for name, value in given.items() if value is not base} | more


def output_of(base: Any, kind: Any, hidden: torch.Tensor) -> Any:
    """Returns the output of a base model with these hidden states, pooled by its own pooler if it has one."""
    pooler = getattr(base, "pooler", None)
    return kind(last_hidden_state=hidden, **({} if pooler is None else {"pooler_output": pooler(hidden)}))


def without_pooler(base: Any) -> AbstractContextManager[None]:
    """Takes the pooler off, which takes the first token of a row for that of a document."""
    return replaced(base, "pooler", None)


def check_head(model: Any) -> None:
    """Raises TrainerError unless a model's outputs depend on nothing but the last hidden states of its base model."""
    base, name = model.base_model, type(model).__name__
    ids = torch.arange(PROBED, device=next(model.parameters()).device)[None]
    if name.endswith(OF_CHOICES):
        ids = torch.stack([ids, ids.flip(1)], 1)

    def reduced(own: Any, this: Any, *arguments: Any, **named: Any) -> Any:
        output = own(this, *arguments, **named)
        return output_of(this, type(output), output.last_hidden_state)

    try:
        with torch.no_grad(), evaluating(model):
            plain = model(input_ids=ids, attention_mask=torch.ones_like(ids))
            with replaced_method(base, "forward", reduced):
                ours = model(input_ids=ids, attention_mask=torch.ones_like(ids))
        pairs = [(ours.get(key), value) for key, value in plain.items() if isinstance(value, torch.Tensor)]
        same = all(one is not None and torch.allclose(one, other, equal_nan=True) for one, other in pairs)
    except Exception as error:  # models may raise anything for outputs that they were not written for
        what = f"{type(error).__name__}: {str(error)[:120]}"
        raise TrainerError(f"the head of {name} does not run on hidden states alone ({what}): it is not supported") from error
    if not same:
        raise TrainerError(f"the head of {name} needs more than the last hidden states of its base model: it is not supported")

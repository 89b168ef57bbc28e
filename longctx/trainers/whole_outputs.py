"""Trainers whose loss is not a sum over tokens: reward models, classification, `compute_loss_func`
and losses of subclasses.

While such a trainer runs a step, the base model inside its model is planned: hidden states of all
tokens come back to the rank of their row, and the head, the pooling and the loss run there on whole
rows, as in plain training on as many ranks.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from longctx.attention.host_to_device import copy_to
from longctx.data import IGNORED_LABEL
from longctx.data.packing import MicroBatch
from longctx.hf.exactness import HARMLESS, evaluating, replaced
from longctx.parallel.sharding import gather_in_backward
from longctx.trainers.agreement import attempted, mean_over_ranks
from longctx.trainers.documents import SEGMENTS, Document, cut_rows, refuse_segments
from longctx.trainers.joined_calls import Fields, JoinedCalls
from longctx.trainers.planned_call import PlannedCall
from longctx.trainers.prepared import replaced_method
from longctx.trainers.refusals import UNEVEN, TrainerError
from longctx.trainers.whole_steps import own_rows_of_last_batch

PROBED = 8
"""Tokens that a head is tried on."""
MOST_TOKENS = 0.9
"""Share of tokens in a batch from which padding costs less than it takes to leave it out."""
MULTIPLE_CHOICE = "ForMultipleChoice"
"""End of the names of models that take [rows, choices, tokens], of which they give their base model
every choice as a row."""
FIELDS = ("input_ids", "attention_mask", "position_ids", SEGMENTS)
UNUSED = {*HARMLESS, "margin"} - {"output_hidden_states"}
"""Arguments that change no hidden state; `margin` is that of TRL's reward models."""


class WholeOutputs:
    """Mixin before a trainer's class: its steps and predictions call the planned model."""

    outputs: "PlannedBase"

    def get_batch_samples(
        self: Any, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> tuple[list[Any], Any]:
        """Leaves out the rows that repeat others in the last batches of an epoch. A rank that has
        no others keeps one, which counts nothing, as the model runs on all ranks. Collective."""
        drawn, items = self._drawn(epoch_iterator, num_batches, device)
        self.outputs.joined.begin_step(drawn)
        return drawn, items

    def _drawn(
        self: Any, epoch_iterator: Iterator[Any], num_batches: int, device: Any
    ) -> tuple[list[Any], Any]:
        """Returns the batches of a step, without rows that repeat others, and the number of their
        labels. Collective."""
        own: Any = super()
        batches = list(itertools.islice(epoch_iterator, num_batches))
        state = self.accelerator.gradient_state
        self.outputs.weights = {}
        counts = [_count_rows(batch) for batch in batches]
        if not state.end_of_dataloader or state.active_dataloader is None or not batches:
            drawn, items = own.get_batch_samples(iter(batches), num_batches, device)
            return drawn, items
        kept = self._own_rows(counts[-1])
        if kept < counts[-1]:
            batches[-1] = _first_rows(batches[-1], counts[-1], max(kept, 1))
            counts[-1] = kept
        ranks = self.dynamic.ranks
        rows = self._sum_over_ranks(sum(counts))
        weights = [count * ranks * len(batches) / rows for count in counts]
        self.outputs.weights = _by_id(batches, weights)
        drawn, items = own.get_batch_samples(iter(batches), num_batches, device)
        self.outputs.weights = _by_id(drawn, weights)
        return drawn, items

    def _get_num_items_in_batch(self: Any, batch_samples: list[Any], device: Any) -> Any:
        """Counts no labels of rows that repeat others."""
        own: Any = super()
        counted = []
        for batch in batch_samples:
            weight = self.outputs.weights.get(id(batch), self.outputs.weight)
            counted.append(batch if weight else _without_labels(batch))
        return own._get_num_items_in_batch(counted, device)

    def _track_num_input_tokens(self: Any, inputs: Any) -> None:
        """Counts no tokens of rows that repeat others."""
        own: Any = super()
        counted = inputs
        if self.outputs.weights.get(id(inputs)) == 0:
            counted = _first_rows(inputs, _count_rows(inputs), 0)
        own._track_num_input_tokens(counted)

    def compute_loss(
        self: Any,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Weighs the mean that a head of transformers takes over the labels of a batch, for the
        mean over those of a step.

        Plain training would multiply it by the number of ranks, as if the head divided a sum by
        `num_items_in_batch`. Without labels, as for answers, it is weighed by rows.
        """
        own: Any = super()
        labels = inputs.get("labels")
        weight = self.outputs.weight
        by_labels = self.outputs.means and num_items_in_batch is not None and labels is not None
        if by_labels:
            with replaced(self, "model_accepts_loss_kwargs", False):
                found = own.compute_loss(model, inputs, return_outputs, num_items_in_batch)
            factor = 0.0
            if weight:
                targets = (labels != IGNORED_LABEL).sum()
                factor = targets * self.args.world_size / num_items_in_batch
        else:
            found = own.compute_loss(model, inputs, return_outputs, num_items_in_batch)
            by_rows = self.outputs.means and num_items_in_batch is None
            factor = weight if by_rows or weight == 0 else 1.0
            if factor == 1.0:
                return found
        mean = found[0] if return_outputs else found
        # The mean of no labels is NaN.
        counts_nothing = torch.as_tensor(factor == 0, device=mean.device)
        loss = torch.where(counts_nothing, torch.zeros_like(mean), mean * factor)
        return (loss, found[1]) if return_outputs else loss

    def training_step(self: Any, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        """Runs forward and backward of a batch, whose calls of the base model are planned."""
        own: Any = super()
        weight = self.outputs.weights.get(id(inputs), 1.0)
        joined = self.outputs.joined.of_batch(inputs)
        with self.outputs.used(), replaced(self.outputs, "weight", weight), joined:
            return own.training_step(model, inputs, *arguments, **named)

    def prediction_step(
        self: Any,
        model: Any,
        inputs: Any,
        prediction_loss_only: bool,
        *arguments: Any,
        **named: Any,
    ) -> Any:
        """Gives the loss of a head, or by `compute_loss_func`, over the rows of all ranks that do
        not repeat others."""
        own: Any = super()
        with self.outputs.used():
            if not self.outputs.leaves_rows_out or self.dynamic.group is None:
                return own.prediction_step(model, inputs, prediction_loss_only, *arguments, **named)
            state = self.accelerator.gradient_state
            rows = _count_rows(inputs)
            kept = rows
            if state.end_of_dataloader and state.active_dataloader is not None:
                kept = self._own_rows(rows)
            every = self._sum_over_ranks(kept)
            weight = kept * self.dynamic.ranks / max(1, every)
            fewer = _first_rows(inputs, rows, max(kept, 1))
            with replaced(self.outputs, "weight", weight):
                loss, logits, labels = own.prediction_step(
                    model, fewer, prediction_loss_only, *arguments, **named
                )
            # Those of all rows, of which the trainer leaves some out.
            if state.end_of_dataloader and not prediction_loss_only:
                _, logits, labels = own.prediction_step(
                    model, inputs, prediction_loss_only, *arguments, **named
                )
            mean = None if loss is None else mean_over_ranks(loss, self.dynamic.group)
            return mean, logits, labels

    def _sum_over_ranks(self: Any, count: int) -> int:
        """Returns the sum of a number over all ranks. Collective."""
        if self.dynamic.group is None:
            return count
        total = torch.tensor(count)
        dist.all_reduce(total, group=self.dynamic.ids_group)
        return int(total)

    def _own_rows(self: Any, rows: int) -> int:
        """Returns how many rows of the last batch do not repeat others. Raises TrainerError on all
        ranks. Collective."""

        def counted() -> int:
            kept = _own_rows(
                self.accelerator.gradient_state.active_dataloader, self.dynamic.rank, rows
            )
            if kept < rows and not self.outputs.leaves_rows_out:
                raise TrainerError(UNEVEN.format("an epoch", type(self.args).__name__))
            return kept

        if self.dynamic.group is None:
            return counted()
        kept, failed = attempted(counted, rows)
        self.dynamic.end_all(failed)
        return int(kept)


def _without_labels(batch: Any) -> Any:
    labels = batch.get("labels")
    return batch if labels is None else {**batch, "labels": torch.full_like(labels, IGNORED_LABEL)}


def _count_rows(batch: Any) -> int:
    return next(
        (len(value) for value in batch.values() if isinstance(value, torch.Tensor) and value.dim()),
        0,
    )


def _own_rows(loader: Any, rank: int, rows: int) -> int:
    """Returns how many of the `rows` of the last batch do not repeat others. Raises TrainerError if
    examples were joined."""
    sampler = loader.batch_sampler
    size = getattr(sampler, "batch_size", None) or rows
    size //= getattr(sampler, "num_processes", 1) if getattr(sampler, "split_batches", False) else 1
    kept = own_rows_of_last_batch(loader, rank, size)
    if kept >= size:
        return rows  # an example may have several
    if rows != size:
        raise TrainerError(
            f"the last batch of an epoch has {rows} rows of {size} examples, of which "
            f"{size - kept} repeat others, and cannot be told: set dataloader_drop_last=True, or "
            "return a row for every example"
        )
    return kept


def _by_id(batches: list[Any], weights: list[float]) -> dict[int, float]:
    return {id(batch): weight for batch, weight in zip(batches, weights, strict=False)}


def _first_rows(batch: Any, rows: int, count: int) -> dict[str, Any]:
    """Returns the first rows of a batch; of a new one, by which it is known."""
    fields = dict(batch)
    for name, value in fields.items():
        if isinstance(value, torch.Tensor) and value.dim() and len(value) == rows:
            fields[name] = value[:count]
    return fields


@dataclass
class PlannedBase(PlannedCall):
    """Plans the calls of a base model while it is `used`; for `replaced_method`.

    Attributes:
        means: the loss is that of a head, a mean over the labels of a batch.
        leaves_rows_out: the loss is that of a head, or by `compute_loss_func`, so that rows that
            repeat others can be left out.
        joins: calls of a step may be planned together, as a backward pass follows each of them.
        padding: the token that a head of a causal model looks for, to find the last token of a row.
        weights: of batches, by `id`, in a step whose rows are not even.
        weight: that of the batch that runs.
        active: whether calls are planned now.
        mask: that of the last call, 1 for tokens [rows, tokens].
        places: rows and columns of its tokens, [2, tokens], where logits leave padding out; else
            None.
        kind: class of the base model's outputs.
        joined: plans calls of a step together.
    """

    means: bool = False
    leaves_rows_out: bool = False
    padding: int | None = None
    joins: bool = True
    weights: dict[int, float] = field(default_factory=dict, init=False)
    weight: float = field(default=1.0, init=False)
    active: bool = field(default=False, init=False)
    mask: torch.Tensor | None = field(default=None, init=False)
    places: torch.Tensor | None = field(default=None, init=False)
    kind: Any = field(default=None, init=False)
    joined: JoinedCalls = field(init=False)

    def __post_init__(self) -> None:
        self.joined = JoinedCalls(self, self._documents, active=self.joins)

    def used(self) -> AbstractContextManager[None]:
        """Plans calls meanwhile."""
        return replaced(self, "active", True)

    def __call__(self, own: Callable[..., Any], base: Any, *arguments: Any, **named: Any) -> Any:
        if not self.active or named.get("ring_attention") is not None:
            return own(base, *arguments, **named)
        given = _by_name(own, base, arguments, named)
        _check_arguments(base, given)
        ids = given["input_ids"]
        mask = given.get("attention_mask")
        if mask is None:
            mask = torch.ones_like(ids)
        kept = self.remember(mask)
        fields = {name: given.get(name) for name in FIELDS}
        fields["attention_mask"] = mask

        def run(batch: MicroBatch, call: int) -> torch.Tensor:
            inputs = self.exchange.inputs(base, batch, call)
            for name in ("labels", "shift_labels"):
                inputs.pop(name, None)
            with without_pooler(base):
                output = own(base, **inputs)
            self.kind = type(output)
            rows: torch.Tensor = output.last_hidden_state
            gather_in_backward(base, rows)
            return rows[0]

        hidden = self.joined.values_of(fields, kept, run)
        return output_of(base, self.kind, hidden)

    def remember(self, mask: torch.Tensor) -> torch.Tensor:
        """Keeps the mask of a call, and returns it in host memory: before the model runs, for which
        a look at a GPU would wait."""
        self.mask = mask
        kept = mask.cpu()
        self.places = _places_of(kept, mask.device)
        return kept

    def _documents(self, fields: Fields) -> list[Document]:
        """Returns the documents of a call, which has no labels, as rows of a batch."""
        ids = fields["input_ids"]
        mask = fields["attention_mask"]
        assert ids is not None and mask is not None
        refuse_segments(fields)
        batch = {**fields, "labels": torch.full_like(ids, IGNORED_LABEL)}
        rows = cut_rows(batch, more_fields=(SEGMENTS,))
        in_padding = mask == 0
        if self.padding is not None and bool(((ids != self.padding) & in_padding).any()):
            raise TrainerError(
                "rows are padded with other tokens than the config's pad_token_id "
                f"{self.padding}, by which the head finds the last token of a row: set "
                "pad_token_id to what the collator pads with"
            )
        return list(itertools.chain.from_iterable(rows))

    def without_padding(self, own: Callable[..., Any], head: Any, hidden: torch.Tensor) -> Any:
        """Returns scores of answers as of rows one by one: the lowest on padding; for
        `replaced_method`."""
        scores = own(head, hidden)
        if not self.active or self.mask is None:
            return scores
        return scores.masked_fill(self.mask[..., None] == 0, torch.finfo(scores.dtype).min)

    def of_tokens(self, own: Callable[..., Any], head: Any, hidden: torch.Tensor) -> Any:
        """Returns logits [rows, tokens, vocabulary], 0 on padding, for which no product is
        computed; for `replaced_method`."""
        mask = self.mask
        if not self.active or mask is None or hidden.shape[:-1] != mask.shape:
            return own(head, hidden)
        if self.places is None:
            return own(head, hidden)
        row, column = self.places
        logits = own(head, hidden[row, column])
        empty = logits.new_zeros(*mask.shape, logits.shape[-1])
        return empty.index_put((row, column), logits)


def _places_of(mask: torch.Tensor, device: torch.device) -> torch.Tensor | None:
    """Returns rows and columns of the tokens of a mask in host memory, [2, tokens]; None if it
    leaves out so few that all cost less."""
    places = torch.nonzero(mask).T.contiguous()
    if places.shape[1] > MOST_TOKENS * mask.numel():
        return None
    return copy_to(places, device)


def _check_arguments(base: Any, given: dict[str, Any]) -> None:
    """Raises TrainerError for arguments of a call that would be lost."""
    ids = given.get("input_ids")
    are_set = [name for name, value in given.items() if value is not None and value is not False]
    lost = sorted({*are_set} - {*FIELDS, *UNUSED})
    if ids is None or lost:
        what = "no input_ids" if ids is None else ", ".join(lost)
        raise TrainerError(
            f"{type(base).__name__} gets {what}, which splitting rows would lose: pass only "
            f"{', '.join(FIELDS)}"
        )
    if not isinstance(ids, torch.Tensor):
        raise TrainerError(f"input_ids is a {type(ids).__name__}: pass a tensor of [rows, tokens]")


def _by_name(own: Any, base: Any, arguments: Any, named: Any) -> dict[str, Any]:
    given = dict(inspect.signature(own).bind(base, *arguments, **named).arguments)
    more: dict[str, Any] = given.pop("kwargs", {})
    return {name: value for name, value in given.items() if value is not base} | more


def output_of(base: Any, kind: Any, hidden: torch.Tensor) -> Any:
    """Returns the output of a base model with these hidden states, pooled by its own pooler if it
    has one."""
    pooler = getattr(base, "pooler", None)
    if pooler is None:
        return kind(last_hidden_state=hidden)
    return kind(last_hidden_state=hidden, pooler_output=pooler(hidden))


def without_pooler(base: Any) -> AbstractContextManager[None]:
    """Takes the pooler off, which takes the first token of a row for that of a document."""
    return replaced(base, "pooler", None)


def check_head(model: Any) -> None:
    """Raises TrainerError unless a model's outputs depend on nothing but the last hidden states of
    its base model."""
    base = model.base_model
    name = type(model).__name__
    ids = torch.arange(PROBED, device=next(model.parameters()).device)[None]
    if name.endswith(MULTIPLE_CHOICE):
        ids = torch.stack([ids, ids.flip(1)], 1)

    def reduced(own: Any, this: Any, *arguments: Any, **named: Any) -> Any:
        output = own(this, *arguments, **named)
        return output_of(this, type(output), output.last_hidden_state)

    try:
        with torch.no_grad(), evaluating(model):
            plain = model(input_ids=ids, attention_mask=torch.ones_like(ids))
            with replaced_method(base, "forward", reduced):
                ours = model(input_ids=ids, attention_mask=torch.ones_like(ids))
        same = all(
            _are_close(ours.get(name), value)
            for name, value in plain.items()
            if isinstance(value, torch.Tensor)
        )
    except Exception as error:  # models may raise anything for outputs that they do not expect
        what = f"{type(error).__name__}: {str(error)[:120]}"
        raise TrainerError(
            f"the head of {name} does not run on hidden states alone ({what}): it is not supported"
        ) from error
    if not same:
        raise TrainerError(
            f"the head of {name} needs more than the last hidden states of its base model: it is "
            "not supported"
        )


def _are_close(ours: torch.Tensor | None, plain: torch.Tensor) -> bool:
    return ours is not None and torch.allclose(ours, plain, equal_nan=True)

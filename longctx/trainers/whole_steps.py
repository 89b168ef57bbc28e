"""The trainers of which whole steps are planned: `transformers.Trainer`, TRL's `SFTTrainer`, and
their subclasses.

`get_batch_samples` takes the batches that the trainer's own loader yields and exchanges the
documents of all ranks, one step ahead. `training_step` and `prediction_step` run this rank's
micro-batches. The trainer of transformers divides the loss by the targets of the step, which
`get_batch_samples` gives it, and multiplies it by the number of ranks, which DDP and FSDP undo.
Losses of encoders, smoothed ones, and those of evaluations are scaled here.
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.utils.data import BatchSampler, IterableDataset

from longctx.attention.host_to_device import copy_to
from longctx.data import IGNORED_LABEL
from longctx.data.packing import MicroBatch
from longctx.hf.exactness import replaced
from longctx.trainers.agreement import attempted, mean_over_ranks
from longctx.trainers.documents import Document, labels_beside_padding
from longctx.trainers.packed_masks import with_flat_mask
from longctx.trainers.pairs import TARGET_FIELDS, TARGETS
from longctx.trainers.refusals import TrainerError
from longctx.trainers.riders import all_during_loss, all_during_step
from longctx.trainers.step import RankStep, StepExchange


class NextStep(NamedTuple):
    """The step that is exchanged while the one before runs, and the batches of the epoch that it
    is drawn from."""

    batches: Iterator[Any]
    step: Future[RankStep]


class WholeSteps:
    """Mixin before a trainer's class: steps of the trainer are planned and exchanged."""

    data_collator: Any
    dynamic: StepExchange
    _next: NextStep | None = None
    _last_step = RankStep()
    _warned = False  # that labels of padding have no loss
    _gathers_loss = False
    """Whether the loss of a batch is what the trainer gathers next."""

    def get_batch_samples(
        self: Any, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Returns one item per batch, as the trainer counts them: empty ones, and last the whole
        step."""
        if self._next is None or self._next.batches is not epoch_iterator:
            self._draw(epoch_iterator, num_batches)
        step: RankStep = self._next.step.result()
        if not step.batches:
            return [], None
        self._draw(epoch_iterator, num_batches)
        empty = [_Inputs(RankStep()) for _ in range(step.batches - 1)]
        return [*empty, _Inputs(step)], self._divisor(step)

    @contextlib.contextmanager
    def all_steps_ended(self: Any) -> Iterator[None]:
        """Goes around a training. Waits for the exchange of the step after the last one, too, for
        which other ranks may wait."""
        self._next = None
        yield
        if self._next is not None:
            self._next.step.exception()

    def training_step(
        self: Any, model: Any, inputs: "_Inputs", num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Runs forward and backward of this rank's micro-batches. Returns the loss of the step, the
        mean over the ranks; 0 for an empty item."""
        own: Any = super()
        step = inputs.step
        loss = torch.zeros((), device=self.args.device)
        model.train()  # as the trainer's own step does; metrics are counted by mode
        if step.plan is not None:
            self._last_step = step
        # FSDP2 would keep whole gradients until the last micro-batch.
        always_sync = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        last = len(step.micro_batches) - 1
        with self._metrics_of_the_step(step), self._riders_of_the_step(model, step):
            for number, batch in enumerate(step.micro_batches):
                sync = always_sync or number == last
                with contextlib.nullcontext() if sync else self.accelerator.no_sync(model):
                    given = self.dynamic.inputs(model, batch)
                    loss += own.training_step(model, given, num_items_in_batch)
        return loss if step.plan is None else mean_over_ranks(loss, self.dynamic.group)

    def log(self: Any, logs: dict[str, float], *more: Any, **named: Any) -> None:
        """Adds to the log of a step how it was split."""
        own: Any = super()
        plan = self._last_step.plan
        if "loss" in logs and plan is not None:
            logs["highest_degree"] = max(plan.degrees)
            logs["split_documents"] = len(plan.lengths) - plan.degrees.get(1, 0)
            logs["balance"] = 1 - plan.idle_share
        own.log(logs, *more, **named)

    def compute_loss(
        self: Any,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Returns the loss of a micro-batch. Sums that of an encoder, or one with smoothed labels,
        itself, of which transformers would take the mean over the labels of a rank."""
        own: Any = super()
        if "ring_attention" not in inputs:
            return own.compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self.dynamic.family.labels_in_place or self.args.label_smoothing_factor:
            loss, outputs = self._summed_loss(model, inputs, num_items_in_batch)
            return (loss, outputs) if return_outputs else loss
        if return_outputs:
            return own.compute_loss(model, inputs, return_outputs, num_items_in_batch)
        with all_during_loss(self.dynamic.riders):
            return own.compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def prediction_step(
        self: Any,
        model: Any,
        inputs: Mapping[str, Any],
        prediction_loss_only: bool,
        ignore_keys: Any = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Returns the loss over the documents of all ranks, and logits and labels of this rank's
        rows if they are asked for. Collective."""
        labels = inputs.get("labels")
        self._gathers_loss = labels is not None or prediction_loss_only
        is_seq2seq_trainer = hasattr(self, "_pad_tensors_to_max_len")
        if not prediction_loss_only and is_seq2seq_trainer and self.args.predict_with_generate:
            loss = None if labels is None else self.prediction_step(model, inputs, True)[0]
            generated, padded_labels = self._generated(model, inputs, ignore_keys)
            return loss, generated, padded_labels
        targets = labels
        if labels is None:
            targets = _no_labels_like(inputs.get(self.dynamic.family.token_field))
        flat, failed = attempted(lambda: with_flat_mask(inputs), inputs)

        def read() -> list[list[Document]]:
            return list(self._rows({**flat, "labels": targets}, training=False))

        rows: list[list[Document]] = []
        if failed is None:
            rows, failed = attempted(read, [])
        documents = list(itertools.chain.from_iterable(rows))
        every = not prediction_loss_only
        step = self.dynamic.start([documents], every=every, failed=failed).result()
        if prediction_loss_only:
            loss, _ = self._evaluated(model, step, with_logits=False)
            return loss, None, None
        kept = self.dynamic.family.kept(flat, rows, targets).cpu()
        loss, logits = self._evaluated(model, step, with_logits=True)
        values = self.dynamic.rows_of_batch(step, logits, mask=kept)
        if labels is None:
            return None, values, None
        return loss, values, copy_to(labels, loss.device)

    def evaluation_loop(self: Any, *arguments: Any, **named: Any) -> Any:
        """Leaves out rows that repeat others, which have no values here; Seq2SeqTrainer would keep
        them. Losses stay."""
        own: Any = super()
        gather_all = self.gather_function
        gather_once = self.accelerator.gather_for_metrics

        def gathered(values: Any) -> Any:
            is_loss = self._gathers_loss
            self._gathers_loss = False
            return gather_all(values) if is_loss else gather_once(values)

        with replaced(self, "gather_function", gathered):
            return own.evaluation_loop(*arguments, **named)

    def _draw(self: Any, epoch_iterator: Iterator[Any], num_batches: int) -> None:
        """Takes the batches of the next step, and begins to exchange their documents."""

        def read() -> list[list[Document]]:
            batches = itertools.islice(epoch_iterator, num_batches)
            return [self._documents(batch) for batch in batches]

        documents, failed = attempted(read, [])
        step = self.dynamic.start(documents, failed=failed)
        self._next = NextStep(batches=epoch_iterator, step=step)

    def _documents(self: Any, batch: Mapping[str, Any]) -> list[Document]:
        """Returns the documents of the last batch that the loader has yielded. Says once which
        labels they do not have."""
        batch = with_flat_mask(batch)
        rows = self._rows(batch)
        may_warn = self.dynamic.rank == 0 and self.dynamic.family.drops_padded_labels
        if may_warn and not self._warned:
            dropped = labels_beside_padding(batch)
            self._warned = dropped > 0
            if dropped:
                print(
                    f"note: {dropped:,} labels of a batch are on padding, or follow it: they have "
                    "no loss, but do in plain training"
                )
        return list(itertools.chain.from_iterable(rows))

    def _rows(self: Any, batch: Mapping[str, Any], training: bool = True) -> list[list[Document]]:
        """Returns the documents of each row."""
        rows: list[list[Document]] = self.dynamic.family.rows_of(batch, training)
        state = self.accelerator.gradient_state
        if state.active_dataloader is None:
            return rows
        # Accelerate fills the last batches of an epoch with rows of its first ones.
        own = own_rows_of_last_batch(state.active_dataloader, self.dynamic.rank, len(rows))
        return rows[:own] if state.end_of_dataloader else rows

    def _evaluated(
        self: Any, model: Any, step: RankStep, *, with_logits: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Returns the loss of a step, the mean over the ranks, and logits [tokens, vocabulary] of
        its micro-batches, if they are asked for, without gradients. Collective."""
        loss = torch.zeros((), device=self.args.device)
        logits = []
        with (
            torch.no_grad(),
            self.compute_loss_context_manager(),
            self._metrics_of_the_step(step),
            self._riders_of_the_step(model, step),
        ):
            for batch in step.micro_batches:
                given = self.dynamic.inputs(model, batch)
                divisor = self._divisor(step)
                if with_logits:
                    batch_loss, outputs = self.compute_loss(
                        model, given, return_outputs=True, num_items_in_batch=divisor
                    )
                    logits.append(outputs["logits"][0].float())
                else:
                    batch_loss = self.compute_loss(model, given, num_items_in_batch=divisor)
                loss += batch_loss
        return mean_over_ranks(loss, self.dynamic.group), logits

    def _summed_loss(
        self: Any, model: Any, inputs: dict[str, Any], num_items_in_batch: Any
    ) -> tuple[torch.Tensor, Any]:
        """Returns the sum of token losses, divided as others are, and the outputs of the model."""
        labels = inputs.pop("labels")[0]  # causal models have shifted ones
        inputs.pop("shift_labels", None)
        weights = inputs.pop("loss_weights", None)
        outputs = model(**inputs)
        logits = outputs["logits"][0, : len(labels)].float()  # none on a rank without tokens
        smoothing = self.args.label_smoothing_factor
        if weights is None:
            total = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
        else:
            total = F.cross_entropy(logits, labels, reduction="none") @ weights
        ranks = self.dynamic.ranks if self.args.average_tokens_across_devices else 1
        return total * ranks / num_items_in_batch, outputs

    def _generated(
        self: Any, model: Any, inputs: Mapping[str, Any], ignore_keys: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns what the model, with its own attention, generates for this rank's rows, and their
        labels, padded as by it."""
        own: Any = super()
        labels = inputs.get("labels")
        started = inputs.get("decoder_input_ids")
        left_out = {"labels", TARGETS}
        if labels is not None and started is not None and started.shape == labels.shape:
            left_out |= {*TARGET_FIELDS}  # the decoder's input is made from the labels
        given = {name: value for name, value in inputs.items() if name not in left_out}
        _, generated, _ = own.prediction_step(model, given, False, ignore_keys=ignore_keys)
        if labels is not None:
            config = self.model.generation_config
            sizes = [config.max_length, (config.max_new_tokens or 0) + 1]
            size = next((size for size in sizes if labels.shape[-1] < size), labels.shape[-1])
            labels = self._pad_tensors_to_max_len(self._prepare_input(labels), size)
        return generated, labels

    def _divisor(self: Any, step: RankStep) -> torch.Tensor:
        """Returns what the trainer divides the sum of token losses by. It multiplies by the number
        of ranks only if it averages tokens across devices."""
        ranks = 1 if self.args.average_tokens_across_devices else self.dynamic.ranks
        return torch.full((), max(1, step.targets) / ranks, device=self.args.device)  # no copy

    def _riders_of_the_step(
        self: Any, model: Any, step: RankStep
    ) -> contextlib.AbstractContextManager[None]:
        """Lets riders go around the micro-batches of a step."""

        def run(batch: MicroBatch) -> None:
            inputs = self.dynamic.inputs(model, batch)
            for name in ("labels", "shift_labels"):
                inputs.pop(name, None)
            with self.compute_loss_context_manager():
                model(**inputs, logits_to_keep=1)

        return all_during_step(self.dynamic.riders, step.micro_batches, tokens=step.tokens, run=run)

    @contextlib.contextmanager
    def _metrics_of_the_step(self: Any, step: RankStep) -> Iterator[None]:
        """Makes TRL's metrics those of the whole step.

        TRL appends the mean of every micro-batch, counts the padding token of a rank without
        tokens, and leaves out ranks at the end of an epoch.
        """
        mode = "train" if self.model.training else "eval"
        metrics: dict[str, list[float]] = getattr(self, "_metrics", {}).get(mode, {})
        counts_before = {name: len(values) for name, values in metrics.items()}
        tokens_before = getattr(self, "_total_train_tokens", None)
        loader = self.accelerator.gradient_state.active_dataloader
        with contextlib.nullcontext() if loader is None else replaced(loader, "remainder", 0):
            yield
        count = len(step.micro_batches)
        for name, values in metrics.items():
            if not count or len(values) != counts_before.get(name, 0) + count:
                continue
            if not sum(step.micro_batch_targets):
                continue
            if name == "aux_loss":  # as TRL divides them in the loss
                value = sum(values[-count:]) / self.current_gradient_accumulation_steps
            else:
                value = _weighted_mean(values[-count:], step.micro_batch_targets)
            values[-count:] = [value]
        if tokens_before is not None and self.model.training:
            self._total_train_tokens = tokens_before + step.tokens
            if count:
                metrics["num_tokens"] = [self._total_train_tokens]


def _weighted_mean(values: Sequence[float], weights: Sequence[int]) -> float:
    products = [weight * value for weight, value in zip(weights, values, strict=True)]
    return sum(products) / sum(weights)


def _no_labels_like(ids: torch.Tensor | None) -> torch.Tensor | None:
    """Returns labels that count nothing, of the shape of token ids; None without these."""
    return None if ids is None else torch.full_like(ids, IGNORED_LABEL)


BATCH_METHODS = ("_prepare_inputs", "_prepare_input", "_get_num_items_in_batch")
"""Methods that trainers call with batches of the data collator, but never here."""
NEEDED = (
    "get_batch_samples",
    "training_step",
    "compute_loss",
    "prediction_step",
    "evaluation_loop",
    "log",
    *BATCH_METHODS,
)
"""Methods that transformers' own loops must call, as versions 5.20 to 5.24 do."""
REPLACED = (*(name for name in vars(WholeSteps) if not name.startswith("__")), *BATCH_METHODS)


def own_rows_of_last_batch(loader: Any, rank: int, rows: int) -> int:
    """Counts rows of the last batch of an epoch that accelerate did not add to fill it.

    An `IterableDataset` is of unknown length: its last batches keep the rows that accelerate fills
    them with. Raises TrainerError for a sampler of batches, of which another rank may have the
    first ones, without a sampler of rows.
    """
    if isinstance(loader.dataset, IterableDataset):
        return rows
    sampler: Any = (
        loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    )
    processes = 1
    filled = False
    # accelerate's share of a rank, and what it leaves of an epoch after a resumption.
    while hasattr(sampler, "batch_sampler"):
        split = getattr(sampler, "split_batches", False)
        filled |= split or getattr(sampler, "num_processes", 1) > 1
        processes *= 1 if split else getattr(sampler, "num_processes", 1)
        sampler = sampler.batch_sampler
    if not filled or getattr(sampler, "drop_last", False):
        return rows
    if getattr(sampler, "batch_size", None) is None:  # whole batches repeat others
        last = len(sampler) % processes
        return 0 if last and rank >= last else rows
    if not hasattr(sampler, "sampler"):
        raise TrainerError(
            f"the batches of {type(sampler).__name__} are filled with rows that repeat others, "
            "which cannot be told without its sampler of rows: give it an attribute `sampler` "
            "with a length, drop_last=True, or no batch_size"
        )
    last = len(sampler.sampler) % (sampler.batch_size * processes)
    return max(0, last - rank * rows) if last else rows


class _Inputs(dict[str, Any]):
    """A step in the place of a batch. Trainers count the tokens, or those of sources, in
    `input_ids`."""

    def __init__(self, step: RankStep) -> None:
        ids = torch.zeros(step.tokens_read, dtype=torch.int64)
        super().__init__(input_ids=ids, attention_mask=torch.ones_like(ids))
        self.step = step

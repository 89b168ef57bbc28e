"""The trainers of which whole steps are planned: `transformers.Trainer`, TRL's `SFTTrainer`, and
their subclasses.

`get_batch_samples` takes the batches that the trainer's own loader yields and shares the documents
of all ranks, one step ahead. `training_step` and `prediction_step` run this rank's micro-batches.
The trainer divides the loss by the targets of the step and multiplies it by the number of ranks,
which DDP and FSDP undo. Losses of encoders, smoothed ones, and those of evaluations are scaled
here.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import BatchSampler, IterableDataset

from longctx.attention.host_to_device import copy_to
from longctx.data import IGNORED_LABEL
from longctx.hf.exactness import replaced
from longctx.trainers.agreement import attempted, mean_over_ranks
from longctx.trainers.documents import Document, labels_beside_padding, rows_of
from longctx.trainers.pairs import OF_TARGETS, TARGETS, columns_of, rows_of_pairs
from longctx.trainers.refusals import TrainerError
from longctx.trainers.router_loss import RouterLoss
from longctx.trainers.step import Share, Sharing


class WholeSteps:
    """Mixin before a trainer's class: steps of the trainer are planned and shared."""

    data_collator: Any
    dynamic: Sharing
    _next: tuple[Iterator[Any], Future[Share]] | None = None
    """Batches of an epoch, and the step that is being shared from them while the one before
    runs."""
    _share = Share()  # of the last step
    _told = False  # that labels of padding have no loss
    _gathers_loss = False
    """Whether the loss of a batch is what the trainer gathers next."""

    def get_batch_samples(
        self: Any, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Returns one item per batch, as the trainer counts them: empty ones, and last the share of
        the whole step."""
        if self._next is None or self._next[0] is not epoch_iterator:
            self._draw(epoch_iterator, num_batches)
        share: Share = self._next[1].result()
        if not share.batches:
            return [], None
        self._draw(epoch_iterator, num_batches)
        empty = [_Inputs(Share()) for _ in range(share.batches - 1)]
        return [*empty, _Inputs(share)], self._divisor(share)

    def train(self: Any, *arguments: Any, **named: Any) -> Any:
        own: Any = super()  # the trainer
        self._next = None
        output = own.train(*arguments, **named)
        if self._next is not None:
            # The step after the last one is shared, too: other ranks may wait for it.
            self._next[1].exception()
        return output

    def training_step(
        self: Any, model: Any, inputs: "_Inputs", num_items_in_batch: Any = None
    ) -> torch.Tensor:
        share, loss = inputs.share, torch.zeros((), device=self.args.device)
        own: Any = super()
        model.train()  # as the trainer's own step does; metrics are counted by mode
        # FSDP2 would keep whole gradients until the last micro-batch.
        always = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        self._share = share if share.plan else self._share
        with self._metrics_of_the_step(share), self._experts_counted(model, share):
            for index, batch in enumerate(share.micro_batches):
                last = always or index == len(share.micro_batches) - 1
                with contextlib.nullcontext() if last else self.accelerator.no_sync(model):
                    loss += own.training_step(
                        model, self.dynamic.inputs(model, batch), num_items_in_batch
                    )
        return mean_over_ranks(loss, self.dynamic) if share.plan else loss

    def log(self: Any, logs: dict[str, float], *more: Any, **named: Any) -> None:
        """Adds to the log of a step how it was split."""
        own: Any = super()
        if "loss" in logs and (plan := self._share.plan) is not None:
            split = len(plan.lengths) - plan.degrees.get(1, 0)
            logs |= {
                "highest_degree": max(plan.degrees),
                "split_documents": split,
                "balance": 1 - plan.idle_share,
            }
        own.log(logs, *more, **named)

    def compute_loss(
        self: Any,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Sums the loss of an encoder, or one with smoothed labels, and divides it as others, which
        transformers sums itself: encoders take the mean over the masked tokens of a rank."""
        own: Any = super()
        smoothing = self.args.label_smoothing_factor
        if not (self.dynamic.predicts_masked or smoothing) or "ring_attention" not in inputs:
            chunked = (
                None
                if return_outputs or "ring_attention" not in inputs
                else self.dynamic.chunked_loss
            )
            with contextlib.nullcontext() if chunked is None else chunked.used():
                return own.compute_loss(model, inputs, return_outputs, num_items_in_batch)
        labels = inputs.pop("labels")[0]  # those of causal models are shifted
        inputs.pop("shift_labels", None)
        outputs = model(**inputs)
        ranks = self.dynamic.ranks if self.args.average_tokens_across_devices else 1
        logits = outputs["logits"][0, : len(labels)].float()  # none on a rank without tokens
        loss = (
            F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
            * ranks
            / num_items_in_batch
        )
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self: Any,
        model: Any,
        inputs: Mapping[str, Any],
        prediction_loss_only: bool,
        ignore_keys: Any = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Returns the loss over the documents of all ranks, and logits and labels of this rank's
        rows if they are asked for."""
        labels, logits = inputs.get("labels"), []
        self._gathers_loss = labels is not None or prediction_loss_only
        # Seq2SeqTrainer.
        generates = hasattr(self, "_pad_tensors_to_max_len") and self.args.predict_with_generate
        if generates and not prediction_loss_only:
            loss = None if labels is None else self.prediction_step(model, inputs, True)[0]
            return loss, *self._generated(model, inputs, ignore_keys)
        of_pairs = self.dynamic.seq2seq is not None
        ids: Any = inputs.get("decoder_input_ids" if of_pairs and labels is None else "input_ids")
        targets: Any = (
            torch.full_like(ids, IGNORED_LABEL) if labels is None and ids is not None else labels
        )
        rows, failed = attempted(
            lambda: self._rows({**inputs, "labels": targets}, training=False), []
        )
        documents = list(itertools.chain.from_iterable(rows))
        share = self.dynamic.start(
            [documents], every=not prediction_loss_only, failed=failed
        ).result()
        mask, loss = inputs.get("attention_mask"), torch.zeros((), device=self.args.device)
        kept = (
            columns_of(rows, targets)
            if of_pairs
            else torch.ones_like(ids)
            if mask is None
            else mask
        ).cpu()
        counted = self._experts_counted(model, share)
        with (
            torch.no_grad(),
            self.compute_loss_context_manager(),
            self._metrics_of_the_step(share),
            counted,
        ):
            for batch in share.micro_batches:
                own, divisor = self.dynamic.inputs(model, batch), self._divisor(share)
                if prediction_loss_only:
                    loss += self.compute_loss(model, own, num_items_in_batch=divisor)
                else:
                    of_batch, outputs = self.compute_loss(
                        model, own, return_outputs=True, num_items_in_batch=divisor
                    )
                    loss += of_batch
                    logits.append(outputs["logits"][0].float())
        loss = mean_over_ranks(loss, self.dynamic)
        if prediction_loss_only:
            return loss, None, None
        values = self.dynamic.rows_of_batch(share, logits, kept)
        return (
            (None, values, None) if labels is None else (loss, values, copy_to(labels, loss.device))
        )

    def evaluation_loop(self: Any, *arguments: Any, **named: Any) -> Any:
        """Leaves out rows that repeat others, which have no values here; Seq2SeqTrainer would keep
        them. Losses stay."""
        own: Any = super()
        every, once = self.gather_function, self.accelerator.gather_for_metrics

        def gathered(values: Any) -> Any:
            of_loss, self._gathers_loss = self._gathers_loss, False
            return (every if of_loss else once)(values)

        with replaced(self, "gather_function", gathered):
            return own.evaluation_loop(*arguments, **named)

    def _draw(self: Any, epoch_iterator: Iterator[Any], num_batches: int) -> None:
        """Takes the batches of the next step, and begins to share their documents."""
        drawn, failed = attempted(
            lambda: [*map(self._documents, itertools.islice(epoch_iterator, num_batches))], []
        )
        self._next = epoch_iterator, self.dynamic.start(drawn, failed=failed)

    def _documents(self: Any, batch: Mapping[str, Any]) -> list[Document]:
        """Returns the documents of the last batch that the loader has yielded. Says once which
        labels they do not have."""
        rows = self._rows(batch)
        told = (
            self._told
            or self.dynamic.seq2seq is not None
            or self.dynamic.predicts_masked
            or self.dynamic.rank
        )
        if not told and (count := labels_beside_padding(batch)):
            self._told = True
            print(
                f"note: {count:,} labels of a batch are on padding, or follow it: they have no "
                "loss, but do in plain training"
            )
        return list(itertools.chain.from_iterable(rows))

    def _rows(self: Any, batch: Mapping[str, Any], training: bool = True) -> list[list[Document]]:
        """Returns the documents of each row."""
        state, seq2seq = self.accelerator.gradient_state, self.dynamic.seq2seq
        of_tokens = batch, self.dynamic.vision, self.dynamic.predicts_masked
        rows = rows_of(*of_tokens) if seq2seq is None else rows_of_pairs(batch, seq2seq, training)
        # Accelerate fills the last batches of an epoch with rows of its first ones.
        if state.active_dataloader is not None:
            own = own_rows_of_last_batch(state.active_dataloader, self.dynamic.rank, len(rows))
            rows = rows[:own] if state.end_of_dataloader else rows
        return rows

    def _generated(
        self: Any, model: Any, inputs: Mapping[str, Any], ignore_keys: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns what the model, with its own attention, generates for this rank's rows, and their
        labels, padded as by it."""
        own: Any = super()
        labels, started = inputs.get("labels"), inputs.get("decoder_input_ids")
        of_labels = labels is not None and started is not None and started.shape == labels.shape
        left_out = ("labels", TARGETS, *(OF_TARGETS if of_labels else ()))
        given = {name: value for name, value in inputs.items() if name not in left_out}
        _, generated, _ = own.prediction_step(model, given, False, ignore_keys=ignore_keys)
        if labels is not None:
            config = self.model.generation_config
            sizes = [config.max_length, (config.max_new_tokens or 0) + 1]
            size = next((size for size in sizes if labels.shape[-1] < size), labels.shape[-1])
            labels = self._pad_tensors_to_max_len(self._prepare_input(labels), size)
        return generated, labels

    def _experts_counted(
        self: Any, model: Any, share: Share
    ) -> contextlib.AbstractContextManager[None]:
        """Counts the tokens of the experts of a mixture in a step of several micro-batches, by a
        forward pass of them all."""
        router_loss: RouterLoss | None = self.dynamic.router_loss
        if router_loss is None:
            return contextlib.nullcontext()

        def run(batch: Any) -> None:
            inputs = self.dynamic.inputs(model, batch)
            for name in ("labels", "shift_labels"):
                inputs.pop(name, None)
            with self.compute_loss_context_manager():
                model(**inputs, logits_to_keep=1)

        return router_loss.counted([functools.partial(run, batch) for batch in share.micro_batches])

    def _divisor(self: Any, share: Share) -> torch.Tensor:
        """Returns what the trainer divides the sum of token losses by. It multiplies by the number
        of ranks only if it averages tokens across devices."""
        ranks = 1 if self.args.average_tokens_across_devices else self.dynamic.ranks
        return torch.full((), max(1, share.targets) / ranks, device=self.args.device)  # no copy

    @contextlib.contextmanager
    def _metrics_of_the_step(self: Any, share: Share) -> Iterator[None]:
        """Makes TRL's metrics those of the whole step.

        TRL appends the mean of every micro-batch, counts the padding token of a rank without
        tokens, and leaves out ranks at the end of an epoch.
        """
        metrics = getattr(self, "_metrics", {}).get("train" if self.model.training else "eval", {})
        before = {name: len(values) for name, values in metrics.items()}
        if self.dynamic.router_loss is not None:
            self.dynamic.router_loss.step_tokens = share.tokens
        tokens, loader = (
            getattr(self, "_total_train_tokens", None),
            self.accelerator.gradient_state.active_dataloader,
        )
        with contextlib.nullcontext() if loader is None else replaced(loader, "remainder", 0):
            yield
        count, total = len(share.micro_batches), sum(share.micro_batch_targets)
        for name, values in metrics.items():
            if count and total and len(values) == before.get(name, 0) + count:
                each = zip(share.micro_batch_targets, values[-count:], strict=True)
                mean = sum(targets * value for targets, value in each) / total
                # As TRL divides them in the loss.
                parts = sum(values[-count:]) / self.current_gradient_accumulation_steps
                values[-count:] = [parts if name == "aux_loss" else mean]
        if tokens is not None and self.model.training:
            self._total_train_tokens = tokens + share.tokens
            if count:
                metrics["num_tokens"] = [self._total_train_tokens]


OF_BATCHES = "_prepare_inputs", "_prepare_input", "_get_num_items_in_batch"
"""Methods that trainers call with batches of the data collator, but never here."""
NEEDED = (
    "get_batch_samples",
    "training_step",
    "compute_loss",
    "prediction_step",
    "evaluation_loop",
    "log",
    *OF_BATCHES,
)
"""Methods that transformers' own loops must call: those of versions 5.20 to 5.24."""
REPLACED = (*(name for name in vars(WholeSteps) if not name.startswith("__")), *OF_BATCHES)


def own_rows_of_last_batch(loader: Any, rank: int, rows: int) -> int:
    """Returns how many of the last `rows` that a loader has yielded in an epoch do not repeat its
    first ones.

    An `IterableDataset` is of unknown length: its last batches keep the rows that accelerate fills
    them with. Raises TrainerError for a sampler of batches, of which another rank may have the
    first ones, without a sampler of rows.
    """
    if isinstance(loader.dataset, IterableDataset):
        return rows
    sampler: Any = (
        loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    )
    processes, filled = 1, False
    # accelerate's share of a rank, and its batches after those of a resumed run.
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
            "which cannot be told without "
            "its sampler of rows: give it an attribute `sampler` with a length, drop_last=True, or "
            "no batch_size"
        )
    last = len(sampler.sampler) % (sampler.batch_size * processes)
    return max(0, last - rank * rows) if last else rows


class _Inputs(dict[str, Any]):
    """A share in the place of a batch. Trainers count the tokens, or those of sources, in
    `input_ids`."""

    def __init__(self, share: Share) -> None:
        ids = torch.zeros(share.read, dtype=torch.int64)
        super().__init__(input_ids=ids, attention_mask=torch.ones_like(ids))
        self.share = share

"""The trainers of which whole steps are planned: `transformers.Trainer`, TRL's `SFTTrainer`, and their subclasses.

Three methods are replaced. `get_batch_samples` takes the batches that the trainer's own loader yields and shares the documents
of all ranks; `training_step` and `prediction_step` run this rank's micro-batches. The trainer divides the loss by the targets
of the whole step and multiplies it by the number of ranks, which DDP and FSDP undo, so nothing is scaled here.
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, IterableDataset

from longctx.attention.huggingface import model_inputs
from longctx.trainers.attached import Attached
from longctx.trainers.documents import rows_of
from longctx.trainers.refusals import TrainerError
from longctx.trainers.step import Share


class WholeSteps:
    """Mixin before a trainer's class: steps of the trainer are planned and shared."""

    data_collator: Any
    dynamic: Attached

    def get_batch_samples(
        self: Any, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Returns one item per batch, as the trainer counts them: empty ones, and last the share of the whole step."""
        batches = list(itertools.islice(epoch_iterator, num_batches))
        share = self._shared(batches)
        if not share.batches:
            return [], None
        empty = [_Inputs(Share()) for _ in range(share.batches - 1)]
        return [*empty, _Inputs(share)], self._divisor(share)

    def training_step(self: Any, model: Any, inputs: "_Inputs", num_items_in_batch: Any = None) -> torch.Tensor:
        share, loss = inputs.share, torch.zeros((), device=self.args.device)
        own: Any = super()  # the trainer
        # FSDP2 would keep whole gradients until the last micro-batch.
        always = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        with self._metrics_of_the_step(share):
            for index, batch in enumerate(share.micro_batches):
                last = always or index == len(share.micro_batches) - 1
                with contextlib.nullcontext() if last else self.accelerator.no_sync(model):
                    loss += own.training_step(model, self._inputs(model, batch), num_items_in_batch)
        return loss

    def prediction_step(
        self: Any, model: Any, inputs: Mapping[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[torch.Tensor, None, None]:
        """Returns the loss over the documents of all ranks, the same on every rank, and no predictions."""
        share, loss = self._shared([inputs]), torch.zeros((), device=self.args.device)
        with torch.no_grad(), self.compute_loss_context_manager(), self._metrics_of_the_step(share):
            for batch in share.micro_batches:
                loss += self.compute_loss(model, self._inputs(model, batch), num_items_in_batch=self._divisor(share))
        if self.dynamic.sharing.group is not None:
            dist.all_reduce(loss, group=self.dynamic.sharing.group)
        return loss / self.dynamic.sharing.ranks, None, None

    def predict(self: Any, *arguments: Any, **named: Any) -> Any:
        """Refuses: logits of documents that are split over ranks are not gathered."""
        raise TrainerError("predict needs the logits of whole documents: call restore(trainer) first")

    def _shared(self: Any, batches: Sequence[Mapping[str, Any]]) -> Share:
        sharing, state = self.dynamic.sharing, self.accelerator.gradient_state
        rows = [rows_of(batch) for batch in batches]
        if rows and state.end_of_dataloader and (remainder := rows_of_last_batches(state.active_dataloader)):
            # accelerate fills the last batches of an epoch with rows of its first ones
            rows[-1] = rows[-1][: max(0, remainder - sharing.rank * len(rows[-1]))]
        share: Share = sharing.share([list(itertools.chain.from_iterable(each)) for each in rows])
        return share

    def _divisor(self: Any, share: Share) -> torch.Tensor:
        """Returns what the trainer divides the sum of token losses by. It multiplies by the number of ranks only if it averages
        tokens across devices."""
        ranks = 1 if self.args.average_tokens_across_devices else self.dynamic.sharing.ranks
        return torch.tensor(max(1, share.targets) / ranks, device=self.args.device)

    def _inputs(self: Any, model: Any, batch: Any) -> dict[str, Any]:
        inputs = model_inputs(model, batch, 1, **self.dynamic.ring_options)
        del inputs["num_items_in_batch"]  # the trainer passes its own
        return inputs

    @contextlib.contextmanager
    def _metrics_of_the_step(self: Any, share: Share) -> Iterator[None]:
        """Makes TRL's metrics those of the whole step.

        TRL appends the mean of every micro-batch, counts the padding token of a rank without tokens, and leaves out ranks at
        the end of an epoch.
        """
        metrics = getattr(self, "_metrics", {}).get("train" if self.model.training else "eval", {})
        before = {name: len(values) for name, values in metrics.items()}
        tokens, loader = getattr(self, "_total_train_tokens", None), self.accelerator.gradient_state.active_dataloader
        remainder = getattr(loader, "remainder", None)
        if remainder is not None:
            loader.remainder = 0
        try:
            yield
        finally:
            if remainder is not None:
                loader.remainder = remainder
        count, total = len(share.micro_batches), sum(share.micro_batch_targets)
        for name, values in metrics.items():
            if count and total and len(values) == before.get(name, 0) + count:
                each = zip(share.micro_batch_targets, values[-count:], strict=True)
                values[-count:] = [sum(targets * value for targets, value in each) / total]
        if tokens is not None and self.model.training:
            self._total_train_tokens = tokens + share.tokens
            if count:
                metrics["num_tokens"] = [self._total_train_tokens]


def rows_of_last_batches(loader: Any) -> int:
    """Returns how many rows all ranks together have in their last batches of an epoch; 0 if these are full.

    An `IterableDataset` is of unknown length: its last batches keep the rows that accelerate fills them with.
    """
    if isinstance(loader.dataset, IterableDataset):
        return 0
    sampler: Any = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    processes = 1
    while hasattr(sampler, "batch_sampler"):  # accelerate's share of a rank, and its batches after those of a resumed run
        if not getattr(sampler, "split_batches", False):
            processes *= getattr(sampler, "num_processes", 1)
        sampler = sampler.batch_sampler
    return 0 if sampler.drop_last else len(sampler.sampler) % (sampler.batch_size * processes)


class _Inputs(dict[str, Any]):
    """A share in the place of a batch. Trainers count the tokens of `input_ids` that `attention_mask` keeps."""

    def __init__(self, share: Share) -> None:
        tokens = [batch.tokens for batch in share.micro_batches]
        ids = torch.cat(tokens) if tokens else torch.zeros(0, dtype=torch.int64)
        super().__init__(input_ids=ids, attention_mask=torch.ones_like(ids))
        self.share = share

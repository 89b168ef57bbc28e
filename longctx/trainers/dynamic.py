"""The trainers of which whole steps are planned: `transformers.Trainer`, TRL's `SFTTrainer`, and their subclasses.

Three methods of the trainer are replaced. `get_batch_samples` takes the batches that the trainer's own loader yields and shares
the documents of all ranks; `training_step` and `prediction_step` run this rank's micro-batches. The trainer divides the loss by
the targets of the whole step and multiplies it by the number of ranks, which DDP and FSDP undo, so nothing is scaled here.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler

from longctx.attention import warm_up
from longctx.attention.huggingface import model_inputs, prepare
from longctx.attention.huggingface_check import HuggingFaceError
from longctx.attention.linear.huggingface import restore_linear
from longctx.planning.hardware_profile import HardwareProfile
from longctx.trainers.documents import CountingRows, rows_of
from longctx.trainers.refusals import TrainerError, refuse
from longctx.trainers.step import Share, Sharing
from longctx.training.run_profile import default_profile


def dynamic_context_parallel(
    trainer: Any,
    *,
    tokens_per_rank: int | None = None,
    profile: HardwareProfile | str | None = None,
    mode: str = "auto",
    degree: int | None = None,
    kernel: str = "auto",
    own_loss_is_a_token_sum: bool = False,
) -> None:
    """Makes a trainer plan every optimizer step and split its documents over all ranks. Call it on every rank, before `train`.

    Args:
        trainer: a `transformers.Trainer` or `trl.SFTTrainer`, or a subclass of either, with a causal language model.
        tokens_per_rank: maximum tokens per rank in a forward pass. None: per_device_train_batch_size × max_length of SFTConfig,
            which is what the trainer's own batches may have.
        profile: hardware profile, a name or a file; None: that of the device.
        mode, degree: see `make_plan`.
        kernel: kernel of attention; see `ring_attention`.
        own_loss_is_a_token_sum: a subclass's own `compute_loss` is a sum over tokens divided by `num_items_in_batch`.

    Raises TrainerError, and leaves the trainer as it was, for what cannot be exact, with every reason and way out.
    """
    if isinstance(trainer, WholeSteps):
        raise TrainerError("this trainer already has dynamic context parallelism: call it once, or restore(trainer) first")
    refuse(trainer, own_loss_is_a_token_sum)
    args, model = trainer.args, prepared_part(trainer)
    sharing = Sharing(
        _profile(profile, args.device),
        tokens_per_rank or _default_tokens_per_rank(args),
        mode,
        degree,
        None,
        args.device,
    )
    _refuse_long_documents(trainer, sharing.tokens_per_rank * args.world_size)
    attention = model.config._attn_implementation
    try:
        prepare(model)
    except HuggingFaceError as error:
        raise TrainerError(str(error)) from error
    if args.world_size > 1:
        sharing.group = dist.new_group(timeout=args.ddp_timeout_delta)
        warm_up(sharing.group, args.device)
    kind = type(trainer)
    trainer.__class__ = type(kind.__name__, (WholeSteps, kind), {"__module__": kind.__module__})
    trainer.sharing, trainer.previous_attention = sharing, attention
    trainer.ring_options = {"group": sharing.group, "kernel": kernel, "device": args.device}
    trainer.data_collator = CountingRows(trainer.data_collator)
    model.generate = _without_layout(trainer, model.generate)


def restore(trainer: Any) -> None:
    """Gives a trainer its own steps and its model its own attention again. Does nothing to other trainers."""
    if not isinstance(trainer, WholeSteps):
        return
    model = prepared_part(trainer)
    del model.generate
    trainer.data_collator = trainer.data_collator.collate
    restore_linear(model)
    model.set_attn_implementation(trainer.previous_attention)
    trainer.__class__ = type(trainer).__mro__[2]


def prepared_part(trainer: Any) -> Any:
    """Returns the model of transformers inside the trainer's model and its adapters."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return model.get_base_model() if hasattr(model, "peft_config") else model


class WholeSteps:
    """Mixin before a trainer's class: steps of the trainer are planned and shared."""

    data_collator: Any
    sharing: Sharing
    ring_options: dict[str, Any]
    previous_attention: str

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
        # FSDP2 would keep whole gradients until the last micro-batch.
        always = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        with self._metrics_of_the_step(share):
            for index, batch in enumerate(share.micro_batches):
                last = always or index == len(share.micro_batches) - 1
                with contextlib.nullcontext() if last else self.accelerator.no_sync(model):
                    step = super().training_step  # type: ignore[misc]  # of the trainer
                    loss += step(model, self._inputs(model, batch), num_items_in_batch)
        return loss

    def prediction_step(
        self: Any, model: Any, inputs: Mapping[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[torch.Tensor, None, None]:
        """Returns the loss over the documents of all ranks, the same on every rank, and no predictions."""
        share, loss = self._shared([inputs]), torch.zeros((), device=self.args.device)
        with torch.no_grad(), self.compute_loss_context_manager(), self._metrics_of_the_step(share):
            for batch in share.micro_batches:
                loss += self.compute_loss(model, self._inputs(model, batch), num_items_in_batch=self._divisor(share))
        if self.sharing.group is not None:
            dist.all_reduce(loss, group=self.sharing.group)
        return loss / self.sharing.ranks, None, None

    def predict(self: Any, *arguments: Any, **named: Any) -> Any:
        """Predicts with the model's own attention, as the logits of whole documents are wanted."""
        raise TrainerError("predict needs the logits of whole documents: call restore(trainer) first")

    def _shared(self: Any, batches: Sequence[Mapping[str, Any]]) -> Share:
        sharing, state = self.sharing, self.accelerator.gradient_state
        rows = [rows_of(batch) for batch in batches]
        if rows and state.end_of_dataloader and (remainder := rows_of_last_batches(state.active_dataloader)):
            # accelerate fills the last batches of an epoch with rows of its first ones
            rows[-1] = rows[-1][: max(0, remainder - sharing.rank * len(rows[-1]))]
        share: Share = sharing.share([list(itertools.chain.from_iterable(each)) for each in rows])
        return share

    def _divisor(self: Any, share: Share) -> torch.Tensor:
        """Returns what the trainer divides the sum of token losses by. It multiplies by the number of ranks only if it averages
        tokens across devices."""
        ranks = 1 if self.args.average_tokens_across_devices else self.sharing.ranks
        return torch.tensor(max(1, share.targets) / ranks, device=self.args.device)

    def _inputs(self: Any, model: Any, batch: Any) -> dict[str, Any]:
        inputs = model_inputs(model, batch, 1, **self.ring_options)
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
    """Returns how many rows all ranks together have in their last batches of an epoch; 0 if these are full."""
    sampler: Any = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    if sampler is None:  # an IterableDataset
        return max(0, int(loader.remainder))
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


def _without_layout(trainer: Any, generate: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a model's `generate`, which has no layout, so that it runs with the model's own attention."""

    def generating(*arguments: Any, **named: Any) -> Any:
        model = prepared_part(trainer)
        model.set_attn_implementation(trainer.previous_attention)
        try:
            return generate(*arguments, **named)
        finally:
            model.set_attn_implementation("longctx")

    return generating


def _profile(profile: HardwareProfile | str | None, device: torch.device) -> HardwareProfile:
    if isinstance(profile, HardwareProfile):
        return profile
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else None
    return HardwareProfile.load(profile or default_profile(device.type, gpu))


def _default_tokens_per_rank(args: Any) -> int:
    longest: int | None = getattr(args, "max_length", None)
    if longest is None:
        raise TrainerError(
            "tokens_per_rank is not given and max_length is not set: give the tokens that a forward pass of one rank may have, "
            "such as tokens_per_rank=16384"
        )
    return longest * int(args.per_device_train_batch_size)


def _refuse_long_documents(trainer: Any, most: int) -> None:
    """Raises TrainerError for a data set with `input_ids` of which a document is longer than all ranks hold."""
    for name in ("train_dataset", "eval_dataset"):
        data: Any = getattr(trainer, name, None)
        for each in data.values() if isinstance(data, dict) else [data]:
            if "input_ids" not in (getattr(each, "column_names", None) or ()) or not hasattr(each, "data"):
                continue
            longest = max(map(len, each.with_format("numpy")["input_ids"]), default=0)
            if longest > most:
                raise TrainerError(
                    f"{name} has a document of {longest:,} tokens, but {trainer.args.world_size} ranks hold {most:,}: give "
                    "more tokens_per_rank, use more ranks, or shorten the documents"
                )

"""Attaches dynamic context parallelism to a trainer, and takes it off."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from pyarrow import compute

from longctx.attention import warm_up
from longctx.attention.huggingface import prepare
from longctx.attention.huggingface_check import HuggingFaceError
from longctx.attention.linear.huggingface import restore_linear
from longctx.model.huggingface import block_name
from longctx.model.huggingface_spec import spec_of
from longctx.planning.check import check_settings
from longctx.planning.hardware_profile import HardwareProfile
from longctx.trainers.attached import Attached
from longctx.trainers.documents import CountingRows
from longctx.trainers.fused_head import PlannedHead
from longctx.trainers.refusals import TrainerError, needs_sequences, refuse
from longctx.trainers.step import Sharing
from longctx.trainers.whole_steps import WholeSteps
from longctx.training.run_profile import RunProfile, model_profile


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
    """Makes a trainer plan its work and split documents over all ranks. Call it on every rank, before `train`.

    Of `transformers.Trainer`, TRL's SFTTrainer and their subclasses, whole optimizer steps are planned; of TRL's DPOTrainer,
    GRPOTrainer, RLOOTrainer and KTOTrainer, every call of the model.

    Args:
        trainer: the trainer, with a causal language model of transformers.
        tokens_per_rank: maximum tokens per rank in a forward pass. None: per_device_train_batch_size × max_length of
            TRL's config, which is what the trainer's own batches may have.
        profile: hardware profile, a name or a file; None: that of the device.
        mode, degree: see `make_plan`.
        kernel: kernel of attention; see `ring_attention`.
        own_loss_is_a_token_sum: a subclass's own `compute_loss` is a sum over tokens divided by `num_items_in_batch`.

    Raises TrainerError, and leaves the trainer as it was, for what cannot be exact, with every reason and way out.
    """
    if hasattr(trainer, "dynamic"):
        raise TrainerError("this trainer already has dynamic context parallelism: call it once, or restore(trainer) first")
    refuse(trainer, own_loss_is_a_token_sum)
    args = trainer.args
    most = tokens_per_rank or _default_tokens_per_rank(args)
    check_settings(args.world_size, most, mode, degree, None, None)
    described = _profile(trainer, profile)
    _refuse_long_documents(trainer, most * args.world_size)
    attentions = _prepare_models(trainer)
    group = None
    if args.world_size > 1:
        group = dist.new_group(timeout=args.ddp_timeout_delta)
        warm_up(group, args.device)
    sharing = Sharing(described.profile, most, mode, degree, group, args.device)
    attached = Attached(sharing, {"group": group, "kernel": kernel, "device": args.device}, attentions)
    trainer.dynamic = attached
    if trainer.is_world_process_zero():
        print(*described.lines, f"documents are split over {args.world_size} ranks of {most:,} tokens", sep="\n")
    for model, attention in attentions:
        model.generate = _with_own_attention(model, attention)
    if needs_sequences(trainer):
        attached.heads = [PlannedHead(model, sharing, attached.ring_options) for model, _ in attentions]
    else:
        kind = type(trainer)
        trainer.__class__ = type(kind.__name__, (WholeSteps, kind), {"__module__": kind.__module__})
        trainer.data_collator = CountingRows(trainer.data_collator)


def restore(trainer: Any) -> None:
    """Gives a trainer its own steps and its models their own attention again. Does nothing to other trainers."""
    if not hasattr(trainer, "dynamic"):
        return
    attached: Attached = trainer.dynamic
    for head in attached.heads:
        head.remove()
    for model, _ in attached.attentions:
        del model.generate
    _restore_models(attached.attentions)
    if isinstance(trainer, WholeSteps):
        trainer.data_collator = trainer.data_collator.collate
        trainer.__class__ = type(trainer).__mro__[2]
    del trainer.dynamic


def _prepare_models(trainer: Any) -> list[tuple[Any, str]]:
    """Prepares the trainer's model and reference model, and returns each with the name of its previous attention.

    Raises TrainerError, and leaves both unchanged.
    """
    attentions: list[tuple[Any, str]] = []
    models = [trainer.model, *filter(None, [getattr(trainer, "ref_model", None)])]
    try:
        for model in (prepared_part(trainer, model) for model in models):
            before = model.config._attn_implementation
            prepare(model)
            attentions.append((model, before))
    except HuggingFaceError as error:
        _restore_models(attentions)
        raise TrainerError(str(error)) from error
    return attentions


def _restore_models(attentions: Sequence[tuple[Any, str]]) -> None:
    for model, attention in attentions:
        restore_linear(model)
        model.set_attn_implementation(attention)


def prepared_part(trainer: Any, model: Any) -> Any:
    """Returns the model of transformers inside a model of the trainer and its adapters."""
    inner = trainer.accelerator.unwrap_model(model)
    return inner.get_base_model() if hasattr(inner, "peft_config") else inner


def _with_own_attention(model: Any, attention: str) -> Callable[..., Any]:
    """Returns the model's `generate`, which has no layout, with the model's own attention."""
    generate = model.generate

    def generating(*arguments: Any, **named: Any) -> Any:
        ring = model.config._attn_implementation
        model.set_attn_implementation(attention)
        try:
            return generate(*arguments, **named)
        finally:
            model.set_attn_implementation(ring)

    return generating


def _profile(trainer: Any, profile: HardwareProfile | str | None) -> RunProfile:
    """Returns the profile, scaled to the trainer's model unless it is given as a value."""
    if isinstance(profile, HardwareProfile):
        return RunProfile("given", profile, ("profile: given as a value, used unscaled",))
    args, model = trainer.args, prepared_part(trainer, trainer.model)
    spec = spec_of(model, model.get_submodule(block_name(model)))
    dtype = "bfloat16" if args.bf16 or next(model.parameters()).dtype == torch.bfloat16 else "float32"
    return model_profile(profile, spec, dtype, args.device, args.world_size, "full" if args.gradient_checkpointing else "none")


def _default_tokens_per_rank(args: Any) -> int:
    longest: int | None = getattr(args, "max_length", None)
    if longest is None:
        raise TrainerError(
            "tokens_per_rank is not given and max_length is not set: give the tokens that a forward pass of one rank may have, "
            "such as tokens_per_rank=16384"
        )
    return longest * int(args.per_device_train_batch_size)


def _longest_document(data: Any) -> int:
    """Returns the tokens of the longest document of a data set, from offsets alone, also of rows that TRL has packed."""
    packed, longest = "seq_lengths" in data.column_names, 0
    for table in data.select_columns("seq_lengths" if packed else "input_ids").with_format("arrow").iter(10_000):
        (lengths,) = table.columns
        lengths = compute.list_flatten(lengths) if packed else compute.list_value_length(lengths)
        longest = max(longest, compute.max(lengths).as_py() or 0)
    return longest


def _refuse_long_documents(trainer: Any, most: int) -> None:
    """Raises TrainerError for a data set with `input_ids` of which a document is longer than all ranks hold."""
    for name in ("train_dataset", "eval_dataset"):
        data: Any = getattr(trainer, name, None)
        for each in data.values() if isinstance(data, dict) else [data]:
            if "input_ids" not in (getattr(each, "column_names", None) or ()) or not hasattr(each, "data"):
                continue
            longest = _longest_document(each)
            if longest > most:
                raise TrainerError(
                    f"{name} has a document of {longest:,} tokens, but {trainer.args.world_size} ranks hold {most:,}: give "
                    "more tokens_per_rank, use more ranks, or shorten the documents"
                )

"""Attaches dynamic context parallelism to a trainer, and takes it off."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from pyarrow import compute

from longctx.attention import warm_up
from longctx.hf.exactness import replaced
from longctx.hf.lora import with_adapters
from longctx.hf.model import block_name
from longctx.hf.spec import spec_of, spec_of_seq2seq
from longctx.hf.vision import is_vision, weights_of_images, with_tower
from longctx.memory.fitting import available_bytes
from longctx.parallel.device import ALLOCATOR_SETTINGS, is_prepared
from longctx.parallel.environment import processes_per_node
from longctx.parallel.mesh import exchange_groups
from longctx.planning.check import check_settings
from longctx.planning.cost.spec import ModelSpec, Recompute
from longctx.planning.cost.tower import TowerSpeed
from longctx.planning.cost.work import work_of
from longctx.planning.hardware_profile import HardwareProfile
from longctx.trainers.agreement import check_same, drawing_together, evaluating_together, on_all_ranks
from longctx.trainers.budget import tokens_that_fit
from longctx.trainers.chunked_loss import ChunkedLoss
from longctx.trainers.documents import CountingRows
from longctx.trainers.fused_head import PlannedHead
from longctx.trainers.images import reading_images
from longctx.trainers.kinds import Kind, has_loss_of_head, kind_of, prepared_part
from longctx.trainers.noise import Noise
from longctx.trainers.pairs import WatchingTargets, sharded_with_head
from longctx.trainers.prepared import prepared, replaced_method
from longctx.trainers.refusals import ANSWERS, TrainerError, balances, is_encoder, means_of_batches, noisy, refuse
from longctx.trainers.router_loss import RouterLoss, without_router_loss
from longctx.trainers.step import Sharing
from longctx.trainers.whole_outputs import PlannedBase, WholeOutputs, check_head, without_pooler
from longctx.trainers.whole_steps import NEEDED, REPLACED, WholeSteps
from longctx.training.build import kernel_requests, prepare_kernels
from longctx.training.run_profile import RunProfile, model_profile
from longctx.units import format_bytes


def dynamic_context_parallel(
    trainer: Any,
    *,
    tokens_per_rank: int | None = None,
    profile: HardwareProfile | str | None = None,
    mode: str = "auto",
    degree: int | None = None,
    kernel: str = "auto",
    merge_prefixes: bool = True,
    own_loss_is_a_token_sum: bool = False,
) -> None:
    """Makes a trainer plan its work and split documents over all ranks. Call it on every rank, before `train`.

    Of `transformers.Trainer`, TRL's SFTTrainer and their subclasses, whole optimizer steps are planned; of TRL's DPOTrainer,
    GRPOTrainer, RLOOTrainer, KTOTrainer and RewardTrainer, heads for classification and own losses, every call of the model.

    Args:
        trainer: the trainer, with a causal language model, an encoder-decoder, or an encoder with a head for masked tokens.
        tokens_per_rank: maximum tokens per rank in a forward pass. None: what the memory of the fullest rank holds by estimate.
        profile: hardware profile, a name or a file; None: that of the device.
        mode, degree, kernel: see `make_plan` and `ring_attention`.
        merge_prefixes: of TRL's trainers of sequences, rows of a rank that begin alike are computed once; the loss is the same.
        own_loss_is_a_token_sum: `compute_loss` and `training_step` of a subclass are sums over tokens by `num_items_in_batch`,
            of which whole steps are planned.

    Raises TrainerError, and leaves the trainer as it was, for what cannot be exact, with every reason and way out.
    """
    if hasattr(trainer, "dynamic"):
        raise TrainerError("this trainer already has dynamic context parallelism: call it once, or restore(trainer) first")
    _check_version(trainer)
    args, kind = trainer.args, kind_of(trainer, own_loss_is_a_token_sum)
    given = {"tokens_per_rank": tokens_per_rank, "profile": profile, "mode": mode, "degree": degree, "kernel": kernel}
    check_same(args.world_size, **given, merge_prefixes=merge_prefixes, own_loss_is_a_token_sum=own_loss_is_a_token_sum)
    with on_all_ranks(args.world_size):
        refuse(trainer, own_loss_is_a_token_sum, REPLACED)
        check_settings(args.world_size, tokens_per_rank or 1, mode, degree, None, None)
        spec = _spec_of(trainer)
        described, tower, dtype = _profile(trainer, spec, profile)
    with contextlib.ExitStack() as undo:
        groups = _groups(args, undo)
        with on_all_ranks(args.world_size):
            chunked = None if kind == "rows" else ChunkedLoss.of(trainer, prepared_part(trainer, trainer.model))
            most = tokens_per_rank or _budget(trainer, spec, dtype, described.profile, groups[1], chunked)
            notes = [*_prepare_kernels(trainer, spec, kernel), *_check_documents(trainer, most * args.world_size, kind)]
            way = described.profile, most, mode, degree, kernel, args.device, *groups
            sharing = Sharing(*way, undo=undo, tower=tower, parts=spec.parts, chunked_loss=chunked)
            if kind == "rows":
                notes.append(_note_of_outputs(trainer, prepared_part(trainer, trainer.model)))
            _replace_parts(trainer, sharing, kind, merge_prefixes)
            _draw_together(trainer, sharing, kind)
        trainer.dynamic = sharing
        sharing.undo = undo.pop_all()
    if trainer.is_world_process_zero():
        ranks = "1 rank" if args.world_size == 1 else f"up to {args.world_size} ranks"
        print(*described.lines, f"a document is split over {ranks}, of {most:,} tokens each", *notes, sep="\n")


def _check_version(trainer: Any) -> None:
    if missing := [name for name in NEEDED if not hasattr(trainer, name)]:
        raise TrainerError(
            f"transformers {version('transformers')} has no Trainer.{missing[0]}, which longctx replaces: install 5.20 to 5.24"
        )


def _replace_parts(trainer: Any, sharing: Sharing, kind: Kind, merge_prefixes: bool) -> None:
    """Replaces methods of the trainer and of its models, until `sharing.undo` is closed."""
    undo = sharing.undo
    models = [prepared_part(trainer, model) for model in (trainer.model, getattr(trainer, "ref_model", None)) if model]
    models = [models[0].base_model] if kind == "rows" else models
    sharing.predicts_masked = is_encoder(models[0])
    for model in models:
        with without_router_loss(model), without_pooler(model):
            undo.enter_context(prepared(model))
    if noisy(trainer):
        sharing.noise = Noise(trainer)
        undo.enter_context(sharing.noise.used_by(models[0]))
    merged = functools.partial(_record, trainer) if merge_prefixes and hasattr(trainer, "_metrics") else None
    if is_vision(models[0]) and kind != "rows":
        sharing.vision = models[0]
        for model in models:
            undo.enter_context(replaced_method(model, "forward", reading_images))
    undo.enter_context(replaced_method(trainer, "train", _wrapping_again))
    if kind == "sequences":
        for model in models:
            undo.enter_context(replaced_method(model, "forward", PlannedHead(sharing, merged)))
        return
    if kind == "rows":
        _plan_outputs(trainer, undo, PlannedBase(sharing, None if sharing.predicts_masked else merged))
        return
    _plan_steps(trainer, undo)
    if sharing.chunked_loss is not None:
        undo.enter_context(replaced_method(models[0], "forward", sharing.chunked_loss))
    if balances(trainer):
        sharing.router_loss = RouterLoss(trainer, models[0], sharing.group)
        undo.enter_context(replaced_method(models[0], "forward", sharing.router_loss))
    if models[0].config.is_encoder_decoder:
        sharing.seq2seq = models[0]
        if trainer.is_fsdp_enabled:
            undo.enter_context(sharded_with_head(models[0]))


def _draw_together(trainer: Any, sharing: Sharing, kind: Kind) -> None:
    """Makes an error of the data of one rank end all, also in evaluations."""
    ways = {"evaluation_loop": evaluating_together} | ({} if kind == "steps" else {"get_batch_samples": drawing_together})
    for name, together in ways.items() if sharing.ids_group is not None else ():
        sharing.undo.enter_context(replaced_method(trainer, name, functools.partial(together, sharing)))


def restore(trainer: Any) -> None:
    """Gives a trainer its own steps and its models their own attention again. Does nothing to other trainers."""
    if hasattr(trainer, "dynamic"):
        trainer.dynamic.undo.close()
        del trainer.dynamic


def _prepare_kernels(trainer: Any, spec: ModelSpec, kernel: str) -> Iterator[str]:
    """Yields a line with the kernels of attention, which are compiled now, and a note on an allocator without settings."""
    args, device = trainer.args, trainer.args.device
    dtype = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else next(trainer.model.parameters()).dtype
    kernels = prepare_kernels(kernel, kernel_requests(spec, device.type, dtype))
    yield f"attention on {device.type} in {str(dtype).removeprefix('torch.')}: {kernels or 'none in this model'}"
    if not is_prepared(device):
        yield (
            "note: every micro-batch has other shapes, which cut segments of torch's allocator into pieces: start the program "
            f"with {ALLOCATOR_SETTINGS[0]}=expandable_segments:True"
        )


def _groups(
    args: Any, undo: contextlib.ExitStack
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Returns groups of all ranks: for rings, for ids, which a thread exchanges between CPUs, and on several nodes for messages
    of rings between nodes. Collective."""
    if args.world_size == 1:
        return None, None, None
    rings, across = exchange_groups(torch.arange(args.world_size)[None], args.ddp_timeout_delta, args.device)
    ids = dist.new_group(backend="gloo", timeout=args.ddp_timeout_delta)
    groups = [group for group in (rings, ids, across) if group is not None]
    undo.callback(lambda: [dist.destroy_process_group(group) for group in groups if dist.is_initialized()])
    for group in (rings, across):
        if group is not None:
            warm_up(group, args.device)
    return rings, ids, across


@contextlib.contextmanager
def _extended(trainer: Any, mixin: type, **more: Any) -> Iterator[None]:
    """Makes a trainer one of a subclass of its class, after `mixin`."""
    kind = type(trainer)
    trainer.__class__ = type(kind.__name__, (mixin, kind), {"__module__": kind.__module__, **more})
    try:
        yield
    finally:
        trainer.__class__ = kind


def _plan_steps(trainer: Any, undo: contextlib.ExitStack) -> None:
    undo.callback(vars(trainer).pop, "_next", None)
    undo.enter_context(_extended(trainer, WholeSteps))
    undo.enter_context(replaced(trainer, "model_accepts_loss_kwargs", True))  # otherwise losses of batches would be averaged
    vars(trainer).setdefault("current_gradient_accumulation_steps", 1)  # evaluations may come first
    pairs = prepared_part(trainer, trainer.model).config.is_encoder_decoder
    collate = (WatchingTargets if pairs else CountingRows)(trainer.data_collator)
    undo.enter_context(replaced(trainer, "data_collator", collate))
    prepare_loader = trainer.accelerator.prepare_data_loader

    def on_host(loader: Any, device_placement: Any = None, **others: Any) -> Any:
        """Leaves batches in host memory, where they are planned: to read them back would wait for the step before."""
        return prepare_loader(loader, device_placement=False, **others)

    undo.enter_context(replaced(trainer.accelerator, "prepare_data_loader", on_host))


def _note_of_outputs(trainer: Any, model: Any) -> str:
    """Returns a line on a model whose loss needs outputs of whole rows. Raises TrainerError."""
    with trainer.accelerator.autocast():  # a head may be in bfloat16, as TRL makes adapters of bases of 4 bits
        check_head(model)
    head = model.get_output_embeddings()
    size = "" if head is None else f", and logits take {format_bytes(4096 * len(head.weight))} per 1,024 tokens of its rows"
    hidden = ", and no answer is looked for in padding" if hasattr(model, ANSWERS) else ""
    return f"note: the loss gets outputs of whole rows: calls of the model are planned, not steps{size}{hidden}"


def _plan_outputs(trainer: Any, undo: contextlib.ExitStack, outputs: PlannedBase) -> None:
    model = prepared_part(trainer, trainer.model)
    outputs.means = has_loss_of_head(trainer) and not trainer.args.label_smoothing_factor
    if type(model).__name__.endswith("ForSequenceClassification") and not is_encoder(model.base_model):
        outputs.padding = model.config.get_text_config().pad_token_id
    undo.enter_context(_extended(trainer, WholeOutputs, outputs=outputs))
    undo.enter_context(replaced_method(model.base_model, "forward", outputs))
    if hasattr(model, ANSWERS):
        undo.enter_context(replaced_method(getattr(model, ANSWERS), "forward", outputs.without_padding))


def _wrapping_again(own: Callable[..., Any], trainer: Any, *arguments: Any, **named: Any) -> Any:
    """Trains. An evaluation before has prepared the model without DDP, and accelerate would leave it so."""
    if not trainer.is_fsdp_enabled:
        trainer.model._is_accelerate_prepared = False
    return own(trainer, *arguments, **named)


def _record(trainer: Any, share: float) -> None:
    """Adds a number to the metrics that TRL averages and logs."""
    trainer._metrics["train" if trainer.model.training else "eval"]["tokens_after_merging"].append(share)


def _spec_of(trainer: Any) -> ModelSpec:
    """Returns the sizes of the trainer's model with its adapters. Raises TrainerError."""
    model = prepared_part(trainer, trainer.model)
    if model.config.is_encoder_decoder:
        with prepared(model):  # refuses those that have no such blocks
            blocks, spec = [*model.get_encoder().layers, *model.get_decoder().layers], spec_of_seq2seq(model)
    else:
        blocks = model.get_submodule(block_name(model))
        spec = with_tower(spec_of(model, blocks, causal=not is_encoder(model.base_model)), model)
        if model.get_output_embeddings() is None:  # as if it had one token, which a head multiplies
            spec = replace(spec, vocab_size=1, encoder_root_parameters=spec.vocabulary_parameters)
    if getattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config", None):
        return with_adapters(spec, blocks, model)
    if is_vision(model):
        return replace(spec, frozen_tower=sum(w.numel() for w in weights_of_images(model) if not w.requires_grad))
    return spec


def _profile(trainer: Any, spec: ModelSpec, profile: HardwareProfile | str | None) -> tuple[RunProfile, TowerSpeed | None, str]:
    """Returns the profile, scaled to the trainer's model unless it is given as a value, the encoder of images, if there is one,
    and the dtype that the model computes in.
    """
    args, model = trainer.args, prepared_part(trainer, trainer.model)
    recompute: Recompute = "full" if args.gradient_checkpointing else "none"
    dtype = "bfloat16" if args.bf16 or next(model.parameters()).dtype == torch.bfloat16 else "float32"
    if isinstance(profile, HardwareProfile):
        described = RunProfile("given", profile, ("profile: given as a value, used unscaled",))
    else:
        described = model_profile(profile, spec, dtype, args.device, args.world_size, recompute)
    return described, _tower_speed(spec, dtype, recompute, described.profile), dtype


def _budget(
    trainer: Any,
    spec: ModelSpec,
    dtype: str,
    profile: HardwareProfile,
    group: dist.ProcessGroup | None,
    chunked: ChunkedLoss | None,
) -> int:
    """Returns the tokens that the memory of the fullest rank holds by estimate. Collective."""
    args = trainer.args
    available = available_bytes(args.device, processes_per_node(args.world_size) or args.world_size) or 0
    least = torch.tensor([available, chunked is not None])  # all ranks must find the same
    if group is not None:
        dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    return tokens_that_fit(trainer, spec, dtype, profile, int(least[0]), all_logits=not least[1])


def _tower_speed(spec: ModelSpec, dtype: str, recompute: str, profile: HardwareProfile) -> TowerSpeed | None:
    """Returns the encoder of images, as fast per operation as the matrices of the model; None if it has none."""
    if spec.tower is None:
        return None
    operations = 6 * work_of(spec, dtype, recompute=recompute).computed
    return TowerSpeed(spec.tower, spec.tower_backward, profile.linear_s_per_token / operations)


def _document_lengths(data: Any, pairs: bool) -> npt.NDArray[np.int64]:
    """Returns the tokens of every document of a data set, from offsets alone, also of rows that TRL has packed.

    Of records of an encoder-decoder (`pairs`) these are the tokens of sources and of labels together.
    """
    packed, lengths = "seq_lengths" in data.column_names, [np.zeros(0, np.int64)]
    counted = ["seq_lengths"] if packed else ["input_ids", "labels"] if pairs else ["input_ids"]
    names = [name for name in counted if name in data.column_names]
    for table in data.select_columns(names).with_format("arrow").iter(10_000):
        parts = [compute.list_flatten(column) if packed else compute.list_value_length(column) for column in table.columns]
        lengths.append(sum(part.to_numpy() for part in parts))
    return np.concatenate(lengths)


def _check_documents(trainer: Any, most: int, kind: Kind) -> Iterator[str]:
    """Yields a note for each data set with documents that TRL may have cut, and for an argument that changes nothing.

    Raises TrainerError for a data set with `input_ids` of which a document is longer than all ranks hold.
    """
    if trainer.args.world_size > 1 and not trainer.args.average_tokens_across_devices and kind != "sequences":
        yield "note: average_tokens_across_devices=False changes nothing: the loss is the mean over the tokens of all ranks"
    if kind == "steps" and means_of_batches(trainer):
        name = type(prepared_part(trainer, trainer.model)).__name__
        yield f"note: the loss is the mean over the tokens of a step; that of {name} would be a mean of means of batches"
    for name in ("train_dataset", "eval_dataset"):
        data: Any = getattr(trainer, name, None)
        for each in data.values() if isinstance(data, dict) else [data]:
            if "input_ids" not in (getattr(each, "column_names", None) or ()) or not hasattr(each, "data"):
                continue
            lengths = _document_lengths(each, trainer.model.config.is_encoder_decoder)
            limit = getattr(trainer.args, "max_length", None)
            if (longest := lengths.max(initial=0)) > most:
                raise TrainerError(
                    f"{name} has a document of {longest:,} tokens, but {trainer.args.world_size} ranks hold {most:,}: give "
                    "more tokens_per_rank, use more ranks, or shorten the documents"
                )
            if cut := int((lengths == limit).sum()):
                yield (
                    f"note: {cut:,} of {len(lengths):,} documents of {name} have exactly max_length={limit:,} tokens: TRL cuts "
                    "longer ones. max_length=None in its config keeps them whole"
                )

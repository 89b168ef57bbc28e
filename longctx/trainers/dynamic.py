"""Attaches dynamic context parallelism to a trainer, and takes it off.

In order: all ranks compare their arguments, the first message; then they refuse what would not be
exact, make groups, agree on profile and budget, and replace methods. Rings exchange K and V from
the first step on (`longctx.trainers.step`).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from longctx.arguments import check_arguments
from longctx.attention import warm_up
from longctx.hf.exactness import replaced
from longctx.parallel.device import ALLOCATOR_SETTINGS, is_prepared
from longctx.parallel.mesh import exchange_groups
from longctx.planning.check import check_settings
from longctx.planning.cost.spec import ModelSpec
from longctx.planning.hardware_profile import HardwareProfile
from longctx.trainers.agreement import (
    agreeing_on_errors,
    averaging,
    check_same,
    drawing_together,
    evaluating_together,
)
from longctx.trainers.budget import Workload
from longctx.trainers.chunked_loss import ChunkedLoss
from longctx.trainers.documents import CountingRows
from longctx.trainers.fused_head import PlannedHead
from longctx.trainers.images import reading_images
from longctx.trainers.kinds import Traits, inner_model
from longctx.trainers.noise import Noise
from longctx.trainers.pairs import WatchingTargets, sharded_with_head
from longctx.trainers.prepared import prepared, replaced_method
from longctx.trainers.refusals import (
    ANSWERS,
    RULES,
    TrainerError,
    check_trainer,
    notes_on_data,
    refuse,
)
from longctx.trainers.router_loss import RouterLoss, without_router_loss
from longctx.trainers.step import Sharing
from longctx.trainers.whole_outputs import PlannedBase, WholeOutputs, check_head, without_pooler
from longctx.trainers.whole_steps import NEEDED, REPLACED, WholeSteps
from longctx.training.build import kernel_requests, prepare_kernels
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
    """Makes a trainer plan its work and split documents over all ranks. Call it on every rank,
    before `train`.

    Of `transformers.Trainer`, TRL's SFTTrainer and their subclasses, whole optimizer steps are
    planned; of TRL's DPOTrainer, GRPOTrainer, RLOOTrainer, KTOTrainer and RewardTrainer, heads for
    classification and own losses, every call of the model.

    Args:
        trainer: the trainer, with a causal language model, an encoder-decoder, or an encoder with a
            head for masked tokens.
        tokens_per_rank: maximum tokens per rank in a forward pass. None: what the memory of the
            fullest rank holds by estimate.
        profile: hardware profile, a name or a file; None: that of the device.
        mode, degree, kernel: see `make_plan` and `ring_attention`.
        merge_prefixes: of TRL's trainers of sequences, rows of a rank that begin alike are computed
            once; the loss is the same.
        own_loss_is_a_token_sum: `compute_loss` and `training_step` of a subclass are sums over
            tokens by `num_items_in_batch`, of which whole steps are planned.

    Raises TrainerError, and leaves the trainer as it was, for what cannot be exact, with every
    reason and way out.
    """
    check_trainer(trainer, NEEDED)
    args = trainer.args
    given: dict[str, Any] = {
        "tokens_per_rank": tokens_per_rank,
        "profile": profile,
        "mode": mode,
        "degree": degree,
        "kernel": kernel,
    }
    given |= {"merge_prefixes": merge_prefixes, "own_loss_is_a_token_sum": own_loss_is_a_token_sum}
    check_same(args.world_size, **given)
    with agreeing_on_errors(args.world_size):
        check_arguments(TrainerError, RULES, given)
        traits = Traits(trainer, own_loss_is_a_token_sum)
        refuse(traits, REPLACED)
        least = 1 if tokens_per_rank is None else tokens_per_rank
        check_settings(args.world_size, least, mode, degree, None, None)
        workload = Workload.of(traits, profile)
    with contextlib.ExitStack() as undo:
        groups = _groups(args, undo)
        with agreeing_on_errors(args.world_size):
            workload, chunked = workload.agreed(groups[1]), ChunkedLoss.of(traits)
            most = tokens_per_rank
            if most is None:
                most = workload.tokens_that_fit(groups[1], chunks=chunked is not None)
            notes = [
                *_prepare_kernels(traits, workload.spec, kernel),
                *notes_on_data(traits, most * args.world_size),
            ]
            way = workload.named.profile, most, mode, degree, kernel, args.device, *groups
            sharing = Sharing(
                *way,
                undo=undo,
                tower=workload.tower,
                parts=workload.spec.parts,
                chunked_loss=chunked,
            )
            notes += _replace_parts(traits, sharing, merge_prefixes)
        trainer.dynamic = sharing
        sharing.undo = undo.pop_all()
    if trainer.is_world_process_zero():
        ranks = "1 rank" if args.world_size == 1 else f"up to {args.world_size} ranks"
        print(
            *workload.named.lines,
            f"a document is split over {ranks}, of {most:,} tokens each",
            *notes,
            sep="\n",
        )


def _replace_parts(traits: Traits, sharing: Sharing, merge_prefixes: bool) -> list[str]:
    """Replaces methods of the trainer and of its models, until `sharing.undo` is closed. Returns
    notes. Raises TrainerError."""
    trainer, undo, notes = traits.trainer, sharing.undo, []
    models, sharing.predicts_masked = [traits.model], traits.masked
    if traits.kind == "rows":
        notes.append(_note_of_outputs(traits))
        models, sharing.predicts_masked = [traits.model.base_model], traits.encoder
    elif getattr(trainer, "ref_model", None):
        models.append(inner_model(trainer, trainer.ref_model))
    for model in models:
        with without_router_loss(model), without_pooler(model):
            undo.enter_context(prepared(model))
    if traits.noisy:
        sharing.noise = Noise(trainer)
        undo.enter_context(sharing.noise.used_by(models[0]))
    if traits.images and traits.kind != "rows":
        sharing.vision = traits.model
        for model in models:
            undo.enter_context(replaced_method(model, "forward", reading_images))
    together: dict[str, Callable[..., Any]] = {"evaluation_loop": evaluating_together}
    merged = (
        functools.partial(_record, trainer)
        if merge_prefixes and hasattr(trainer, "_metrics")
        else None
    )
    if traits.kind == "steps":
        _plan_steps(traits, sharing)
    else:
        together |= {"get_batch_samples": drawing_together, "training_step": averaging}
        if traits.kind == "sequences":
            for model in models:
                undo.enter_context(replaced_method(model, "forward", PlannedHead(sharing, merged)))
        else:
            _plan_outputs(
                traits, undo, PlannedBase(sharing, None if sharing.predicts_masked else merged)
            )
    # Around the train of WholeSteps.
    undo.enter_context(replaced_method(trainer, "train", _wrapping_again))
    for name, method in together.items() if sharing.ids_group is not None else ():
        undo.enter_context(replaced_method(trainer, name, functools.partial(method, sharing)))
    return notes


def restore(trainer: Any) -> None:
    """Gives a trainer its own steps and its models their own attention again. Does nothing to other
    trainers."""
    if hasattr(trainer, "dynamic"):
        trainer.dynamic.undo.close()
        del trainer.dynamic


def _prepare_kernels(traits: Traits, spec: ModelSpec, kernel: str) -> Iterator[str]:
    """Yields a line with the kernels of attention, which are compiled now, and a note on an
    allocator without settings."""
    args, device = traits.args, traits.args.device
    dtype = (
        torch.float16
        if args.fp16
        else torch.bfloat16
        if args.bf16
        else next(traits.model.parameters()).dtype
    )
    kernels = prepare_kernels(kernel, kernel_requests(spec, device.type, dtype))
    yield (
        f"attention on {device.type} in {str(dtype).removeprefix('torch.')}: "
        f"{kernels or 'none in this model'}"
    )
    if not is_prepared(device):
        yield (
            "note: every micro-batch has other shapes, which cut segments of torch's allocator "
            "into pieces: start the program "
            f"with {ALLOCATOR_SETTINGS[0]}=expandable_segments:True"
        )


def _groups(
    args: Any, undo: contextlib.ExitStack
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Returns groups of all ranks: for rings, for ids, which a thread exchanges between CPUs, and
    on several nodes for messages of rings between nodes. Collective."""
    if args.world_size == 1:
        return None, None, None
    rings, across = exchange_groups(
        torch.arange(args.world_size)[None], args.ddp_timeout_delta, args.device
    )
    ids = dist.new_group(backend="gloo", timeout=args.ddp_timeout_delta)
    groups = [group for group in (rings, ids, across) if group is not None]
    undo.callback(
        lambda: [dist.destroy_process_group(group) for group in groups if dist.is_initialized()]
    )
    for group in (rings, across):
        if group is not None:
            warm_up(group, args.device)
    return rings, ids, across


@contextlib.contextmanager
def _extended(trainer: Any, mixin: type, **more: Any) -> Iterator[None]:
    """Makes a trainer one of a subclass of its class, after `mixin`, whose attributes do not stay
    on it."""
    kind = type(trainer)
    trainer.__class__ = type(kind.__name__, (mixin, kind), {"__module__": kind.__module__, **more})
    try:
        yield
    finally:
        trainer.__class__ = kind
        for name in vars(mixin):
            vars(trainer).pop(name, None)


def _plan_steps(traits: Traits, sharing: Sharing) -> None:
    trainer, model, undo = traits.trainer, traits.model, sharing.undo
    undo.enter_context(_extended(trainer, WholeSteps))
    # Otherwise losses of batches would be averaged.
    undo.enter_context(replaced(trainer, "model_accepts_loss_kwargs", True))
    undo.enter_context(replaced(trainer, "loss_is_scaled_for_ga", True))
    vars(trainer).setdefault("current_gradient_accumulation_steps", 1)  # evaluations may come first
    collate = (WatchingTargets if traits.pairs else CountingRows)(trainer.data_collator)
    undo.enter_context(replaced(trainer, "data_collator", collate))
    prepare_loader = trainer.accelerator.prepare_data_loader

    def on_host(loader: Any, device_placement: Any = None, **others: Any) -> Any:
        """Leaves batches in host memory, where they are planned: to read them back would wait for
        the step before."""
        return prepare_loader(loader, device_placement=False, **others)

    undo.enter_context(replaced(trainer.accelerator, "prepare_data_loader", on_host))
    if sharing.chunked_loss is not None:
        undo.enter_context(replaced_method(model, "forward", sharing.chunked_loss))
    if traits.balances:
        sharing.router_loss = RouterLoss(traits, sharing.group)
        undo.enter_context(replaced_method(model, "forward", sharing.router_loss))
    if traits.pairs:
        sharing.seq2seq = model
        if trainer.is_fsdp_enabled:
            undo.enter_context(sharded_with_head(model))


def _note_of_outputs(traits: Traits) -> str:
    """Returns a line on a model whose loss needs outputs of whole rows. Raises TrainerError."""
    model = traits.model
    # A head may be in bfloat16, as TRL makes adapters of bases of 4 bits.
    with traits.trainer.accelerator.autocast():
        check_head(model)
    head = model.get_output_embeddings()
    size = (
        ""
        if head is None
        else f", and logits take {format_bytes(4096 * len(head.weight))} per 1,024 tokens of its "
        "rows"
    )
    hidden = ", and no answer is looked for in padding" if hasattr(model, ANSWERS) else ""
    return (
        "note: the loss gets outputs of whole rows: calls of the model are planned, not "
        f"steps{size}{hidden}"
    )


def _plan_outputs(traits: Traits, undo: contextlib.ExitStack, outputs: PlannedBase) -> None:
    model = traits.model
    outputs.of_head = not traits.has_unknown_loss
    outputs.means = traits.has_loss_of_head and not traits.args.label_smoothing_factor
    if outputs.of_head:
        # Labels of all ranks are counted.
        undo.enter_context(replaced(traits.args, "average_tokens_across_devices", True))
    if outputs.means:
        undo.enter_context(replaced(traits.trainer, "model_accepts_loss_kwargs", True))
        undo.enter_context(replaced(traits.trainer, "loss_is_scaled_for_ga", None))
    if type(model).__name__.endswith("ForSequenceClassification") and not traits.encoder:
        outputs.padding = model.config.get_text_config().pad_token_id
    undo.enter_context(_extended(traits.trainer, WholeOutputs, outputs=outputs))
    undo.enter_context(replaced_method(model.base_model, "forward", outputs))
    if hasattr(model, ANSWERS):
        undo.enter_context(
            replaced_method(getattr(model, ANSWERS), "forward", outputs.without_padding)
        )


def _wrapping_again(own: Callable[..., Any], trainer: Any, *arguments: Any, **named: Any) -> Any:
    """Trains. An evaluation before has prepared the model without DDP, and accelerate would leave
    it so."""
    if not trainer.is_fsdp_enabled:
        trainer.model._is_accelerate_prepared = False
    return own(trainer, *arguments, **named)


def _record(trainer: Any, share: float) -> None:
    """Adds a number to the metrics that TRL averages and logs."""
    trainer._metrics["train" if trainer.model.training else "eval"]["tokens_after_merging"].append(
        share
    )

"""Attaches dynamic context parallelism to a trainer, and takes it off.

In order: all ranks compare their arguments, the first message; then they refuse what would not be
exact, make groups, agree on profile and budget, and replace methods. Rings exchange K and V from
the first step on (`longctx.trainers.step`).
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from longctx.arguments import check_arguments
from longctx.hf.exactness import replaced
from longctx.hf.indexed import indexers
from longctx.parallel.device import ALLOCATOR_SETTINGS, is_prepared
from longctx.planning.check import check_settings
from longctx.planning.cost.spec import ModelSpec
from longctx.planning.hardware_profile import HardwareProfile
from longctx.trainers.agreement import (
    agreeing_on_errors,
    averaging,
    check_buffers,
    check_same,
    drawing_together,
    evaluating_together,
)
from longctx.trainers.budget import Workload
from longctx.trainers.chunked_loss import ChunkedLoss
from longctx.trainers.distillation import distilled, teacher_of
from longctx.trainers.expert_replay import Mode, RouterReplay
from longctx.trainers.families import family_of, family_of_model
from longctx.trainers.fused_head import PlannedHead
from longctx.trainers.groups import Groups
from longctx.trainers.kinds import Kind, Traits, inner_model
from longctx.trainers.noise import Noise
from longctx.trainers.pass_through import methods_of_libraries
from longctx.trainers.planned_call import PlannedCall
from longctx.trainers.prepared import prepared, replaced_method
from longctx.trainers.refusals import (
    ANSWERS,
    RULES,
    TrainerError,
    check_trainer,
    notes_on_data,
    refuse,
    refuse_long_completions,
)
from longctx.trainers.riders import Rider
from longctx.trainers.rollout_experts import Replaying, notes_on_replay, replay_of
from longctx.trainers.router_loss import RouterLoss, without_router_loss
from longctx.trainers.step import Planning, StepExchange
from longctx.trainers.whole_outputs import PlannedBase, WholeOutputs, check_head, without_pooler
from longctx.trainers.whole_steps import NEEDED, REPLACED, WholeSteps
from longctx.training.kernels import kernel_requests, prepare_kernels
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
    keep_their_scale: bool = False,
    router_replay: Mode | None = None,
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
        keep_their_scale: a trainer of another tool keeps its own mean of a batch (Axolotl's and
            LLaMA-Factory's mean of means): calls of the model are planned, as of own losses.
        router_replay: of a mixture that GRPO or RLOO trains: "R2", each token uses the experts that
            computed its old log-probability; "R3", those of the engine, which `rollout_func`
            returns as `routed_experts`, ids [tokens, layers, experts] of every prompt with its
            completion. None: routers choose.

    Raises TrainerError, and leaves the trainer as it was, for what cannot be exact, with every
    reason and way out.
    """
    check_trainer(trainer, NEEDED)
    ranks = trainer.args.world_size
    given: dict[str, Any] = {
        "tokens_per_rank": tokens_per_rank,
        "profile": profile,
        "mode": mode,
        "degree": degree,
        "kernel": kernel,
        "merge_prefixes": merge_prefixes,
        "own_loss_is_a_token_sum": own_loss_is_a_token_sum,
        "keep_their_scale": keep_their_scale,
        "router_replay": router_replay,
    }
    check_same(ranks, **given)
    with agreeing_on_errors(ranks):
        check_options(ranks, given)
        traits = Traits(trainer, own_loss_is_a_token_sum, keeps_scale=keep_their_scale)
        model_family = family_of_model(traits)
        refuse(traits, REPLACED, family_problems=model_family.problems(traits))
        workload = Workload.of(traits, profile)
    if traits.uses_ddp and trainer.args.ddp_broadcast_buffers is not False:
        check_buffers(ranks, traits.model)
    undo = contextlib.ExitStack()
    with _closed_on_error(undo):
        groups = Groups.made(trainer.args, undo)
        with agreeing_on_errors(ranks):
            workload = workload.agreed(groups.ids)
            chunked = ChunkedLoss.of(traits)
            if tokens_per_rank is None:
                has_chunks = chunked is not None
                tokens_per_rank = workload.tokens_that_fit(groups.ids, chunks=has_chunks)
            refuse_long_completions(trainer.args, tokens_per_rank, degree)
            notes = [
                *_prepare_kernels(traits, workload.spec, kernel),
                *notes_on_data(traits, tokens_per_rank * ranks, model_family.length_fields),
                *_notes_on_calls(traits, router_replay),
                *notes_on_sharding(traits),
            ]
            replay = replay_of(traits, router_replay)
            planning = Planning(workload.named.profile, tokens_per_rank, mode=mode, degree=degree)
            exchange = StepExchange(
                planning=planning,
                attention=groups.attention(planning.profile, trainer.args.device, kernel),
                ids_group=groups.ids,
                family=family_of(traits, workload),
                riders=_riders(traits, groups, chunked, replay),
                undo=undo,
            )
            _attach(traits, exchange, merge_prefixes, replay)
        trainer.dynamic = exchange
    if trainer.is_world_process_zero():
        _print(workload, tokens_per_rank, notes)


def _print(workload: Workload, tokens_per_rank: int, notes: Iterable[str]) -> None:
    """Prints what was found about a trainer."""
    ranks = workload.traits.args.world_size
    split = f"up to {ranks} ranks"
    if ranks == 1:
        split = "1 rank"
    for line in workload.named.lines:
        print(line)
    print(f"a document is split over {split}, of {tokens_per_rank:,} tokens each")
    for line in notes:
        print(line)


def check_options(ranks: int, given: Mapping[str, Any]) -> None:
    """Raises TrainerError or PlanError for options that are wrong for any trainer on so many
    ranks."""
    check_arguments(TrainerError, RULES, given)
    tokens_per_rank = given.get("tokens_per_rank")
    check_settings(
        ranks,
        1 if tokens_per_rank is None else tokens_per_rank,
        mode=given.get("mode", "auto"),
        degree=given.get("degree"),
        bins=None,
        max_remote_tokens=None,
    )


@contextlib.contextmanager
def _closed_on_error(undo: contextlib.ExitStack) -> Iterator[None]:
    """Closes a stack if something is raised."""
    try:
        yield
    except BaseException:
        undo.close()
        raise


def _riders(
    traits: Traits, groups: Groups, chunked: ChunkedLoss | None, replay: RouterReplay | None
) -> list[Rider]:
    """Returns what goes along with the micro-batches of a trainer, in the order in which it
    replaces methods of the model. Raises TrainerError."""
    riders: list[Rider] = []
    if traits.noisy:
        riders.append(Noise(traits.trainer))
    if chunked is not None:
        riders.append(chunked)
    if traits.balances and traits.kind == "step":
        riders.append(RouterLoss(traits, groups.rings))
    if replay is not None:
        riders.append(replay)
    return riders


def _attach(
    traits: Traits, exchange: StepExchange, merge_prefixes: bool, replay: RouterReplay | None
) -> None:
    """Replaces methods of the trainer and of its models, until `exchange.undo` is closed. Raises
    TrainerError."""
    trainer = traits.trainer
    undo = exchange.undo
    models = _planned_models(traits)
    for model in models:
        with without_router_loss(model), without_pooler(model):
            undo.enter_context(prepared(model))
    undo.enter_context(exchange.family.used_by(models, sharded=trainer.is_fsdp_enabled))
    for rider in exchange.riders:
        undo.enter_context(rider.used_by(models[0]))
    merged = None
    merges = exchange.family.merges_prefixes and not any(map(indexers, models))
    if merge_prefixes and merges and hasattr(trainer, "_metrics"):
        merged = functools.partial(_record, trainer)
    if traits.kind == "step":
        _plan_steps(traits, exchange)
    elif traits.kind == "token_values":
        for model in models:
            head = PlannedHead(exchange, merged)  # each numbers the calls of its own model
            if model is traits.model:
                head.carrier = replay  # a reference chooses its own experts
            undo.enter_context(replaced_method(model, "forward", head))
        if replay is not None:
            undo.enter_context(_extended(trainer, Replaying, replay=replay))
    elif traits.kind == "divergence":
        mixin, divergence = distilled(traits, PlannedCall(exchange, merged))
        undo.enter_context(_extended(trainer, mixin, divergence=divergence))
    else:
        _plan_outputs(traits, exchange, merged)
    undo.enter_context(replaced_method(trainer, "train", train_planned))
    if exchange.ids_group is not None:
        for name, method in _collective_methods(traits.kind).items():
            collective = functools.partial(method, exchange)
            undo.enter_context(replaced_method(trainer, name, collective))


def _planned_models(traits: Traits) -> list[Any]:
    """Returns the models of a trainer whose calls are planned; that which is trained is first."""
    if traits.kind == "hidden_states":
        return [traits.model.base_model]
    if traits.kind == "divergence":
        return [traits.model.base_model, teacher_of(traits.trainer).base_model]
    reference = getattr(traits.trainer, "ref_model", None)
    if not reference:
        return [traits.model]
    return [traits.model, inner_model(traits.trainer, reference)]


def _collective_methods(kind: Kind) -> dict[str, Callable[..., Any]]:
    """Returns what replaces methods of a trainer on several ranks, which run them together."""
    methods: dict[str, Callable[..., Any]] = {"evaluation_loop": evaluating_together}
    if kind != "step":
        methods["get_batch_samples"] = drawing_together
        methods["training_step"] = averaging
    return methods


def restore(trainer: Any) -> None:
    """Gives a trainer its own steps and its models their own attention again. Does nothing to other
    trainers."""
    if hasattr(trainer, "dynamic"):
        trainer.dynamic.undo.close()
        del trainer.dynamic


def _prepare_kernels(traits: Traits, spec: ModelSpec, kernel: str) -> Iterator[str]:
    """Yields a line with the kernels of attention, which are compiled now, and a note on an
    allocator without settings."""
    args = traits.args
    device = args.device
    dtype = next(traits.model.parameters()).dtype
    if args.fp16:
        dtype = torch.float16
    elif args.bf16:
        dtype = torch.bfloat16
    kernels = prepare_kernels(kernel, kernel_requests(spec, device.type, dtype))
    yield (
        f"attention on {device.type} in {str(dtype).removeprefix('torch.')}: "
        f"{kernels or 'none in this model'}"
    )
    if not is_prepared(device):
        yield (
            "note: every micro-batch has other shapes, which cut segments of torch's allocator "
            f"into pieces: start the program with {ALLOCATOR_SETTINGS[0]}=expandable_segments:True"
        )


@contextlib.contextmanager
def _extended(
    trainer: Any, mixin: type, *, below: Mapping[str, Any] | None = None, **more: Any
) -> Iterator[None]:
    """Makes a trainer one of a subclass of its class, after `mixin`, whose attributes do not stay
    on it. `below`: methods that `mixin` calls in place of those of its class."""
    kind = type(trainer)
    named = {"__module__": kind.__module__}
    base = type(kind.__name__, (kind,), {**named, **below}) if below else kind
    trainer.__class__ = type(kind.__name__, (mixin, base), {**named, **more})
    try:
        yield
    finally:
        trainer.__class__ = kind
        for name in vars(mixin):
            vars(trainer).pop(name, None)


def _plan_steps(traits: Traits, exchange: StepExchange) -> None:
    """Makes a trainer plan whole steps."""
    trainer = traits.trainer
    undo = exchange.undo
    # Of other tools' overrides that pass on what they get.
    below = methods_of_libraries(trainer)
    undo.enter_context(_extended(trainer, WholeSteps, below=below))
    # Otherwise losses of batches would be averaged.
    undo.enter_context(replaced(trainer, "model_accepts_loss_kwargs", True))
    undo.enter_context(replaced(trainer, "loss_is_scaled_for_ga", True))
    vars(trainer).setdefault("current_gradient_accumulation_steps", 1)  # evaluations may come first
    watched = exchange.family.watched(trainer.data_collator)
    undo.enter_context(replaced(trainer, "data_collator", watched))
    prepare_loader = trainer.accelerator.prepare_data_loader

    def on_host(loader: Any, device_placement: Any = None, **others: Any) -> Any:
        """Leaves batches in host memory, where they are planned: to read them back would wait for
        the step before."""
        return prepare_loader(loader, device_placement=False, **others)

    undo.enter_context(replaced(trainer.accelerator, "prepare_data_loader", on_host))


def notes_on_sharding(traits: Traits) -> Iterator[str]:
    """Yields a note if accelerate does not shard what its arguments ask to be sharded."""
    if traits.args.fsdp and traits.uses_ddp:
        yield (
            "note: fsdp is set, but accelerate shards nothing on CPUs: every process keeps all "
            "weights, as with DDP"
        )


def _notes_on_calls(traits: Traits, router_replay: Mode | None) -> Iterator[str]:
    """Yields lines on planned calls. Raises TrainerError."""
    if traits.kind == "hidden_states":
        yield _note_of_outputs(traits)
    if router_replay == "R2":
        yield from notes_on_replay(traits)


def _note_of_outputs(traits: Traits) -> str:
    """Returns a line on a model whose loss needs outputs of whole rows. Raises TrainerError."""
    model = traits.model
    # A head may be in bfloat16, as TRL makes adapters of bases of 4 bits.
    with traits.trainer.accelerator.autocast():
        check_head(model)
    note = "note: the loss gets outputs of whole rows: calls of the model are planned, not steps"
    head = model.get_output_embeddings()
    if head is not None:
        size = format_bytes(4096 * len(head.weight))
        note += f", and logits take {size} per 1,024 tokens of its rows"
    if hasattr(model, ANSWERS):
        note += ", and no answer is looked for in padding"
    return note


def _plan_outputs(
    traits: Traits, exchange: StepExchange, merged: Callable[[float], None] | None
) -> None:
    """Makes a trainer plan calls of its base model, whose hidden states the loss needs."""
    model = traits.model
    undo = exchange.undo
    padding = None
    classifies_rows = type(model).__name__.endswith("ForSequenceClassification")
    if classifies_rows and exchange.family.last_token_is_found:
        padding = model.config.get_text_config().pad_token_id
    outputs = PlannedBase(
        exchange,
        merged,
        means=traits.has_loss_of_head and not traits.args.label_smoothing_factor,
        leaves_rows_out=not traits.has_unknown_loss,
        joins=traits.joins_calls,
        padding=padding,
    )
    if outputs.leaves_rows_out:
        # Labels of all ranks are counted.
        undo.enter_context(replaced(traits.args, "average_tokens_across_devices", True))
    if outputs.means:
        undo.enter_context(replaced(traits.trainer, "model_accepts_loss_kwargs", True))
        undo.enter_context(replaced(traits.trainer, "loss_is_scaled_for_ga", None))
    undo.enter_context(_extended(traits.trainer, WholeOutputs, outputs=outputs))
    undo.enter_context(replaced_method(model.base_model, "forward", outputs))
    head = model.get_output_embeddings()
    if head is not None:
        undo.enter_context(replaced_method(head, "forward", outputs.of_tokens))
    if hasattr(model, ANSWERS):
        answers = getattr(model, ANSWERS)
        undo.enter_context(replaced_method(answers, "forward", outputs.without_padding))


def train_planned(own: Callable[..., Any], trainer: Any, *arguments: Any, **named: Any) -> Any:
    """Trains by `own`, a `train` of the trainer's class. An evaluation before has prepared the
    model without DDP, and accelerate would leave it so."""
    if not trainer.is_fsdp_enabled:
        trainer.model._is_accelerate_prepared = False
    if not isinstance(trainer, WholeSteps):
        return own(trainer, *arguments, **named)
    with trainer.all_steps_ended():
        return own(trainer, *arguments, **named)


def _record(trainer: Any, share: float) -> None:
    """Adds a number to the metrics that TRL averages and logs."""
    trainer._metrics["train" if trainer.model.training else "eval"]["tokens_after_merging"].append(
        share
    )

"""What a trainer must not ask for if its documents are split over ranks, checked before the first
step."""

from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pyarrow import compute

from longctx.arguments import Rule, flag, or_none
from longctx.errors import UserError
from longctx.hf.attention import configs_of_parts
from longctx.hf.exactness import evaluating
from longctx.parallel.environment import Launch, other_tasks
from longctx.planning.hardware_profile import HardwareProfile
from longctx.trainers.kinds import KINDS, LOSS, OTHER_HEADS, Traits, inner_model, is_own, tuner_of
from longctx.trainers.versions import is_too_old, span

ANSWERS = "qa_outputs"
"""Attribute of models for question answering: the layer that scores tokens."""
CALLED = ("train", "evaluation_loop", "log")
"""Methods of a subclass that are called as before."""
DRAWN_FOR = 8
"""Tokens on which adapters are tried."""
WRAPPED = ("training_step", "prediction_step")
"""Methods that call a model whose outputs the loss needs whole."""


UNEVEN = (
    "the last rows of {} are not as many on every rank, so plain training fills them with "
    "others, and nothing says how the loss weighs fewer: set dataloader_drop_last=True in {}, a "
    "batch size that divides the rows, or compute_loss_func"
)


NO_ROUTER_LOSS = (
    "the auxiliary loss of routers is not computed beside images or losses of whole rows: set "
    "router_aux_loss_coef=0.0 in {}, or output_router_logits=False in the model's config"
)
UNSUPPORTED = "{} is {}, which is not supported: omit it"


class TrainerError(UserError):
    """A trainer, model or batch that cannot be trained exactly on split documents."""


def check_trainer(trainer: Any, needed: Sequence[str]) -> None:
    """Raises TrainerError for what is no trainer, or not yet one, that has the `needed` methods of
    transformers."""
    from transformers import PreTrainedModel, Trainer

    given = (
        f"the class {trainer.__name__}"
        if isinstance(trainer, type)
        else f"an object of {type(trainer).__name__}"
    )
    if not isinstance(trainer, Trainer):
        raise TrainerError(
            f"trainer is {given}: give the transformers.Trainer, or TRL's, that was made with the "
            "model and its arguments. A loop of your own calls prepare(model) and ring_attention "
            "instead (docs/own-trainer.md)"
        )
    missing = [name for name in ("args", "accelerator", "model") if name not in vars(trainer)]
    if missing:
        raise TrainerError(
            f"trainer is {given} without {missing[0]}: its __init__ must call that of Trainer first"
        )
    if hasattr(trainer, "dynamic"):
        raise TrainerError(
            "this trainer already has dynamic context parallelism: call it once, or "
            "restore(trainer) first"
        )
    if is_too_old("transformers"):
        raise TrainerError(
            f"transformers is {version('transformers')}, whose Trainer longctx does not know: "
            f"install {span('transformers')}"
        )
    missing = [name for name in needed if not hasattr(trainer, name)]
    if missing:
        raise TrainerError(
            f"transformers {version('transformers')} has no Trainer.{missing[0]}, which longctx "
            f"replaces: install {span('transformers')}"
        )
    model = inner_model(trainer, trainer.model)
    if not isinstance(model, PreTrainedModel):
        raise TrainerError(
            f"the model of {type(trainer).__name__} is a {type(model).__name__}, no "
            "PreTrainedModel of transformers, whose attention is replaced: train such a model, or "
            "prepare(model) the one inside in a loop of your own"
        )


def _is_profile(value: Any) -> str:
    """The rule of a hardware profile, or of its name or file."""
    is_one = isinstance(value, HardwareProfile | str | Path) and value != ""
    return "" if is_one else "must be a HardwareProfile, its name or file"


def _is_replay(value: Any) -> str:
    """The rule of `router_replay`."""
    return "" if value in ("R2", "R3") else "must be 'R2' or 'R3'"


RULES: dict[str, Rule] = {
    "profile": or_none(_is_profile),
    "merge_prefixes": flag,
    "own_loss_is_a_token_sum": flag,
    "keep_their_scale": flag,
    "router_replay": or_none(_is_replay),
}
"""Rules of the arguments of `dynamic_context_parallel` that `check_settings` does not check."""


def refuse(traits: Traits, replaced: Sequence[str], family_problems: Iterable[str]) -> None:
    """Raises TrainerError with everything that would make the result depend on how documents are
    split.

    Args:
        traits: the trainer and its model.
        replaced: names in a trainer of whole steps that are replaced, or of no use.
        family_problems: what is wrong with the family of its model.
    """
    set_on_it = [name for name in WRAPPED if name in vars(traits.trainer)]
    names_by_kind = {
        "token_values": LOSS[:1],
        "divergence": (*LOSS[:1], "_compute_loss"),
        "hidden_states": set_on_it,
        "step": replaced,
    }
    names = names_by_kind[traits.kind]
    problems = [
        *_trainer_problems(traits),
        *_uneven_problems(traits),
        *_method_problems(traits, names),
        *_argument_problems(traits),
        *_model_problems(traits),
        *family_problems,
        *_adapter_problems(traits),
        *_ddp_problems(traits),
    ]
    if problems:
        raise TrainerError(f"dynamic context parallelism is not possible: {'; '.join(problems)}")


def _trainer_problems(traits: Traits) -> Iterator[str]:
    trainer = traits.trainer
    if traits.trl_class not in (None, *KINDS):
        yield (
            f"{traits.trl_class} is not supported: use transformers.Trainer, {', '.join(KINDS)} or "
            "your own subclass of those"
        )
    elif traits.trl_class and is_too_old("trl"):
        yield (
            f"TRL is {version('trl')}, in which {traits.trl_class} has no fused head, by which its "
            f"loss is split: install trl {span('trl')}, or use transformers.Trainer"
        )
    yield from _scale_problems(traits)
    if traits.kind == "divergence":
        yield from _teacher_problems(traits)
    if trainer.model_init is not None:
        yield (
            "model_init builds another model when training begins: pass model=model_init() instead"
        )
    if trainer.compute_loss_func is not None and traits.kind != "hidden_states":
        yield (
            "compute_loss_func sees only this rank's tokens: omit it, or use "
            "transformers.Trainer with a model of text alone"
        )
    if traits.balances and traits.kind == "hidden_states":
        yield NO_ROUTER_LOSS.format(type(trainer.args).__name__)


def _teacher_problems(traits: Traits) -> Iterator[str]:
    """Yields why the divergence from a teacher cannot be planned."""
    trainer = traits.trainer
    if getattr(trainer, "teacher_model", None) is None:
        yield (
            f"{traits.trl_class} has no teacher_model, whose calls are planned with the student's: "
            "give one, or train by a teacher on a server without longctx"
        )
    if traits.images:
        yield "student and teacher read images, whose divergence is not planned: use models of text"
    if trainer.compute_metrics is not None:
        yield "compute_metrics gets no logits of a divergence from a teacher: omit it"


def _scale_problems(traits: Traits) -> Iterator[str]:
    """Yields why the scale of another tool's losses cannot be kept."""
    if not traits.keeps_scale:
        return
    name = type(traits.trainer).__name__
    if traits.token_sum:
        yield (
            "keep_their_scale and own_loss_is_a_token_sum are both True, but a sum over tokens has "
            "the scale of a step: leave one out"
        )
    elif traits.kind != "hidden_states":
        yield (
            f"keep_their_scale is True, but the loss of {name} is not a mean of batches of text by "
            "another tool: omit it"
        )


def _uneven_problems(traits: Traits) -> Iterator[str]:
    """Yields what is wrong with the end of an epoch for a loss that may or may not be a mean over
    rows."""
    trainer = traits.trainer
    args = traits.args
    if (
        traits.kind != "hidden_states"
        or not traits.has_unknown_loss
        or args.dataloader_drop_last
        or args.world_size == 1
    ):
        return
    data = trainer.train_dataset
    batch = args.per_device_train_batch_size * args.world_size
    if data is None or not hasattr(data, "__len__") or len(data) % batch == 0:
        return
    full_steps = len(data) // (batch * args.gradient_accumulation_steps)
    if args.max_steps <= 0 or args.max_steps > full_steps:
        yield UNEVEN.format(f"train_dataset ({len(data):,} by {batch:,})", type(args).__name__)


def _method_problems(traits: Traits, names: Sequence[str]) -> Iterator[str]:
    """Yields what is wrong with methods that neither transformers nor TRL define."""
    trainer = traits.trainer
    for name in names:
        if not is_own(trainer, name):
            continue
        if name in vars(trainer):
            yield (
                f"{name} is set on the trainer itself, which would hide that of longctx: define "
                "it in a subclass"
            )
            continue
        own = (
            f"{next(kind.__name__ for kind in type(trainer).__mro__ if name in vars(kind))}.{name}"
        )
        if name in LOSS and not traits.token_sum:
            yield (
                f"{own} may not be a sum over tokens divided by num_items_in_batch: omit it, or "
                "say own_loss_is_a_token_sum=True if it is, whichever documents, or parts of "
                "them, are in a row of its inputs"
            )
        elif name not in LOSS + CALLED:
            way = (
                "edit them there, and read results in compute_metrics, "
                "preprocess_logits_for_metrics or a callback"
            )
            yield f"{own} would not be called for the batches of the data collator: {way}"


def _argument_problems(traits: Traits) -> Iterator[str]:
    trainer = traits.trainer
    args = traits.args
    accelerator = trainer.accelerator
    if args.device.type not in ("cpu", "cuda"):
        yield (
            f"the trainer is on {args.device.type}, for which there are no kernels: set "
            "use_cpu=True in its arguments"
        )
    unsupported = ["torch_compile", "use_liger_kernel"]
    if traits.trl_class is not None:
        unsupported.append("label_smoothing_factor")
    for name in unsupported:
        if getattr(args, name, None):
            yield UNSUPPORTED.format(name, getattr(args, name))
    started = Launch.read().world_size
    if started > args.world_size:
        yield (
            f"{started} processes were started, but the trainer sees {args.world_size}, so each "
            f"would train by itself: set use_cpu=True in {type(args).__name__} if there are no "
            "GPUs"
        )
    tasks = other_tasks() if args.world_size == 1 else ""
    if tasks:
        yield tasks
    if args.n_gpu > 1:
        yield (
            f"one process uses {args.n_gpu} GPUs: start a process per GPU by torchrun or accelerate"
        )
    if trainer.is_deepspeed_enabled:
        yield "DeepSpeed is not supported: use FSDP2 or DDP"
    sizes = {
        "cp_size": trainer.get_cp_size(),
        "sp_size": trainer.get_sp_size(),
        "tp_size": trainer.get_tp_size(),
    }
    for name, size in sizes.items():
        if size > 1:
            yield f"{name} is {size}: leave it at 1, documents are split by longctx"
    if not accelerator.even_batches:
        yield (
            "even_batches is False: ranks would have different numbers of batches, and wait for "
            "each other: set it to True"
        )
    if accelerator.dispatch_batches and hasattr(trainer.train_dataset, "__len__"):
        yield "dispatch_batches is True, with which rows that repeat others cannot be told: omit it"
    if (
        getattr(accelerator.state, "fsdp_plugin", None) is not None
        and accelerator.state.fsdp_plugin.fsdp_version != 2
    ):
        yield "FSDP version 1 is not supported: set fsdp_version to 2"
    if getattr(args, "predict_with_generate", False) and trainer.is_fsdp_enabled:
        yield (
            "predict_with_generate calls parts of the model, whose weights FSDP keeps sharded: "
            "omit it, or use DDP"
        )


def _model_problems(traits: Traits) -> Iterator[str]:
    model = traits.model
    head = type(model).__name__
    if head.endswith(OTHER_HEADS) and traits.kind != "hidden_states":
        yield (
            f"{head} has a head that is not for tokens: use transformers.Trainer, and no "
            "encoder-decoder or reader of images"
        )
    if head.endswith("ForQuestionAnswering") and not hasattr(model, ANSWERS):
        yield (
            f"{head} has no layer {ANSWERS}, by which answers in padding are hidden: use another "
            "family's model"
        )
    for config in filter(
        None, (*configs_of_parts(model), getattr(model.config, "vision_config", None))
    ):
        for name, value in config.to_dict().items():
            if "att" in name and "drop" in name and value:
                yield (
                    f"{name} is {value:g} in the model's config, which no kernel of attention "
                    "has: set it to 0"
                )


def _adapter_problems(traits: Traits) -> Iterator[str]:
    """Yields what is wrong with adapters that do more than change layers by what a token itself
    is."""
    if not traits.adapters:
        return
    from peft.tuners.tuners_utils import BaseTuner

    way = "use adapters of matrices, such as LoRA"
    tuner = tuner_of(traits.trainer.accelerator.unwrap_model(traits.trainer.model))
    found = list[str]()
    for config in traits.adapters.values():
        kind = config.peft_type.value
        if config.is_prompt_learning:
            found.append(f"{kind} adds virtual tokens to every document: {way}")
        elif tuner is not None and type(tuner).forward is not BaseTuner.forward:
            found.append(
                f"{kind} has a forward of its own, whose loss or input would be that of a "
                f"micro-batch: {way}"
            )
        if getattr(config, "alora_invocation_tokens", None):
            found.append(
                "alora_invocation_tokens switch adapters on from a place in the row, not in the "
                "document: omit them"
            )
    if (
        not found
        and not any(map(_drops_nothing, traits.adapters.values()))
        and _draws(traits.model)
    ):
        found.append(
            "the adapters draw random numbers in every call, which would be others on every rank: "
            "set their dropout to 0, or use LoRA, whose dropout is the same under any split"
        )
    yield from found


def _drops_nothing(config: Any) -> bool:
    """Returns whether adapters draw only numbers that they compare with a dropout of modules that
    is 0, as LoHa and LoKr."""
    dropouts = {name: value for name, value in vars(config).items() if name.endswith("dropout")}
    return "module_dropout" in dropouts and not any(dropouts.values())


def _draws(model: Any) -> bool:
    """Returns whether adapters in a model draw random numbers in training, apart from torch's
    modules of dropout."""
    device = next(model.parameters()).device
    ids = torch.arange(DRAWN_FOR, device=device)[None]
    given = {"input_ids": ids} | (
        {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    )
    with (
        torch.no_grad(),
        evaluating(model),
        torch.random.fork_rng([device] if device.type == "cuda" else []),
    ):
        for module in model.modules():
            module.training |= type(module).__module__.startswith("peft.")
        before = _random_states(device)
        model.base_model(**given)
        after = _random_states(device)
    return not all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def _random_states(device: torch.device) -> list[torch.Tensor]:
    cpu_state = torch.get_rng_state()
    return [cpu_state, torch.cuda.get_rng_state(device)] if device.type == "cuda" else [cpu_state]


def _ddp_problems(traits: Traits) -> Iterator[str]:
    args = traits.args
    if not traits.uses_ddp:
        return
    if traits.kind == "step" and getattr(args, "ddp_static_graph", False):
        yield "ddp_static_graph is True, but ranks have other micro-batches in every step: omit it"
    if traits.reentrant and (traits.kind != "step" or traits.finds_unused):
        calls = "takes one call of the model before backward, but a call is planned as several"
        twice = "sees weights ready twice beside ddp_find_unused_parameters"
        yield (
            f"use_reentrant is True, with which DDP {twice if traits.kind == 'step' else calls}: "
            "set gradient_checkpointing_kwargs={'use_reentrant': False} in "
            f"{type(args).__name__}, or where the model is told to recompute"
        )


def notes_on_data(
    traits: Traits, limit: int, length_fields: Sequence[str] = ("input_ids",)
) -> Iterator[str]:
    """Refuses data sets with documents that are too long. Yields a note for each data set with
    documents that TRL may have cut, and for an argument that changes nothing.

    `limit` is the number of tokens that all ranks hold; `length_fields` are the columns of a data
    set that make up a document. Raises TrainerError for a data set with `input_ids` of which a
    document is longer.
    """
    trainer = traits.trainer
    args = traits.args
    counts_all = traits.kind == "step" or (
        traits.kind == "hidden_states" and not traits.has_unknown_loss
    )
    if args.world_size > 1 and not args.average_tokens_across_devices and counts_all:
        yield (
            "note: average_tokens_across_devices=False changes nothing: the loss is the mean "
            "over the tokens of all ranks"
        )
    if traits.kind == "step" and traits.means_of_batches:
        asking = (
            traits.model
            if getattr(traits.model, "accepts_loss_kwargs", None) is False
            else traits.trainer
        )
        name = type(asking).__name__
        way = "" if asking is traits.model else ": keep_their_scale=True keeps it"
        yield (
            f"note: the loss is the mean over the tokens of a step; that of {name} would be a "
            f"mean of means of batches{way}"
        )
    max_length = getattr(args, "max_length", None)
    for name in ("train_dataset", "eval_dataset"):
        data: Any = getattr(trainer, name, None)
        for part in data.values() if isinstance(data, dict) else [data]:
            column_names = getattr(part, "column_names", None) or ()
            if "input_ids" not in column_names or not hasattr(part, "data"):
                continue
            lengths = _document_lengths(part, length_fields)
            longest = lengths.max(initial=0)
            if longest > limit:
                raise TrainerError(
                    f"{name} has a document of {longest:,} tokens, but {args.world_size} ranks "
                    f"hold {limit:,}: give more tokens_per_rank, use more ranks, or shorten the "
                    "documents"
                )
            cut = int((lengths == max_length).sum())
            if cut:
                yield (
                    f"note: {cut:,} of {len(lengths):,} documents of {name} have exactly "
                    f"max_length={max_length:,} tokens: TRL cuts longer ones. max_length=None in "
                    "its config keeps them whole"
                )


def refuse_long_completions(args: Any, tokens_per_rank: int, degree: int | None = None) -> None:
    """Raises TrainerError if a completion as long as a trainer may sample, after a prompt, has more
    tokens than the ranks hold that share it: all, or `degree`."""
    most = getattr(args, "max_completion_length", None)
    if most is None or not hasattr(args, "num_generations"):
        return
    ranks = args.world_size
    if degree is not None:
        ranks = degree
    held = ranks * tokens_per_rank
    whole = getattr(args, "vllm_max_model_length", None)
    if args.use_vllm and whole is not None and whole <= held:
        return  # the engine stops before
    if most >= held:
        raise TrainerError(
            f"max_completion_length is {most:,}, but {ranks} ranks of "
            f"{tokens_per_rank:,} tokens hold {held:,} with the prompt: give more "
            "tokens_per_rank, use more ranks, or lower max_completion_length"
        )


def _document_lengths(data: Any, length_fields: Sequence[str]) -> npt.NDArray[np.int64]:
    """Returns the tokens of every document of a data set, in all its `length_fields`, from offsets
    alone; also of rows that TRL has packed."""
    packed = "seq_lengths" in data.column_names
    counted = ["seq_lengths"] if packed else length_fields
    names = [name for name in counted if name in data.column_names]
    count = compute.list_flatten if packed else compute.list_value_length
    lengths = [np.zeros(0, np.int64)]
    for table in data.select_columns(names).with_format("arrow").iter(10_000):
        lengths.append(sum(count(column).to_numpy() for column in table.columns))
    return np.concatenate(lengths)

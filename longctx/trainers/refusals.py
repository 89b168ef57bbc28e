"""What a trainer must not ask for if its documents are split over ranks, checked before the first step."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from longctx.errors import UserError
from longctx.hf.attention import configs_of_parts
from longctx.hf.vision import is_vision, weights_of_images
from longctx.parallel.environment import Launch
from longctx.trainers.kinds import KINDS, LOSS, OTHER_HEADS, Kind, is_own, kind_of, prepared_part, trainer_of_trl

ANSWERS = "qa_outputs"
"""Attribute of models for question answering: the layer that scores tokens."""
CALLED = ("train", "evaluation_loop", "log")
"""Methods of a subclass that are called as before."""
WRAPPED = ("training_step", "prediction_step")
"""Methods that call a model whose outputs the loss needs whole."""


class TrainerError(UserError):
    """A trainer, model or batch that cannot be trained exactly on split documents."""


def refuse(trainer: Any, own_loss_is_a_token_sum: bool, replaced: Sequence[str]) -> None:
    """Raises TrainerError with everything that would make the result depend on how documents are split.

    `replaced` are the names in a trainer of whole steps that are replaced, or of no use.
    """
    kind = kind_of(trainer, own_loss_is_a_token_sum)
    set_on_it = [name for name in WRAPPED if name in vars(trainer)]
    names = {"sequences": LOSS[:1], "rows": set_on_it, "steps": replaced}[kind]
    methods = _method_problems(trainer, own_loss_is_a_token_sum, names)
    problems = [*_trainer_problems(trainer, kind), *methods, *_argument_problems(trainer), *_model_problems(trainer, kind)]
    if problems:
        raise TrainerError(f"dynamic context parallelism is not possible: {'; '.join(problems)}")


def predicts_masked(model: Any) -> bool:
    """Returns whether a model is an encoder that predicts masked tokens."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return type(model).__name__ in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()


def is_encoder(model: Any) -> bool:
    """Returns whether a model, or a base model, is an encoder, whose tokens see later ones."""
    directions = {getattr(module, "is_causal", None) for module in model.modules()} - {None}
    return predicts_masked(model) or (model.base_model is model and directions == {False})


def noisy(trainer: Any) -> bool:
    """Returns whether a module of a trainer's model drops at random, or NEFTune adds noise."""
    modules = prepared_part(trainer, trainer.model).modules()
    return bool(trainer.neftune_noise_alpha) or any(isinstance(each, nn.Dropout) and each.p > 0 for each in modules)


def means_of_batches(trainer: Any) -> bool:
    """Returns whether a model asks for means of batches, though its loss can be a sum over tokens: many that read images do."""
    asked = getattr(prepared_part(trainer, trainer.model), "accepts_loss_kwargs", None)
    return asked is False and not trainer.model_accepts_loss_kwargs


def balances(trainer: Any) -> bool:
    """Returns whether the auxiliary loss of a mixture's routers is to be trained."""
    config = prepared_part(trainer, trainer.model).config
    in_config = not config.is_encoder_decoder and getattr(config.get_text_config(), "output_router_logits", False)
    return bool(in_config or getattr(trainer, "aux_loss_enabled", False))


def _method_problems(trainer: Any, own_loss_is_a_token_sum: bool, names: Sequence[str]) -> Iterator[str]:
    """Yields what is wrong with methods that are not those of transformers or TRL."""
    for name in names:
        if not is_own(trainer, name):
            continue
        if name in vars(trainer):
            yield f"{name} is set on the trainer itself, which would hide that of longctx: define it in a subclass"
            continue
        own = f"{next(kind.__name__ for kind in type(trainer).__mro__ if name in vars(kind))}.{name}"
        if name in LOSS and not own_loss_is_a_token_sum:
            yield (
                f"{own} may not be a sum over tokens divided by num_items_in_batch: omit it, or say "
                "own_loss_is_a_token_sum=True if it is, whichever documents, or parts of them, are in a row of its inputs"
            )
        elif name not in LOSS + CALLED:
            way = "edit them there, and read results in compute_metrics, preprocess_logits_for_metrics or a callback"
            yield f"{own} would not be called for the batches of the data collator: {way}"


def _trainer_problems(trainer: Any, kind: Kind) -> Iterator[str]:
    if (name := trainer_of_trl(trainer)) not in (None, *KINDS):
        yield f"{name} is not supported: use transformers.Trainer, {', '.join(KINDS)} or a subclass of those"
    if trainer.model_init is not None:
        yield "model_init builds another model when training begins: pass model=model_init() instead"
    model = prepared_part(trainer, trainer.model)
    if trainer.compute_loss_func is not None and kind != "rows":
        yield "compute_loss_func sees only this rank's tokens: omit it, or use transformers.Trainer with a model of text alone"
    sums = trainer.model_accepts_loss_kwargs or kind != "steps"
    if not sums and not means_of_batches(trainer) and not predicts_masked(model):
        yield f"the forward of {type(trainer.model).__name__} takes no num_items_in_batch: use a causal model of transformers"
    if balances(trainer) and (kind == "rows" or is_vision(model)):
        yield (
            "the auxiliary loss of routers is not computed beside images or losses of whole rows: set router_aux_loss_coef=0.0 "
            f"in {type(trainer.args).__name__}, or output_router_logits=False in the model's config"
        )


def _argument_problems(trainer: Any) -> Iterator[str]:
    args, accelerator = trainer.args, trainer.accelerator
    smoothed = trainer_of_trl(trainer) is None and not trainer.model.config.is_encoder_decoder
    for name in ("torch_compile", "use_liger_kernel", *["label_smoothing_factor"] * (not smoothed)):
        if getattr(args, name, None):
            yield f"{name} is {getattr(args, name)}, which is not supported: omit it"
    if (started := Launch.read().world_size) > args.world_size:
        yield (
            f"{started} processes were started, but the trainer sees {args.world_size}, so each would train by itself: set "
            f"use_cpu=True in {type(args).__name__} if there are no GPUs"
        )
    if args.n_gpu > 1:
        yield f"one process uses {args.n_gpu} GPUs: start a process per GPU by torchrun or accelerate"
    if trainer.is_deepspeed_enabled:
        yield "DeepSpeed is not supported: use FSDP2 or DDP"
    sizes = {"cp_size": trainer.get_cp_size(), "sp_size": trainer.get_sp_size(), "tp_size": trainer.get_tp_size()}
    for name, size in sizes.items():
        if size > 1:
            yield f"{name} is {size}: leave it at 1, documents are split by longctx"
    if not accelerator.even_batches:
        yield "even_batches is False: ranks would have different numbers of batches, and wait for each other: set it to True"
    if accelerator.dispatch_batches and hasattr(trainer.train_dataset, "__len__"):
        yield "dispatch_batches is True, with which rows that repeat others cannot be told: omit it"
    if getattr(accelerator.state, "fsdp_plugin", None) is not None and accelerator.state.fsdp_plugin.fsdp_version != 2:
        yield "FSDP version 1 is not supported: set fsdp_version to 2"


def _model_problems(trainer: Any, kind: Kind) -> Iterator[str]:
    if (head := type(prepared_part(trainer, trainer.model)).__name__).endswith(OTHER_HEADS) and kind != "rows":
        yield f"{head} has a head that is not for tokens: use transformers.Trainer, and no encoder-decoder or reader of images"
    if head.endswith("ForQuestionAnswering") and not hasattr(prepared_part(trainer, trainer.model), ANSWERS):
        yield f"{head} has no layer {ANSWERS}, by which answers in padding are hidden: use another family's model"
    if trainer.model.config.is_encoder_decoder and (name := trainer_of_trl(trainer)):
        yield f"{name} makes batches without sources, but the model is an encoder-decoder: use Seq2SeqTrainer"
    if predicts_masked(prepared_part(trainer, trainer.model)) and (name := trainer_of_trl(trainer)):
        yield f"{name} trains causal models, but the model is an encoder: use transformers.Trainer with a collator that masks"
    if getattr(trainer.args, "predict_with_generate", False) and trainer.is_fsdp_enabled:
        yield "predict_with_generate calls parts of the model, whose weights FSDP keeps sharded: omit it, or use DDP"
    for config in getattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config", {}).values():
        if config.is_prompt_learning:
            yield f"{config.peft_type.value} adds virtual tokens to every document: use adapters of matrices, such as LoRA"
    model = prepared_part(trainer, trainer.model)
    for config in filter(None, (*configs_of_parts(model), getattr(model.config, "vision_config", None))):
        for name, value in config.to_dict().items():
            if "att" in name and "drop" in name and value:
                yield f"{name} is {value:g} in the model's config, which no kernel of attention has: set it to 0"
    handler, ddp = trainer.accelerator.ddp_handler, trainer.args.world_size > 1 and not trainer.is_fsdp_enabled
    if ddp and is_vision(model) and not (handler and handler.find_unused_parameters) and _trains_encoder(model):
        yield (
            "ddp_find_unused_parameters is off, but documents without images give the encoder of images no gradient: set it to "
            "True, with gradient_checkpointing_kwargs={'use_reentrant': False}, or freeze the encoder"
        )
    if ddp and kind == "steps" and getattr(trainer.args, "ddp_static_graph", False):
        yield "ddp_static_graph is True, but ranks have other micro-batches in every step: omit it"
    if ddp and kind != "steps" and (trainer.args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        yield (
            "use_reentrant is True, with which DDP takes one call of the model before backward, but a call is planned as "
            "several: set gradient_checkpointing_kwargs={'use_reentrant': False}"
        )
    if model.config.is_encoder_decoder and noisy(trainer):
        yield "the model is an encoder-decoder, whose dropout and NEFTune would depend on how documents are split: omit them"


def _trains_encoder(model: Any) -> bool:
    return any(weight.requires_grad for weight in weights_of_images(model))

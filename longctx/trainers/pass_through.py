"""Overrides of other tools that pass on what they are given: with them a trainer computes what that
of transformers computes, so that whole steps are planned, and the methods of transformers run in
their place.

An override is known by its class and by its source, which must be that of a version that was read.
Another one counts as the trainer's own, as everywhere.
"""

import hashlib
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LIBRARIES = ("transformers", "trl")
DIGITS = 16
"""Hexadecimal digits of a checksum that are compared."""
NAMES = (
    "compute_loss",
    "training_step",
    "prediction_step",
    "_prepare_inputs",
    "_get_num_items_in_batch",
)
"""Methods of which overrides are known."""


@dataclass(frozen=True)
class PassThrough:
    """An override that passes on what it is given.

    Attributes:
        checksums: of its source, of every version that was read.
        if_: whether it does so for a trainer, whose settings may ask for more.
    """

    checksums: tuple[str, ...]
    if_: Callable[[Any], bool]


def _has_no_loss_of_its_own(trainer: Any) -> bool:
    """LLaMA-Factory computes ASFT's loss itself."""
    return not trainer.finetuning_args.use_asft_loss


def _always(trainer: Any) -> bool:
    return True


def _generates_nothing(trainer: Any) -> bool:
    """LLaMA-Factory and ms-swift read prompts of what is generated."""
    return not trainer.args.predict_with_generate


def _has_tokens_alone(trainer: Any) -> bool:
    """Axolotl computes ORPO's loss itself, and adds inputs for Gemma 4."""
    model_type = trainer.accelerator.unwrap_model(trainer.model).config.model_type
    return not trainer.args.orpo_alpha and not model_type.startswith("gemma4")


def _offloads_no_layers(trainer: Any) -> bool:
    return not getattr(trainer.args, "layer_offloading", False)


def _offloads_no_activations(trainer: Any) -> bool:
    return not trainer.args.activation_offloading


def _has_loss_of_transformers(trainer: Any) -> bool:
    """ms-swift weighs tokens, splits rows and balances mixtures itself, and some of its templates
    compute losses."""
    args = trainer.args
    if args.enable_dft_loss or args.enable_channel_loss or trainer.model.model_info.is_moe_model:
        return False
    if trainer.template.sequence_parallel_size > 1:
        return False
    template = type(trainer.template)
    return all(
        checksum(getattr(template, name)) in sums for name, sums in TEMPLATE_CHECKSUMS.items()
    )


TEMPLATE_CHECKSUMS = {
    "compute_sft_loss": ("c4956e60c183a054",),  # 4.5.0 to 4.6.0
    "forward_context": ("8ba69c9b992e987d",),  # 4.5.0 to 4.6.0
}
"""Of methods of ms-swift's templates by which models compute their own loss."""
AXOLOTL = "axolotl.core.trainers"
LLAMA_FACTORY = "llamafactory.train"
SWIFT = "swift.trainers.seq2seq_trainer.Seq2SeqTrainer"
KNOWN = {
    (f"{LLAMA_FACTORY}.sft.trainer.CustomSeq2SeqTrainer", "compute_loss"): PassThrough(
        checksums=("de796d666d990041",),  # 0.9.5
        if_=_has_no_loss_of_its_own,
    ),
    (f"{LLAMA_FACTORY}.sft.trainer.CustomSeq2SeqTrainer", "prediction_step"): PassThrough(
        checksums=("e8f68c6e81d3f639",),  # 0.9.5
        if_=_generates_nothing,
    ),
    (f"{LLAMA_FACTORY}.pt.trainer.CustomTrainer", "compute_loss"): PassThrough(
        checksums=("d3e9d9111bf4e40f",),  # 0.9.5
        if_=_always,
    ),
    (f"{AXOLOTL}.base.AxolotlTrainer", "compute_loss"): PassThrough(
        checksums=("d819eddef0778d3c", "b81fa336bc4c16ce", "1de7c7798321c1b9"),  # 0.18 to 0.21
        if_=_has_tokens_alone,
    ),
    (f"{AXOLOTL}.base.AxolotlTrainer", "prediction_step"): PassThrough(
        checksums=("72a85bad48a723b0", "ab5ba71c6c2f580f"),  # 0.18 to 0.21
        if_=_has_tokens_alone,
    ),
    (f"{AXOLOTL}.base.AxolotlTrainer", "training_step"): PassThrough(
        checksums=("84d409e843f3a578",),  # 0.21.0; DeepSpeed is refused
        if_=_always,
    ),
    (f"{AXOLOTL}.base.AxolotlTrainer", "_get_num_items_in_batch"): PassThrough(
        checksums=("bcd9850b3b8ddd39", "00221b042ad117ee"),  # 0.20, 0.21; no tensor parallelism
        if_=_always,
    ),
    (
        f"{AXOLOTL}.mixins.layer_offloading.LayerOffloadingMixin",
        "training_step",
    ): PassThrough(
        checksums=("f00edf2d2da5c639",),  # 0.18 to 0.21
        if_=_offloads_no_layers,
    ),
    (
        f"{AXOLOTL}.mixins.activation_checkpointing.ActivationOffloadingMixin",
        "training_step",
    ): PassThrough(
        checksums=("2e56e48290c7ab7f", "8090b7942b6b2bde"),  # 0.18 to 0.21
        if_=_offloads_no_activations,
    ),
    (SWIFT, "compute_loss"): PassThrough(
        checksums=("10a889cdf641085d",),  # 4.6.0
        if_=_has_loss_of_transformers,
    ),
    (SWIFT, "training_step"): PassThrough(
        checksums=("fa7bad6d088e5f82",),  # 4.6.0
        if_=_has_loss_of_transformers,
    ),
    (SWIFT, "_prepare_inputs"): PassThrough(
        checksums=("4ad846738b737533",),  # 4.6.0
        if_=_has_loss_of_transformers,
    ),
    (SWIFT, "prediction_step"): PassThrough(
        checksums=("328aacdcde8c1632",),  # 4.6.0
        if_=_generates_nothing,
    ),
}
"""By class, with its module, and method."""


def passes_on(trainer: Any, name: str) -> bool:
    """Returns whether all overrides of a method, up to that of transformers or TRL, are known to
    pass on what they are given."""
    if name in vars(trainer):
        return False
    for owner in type(trainer).__mro__:
        function = vars(owner).get(name)
        if function is None:
            continue
        if _is_of_library(function):
            return True
        known = KNOWN.get((f"{owner.__module__}.{owner.__qualname__}", name))
        if known is None or checksum(function) not in known.checksums or not known.if_(trainer):
            return False
    return False


def methods_of_libraries(trainer: Any) -> dict[str, Callable[..., Any]]:
    """Returns the methods of transformers or TRL that do the same as overrides of a trainer which
    pass on what they are given, by name."""
    methods = {}
    for name in NAMES:
        if not passes_on(trainer, name):
            continue
        found = [vars(owner)[name] for owner in type(trainer).__mro__ if name in vars(owner)]
        if not _is_of_library(found[0]):
            methods[name] = next(function for function in found if _is_of_library(function))
    return methods


def _is_of_library(function: Callable[..., Any]) -> bool:
    return function.__module__.split(".")[0] in LIBRARIES


def checksum(function: Callable[..., Any]) -> str:
    """Returns the checksum of a function's source; nothing if there is none."""
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return ""
    text = textwrap.dedent(source).strip()
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]

"""Overrides of other tools that pass on what they are given: with them a trainer computes what that
of transformers computes, so that whole steps are planned.

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
    """LLaMA-Factory takes prompts from what is generated."""
    return not trainer.args.predict_with_generate


KNOWN = {
    ("llamafactory.train.sft.trainer.CustomSeq2SeqTrainer", "compute_loss"): PassThrough(
        checksums=("de796d666d990041",),  # 0.9.5
        if_=_has_no_loss_of_its_own,
    ),
    ("llamafactory.train.sft.trainer.CustomSeq2SeqTrainer", "prediction_step"): PassThrough(
        checksums=("e8f68c6e81d3f639",),  # 0.9.5
        if_=_generates_nothing,
    ),
    ("llamafactory.train.pt.trainer.CustomTrainer", "compute_loss"): PassThrough(
        checksums=("d3e9d9111bf4e40f",),  # 0.9.5
        if_=_always,
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
        if function.__module__.split(".")[0] in LIBRARIES:
            return True
        known = KNOWN.get((f"{owner.__module__}.{owner.__qualname__}", name))
        if known is None or checksum(function) not in known.checksums or not known.if_(trainer):
            return False
    return False


def checksum(function: Callable[..., Any]) -> str:
    """Returns the checksum of a function's source; nothing if there is none."""
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return ""
    text = textwrap.dedent(source).strip()
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]

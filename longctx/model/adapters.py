"""Settings of LoRA adapters, without torch; `longctx.model.lora` creates the adapters."""

from dataclasses import dataclass

from longctx.errors import UserError

ALL_LINEAR = "all-linear"


class LoraError(UserError):
    """Adapters that a model does not support."""


@dataclass(frozen=True)
class Lora:
    """Trained matrices of rank `rank` beside frozen linear layers, scaled by alpha / rank.

    `target_modules` is "all-linear", or the names of layers.
    """

    rank: int
    alpha: float
    target_modules: str | tuple[str, ...] = ALL_LINEAR

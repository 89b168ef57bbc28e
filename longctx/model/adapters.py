"""What is asked of adapters, known without torch; `longctx.model.lora` makes them."""

from dataclasses import dataclass

from longctx.errors import UserError

ALL_LINEAR = "all-linear"


class LoraError(UserError):
    """Adapters that a model cannot have."""


@dataclass(frozen=True)
class Lora:
    """Trained matrices of this rank beside frozen linear layers, scaled by alpha / rank; targets: "all-linear", or names."""

    rank: int
    alpha: float
    target_modules: str | tuple[str, ...] = ALL_LINEAR

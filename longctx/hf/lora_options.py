"""What settings offer beside shapes, without torch: LoRA's options."""

from dataclasses import dataclass

from longctx.errors import UserError

ALL_LINEAR = "all-linear"


class LoraError(UserError):
    """Adapters that a model does not support."""


class QuantizationError(LoraError):
    """A model whose frozen weights cannot be quantized."""


@dataclass(frozen=True)
class Lora:
    """Trained matrices of rank `rank` beside frozen linear layers, scaled by `scale`.

    `target_modules` is "all-linear", or the names of layers; `quantized` how frozen linear layers
    are kept: nf4, int8, or None.
    """

    rank: int
    alpha: float
    target_modules: str | tuple[str, ...] = ALL_LINEAR
    quantized: str | None = None

    @property
    def scale(self) -> float:
        """Factor of the adapters' outputs."""
        return self.alpha / self.rank

"""Tolerances: largest relative differences that are put down to rounding, by the coarsest dtype in
which a step computed."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch


class Tolerances(NamedTuple):
    """Limits, each relative to what is compared.

    `python -m bench.check_rounding` prints what right steps leave of each, for many models.

    Attributes:
        states: of a token's hidden state, or of the output of a part of a layer.
        objective: of ∂loss/∂logits of a token, without cross-entropy.
        after: of the output layer's gradient, without what backward gave it.
        weights: of the weight of a prediction, to 1/N.
        weights_shown: the same, where the output layer showed them.
        least_weight: the smallest weight that counts, to the largest one.
        backward: of a parameter's gradient that follows from weights.
        logged: of a logged loss or norm.
        residual: of the gradient that least squares explain, where the output layer was not seen.
        residual_of_unknown: the same, where hidden states of some tokens are of no context; then
            also of weights.
        direction: of two hidden states that least squares take for the same.
        parameters: by name, instead of `backward`, of those whose gradients this model rounds more.
    """

    states: float
    objective: float
    after: float
    weights: float
    weights_shown: float
    least_weight: float
    backward: float
    logged: float
    residual: float
    residual_of_unknown: float
    direction: float
    parameters: Mapping[str, float] = MappingProxyType({})

    def of_parameter(self, name: str) -> float:
        """Returns the limit of a parameter's gradient."""
        return max(self.backward, self.parameters.get(name, 0.0))


FLOAT32 = Tolerances(
    states=3e-5,
    objective=1e-5,
    after=1e-5,
    weights=2e-3,
    weights_shown=5e-5,
    least_weight=1e-5,
    backward=5e-4,
    logged=1e-3,
    residual=1e-4,
    residual_of_unknown=2e-2,
    direction=1e-4,
)
BFLOAT16 = Tolerances(
    states=2e-2,
    objective=5e-4,
    after=2e-2,
    weights=2e-2,
    weights_shown=2e-2,
    least_weight=1e-3,
    backward=3e-2,
    logged=1e-2,
    residual=3e-2,
    residual_of_unknown=5e-2,
    direction=5e-2,
)
FLOAT16 = Tolerances(
    states=4e-3,
    objective=6e-5,
    after=3e-3,
    weights=3e-3,
    weights_shown=3e-3,
    least_weight=1e-3,
    backward=5e-3,
    logged=3e-3,
    residual=5e-3,
    residual_of_unknown=3e-2,
    direction=1e-2,
)
OF = {
    torch.float64: FLOAT32,
    torch.float32: FLOAT32,
    torch.bfloat16: BFLOAT16,
    torch.float16: FLOAT16,
}
"""By dtype, the finest first."""
NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in OF}


def coarsest(dtypes: set[torch.dtype]) -> torch.dtype:
    """Returns the one of `OF` that rounds most; float32 of none."""
    return max(dtypes | {torch.float32}, key=list(OF).index)

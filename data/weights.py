"""Weights of tokens: how much each target of a document counts in the loss, besides the weight of the document."""

from typing import Any

import numpy as np
import numpy.typing as npt

TokenWeights = npt.NDArray[np.bool_] | npt.NDArray[np.float32]
"""Weight of every token as a target `[tokens]`: bool if all weights are 0 or 1, otherwise float32."""


LEAST, MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def token_weights(values: npt.ArrayLike) -> TokenWeights:
    """Returns weights of tokens in the smaller of the two types that holds them."""
    weights = np.asarray(values, np.float32)
    some = weights != 0
    return some if (weights[some] == 1).all() else weights


def is_weight(value: Any) -> bool:
    """Returns whether a value is 0 or a positive number that float32 holds."""
    return isinstance(value, bool | int | float) and bool(are_weights(value))


def are_weights(values: Any) -> Any:
    """Returns whether a number, or each of an array, is 0 or a positive number that float32 holds."""
    return (values == 0) | ((values >= LEAST) & (values <= MOST))

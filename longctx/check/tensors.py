"""Gradients of a model, and tensors that may be sharded."""

from typing import Any

import torch

from .looked import plain_name

Tensors = dict[str, torch.Tensor]
"""By names of parameters."""


def gradients_of(model: Any) -> Tensors:
    """Returns the gradients that a model has now, by plain names of its parameters. Collective if
    they are sharded (DTensor)."""
    found = Tensors()
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            found[plain_name(name)] = whole(weight.grad)
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy, gathered if the tensor is a DTensor (collective then)."""
    full = getattr(tensor, "full_tensor", None)
    return (full() if full is not None else tensor).detach().clone()

"""Latent attention in models of `transformers`, as in DeepSeek V3: split documents send latents,
not keys and values.

Such a layer keeps of each token a latent and a rotary key that all heads share. Its method
`expand_kv` computes K and V from both, and then it calls attention. This form is recognised, not
the name of a model; a layer of another form sends K and V.
"""

import inspect
from typing import Any

import torch
from torch import nn

from longctx.attention import operator
from longctx.attention.expansion import Compressed

METHOD = "expand_kv"


class Latents:
    """The expansion of a layer's latents by the layer itself, with its adapters; also replaces the
    layer's method."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.handle = operator.register(self)
        self.last: tuple[torch.Tensor, ...] | None = None
        """Arguments and results of the last call, until attention takes them."""

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of a model, and a pickled one, has its own method, of its class.
        return getattr, (self.layer, METHOD)

    def __call__(
        self, latent: torch.Tensor, rotary: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = getattr(type(self.layer), METHOD)(self.layer, latent, rotary)
        self.last = latent, rotary, key, value
        return key, value

    def expand(
        self, first: torch.Tensor, second: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = getattr(type(self.layer), METHOD)(
            self.layer, first[None, None], second[None, None]
        )
        return key[0].transpose(0, 1), value[0].transpose(0, 1)

    def weights(self) -> list[torch.Tensor]:
        return [
            weight
            for part in used_parts(self.layer)
            for weight in part.parameters()
            if weight.requires_grad
        ]


def used_parts(layer: nn.Module) -> list[nn.Module]:
    """Returns the submodules of a layer that its method uses, such as `kv_b_proj`."""
    names = getattr(type(layer), METHOD).__code__.co_names
    return [part for name, part in layer.named_children() if name in names]


def has_latents(layer: nn.Module) -> bool:
    """Returns whether a layer has a method that expands latents and rotary keys."""
    method = getattr(type(layer), METHOD, None)
    return (
        inspect.isfunction(method)
        and len(inspect.signature(method).parameters) == 3
        and bool(used_parts(layer))
    )


def send_latents(model: nn.Module) -> None:
    """Lets the layers of a model that have latents hand these to ring attention beside K and V."""
    for layer in filter(has_latents, model.modules()):
        vars(layer)[METHOD] = Latents(layer)


def send_keys(model: nn.Module) -> None:
    """Undoes `send_latents`."""
    for layer in model.modules():
        vars(layer).pop(METHOD, None)


def latents_of(
    layer: nn.Module, key: torch.Tensor, value: torch.Tensor, dtype: torch.dtype
) -> Compressed | None:
    """Returns the latents of which a layer computed K and V in `dtype`; None if it did not, or
    could not again in backward."""
    latents = vars(layer).get(METHOD)
    if not isinstance(latents, Latents) or latents.last is None:
        return None
    (*rows, last_key, last_value), latents.last = latents.last, None
    if last_key is not key or last_value is not value:
        return None
    autocast = torch.is_autocast_enabled(key.device.type)
    if any(_changes(each) for part in used_parts(layer) for each in part.modules()):
        return None
    if any(
        row.shape[:-1] != (1, 1, key.shape[2]) or not (autocast or row.dtype == dtype)
        for row in rows
    ):
        return None
    first, second = (row[0, 0].to(dtype) for row in rows)
    return Compressed(first, second, latents, autocast)


def _changes(module: nn.Module) -> bool:
    """Returns whether a module drops at random, or its weight is no whole parameter of its own, as
    in FSDP 1 and DeepSpeed."""
    weight = getattr(module, "weight", None)
    whole = weight is None or (
        isinstance(weight, nn.Parameter) and weight.numel() > 0 and not hasattr(weight, "to_local")
    )
    return not whole or (isinstance(module, nn.Dropout) and module.p > 0 and module.training)

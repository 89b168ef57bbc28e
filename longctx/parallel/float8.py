"""Float8: computes the linear layers of the blocks in float8, by torchao, with scales from the
current tensors.

Weights, their gradients and what FSDP gathers stay as without float8: a layer casts its inputs and
its gathered weight when it multiplies them. Embedding and head are not converted.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from longctx.errors import UserError
from longctx.model.protocol import Model

LEAST_CAPABILITY = (8, 9)


def check_float8(device: torch.device) -> None:
    """Raises UserError if a GPU has no float8 matrix products. They are emulated on a CPU."""
    if (
        device.type == "cuda"
        and (capability := torch.cuda.get_device_capability(device)) < LEAST_CAPABILITY
    ):
        major, minor = capability
        raise UserError(
            f"train.float8 is set, but {torch.cuda.get_device_name(device)} has compute "
            f"capability {major}.{minor}, and float8 matrix products need 8.9 (Ada, Hopper) or "
            "higher: omit train.float8"
        )


def convert_to_float8(model: Model, recipe: str, device: torch.device, multiple: int) -> None:
    """Converts the linear layers of every block whose sizes are multiples of `multiple`, in place,
    before all other changes.

    `recipe` is tensorwise or rowwise. Raises UserError if there is no such layer.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=device.type == "cpu")
    converted = 0
    for block in model.layers:
        convert_to_float8_training(
            block, module_filter_fn=lambda layer, _: _is_aligned(layer, multiple), config=config
        )
        for layer in block.modules():
            if isinstance(layer, Float8Linear):
                layer.forward = _or_plain(layer.forward, layer, multiple)
                converted += 1
    if not converted:
        raise UserError(
            f"train.float8 is {recipe}, but no linear layer of the blocks of "
            f"{type(model).__name__} has sizes that are multiples of {multiple}: omit it"
        )


def _is_aligned(layer: nn.Module, multiple: int) -> bool:
    return isinstance(layer, nn.Linear) and not (
        layer.in_features % multiple or layer.out_features % multiple
    )


def _or_plain(
    float8: Callable[[torch.Tensor], torch.Tensor], layer: nn.Linear, multiple: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Runs a layer without float8 for 0 tokens or no multiple, as in micro-batches in which a rank
    has no document."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        tokens = x.numel() // x.shape[-1]
        if tokens == 0 or tokens % multiple:
            return F.linear(x, layer.weight, layer.bias)
        return float8(x)

    return forward

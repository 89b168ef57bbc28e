"""Weights as torchao quantizes them, without our code."""

import math
from typing import Any

import torch
from torch import nn
from torchao.quantization import Int8Tensor, PerRow
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

BLOCK = 64


def by_torchao(weight: torch.Tensor, base: str) -> Any:
    scales = math.gcd(weight.numel() // BLOCK, 256)
    return to_nf4(weight, BLOCK, scales) if base == "nf4" else Int8Tensor.from_hp(weight, PerRow())


def expanded(weight: torch.Tensor, base: str) -> torch.Tensor:
    made = by_torchao(weight, base)
    values: torch.Tensor = made.get_original_weight() if base == "nf4" else made.dequantize()
    return values


def quantize(base: str, hf: Any) -> None:
    """Quantizes the blocks of a model by torchao: as its tensors in nf4, which have a backward, and
    as values in int8."""
    for layer in hf.layers.modules():
        if isinstance(layer, nn.Linear):
            weight = layer.weight.detach()
            kept = by_torchao(weight, base) if base == "nf4" else expanded(weight, base)
            layer.weight = nn.Parameter(kept, requires_grad=False)

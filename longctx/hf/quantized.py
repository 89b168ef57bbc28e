"""Quantized frozen weights (QLoRA, Dettmers et al., 2023): matrices kept as bytes, and expanded for
each product.

torchao quantizes: to NF4 with scales that are quantized again, or to int8 with a scale per row;
from float32, whatever the compute dtype, so that an export finds the same values. The libraries'
own tensors are not kept: NF4Tensor can be split only into equal parts of whole blocks of scales,
Int8Tensor has no hooks for FSDP2, and bitsandbytes keeps scales outside of the parameter, where
FSDP2 does not shard them. One parameter of bytes is sharded as any other, over any number of ranks,
and ranks gather the bytes: no rank ever has more than one matrix in full precision.
"""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from longctx.attention import keeping

BLOCK = 64
"""Weights with a common scale in NF4."""
LEVELS = 16
SCALES = 256
"""Scales in NF4 that are quantized together, at most."""
FLOAT32 = 4


class QuantizedLinear(nn.Module):
    """A frozen linear layer whose `weight` is one vector of bytes.

    First come float32 numbers. nf4: the factors of quantized scales, their mean, the 16 levels;
    then quantized scales, and two codes per byte. int8: a scale per row; then the matrix.
    """

    def __init__(self, layer: nn.Linear, base: str) -> None:
        """Replaces `layer`, on its device; `base` is nf4 or int8. The weight is not initialized
        (see `pack`)."""
        super().__init__()
        self.base = base
        self.rows = layer.out_features
        self.columns = layer.in_features
        self.bias = layer.bias
        count = self.rows * self.columns
        scales = self.rows
        codes = count
        if base == "nf4":
            blocks = count // BLOCK
            scales = blocks // math.gcd(blocks, SCALES) + 1 + LEVELS
            codes = blocks + count // 2
        weight = torch.empty(
            FLOAT32 * scales + codes, dtype=torch.uint8, device=layer.weight.device
        )
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Product.apply(x, self.weight, self.base, self.rows, self.columns)  # type: ignore[no-untyped-call]  # torch's own
        if self.bias is None:
            return out
        return out + self.bias

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Quantizes a matrix [out, in]. Returns the bytes, on its device."""
        weight = weight.float().contiguous()
        scales, codes = _nf4(weight) if self.base == "nf4" else _int8(weight)
        return torch.cat(
            [scales.view(torch.uint8), *(part.flatten().view(torch.uint8) for part in codes)]
        )

    def unpack(self, packed: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns the matrix [out, in] of bytes."""
        return unpack(packed, self.base, rows=self.rows, columns=self.columns, dtype=dtype)


def quantize_layers(root: nn.Module, base: str) -> None:
    """Replaces the frozen linear layers in `root`, in place; those whose size is no multiple of 64
    stay as they are."""
    for name, layer in list(root.named_modules()):
        if (
            type(layer) is nn.Linear
            and not layer.weight.requires_grad
            and not layer.weight.numel() % BLOCK
        ):
            root.set_submodule(name, QuantizedLinear(layer, base))


def unpack(
    packed: torch.Tensor, base: str, rows: int, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """Returns the matrix [rows, columns] of bytes, bit by bit that of torchao, rounded from float32
    to `dtype`."""
    count = rows * columns
    if base == "int8":
        scales = packed[: FLOAT32 * rows].view(torch.float32)
        codes = packed[FLOAT32 * rows :].view(torch.int8)
        return codes.view(rows, columns).float().mul_(scales[:, None]).to(dtype)
    blocks = count // BLOCK
    pairs_of_codes = count // 2
    numbers, quantized, codes = packed.split(
        [packed.numel() - blocks - pairs_of_codes, blocks, pairs_of_codes]
    )
    floats = numbers.view(torch.float32)
    factors = floats[: -LEVELS - 1]
    mean = floats[-LEVELS - 1]
    levels = floats[-LEVELS:]
    scales = (quantized.view(torch.int8).view(len(factors), -1) / factors[:, None]).flatten() + mean
    # Of all values of a byte.
    pairs = torch.stack([levels.repeat_interleave(LEVELS), levels.repeat(LEVELS)], dim=1)
    return (
        pairs[codes.int()].view(blocks, BLOCK).mul_(scales[:, None]).view(rows, columns).to(dtype)
    )


def _nf4(weight: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    blocks = weight.numel() // BLOCK
    made: Any = to_nf4(weight, BLOCK, math.gcd(blocks, SCALES))
    factors = made.quantization_factor
    scales = made.quantized_scalers.view(len(made.quantization_factor), -1)
    # All scales that are quantized together are the mean, as in a matrix of zeros.
    equal = factors.isinf()
    factors = factors.masked_fill(equal, 1.0)
    scales = scales.masked_fill(equal[:, None], 0)
    return torch.cat([factors, made.scaler_mean[None], made.nf4]), (scales, made.quantized_data)


def _int8(weight: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    from torchao.quantization import Int8Tensor, PerRow

    made: Any = Int8Tensor.from_hp(weight, PerRow())
    return made.scale.flatten().float(), (made.qdata,)


class _Product(torch.autograd.Function):
    """x · Wᵀ, which keeps the bytes of W for backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, packed: torch.Tensor, base: str, rows: int, columns: int
    ) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.layout = base, rows, columns

        def multiply() -> torch.Tensor:
            weight = unpack(packed, base, rows=rows, columns=columns, dtype=x.dtype)
            return F.linear(x, weight)

        if keeping.keeps_product():
            return keeping.run(multiply)
        return multiply()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (packed,), (gradient,), (base, rows, columns) = ctx.saved_tensors, gradients, ctx.layout
        return (
            gradient @ unpack(packed, base, rows=rows, columns=columns, dtype=gradient.dtype),
            None,
            None,
            None,
            None,
        )

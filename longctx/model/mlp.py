"""The MLP of blocks: gated, or plain as in GPT-2."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from longctx.model.presets import ModelShape

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": F.silu, "gelu": partial(F.gelu, approximate="tanh")}


class MLP(nn.Module):
    """An MLP, `width` wide: SwiGLU or GeGLU (Shazeer, 2020), or plain as in GPT-2: two matrices around an activation."""

    def __init__(self, shape: ModelShape, width: int) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[shape.hidden_act]
        self.gate_proj = nn.Linear(shape.hidden_size, width, bias=shape.linear_bias) if shape.mlp == "gated" else None
        self.up_proj = nn.Linear(shape.hidden_size, width, bias=shape.linear_bias)
        self.down_proj = nn.Linear(width, shape.hidden_size, bias=shape.linear_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up_proj(x)
        inner = self.activation(up) if self.gate_proj is None else self.gated(self.gate_proj(x), up)
        out: torch.Tensor = self.down_proj(inner)
        return out

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return self.activation(gate) * up

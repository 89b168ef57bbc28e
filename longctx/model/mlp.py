"""MLPs: gated, and plain."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from longctx.model.presets import ModelShape

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": F.silu, "gelu": partial(F.gelu, approximate="tanh")}


class MLP(nn.Module):
    """A gated MLP: SwiGLU, or GeGLU (Shazeer, 2020), `width` wide."""

    def __init__(self, shape: ModelShape, width: int) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[shape.hidden_act]
        self.gate_proj = nn.Linear(shape.hidden_size, width, bias=shape.linear_bias)
        self.up_proj = nn.Linear(shape.hidden_size, width, bias=shape.linear_bias)
        self.down_proj = nn.Linear(width, shape.hidden_size, bias=shape.linear_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.gated(self.gate_proj(x), self.up_proj(x)))
        return out

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return self.activation(gate) * up


class PlainMLP(nn.Module):
    """An MLP without gate, as in GPT-2: two matrices with an activation between them."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[shape.hidden_act]
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=shape.linear_bias)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=shape.linear_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.activation(self.up_proj(x)))
        return out

"""The gated MLP of blocks and of shared experts."""

import torch
from torch import nn
from torch.nn import functional as F

from longctx.model.presets import ModelShape


class MLP(nn.Module):
    """SwiGLU (Shazeer, 2020), `width` wide."""

    def __init__(self, shape: ModelShape, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.gated(self.gate_proj(x), self.up_proj(x)))
        return out

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate) * up

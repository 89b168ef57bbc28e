"""Absorbed attention is only for layers whose expansion of latents is linear."""

import pytest
import torch
from torch import Tensor, nn

from longctx.attention.expansion import Compressed
from longctx.hf.absorbed import is_linear
from longctx.hf.latents import Latents

LATENT, ROTARY, HEADS, DIM = 5, 2, 3, 4


class Layer(nn.Module):
    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(LATENT, HEADS * 2 * DIM, bias=bias)

    def expand_kv(self, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        both = self.kv_b_proj(latent).unflatten(-1, (HEADS, 2 * DIM))
        keys, values = both[0].transpose(1, 2).split(DIM, dim=-1)
        of_heads = rotary[0].unsqueeze(1).expand(-1, HEADS, -1, -1)
        return torch.cat([keys, of_heads], dim=-1), values


@pytest.mark.parametrize("bias", [False, True])
def test_a_call_without_rows_decides_nothing(bias: bool) -> None:
    torch.manual_seed(0)
    expansion = Latents(Layer(bias=bias))
    for rows in (0, 3):
        latents = Compressed(torch.randn(rows, LATENT), torch.randn(rows, ROTARY), expansion)
        assert is_linear(latents) == (rows > 0 and not bias)

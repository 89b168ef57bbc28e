"""Rotary position embedding (Su et al., 2021), in the half-split form of Llama and Hugging Face."""

import torch


def rope_tables(positions: torch.Tensor, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [tokens, 1, head_dim / 2], for `positions` [tokens], which restart in every document."""
    # float64 keeps angles exact to the last digit of float32 at positions beyond 2²⁴ / 2π.
    frequency = theta ** -(torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim)
    angles = positions.double().unsqueeze(-1) * frequency
    return angles.cos().float().unsqueeze(1), angles.sin().float().unsqueeze(1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates x [tokens, heads, head_dim] by the angles of its tokens; computes in float32, returns the dtype of x."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)

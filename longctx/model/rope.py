"""Rotary position embedding (Su et al., 2021) in the head layout of Llama and Hugging Face, plain
or for longer documents."""

import math
from dataclasses import dataclass

import torch

from longctx.model.context_extension import ntk_theta


@dataclass(frozen=True)
class Rope:
    """Rotation angles of heads by position.

    Attributes:
        dim: size of a head, which is even.
        theta: base of the frequencies θ^(-2i/dim).
        scaling: none; linear: divides frequencies by `factor` (Chen et al., 2023); ntk: raises the
            base so that the lowest frequency is divided by `factor` (bloc97, 2023); yarn: divides
            frequencies with fewer than `beta_slow` rotations over the original length, keeps those
            with more than `beta_fast`, with a ramp in between (Peng et al., 2023); llama3: the same
            with `low_freq_factor` and `high_freq_factor` rotations, smooth in the wavelength.
        factor: new context length / original context length.
        original_length: original context length in tokens.
    """

    dim: int
    theta: float
    scaling: str = "none"
    factor: float = 1.0
    original_length: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def frequencies(self, device: torch.device) -> torch.Tensor:
        """Returns radians per token, float64 [dim / 2]."""
        if self.scaling == "ntk":
            theta = ntk_theta(self.theta, self.factor, self.dim)
        else:
            theta = self.theta
        plain = theta ** -(
            torch.arange(0, self.dim, 2, device=device, dtype=torch.float64) / self.dim
        )
        if self.scaling == "linear":
            return plain / self.factor
        if self.scaling in ("yarn", "llama3"):
            kept = self._kept(plain)
            return plain * kept + plain / self.factor * (1 - kept)
        return plain

    def _kept(self, plain: torch.Tensor) -> torch.Tensor:
        """Returns the share of each frequency that is not scaled, [dim / 2]."""
        if self.scaling == "llama3":
            turns = self.original_length * plain / (2 * math.pi)
            return (
                (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            ).clamp(0, 1)

        def index(turns: float) -> float:
            """Returns the index of the frequency with this number of rotations over the original
            length."""
            return (
                self.dim
                * math.log(self.original_length / (turns * 2 * math.pi))
                / (2 * math.log(self.theta))
            )

        low = max(0, math.floor(index(self.beta_fast)))
        high = min(self.dim - 1, math.ceil(index(self.beta_slow)))
        ramp = (torch.arange(len(plain), device=plain.device, dtype=torch.float64) - low) / max(
            high - low, 0.001
        )
        return 1 - ramp.clamp(0, 1)

    @property
    def magnitude(self) -> float:
        """Factor by which YaRN scales queries and keys, to keep the entropy of attention."""
        if self.scaling == "yarn" and self.factor > 1:
            return 0.1 * math.log(self.factor) + 1
        return 1.0

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cos and sin, float32 [tokens, 1, dim / 2], for `positions` [tokens], which
        restart in every document."""
        # float64 keeps angles exact to the last digit of float32 at positions beyond 2²⁴ / 2π.
        angles = positions.double().unsqueeze(-1) * self.frequencies(positions.device)
        cos = angles.cos() * self.magnitude
        sin = angles.sin() * self.magnitude
        return cos.float().unsqueeze(1), sin.float().unsqueeze(1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the heads of x [tokens, heads, head_dim] by the angles of each token.

    Computes in float32 and returns the dtype of x.
    """
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)

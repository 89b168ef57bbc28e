"""What every attention kernel promises.

    forward(q, k, v, segments, scale, softcap) -> out, lse
    backward(dout, q, k, v, out, lse, segments, scale, softcap) -> dq, dk, dv
    refusal(request) -> why this kernel cannot do it, or None

q [Tq, heads, dim], k [Tk, kv_heads, dim], v [Tk, kv_heads, v_dim]; heads is a multiple of kv_heads. out [Tq, heads, v_dim] and
the gradients have the dtype of q, or that of lse where the kernel has them in it anyway: the caller adds them up in that one.
lse [Tq, heads] is the natural log-sum-exp of the scores, float32 (float64 for float64 inputs). Scores are scale · q·k, or
softcap · tanh(scale · q·k / softcap) if softcap is not 0. No two segments of one call share a query or a key, and every query
of a segment sees at least one of its keys; empty segments are skipped. Queries that no segment covers get out = 0 and
lse = -inf, and gradients of rows outside all segments are 0. `backward` takes the FINAL out and lse of all calls merged, as
ring attention needs. The last dimension of every tensor is contiguous, the others may be strided.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from longctx.attention.segments import Segments


@dataclass(frozen=True)
class Request:
    """What a kernel is asked to do. `bands`: some segments are neither dense nor plain causal."""

    device: str
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    bands: bool = False
    softcap: bool = False


class Kernel(Protocol):
    """The signature above, as a module."""

    def refusal(self, request: Request) -> str | None: ...

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float, softcap: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        segments: Segments,
        scale: float,
        softcap: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...

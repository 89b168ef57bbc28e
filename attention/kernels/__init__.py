"""Attention kernels behind one signature over segments, and the choice among them.

    forward(q, k, v, segments, scale) -> out, lse
    backward(dout, q, k, v, out, lse, segments, scale) -> dq, dk, dv

q [Tq, heads, dim], k [Tk, kv_heads, dim], v [Tk, kv_heads, v_dim]; heads is a multiple of kv_heads. out [Tq, heads, v_dim] has
the dtype of q; lse [Tq, heads] is the natural log-sum-exp of the scaled scores, float32 (float64 for float64 inputs). No two
segments of one call share a query. Queries that no segment covers get out = 0 and lse = -inf, and gradients of rows outside
all segments are 0. `backward` takes the FINAL out and lse of all calls merged, as ring attention needs.
"""

from typing import Protocol

import torch

from longctx.attention.kernels import cpu, reference
from longctx.attention.segments import Segments
from longctx.errors import UserError


class Kernel(Protocol):
    """The signature above, as a module."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, scale: float
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
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


KERNELS: dict[str, Kernel] = {"cpu": cpu, "reference": reference}


def choose_kernel(name: str, device: torch.device, head_dim: int, v_head_dim: int) -> Kernel:
    """The kernel called `name`, or for `auto` the fast one for these tensors. Raises KernelError if there is none."""
    if name not in ("auto", *KERNELS):
        raise KernelError(f"kernel is {name!r}: choose auto, {', '.join(KERNELS)}")
    wanted = "cpu" if name == "auto" else name
    if wanted == "cpu" and device.type != "cpu":
        raise KernelError(
            f"kernel {name}: this version has no fast attention kernel for {device.type}. kernel reference runs there and is "
            "exact, but dense and in float64: for documents of a few thousand tokens"
        )
    if name == "cpu" and head_dim != v_head_dim:
        raise KernelError(
            f"kernel cpu needs equal head sizes of k and v, not {head_dim} and {v_head_dim}: use auto or reference"
        )
    return KERNELS[wanted] if head_dim == v_head_dim else reference


class KernelError(UserError):
    """A kernel that does not exist or does not take the given tensors."""

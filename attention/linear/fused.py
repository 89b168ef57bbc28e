"""The delta rule by the kernels of `flash-linear-attention`, where they are installed, in bfloat16
or float16 on CUDA devices.

They scan packed segments from given states, return the states at their ends, and have the gradients
of both. So they take the place of `chunked`, also for the transitions of split documents. They read
q, k and v in the model's dtype; states are float32.
"""

import logging
from functools import cache
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

log = logging.getLogger(__name__)

MOST_K_DIM = 256
"""Largest k_dim of the kernels."""


@cache
def kernels() -> tuple[Any, Any] | None:
    """Returns the kernels with a decay per head and per channel; None if they are not installed."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda

        found = version("fla-core")  # what has the kernels of flash-linear-attention
    except ImportError:
        return None
    log.info("linear attention with a delta rule: kernels of flash-linear-attention %s", found)
    return chunk_gated_delta_rule, chunk_kda


def run_in(dtype: torch.dtype, device: str) -> bool:
    """Returns whether the kernels scan delta rules in models of a dtype on this kind of device."""
    return device == "cuda" and dtype in (torch.bfloat16, torch.float16) and kernels() is not None


def dtype_of(v: Tensor, k_dim: int, beta: Tensor | None) -> torch.dtype | None:
    """Returns the dtype in which the kernels scan, or None if `chunked` does."""
    if beta is None or k_dim > MOST_K_DIM or not run_in(v.dtype, v.device.type):
        return None
    return v.dtype


def scan_fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    initial: Tensor | None,
    bounds: tuple[Tensor, Tensor],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """As `scan_chunks`, for segments between `bounds` [segments + 1], int64, on the device and on
    the CPU.

    No initial states: they are zero. `dtype`: see `dtype_of`.
    """
    found = kernels()
    assert found is not None
    per_head, per_channel = found
    columns = v.shape[-1] if initial is None else initial.shape[-1]
    v = F.pad(v, (columns - v.shape[-1], 0))
    kernel = per_channel
    if decay.shape[-1] == 1:
        kernel = per_head
        decay = decay[..., 0]
    out, ends = kernel(
        q.to(dtype).unsqueeze(0),
        k.to(dtype).unsqueeze(0),
        v.to(dtype).unsqueeze(0),
        decay.unsqueeze(0),
        beta.unsqueeze(0),
        scale=1.0,
        initial_state=initial,
        output_final_state=True,
        cu_seqlens=bounds[0],
        cu_seqlens_cpu=bounds[1],
    )
    return out[0].to(q.dtype), ends

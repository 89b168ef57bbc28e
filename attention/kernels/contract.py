"""The interface of every attention kernel.

    forward(q, k, v, segments, options) -> out, lse backward(dout, q, k, v, out, lse, segments,
    options) -> dq, dk, dv refusal(request) -> reason why the kernel does not support the request,
    or None workspace(sizes) -> bytes that backward allocates on a GPU beside its arguments and
    results, from the kernel's source

q [Tq, heads, dim], k [Tk, kv_heads, dim], v [Tk, kv_heads, v_dim]; heads is a multiple of kv_heads.
out [Tq, heads, v_dim] and the gradients have the dtype of q, or that of lse if the kernel computes
them in it; the caller accumulates in the dtype of lse. lse [Tq, heads] is the natural log-sum-exp
of the scores, float32 (float64 for float64 inputs). Scores are scale · q·k, or softcap · tanh(scale
· q·k / softcap) if softcap is not 0. No two segments of one call share a query or a key, and every
query of a segment sees at least one of its keys; empty segments are skipped. q, k and v have one
dtype and device. Queries outside all segments get out = 0 and lse = -inf; gradients of rows outside
all segments are 0. `backward` takes the FINAL out and lse, merged over all calls, as ring attention
needs. The last dimension of every tensor is contiguous; the others may be strided. A kernel ignores
`deterministic` and `overlapped` if they make no difference to it.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from longctx.attention.segments import Segments


class KernelRequest(NamedTuple):
    """The properties of a call that a kernel must support. A tuple, as every call makes and hashes
    several.

    `bands`: some segments are neither dense nor plain causal; `deterministic`: see `Options`.
    `elements`: of the largest tensor or buffer, rounded down, or 0 if it has less than
    MOST_ELEMENTS.
    """

    device: str
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    bands: bool = False
    softcap: bool = False
    deterministic: bool = False
    elements: int = 0


MOST_ELEMENTS = 1 << 31
"""From so many elements on, a tensor has places that 32 bits cannot count."""
PADDING = 128
"""Rows that libraries add to a sequence in some of their buffers, at most."""


def request_of(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, **properties: bool
) -> KernelRequest:
    """Returns the request of a call, with its other properties."""
    rows = PADDING * (2 * len(segments) + 1)  # rows between segments are sequences too
    queries, heads, dim = q.shape
    keys, kv_heads, v_dim = v.shape
    largest = max((queries + rows) * heads, (keys + rows) * kv_heads) * max(dim, v_dim)
    largest = max(largest, queries * q.stride(0), keys * k.stride(0), keys * v.stride(0))
    step = MOST_ELEMENTS // 8  # kernels are chosen once for a request
    large = largest // step * step if largest >= MOST_ELEMENTS else 0
    return KernelRequest(q.device.type, q.dtype, dim, v_dim, elements=large, **properties)


class Options(NamedTuple):
    """What a call computes besides its segments, and how.

    Attributes:
        scale, softcap: of the scores.
        deterministic: backward calls with equal inputs give bitwise equal gradients.
        overlapped: messages are in flight, so a kernel that fills the GPU should leave them some
            processors.
    """

    scale: float
    softcap: float = 0.0
    deterministic: bool = False
    overlapped: bool = False


class BackwardSizes(NamedTuple):
    """Sizes of a call of `backward`, from which memory is estimated; `longest`: queries or keys of
    its longest document."""

    request: KernelRequest
    queries: int
    keys: int
    longest: int
    heads: int
    kv_heads: int

    @property
    def float32_queries(self) -> int:
        """Bytes of dQ in float32."""
        return 4 * self.queries * self.heads * self.request.head_dim


Gradients = tuple[Tensor, Tensor, Tensor]


class Computes(Protocol):
    """Both passes of the interface above."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, options: Options
    ) -> tuple[Tensor, Tensor]: ...

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        segments: Segments,
        options: Options,
    ) -> Gradients: ...


class Kernel(Computes, Protocol):
    """The interface above, as implemented by a module."""

    def refusal(self, request: KernelRequest) -> str | None: ...

    def workspace(self, sizes: BackwardSizes) -> int: ...

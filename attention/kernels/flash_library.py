"""The interface of a flash attention library, and what the libraries share.

All take q [Tq, heads, dim], k [Tk, kv_heads, dim] and v [Tk, kv_heads, v_dim] with int32 sequence
boundaries, align windows to the bottom right, return log-sum-exp as [heads, Tq] in float32, and
have a backward that uses the given out and log-sum-exp.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from torch import Tensor

from longctx.attention.kernels.contract import BackwardSizes, Gradients, KernelRequest, Options

Capability = tuple[int, int]

HOPPER_OR_BLACKWELL = (9, 10, 11)
"""Major capabilities of Hopper and data-center Blackwell, on which flash-attn 2 is at most half as
fast as its successors."""


@dataclass(frozen=True)
class Sequences:
    """Sequences of a call.

    Attributes:
        edges_q, edges_k: boundaries of their queries and keys (int32, on the device, same length).
        longest_q, longest_k: largest number of queries and of keys.
        left, right: window: number of keys before and after its diagonal key that a query sees
            (aligned to the bottom right); None: all.
    """

    edges_q: Tensor
    edges_k: Tensor
    longest_q: int
    longest_k: int
    left: int | None
    right: int | None

    @property
    def causal(self) -> bool:
        return self.left is None and self.right == 0

    @property
    def has_window(self) -> bool:
        return self.left is not None or self.right not in (None, 0)

    @property
    def limits(self) -> tuple[int, int]:
        """Window in the format of flash-attn 2, 3 and torch: -1 means no limit."""
        return -1 if self.left is None else self.left, -1 if self.right is None else self.right

    @property
    def bounds(self) -> tuple[int, int]:
        """Longest queries and keys, increased where flash-attn 2 (and its copy in torch) would
        misinterpret the true ones.

        It treats one query per sequence with GQA as decoding, where every sequence must have
        exactly one query. It also treats a window that reaches the longest keys as unlimited, and
        an unlimited side as such a window; both are wrong on the right side if there are more
        queries than keys.
        """
        windowed = not self.causal and (self.left, self.right) != (None, None)
        longest_k = max(self.longest_k, self.longest_q) if windowed else self.longest_k
        return max(self.longest_q, 2), longest_k


Forward = Callable[[Tensor, Tensor, Tensor, Sequences, Options], tuple[Tensor, Tensor]]
"""Signature (q, k, v, sequences, options) → out, lse [heads, Tq]."""

Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Sequences, Options], Gradients]
"""Signature (dout, q, k, v, out, lse [heads, Tq], sequences, options) → dq, dk, dv."""


@dataclass(frozen=True)
class Library:
    """A flash attention library.

    Attributes:
        name: name for messages.
        missing: returns why the library is not available, or None.
        refusal: returns why it does not support a request on a GPU of some capability, or None.
        forward, backward: its functions. Results for queries without keys and keys without queries
            may be arbitrary.
        workspace: returns the bytes that its backward allocates (see `contract`).
        made_for_hopper: whether it reaches the speed of Hopper or Blackwell GPUs.
    """

    name: str
    missing: Callable[[], str | None]
    refusal: Callable[[KernelRequest, Capability], str | None]
    forward: Forward
    backward: Backward
    workspace: Callable[[BackwardSizes], int]
    made_for_hopper: bool = False


@cache
def import_error(module: str) -> str | None:
    """Returns why a module cannot be imported, or None; a build for another torch or CUDA may raise
    any error."""
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        return f"not installed (no module {error.name})"
    except Exception as error:
        return f"cannot be imported ({error})"
    return None


def unequal(request: KernelRequest) -> str | None:
    if request.head_dim != request.v_head_dim:
        return f"needs equal head sizes of k and v, not {request.head_dim} and {request.v_head_dim}"
    return None


def too_large(request: KernelRequest, largest: int) -> str | None:
    size = max(request.head_dim, request.v_head_dim)
    return f"supports head sizes up to {largest}, not {size}" if size > largest else None


def float32_workspace(sizes: BackwardSizes) -> int:
    """Returns the workspace of flash-attn 3 and 4: dQ, and with GQA dK and dV, in float32."""
    if sizes.heads <= sizes.kv_heads:
        return sizes.float32_queries
    return sizes.float32_queries + 2 * 4 * sizes.keys * sizes.kv_heads * sizes.request.head_dim


def shared_options(
    sequences: Sequences,
    options: Options,
    longest: tuple[int, int],
    window: tuple[int | None, int | None],
) -> dict[str, Any]:
    """Returns the keyword arguments that all versions of flash-attn share."""
    return {
        "cu_seqlens_q": sequences.edges_q,
        "cu_seqlens_k": sequences.edges_k,
        "max_seqlen_q": longest[0],
        "max_seqlen_k": longest[1],
        "softmax_scale": options.scale,
        "window_size_left": window[0],
        "window_size_right": window[1],
        "softcap": options.softcap,
    }

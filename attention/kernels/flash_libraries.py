"""The flash attention libraries of the flash kernel, best first, with the same forward and backward signatures.

Based on flash-attn-4 4.0.0b36 (flash_attn/cute/interface.py), flash-attn 3 (the operators of hopper/flash_api.cpp, identical in
the 2.8.3 and 2026 sources), flash-attn 2.8.3, and the operators of torch 2.13. All take q [Tq, heads, dim], k [Tk, kv_heads,
dim] and v [Tk, kv_heads, v_dim] with int32 sequence boundaries, align windows to the bottom right, return log-sum-exp as
[heads, Tq] in float32, and have a backward that uses the given out and log-sum-exp.

All hold dQ in float32 for backward. With GQA, flash-attn 2 and torch also hold dK and dV per query head (heads / kv_heads times
their size), and flash-attn 3 and 4 hold them in float32; use more exchange stages to bound the keys per call. The deterministic
backward is slower: flash-attn 3 and 4 add in an order enforced by semaphores, and flash-attn 2 and torch hold dQ once per split
of the keys.

One dense SDPA call per segment is not offered: a CUDA build of torch with flash attention supports variable lengths as well.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx.attention.kernels.contract import Mode, Request

Capability = tuple[int, int]


@dataclass(frozen=True)
class Sequences:
    """Sequences of a call.

    Attributes:
        edges_q, edges_k: boundaries of their queries and keys (int32, on the device, same length).
        longest_q, longest_k: largest number of queries and of keys.
        left, right: window: number of keys before and after its diagonal key that a query sees (aligned to the bottom right);
            None: all.
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
    def limits(self) -> tuple[int, int]:
        """Window in the format of flash-attn 2, 3 and torch: -1 means no limit."""
        return -1 if self.left is None else self.left, -1 if self.right is None else self.right

    @property
    def bounds(self) -> tuple[int, int]:
        """Longest queries and keys, increased where flash-attn 2 (and its copy in torch) would misinterpret the true ones.

        It treats one query per sequence with GQA as decoding, where every sequence must have exactly one query. It also treats
        a window that reaches the longest keys as unlimited, and an unlimited side as such a window; both are wrong on the right
        side if there are more queries than keys.
        """
        windowed = not self.causal and (self.left, self.right) != (None, None)
        return max(self.longest_q, 2), max(self.longest_k, self.longest_q) if windowed else self.longest_k


class Scores(NamedTuple):
    """Scale and soft cap of the scores, as in `contract`."""

    scale: float
    softcap: float


Gradients = tuple[Tensor, Tensor, Tensor]

Forward = Callable[[Tensor, Tensor, Tensor, Sequences, Scores, Mode], tuple[Tensor, Tensor]]
"""Signature (q, k, v, sequences, scores, mode) → out, lse [heads, Tq]."""

Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Sequences, Scores, Mode], Gradients]
"""Signature (dout, q, k, v, out, lse [heads, Tq], sequences, scores, mode) → dq, dk, dv."""


@dataclass(frozen=True)
class Library:
    """A flash attention library.

    Attributes:
        name: name for messages.
        missing: returns why the library is not available, or None.
        refusal: returns why it does not support a request on a GPU of some capability, or None.
        forward, backward: its functions. Results for queries without keys and keys without queries may be arbitrary.
        made_for_hopper: whether it reaches the speed of Hopper GPUs.
    """

    name: str
    missing: Callable[[], str | None]
    refusal: Callable[[Request, Capability], str | None]
    forward: Forward
    backward: Backward
    made_for_hopper: bool = False


@cache
def _import_error(module: str) -> str | None:
    """Returns why a module cannot be imported, or None; a build for another torch or CUDA may raise any error."""
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        return f"not installed (no module {error.name})"
    except Exception as error:
        return f"cannot be imported ({error})"
    return None


def _unequal(request: Request) -> str | None:
    if request.head_dim != request.v_head_dim:
        return f"needs equal head sizes of k and v, not {request.head_dim} and {request.v_head_dim}"
    return None


def _too_large(request: Request, largest: int) -> str | None:
    size = max(request.head_dim, request.v_head_dim)
    return f"supports head sizes up to {largest}, not {size}" if size > largest else None


def _options(
    sequences: Sequences, scores: Scores, longest: tuple[int, int], window: tuple[int | None, int | None]
) -> dict[str, Any]:
    """Returns the keyword arguments that all versions of flash-attn share."""
    return {
        "cu_seqlens_q": sequences.edges_q,
        "cu_seqlens_k": sequences.edges_k,
        "max_seqlen_q": longest[0],
        "max_seqlen_k": longest[1],
        "softmax_scale": scores.scale,
        "window_size_left": window[0],
        "window_size_right": window[1],
        "softcap": scores.softcap,
    }


# flash-attn 4


def _missing_4() -> str | None:
    why = _import_error("flash_attn.cute.interface")
    return f"{why}: pip install flash-attn-4" if why else None


def _refusal_4(request: Request, capability: Capability) -> str | None:
    if capability[0] not in (9, 10, 11):
        # On other GPUs it is not faster than flash-attn 2.
        return f"is used only on Hopper and data-center Blackwell, not on capability {capability}"
    # Its own tests cover backward up to head size 128, and unequal sizes (192 and 128) only without GQA.
    return _unequal(request) or _too_large(request, 128)


def _forward_4(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scores: Scores, mode: Mode) -> tuple[Tensor, Tensor]:
    results = import_module("flash_attn.cute.interface")._flash_attn_fwd(
        q, k, v, return_lse=True, **_options_4(sequences, scores)
    )
    return results[0], results[1]


def _backward_4(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sequences: Sequences, scores: Scores, mode: Mode
) -> Gradients:
    gradients: Gradients = import_module("flash_attn.cute.interface")._flash_attn_bwd(
        q, k, v, out, dout, lse, deterministic=mode.deterministic, **_options_4(sequences, scores)
    )
    return gradients


def _options_4(sequences: Sequences, scores: Scores) -> dict[str, Any]:
    longest, window = (sequences.longest_q, sequences.longest_k), (sequences.left, sequences.right)
    return {"causal": sequences.causal, **_options(sequences, scores, longest, window)}


# flash-attn 3: its operators, because their arguments are stable and those of the Python functions are not

SM_MARGIN = 16
"""Multiprocessors that flash-attn 3 leaves to messages in flight: its forward occupies all others until it ends."""


def _missing_3() -> str | None:
    why = _import_error("flash_attn_interface")
    return f"{why}: build the folder hopper of github.com/Dao-AILab/flash-attention" if why else None


def _refusal_3(request: Request, capability: Capability) -> str | None:
    if capability[0] != 9:
        return f"supports only Hopper, not capability {capability}"
    sizes = request.head_dim, request.v_head_dim
    if sizes[0] != sizes[1] and not (128 < sizes[0] <= 192 and 96 < sizes[1] <= 128):
        return f"supports head sizes of k and v that are equal or about 192 and 128, not {sizes[0]} and {sizes[1]}"
    if request.deterministic and (why := _too_large(request, 192)):
        return f"{why}, with a deterministic backward"
    return _too_large(request, 256)


def _forward_3(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scores: Scores, mode: Mode) -> tuple[Tensor, Tensor]:
    # The default number of splits depends on the other sequences of the call; 1 makes results independent of them.
    out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, num_splits=1, **_options_3(sequences, scores, mode))
    return out, lse


def _backward_3(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sequences: Sequences, scores: Scores, mode: Mode
) -> Gradients:
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    options = _options_3(sequences, scores, mode)
    torch.ops.flash_attn_3.bwd(dout, q, k, v, out, lse, dq, dk, dv, deterministic=mode.deterministic, **options)
    return dq, dk, dv


def _options_3(sequences: Sequences, scores: Scores, mode: Mode) -> dict[str, Any]:
    longest = sequences.longest_q, sequences.longest_k
    options = _options(sequences, scores, longest, sequences.limits)
    return {"is_causal": sequences.causal, "sm_margin": SM_MARGIN if mode.overlapped else 0, **options}


# flash-attn 2


def _missing_2() -> str | None:
    if why := _import_error("flash_attn.flash_attn_interface"):
        return why
    version: str = import_module("flash_attn").__version__
    major, minor = version.split(".")[:2]
    return None if (int(major), int(minor)) >= (2, 8) else f"{version} is too old: install 2.8 or newer"


def _refusal_2(request: Request, capability: Capability) -> str | None:
    if capability[0] < 8:
        return f"needs Ampere or newer, not capability {capability}"
    return _unequal(request) or _too_large(request, 256)


def _forward_2(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scores: Scores, mode: Mode) -> tuple[Tensor, Tensor]:
    out, lse, *_ = import_module("flash_attn.flash_attn_interface")._flash_attn_varlen_forward(
        q, k, v, **_options_2(sequences, scores)
    )
    return out, lse


def _backward_2(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sequences: Sequences, scores: Scores, mode: Mode
) -> Gradients:
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    options = _options_2(sequences, scores)
    import_module("flash_attn.flash_attn_interface")._flash_attn_varlen_backward(
        dout, q, k, v, out, lse, dq, dk, dv, alibi_slopes=None, deterministic=mode.deterministic, **options
    )
    return dq, dk, dv


def _options_2(sequences: Sequences, scores: Scores) -> dict[str, Any]:
    options = _options(sequences, scores, sequences.bounds, sequences.limits)
    return {"causal": sequences.causal, "dropout_p": 0.0, **options}


# torch's copy of flash-attn 2


def _missing_torch() -> str | None:
    if torch.version.hip:
        return "not supported on ROCm, where torch has other operators"
    return None if torch.backends.cuda.is_flash_attention_available() else "this build of torch has no flash attention"


def _refusal_torch(request: Request, capability: Capability) -> str | None:
    return "does not support a soft cap" if request.softcap else _refusal_2(request, capability)


def _forward_torch(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scores: Scores, mode: Mode) -> tuple[Tensor, Tensor]:
    (left, right), bounds = sequences.limits, sequences.bounds
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        sequences.edges_q,
        sequences.edges_k,
        *bounds,
        0.0,
        sequences.causal,
        False,
        scale=scores.scale,
        window_size_left=left,
        window_size_right=right,
    )
    return out, lse


def _backward_torch(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sequences: Sequences, scores: Scores, mode: Mode
) -> Gradients:
    (left, right), bounds = sequences.limits, sequences.bounds
    with _deterministic() if mode.deterministic else nullcontext():
        gradients: Gradients = torch.ops.aten._flash_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            sequences.edges_q,
            sequences.edges_k,
            *bounds,
            0.0,
            sequences.causal,
            q.new_zeros(2, dtype=torch.uint64),  # random state of dropout, unused
            q.new_empty(0),
            scale=scores.scale,
            window_size_left=left,
            window_size_right=right,
        )
    return gradients


@contextmanager
def _deterministic() -> Iterator[None]:
    """Sets torch's process-wide deterministic mode, which its flash operator reads, without filling new memory with NaN."""
    memory: Any = torch.utils.deterministic  # type checkers do not see its properties
    was, filled = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(was)
        memory.fill_uninitialized_memory = filled


LIBRARIES = (
    Library("flash-attn 4", _missing_4, _refusal_4, _forward_4, _backward_4, made_for_hopper=True),
    Library("flash-attn 3", _missing_3, _refusal_3, _forward_3, _backward_3, made_for_hopper=True),
    Library("flash-attn 2", _missing_2, _refusal_2, _forward_2, _backward_2),
    Library("torch's flash operators", _missing_torch, _refusal_torch, _forward_torch, _backward_torch),
)

"""The flash attention libraries of the flash kernel, best first, behind the interface of
`flash_library`.

Based on flash-attn 3 (the operators of hopper/flash_api.cpp, identical in the 2.8.3 and 2026
sources), flash-attn 2.8.3, and the operators of torch 2.13; `flash_4` has flash-attn 4.

All hold dQ in float32 for backward. With GQA, flash-attn 2 and torch also hold dK and dV per query
head (heads / kv_heads times their size), and flash-attn 3 and 4 hold them in float32; use more
exchange rounds to bound the keys per call. The deterministic backward is slower: flash-attn 3 and 4
add in an order enforced by semaphores, and flash-attn 2 and torch hold dQ once per split of the
keys.

One dense SDPA call per segment is not offered: a CUDA build of torch with flash attention supports
variable lengths as well.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from longctx.attention.kernels import flash_4
from longctx.attention.kernels.contract import BackwardSizes, Gradients, KernelRequest, Options
from longctx.attention.kernels.flash_library import (
    Capability,
    Library,
    Sequences,
    float32_workspace,
    import_error,
    shared_options,
    too_large,
    unequal,
)

# flash-attn 3: its operators, because their arguments are stable and those of the Python functions
# are not

MULTIPROCESSORS = 132
"""Of an H100, over which flash-attn 2 splits the keys for a deterministic dQ."""
SM_MARGIN = 16
"""Multiprocessors that flash-attn 3 leaves to messages in flight: its forward occupies all others
until it ends."""


def _missing_3() -> str | None:
    why = import_error("flash_attn_interface")
    if why is None:
        return None
    return f"{why}: build the folder hopper of github.com/Dao-AILab/flash-attention"


def _refusal_3(request: KernelRequest, capability: Capability) -> str | None:
    if capability[0] != 9:
        return f"supports only Hopper, not capability {capability}"
    sizes = request.head_dim, request.v_head_dim
    if sizes[0] != sizes[1] and not (128 < sizes[0] <= 192 and 96 < sizes[1] <= 128):
        return (
            "supports head sizes of k and v that are equal or about 192 and 128, not "
            f"{sizes[0]} and {sizes[1]}"
        )
    if request.deterministic and (why := too_large(request, 192)):
        return f"{why}, with a deterministic backward"
    return too_large(request, 256)


def _forward_3(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, options: Options
) -> tuple[Tensor, Tensor]:
    # The default number of splits depends on the other sequences of the call; 1 makes results
    # independent of them.
    out, lse, *_ = torch.ops.flash_attn_3.fwd(
        q, k, v, num_splits=1, **_options_3(sequences, options)
    )
    return out, lse


def _backward_3(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sequences: Sequences,
    options: Options,
) -> Gradients:
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    named = _options_3(sequences, options)
    torch.ops.flash_attn_3.bwd(
        dout, q, k, v, out, lse, dq, dk, dv, deterministic=options.deterministic, **named
    )
    return dq, dk, dv


def _options_3(sequences: Sequences, options: Options) -> dict[str, Any]:
    longest = sequences.longest_q, sequences.longest_k
    shared = shared_options(sequences, options, longest, sequences.limits)
    return {
        "is_causal": sequences.causal,
        "sm_margin": SM_MARGIN if options.overlapped else 0,
        **shared,
    }


# flash-attn 2


def _missing_2() -> str | None:
    why = import_error("flash_attn.flash_attn_interface")
    if why is not None:
        return why
    version: str = import_module("flash_attn").__version__
    major, minor = version.split(".")[:2]
    if (int(major), int(minor)) >= (2, 8):
        return None
    return f"{version} is too old: install 2.8 or newer"


def _refusal_2(request: KernelRequest, capability: Capability) -> str | None:
    if capability[0] < 8:
        return f"needs Ampere or newer, not capability {capability}"
    return unequal(request) or too_large(request, 256)


def _forward_2(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, options: Options
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = import_module("flash_attn.flash_attn_interface")._flash_attn_varlen_forward(
        q, k, v, **_options_2(sequences, options)
    )
    return out, lse


def _backward_2(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sequences: Sequences,
    options: Options,
) -> Gradients:
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    named = _options_2(sequences, options)
    import_module("flash_attn.flash_attn_interface")._flash_attn_varlen_backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        dq,
        dk,
        dv,
        alibi_slopes=None,
        deterministic=options.deterministic,
        **named,
    )
    return dq, dk, dv


def _workspace_2(sizes: BackwardSizes) -> int:
    """dQ in float32, once per split of the keys if deterministic; with GQA also dK and dV per query
    head."""
    request, grouped = sizes.request, sizes.heads > sizes.kv_heads
    splits = -(-MULTIPROCESSORS // sizes.heads) if request.deterministic else 1
    per_query_head = 2 * request.dtype.itemsize * sizes.keys * sizes.heads * request.head_dim
    return splits * sizes.float32_queries + (per_query_head if grouped else 0)


def _options_2(sequences: Sequences, options: Options) -> dict[str, Any]:
    shared = shared_options(sequences, options, sequences.bounds, sequences.limits)
    return {"causal": sequences.causal, "dropout_p": 0.0, **shared}


# torch's copy of flash-attn 2


def _missing_torch() -> str | None:
    if torch.version.hip:
        return "not supported on ROCm, where torch has other operators"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch has no flash attention"
    return None


def _refusal_torch(request: KernelRequest, capability: Capability) -> str | None:
    return "does not support a soft cap" if request.softcap else _refusal_2(request, capability)


def _forward_torch(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, options: Options
) -> tuple[Tensor, Tensor]:
    left, right = sequences.limits
    longest_q, longest_k = sequences.bounds
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        sequences.edges_q,
        sequences.edges_k,
        longest_q,
        longest_k,
        dropout_p=0.0,
        is_causal=sequences.causal,
        return_debug_mask=False,
        scale=options.scale,
        window_size_left=left,
        window_size_right=right,
    )
    return out, lse


def _backward_torch(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sequences: Sequences,
    options: Options,
) -> Gradients:
    left, right = sequences.limits
    longest_q, longest_k = sequences.bounds
    with _deterministic() if options.deterministic else nullcontext():
        gradients: Gradients = torch.ops.aten._flash_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            sequences.edges_q,
            sequences.edges_k,
            longest_q,
            longest_k,
            dropout_p=0.0,
            is_causal=sequences.causal,
            rng_state=q.new_zeros(2, dtype=torch.uint64),  # of dropout, unused
            unused=q.new_empty(0),
            scale=options.scale,
            window_size_left=left,
            window_size_right=right,
        )
    return gradients


@contextmanager
def _deterministic() -> Iterator[None]:
    """Sets torch's process-wide deterministic mode, which its flash operator reads, without filling
    new memory with NaN."""
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
    Library(
        "flash-attn 4",
        missing=flash_4.missing,
        refusal=flash_4.refusal,
        forward=flash_4.forward,
        backward=flash_4.backward,
        workspace=float32_workspace,
        made_for_hopper=True,
    ),
    Library(
        "flash-attn 3",
        missing=_missing_3,
        refusal=_refusal_3,
        forward=_forward_3,
        backward=_backward_3,
        workspace=float32_workspace,
        made_for_hopper=True,
    ),
    Library(
        "flash-attn 2",
        missing=_missing_2,
        refusal=_refusal_2,
        forward=_forward_2,
        backward=_backward_2,
        workspace=_workspace_2,
    ),
    Library(
        "torch's flash operators",
        missing=_missing_torch,
        refusal=_refusal_torch,
        forward=_forward_torch,
        backward=_backward_torch,
        workspace=_workspace_2,
    ),
)

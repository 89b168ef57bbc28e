"""Functions of flash-attn 2.8.3, with its arguments in its order. What they cannot do they refuse.

q is [batch, queries, heads, width] or, of packed sequences, [tokens, heads, width]; k and v have
heads of their own number, which divides that of queries.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .attention import Rules, attend, attend_backward, computed_in

WIDEST = 256
"""Widest head that flash-attn's kernels take."""
Forward = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Output, sums (softmax_lse), and two that are of use with dropout only: weights, random state."""


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> Forward:
    """Returns the output, as `q`, and sums [batch, heads, queries]."""
    _refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes, return_softmax=return_softmax)
    _require_fitting(q, k, v, dimensions=4)
    _require_width_of_kernels(q)
    rules = Rules(
        softmax_scale,
        causal,
        left=window_size_left,
        right=window_size_right,
        softcap=softcap,
    )
    out = torch.empty_like(q)
    batch, queries, heads, _ = q.shape
    sums = torch.empty(batch, heads, queries, dtype=computed_in(q.dtype))
    for row in range(batch):
        out[row], sums[row] = attend(q[row], k[row], v[row], rules)
    return out, sums, *_without_dropout(q)


def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
    block_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> Forward:
    """Returns the output, as `q`, and sums [heads, tokens]. `zero_tensors` changes nothing: all is
    written."""
    _refuse(
        dropout_p=dropout_p,
        alibi_slopes=alibi_slopes,
        return_softmax=return_softmax,
        block_table=block_table,
        leftpad_k=leftpad_k,
        seqused_k=seqused_k,
    )
    _require_fitting(q, k, v, dimensions=3)
    _require_width_of_kernels(q)
    _require_sequences("q", len(q), cu_seqlens_q, max_seqlen_q)
    _require_sequences("k", len(k), cu_seqlens_k, max_seqlen_k)
    rules = Rules(
        softmax_scale,
        causal,
        left=window_size_left,
        right=window_size_right,
        softcap=softcap,
    )
    out = torch.empty_like(q)
    sums = torch.empty(q.shape[1], len(q), dtype=computed_in(q.dtype))
    for queries, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
        out[queries], sums[:, queries] = attend(q[queries], k[keys], v[keys], rules)
    return out, sums, *_without_dropout(q)


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """Writes gradients into `dq`, `dk` and `dv`; returns Σ dout · out, [batch, heads, queries].
    They are always deterministic."""
    _refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    _require_fitting(q, k, v, dimensions=4)
    _require_width_of_kernels(q)
    _require_like({"dout": dout, "out": out, "dq": dq}, q)
    _require_like({"dk": dk, "dv": dv}, k)
    rules = Rules(
        softmax_scale,
        causal,
        left=window_size_left,
        right=window_size_right,
        softcap=softcap,
    )
    for row in range(len(q)):
        dq[row], dk[row], dv[row] = attend_backward(
            dout[row], q[row], k[row], v[row], out[row], sums=softmax_lse[row], rules=rules
        )
    return _inner(dout, out).transpose(1, 2)


def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> torch.Tensor:
    """Writes gradients into `dq`, `dk` and `dv`; returns Σ dout · out, [heads, tokens]."""
    _refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    _require_fitting(q, k, v, dimensions=3)
    _require_width_of_kernels(q)
    _require_like({"dout": dout, "out": out, "dq": dq}, q)
    _require_like({"dk": dk, "dv": dv}, k)
    _require_sequences("q", len(q), cu_seqlens_q, max_seqlen_q)
    _require_sequences("k", len(k), cu_seqlens_k, max_seqlen_k)
    rules = Rules(
        softmax_scale,
        causal,
        left=window_size_left,
        right=window_size_right,
        softcap=softcap,
    )
    for queries, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
        dq[queries], dk[keys], dv[keys] = attend_backward(
            dout[queries],
            q[queries],
            k[keys],
            v[keys],
            out[queries],
            sums=softmax_lse[:, queries],
            rules=rules,
        )
    return _inner(dout, out).T


# As flash-attn names what its public functions call.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


class _Attention(torch.autograd.Function):
    """Attention of packed sequences of any width; returns the output and sums [heads, tokens]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        rules: Rules,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty_like(q)
        sums = torch.empty(q.shape[1], len(q), dtype=computed_in(q.dtype))
        for queries, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
            out[queries], sums[:, queries] = attend(q[queries], k[keys], v[keys], rules)
        ctx.save_for_backward(q, k, v, out, sums, cu_seqlens_q, cu_seqlens_k)
        ctx.rules = rules
        ctx.mark_non_differentiable(sums)
        return out, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, sums, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
        dq = torch.empty_like(q)
        dk = torch.empty_like(k)
        dv = torch.empty_like(v)
        for queries, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
            dq[queries], dk[keys], dv[keys] = attend_backward(
                dout[queries],
                q[queries],
                k[keys],
                v[keys],
                out[queries],
                sums=sums[:, queries],
                rules=ctx.rules,
            )
        return dq, dk, dv, None, None, None


def _attention(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns output and sums of what `_Attention.forward` takes."""
    found: tuple[torch.Tensor, torch.Tensor] = _Attention.apply(*given)  # type: ignore[no-untyped-call]  # torch's own
    return found


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """Returns the output of packed sequences, as `q`; with `return_attn_probs` also sums [heads,
    tokens] and the empty tensor that flash-attn returns without dropout."""
    _refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes, block_table=block_table)
    _require_fitting(q, k, v, dimensions=3)
    _require_sequences("q", len(q), cu_seqlens_q, max_seqlen_q)
    _require_sequences("k", len(k), cu_seqlens_k, max_seqlen_k)
    rules = _rules(q, softmax_scale, causal, window_size, softcap)
    out, sums = _attention(q, k, v, cu_seqlens_q, cu_seqlens_k, rules)
    return (out, sums, q.new_empty(0)) if return_attn_probs else out


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Returns the output, as `q`; with `return_attn_probs` also sums [batch, heads, queries] and
    the empty tensor that flash-attn returns without dropout."""
    _refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    _require_fitting(q, k, v, dimensions=4)
    rules = _rules(q, softmax_scale, causal, window_size, softcap)
    batch, queries = q.shape[:2]
    packed = (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))
    flat, sums = _attention(*packed, _equal(q), _equal(k), rules)
    out = flat.unflatten(0, (batch, queries))
    if not return_attn_probs:
        return out
    return out, sums.unflatten(1, (batch, queries)).transpose(0, 1), q.new_empty(0)


def flash_attn_qkvpacked_func(qkv: torch.Tensor, *args: Any, **named: Any) -> Any:
    """`flash_attn_func` of [batch, tokens, 3, heads, width]."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *args, **named)


def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, **named: Any) -> Any:
    """`flash_attn_func` with keys and values as [batch, keys, 2, heads, width]."""
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *args, **named)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, *args: Any, **named: Any
) -> Any:
    """`flash_attn_varlen_func` of [tokens, 3, heads, width]."""
    q, k, v = qkv.unbind(1)
    sequences = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(q, k, v, *sequences, *args, **named)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, *args: Any, **named: Any
) -> Any:
    """`flash_attn_varlen_func` with keys and values as [tokens, 2, heads, width]."""
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, *args, **named)


def flash_attn_with_kvcache(*args: Any, **named: Any) -> torch.Tensor:
    """Raises NotImplementedError: a step of training has no cache of keys."""
    raise NotImplementedError(
        "longctx-flash-attn-cpu is for training: it has no cache of keys and values"
    )


def _refuse(**given: Any) -> None:
    """Raises NotImplementedError for an argument that is used, and that changes results."""
    for name, value in given.items():
        unused = value is None or (not isinstance(value, torch.Tensor) and value == 0)
        if not unused:
            raise NotImplementedError(
                f"longctx-flash-attn-cpu has no {name}: leave it out, or install flash-attn itself"
            )


def _require_fitting(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, dimensions: int) -> None:
    """Raises ValueError for shapes and dtypes that do not fit, NotImplementedError for tensors that
    are not on the CPU."""
    for name, tensor in {"q": q, "k": k, "v": v}.items():
        if tensor.device.type != "cpu":
            raise NotImplementedError(
                f"{name} is on {tensor.device}, and longctx-flash-attn-cpu is for CPUs: uninstall "
                "it, and install flash-attn itself"
            )
        if tensor.dim() != dimensions:
            raise ValueError(f"{name} has {tensor.dim()} dimensions, not {dimensions}")
        if not tensor.is_floating_point() or tensor.dtype != q.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, and q is {q.dtype}")
    if k.shape != v.shape:
        raise ValueError(f"k is {list(k.shape)}, and v is {list(v.shape)}")
    if q.shape[-1] != k.shape[-1] or q.shape[-1] > WIDEST:
        raise ValueError(
            f"heads of queries are {q.shape[-1]} wide, of keys {k.shape[-1]}: flash-attn takes the "
            f"same width of at most {WIDEST}"
        )
    if q.shape[-2] % k.shape[-2] != 0:
        raise ValueError(f"{q.shape[-2]} heads of queries are no multiple of {k.shape[-2]} of keys")
    if dimensions == 4 and len(q) != len(k):
        raise ValueError(f"q has {len(q)} rows, and k has {len(k)}")


def _require_width_of_kernels(q: torch.Tensor) -> None:
    """Raises ValueError for a width that only flash-attn's public functions pad."""
    if q.shape[-1] % 8 != 0:
        raise ValueError(f"heads are {q.shape[-1]} wide: flash-attn's kernels take multiples of 8")


def _require_like(given: dict[str, torch.Tensor], tensor: torch.Tensor) -> None:
    """Raises ValueError for tensors of another shape or dtype than `tensor`."""
    for name, each in given.items():
        if each is None or each.shape != tensor.shape or each.dtype != tensor.dtype:
            found = "None" if each is None else f"{each.dtype} {list(each.shape)}"
            raise ValueError(f"{name} is {found}, not {tensor.dtype} {list(tensor.shape)}")


def _require_sequences(name: str, tokens: int, cu_seqlens: torch.Tensor, max_seqlen: int) -> None:
    """Raises ValueError for cumulative lengths that flash-attn refuses, or does not write all
    tokens of."""
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
        raise ValueError(f"cu_seqlens_{name} is {cu_seqlens.dtype}, not one row of int32")
    ends = cu_seqlens.tolist()
    lengths = [after - before for before, after in pairwise(ends)]
    if ends[0] != 0 or ends[-1] != tokens or any(length < 0 for length in lengths):
        raise ValueError(f"cu_seqlens_{name} is {ends}, and {name} has {tokens} tokens")
    if max(lengths, default=0) > max_seqlen:
        raise ValueError(
            f"max_seqlen_{name} is {max_seqlen}, and a sequence has {max(lengths)} tokens: "
            "flash-attn would leave the rest out"
        )


def _rules(
    q: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> Rules:
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    left, right = window_size
    return Rules(scale, causal, left=left, right=right, softcap=softcap)


def _sequences(
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor
) -> Iterator[tuple[slice, slice]]:
    """Yields the tokens of queries and of keys of each sequence."""
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise ValueError(
            f"q has {len(cu_seqlens_q) - 1} sequences, and k has {len(cu_seqlens_k) - 1}"
        )
    queries = pairwise(cu_seqlens_q.tolist())
    keys = pairwise(cu_seqlens_k.tolist())
    for (first, last), (first_key, last_key) in zip(queries, keys, strict=True):
        yield slice(first, last), slice(first_key, last_key)


def _equal(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the cumulative lengths of rows of one length."""
    rows, length = tensor.shape[:2]
    return torch.arange(rows + 1, dtype=torch.int32) * length


def _inner(dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Returns Σ dout · out of every token and head."""
    dtype = computed_in(out.dtype)
    return (dout.to(dtype) * out.to(dtype)).sum(-1)


def _without_dropout(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what flash-attn has for weights and its random state."""
    return q.new_empty(0), torch.zeros(2, dtype=torch.int64)

"""Fakes of the flash libraries on the CPU: the functions that the flash kernel calls, with their real names, arguments, layouts
and pitfalls, computed by the reference kernel.

They are at least as strict as the libraries: rows without keys or queries are NaN, as the libraries differ in them.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from longctx.attention.kernels import Options, flash_4, reference
from longctx.attention.segments import Segment

Tensor = torch.Tensor

deterministic_calls: list[tuple[str, bool]] = []
"""Library of every backward call, and whether it was to be deterministic."""

margins: list[int] = []
"""sm_margin of every call of flash-attn 3."""

FLASH_3 = """fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? v_new=None, Tensor? q_v=None, Tensor? out=None,
    Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None,
    Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor? page_table=None, Tensor? kv_batch_idx=None,
    Tensor? leftpad_k=None, Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None,
    Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False,
    int window_size_left=-1, int window_size_right=-1, int attention_chunk=0, float softcap=0.0,
    bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0
    ) -> (Tensor, Tensor, Tensor, Tensor)
bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, Tensor(dk!)? dk=None,
    Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None,
    int? max_seqlen_q=None, int? max_seqlen_k=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1,
    int window_size_right=-1, float softcap=0.0, bool deterministic=False, int sm_margin=0
    ) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"""
"""The operators that flash-attn 3 registers (schemas are its interface)."""


class Sequences:
    """Does the checks of every library, and computes the keys that the queries of each sequence see."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, edges_q: Any, edges_k: Any, most_q: Any, most_k: Any) -> None:
        for x in (q, k, v):
            assert x.dim() == 3 and x.stride(-1) == 1
        assert q.shape[1] % k.shape[1] == 0 and k.shape[:2] == v.shape[:2] and q.shape[2] == k.shape[2]
        for edges, rows in ((edges_q, len(q)), (edges_k, len(k))):
            assert edges.dtype == torch.int32 and edges.is_contiguous() and edges.dim() == 1
            assert edges[0] == 0 and edges[-1] == rows and (edges.diff() >= 0).all()
        assert len(edges_q) == len(edges_k) > 1
        assert isinstance(most_q, int) and isinstance(most_k, int)
        assert edges_q.diff().max() <= most_q and edges_k.diff().max() <= most_k
        self.q = list(zip(edges_q[:-1].tolist(), edges_q[1:].tolist(), strict=True))
        self.k = list(zip(edges_k[:-1].tolist(), edges_k[1:].tolist(), strict=True))

    def segments(self, left: int | None, right: int | None) -> list[Segment]:
        """Bottom-right alignment: query i of m is aligned with key i + n - m of n."""
        made = []
        for (q0, q1), (k0, k1) in zip(self.q, self.k, strict=True):
            shift = (k1 - k0) - (q1 - q0)
            if q1 > q0 and k1 > k0:
                lo, hi = None if left is None else shift - left, None if right is None else shift + right
                made.append(Segment(q0, q1, k0, k1, lo, hi))
        return made

    def lonely(self) -> tuple[list[int], list[int]]:
        """Queries of sequences without keys, and keys of sequences without queries."""
        queries = [row for (q0, q1), (k0, k1) in zip(self.q, self.k, strict=True) if k0 == k1 for row in range(q0, q1)]
        keys = [row for (q0, q1), (k0, k1) in zip(self.q, self.k, strict=True) if q0 == q1 for row in range(k0, k1)]
        return queries, keys


def attend(sequences: Sequences, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, window: Any) -> Any:
    out, lse = reference.forward(q, k, v, sequences.segments(*window), Options(scale, softcap))
    queries, _ = sequences.lonely()
    out[queries], lse[queries] = float("nan"), float("inf")
    return out, lse.T.contiguous()


def differentiate(
    sequences: Sequences, tensors: tuple[Tensor, ...], scale: float, softcap: float, window: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, out, lse = tensors
    assert dout.stride(-1) == 1 and out.stride(-1) == 1 and dout.shape == out.shape == (*q.shape[:2], v.shape[2])
    assert lse.shape == (q.shape[1], len(q)) and lse.is_contiguous() and lse.dtype == torch.float32
    dq, dk, dv = reference.backward(dout, q, k, v, out, lse.T, sequences.segments(*window), Options(scale, softcap))
    queries, keys = sequences.lonely()
    dq[queries], dk[keys], dv[keys] = float("nan"), float("nan"), float("nan")
    return dq, dk, dv


# flash-attn 4


def _flash_4() -> ModuleType:
    calls: list[str] = []

    def window(causal: bool, left: int | None, right: int | None) -> tuple[int | None, int | None]:
        for side in (left, right):
            assert side is None or side >= 0, "flash-attn 4 does not support -1 for one side"
        return left, 0 if causal else right

    def _flash_attn_fwd(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qv: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        min_seqlen_k: int | None = None,
        page_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        softcap: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        *,
        return_lse: bool = False,
        num_splits: int = 1,
    ) -> Any:
        calls.append("forward")
        sequences = Sequences(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        assert softmax_scale is not None and return_lse
        seen = window(causal, window_size_left, window_size_right)
        return (*attend(sequences, q, k, v, softmax_scale, softcap or 0.0, seen), None, None, None)

    def _flash_attn_bwd(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        dout: Tensor,
        lse: Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        softcap: float = 0.0,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        *,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        deterministic: bool = False,
    ) -> Any:
        calls.append("backward")
        assert softmax_scale is not None
        deterministic_calls.append(("flash-attn 4", deterministic))
        sequences = Sequences(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        seen = window(causal, window_size_left, window_size_right)
        return differentiate(sequences, (dout, q, k, v, out, lse), softmax_scale, softcap, seen)

    module = ModuleType("flash_attn.cute.interface")
    vars(module).update(_flash_attn_fwd=_flash_attn_fwd, _flash_attn_bwd=_flash_attn_bwd, calls=calls)
    return module


# flash-attn 3


def _limits(left: int, right: int) -> tuple[int | None, int | None]:
    return None if left < 0 else left, None if right < 0 else right


def _window_3(is_causal: bool, left: int, right: int, max_seqlen_q: int, max_seqlen_k: int) -> tuple[int | None, int | None]:
    left = -1 if left >= max_seqlen_k - 1 else left
    right = -1 if right >= max_seqlen_q - 1 else right
    return _limits(left, 0 if is_causal else right)


def _given(schema: Any, first: int, arguments: tuple[Any, ...]) -> SimpleNamespace:
    """Returns the arguments of an operator from number `first` on by name; torch leaves out trailing defaults."""
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    return SimpleNamespace(**defaults | dict(zip(list(defaults)[first:], arguments, strict=False)))


def _forward_3(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    given = _given(torch.ops.flash_attn_3.fwd.default._schema, 3, arguments)
    sequences = Sequences(q, k, v, given.cu_seqlens_q, given.cu_seqlens_k, given.max_seqlen_q, given.max_seqlen_k)
    assert given.num_splits == 1
    margins.append(given.sm_margin)
    limits = given.is_causal, given.window_size_left, given.window_size_right
    window = _window_3(*limits, given.max_seqlen_q, given.max_seqlen_k)
    out, lse = attend(sequences, q, k, v, given.softmax_scale, given.softcap, window)
    return out, lse, q.new_empty(0), q.new_empty(0)


def _backward_3(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    given = _given(torch.ops.flash_attn_3.bwd.default._schema, 6, arguments)
    sequences = Sequences(q, k, v, given.cu_seqlens_q, given.cu_seqlens_k, given.max_seqlen_q, given.max_seqlen_k)
    deterministic_calls.append(("flash-attn 3", given.deterministic))
    margins.append(given.sm_margin)
    limits = given.is_causal, given.window_size_left, given.window_size_right
    window = _window_3(*limits, given.max_seqlen_q, given.max_seqlen_k)
    gradients = differentiate(sequences, (dout, q, k, v, out, lse), given.softmax_scale, given.softcap, window)
    for into, gradient in zip((given.dq, given.dk, given.dv), gradients, strict=True):
        into.copy_(gradient)
    return tuple(q.new_empty(0) for _ in range(5))


# flash-attn 2 and torch's copy of it


def _check_2(sequences: Sequences, q: Tensor, k: Tensor, v: Tensor, window: Any, most_q: int) -> None:
    assert k.shape[2] == v.shape[2], "flash-attn 2 supports one head size only"
    if most_q == 1 and q.shape[1] > k.shape[1] and window == (None, None):
        q.reshape(len(sequences.q), -1, *q.shape[2:])  # treated as decoding: one query per sequence
        raise AssertionError("the log-sum-exp comes in another layout then")


def _window_2(causal: bool, left: int, right: int, most_k: int) -> tuple[int | None, int | None]:
    right = 0 if causal else right
    left = -1 if left >= most_k else left
    right = -1 if right >= most_k else right
    if left < 0 <= right != 0:
        left = most_k
    if right < 0 <= left:
        right = most_k
    return _limits(left, right)


def _flash_2() -> ModuleType:
    def _flash_attn_varlen_forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        return_softmax: bool = False,
        block_table: Tensor | None = None,
        leftpad_k: Tensor | None = None,
        seqused_k: Tensor | None = None,
        zero_tensors: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sequences = Sequences(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        window = _window_2(causal, window_size_left, window_size_right, max_seqlen_k)
        _check_2(sequences, q, k, v, window, max_seqlen_q)
        assert dropout_p == 0.0
        return (*attend(sequences, q, k, v, softmax_scale, softcap, window), q.new_empty(0), q.new_empty(0))

    def _flash_attn_varlen_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor | None,
        dk: Tensor | None,
        dv: Tensor | None,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        rng_state: Tensor | None = None,
        zero_tensors: bool = False,
    ) -> Tensor:
        sequences = Sequences(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        window = _window_2(causal, window_size_left, window_size_right, max_seqlen_k)
        assert dropout_p == 0.0 and dq is not None and dk is not None and dv is not None
        deterministic_calls.append(("flash-attn 2", deterministic))
        gradients = differentiate(sequences, (dout, q, k, v, out, softmax_lse), softmax_scale, softcap, window)
        for into, gradient in zip((dq, dk, dv), gradients, strict=True):
            into.copy_(gradient)
        return q.new_empty(0)

    module = ModuleType("flash_attn.flash_attn_interface")
    vars(module).update(
        _flash_attn_varlen_forward=_flash_attn_varlen_forward, _flash_attn_varlen_backward=_flash_attn_varlen_backward
    )
    return module


def _forward_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    edges_q: Tensor,
    edges_k: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, ...]:
    sequences = Sequences(q, k, v, edges_q, edges_k, max_q, max_k)
    window = _window_2(is_causal, window_size_left, window_size_right, max_k)
    _check_2(sequences, q, k, v, window, max_q)
    assert dropout == 0.0 and not return_debug_mask
    return (*attend(sequences, q, k, v, scale, 0.0, window), *(q.new_empty(0) for _ in range(3)))


def _backward_torch(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    edges_q: Tensor,
    edges_k: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    sequences = Sequences(q, k, v, edges_q, edges_k, max_q, max_k)
    window = _window_2(is_causal, window_size_left, window_size_right, max_k)
    assert dropout == 0.0 and rng_state.dtype == torch.uint64
    asked = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic_calls.append(("torch's flash operators", asked))
    return differentiate(sequences, (dout, q, k, v, out, lse), scale, 0.0, window)


@contextmanager
def installed() -> Iterator[None]:
    """Makes all libraries appear installed, for tensors on the CPU."""
    package = ModuleType("flash_attn")
    vars(package)["__version__"] = "2.8.3"
    modules = {
        "flash_attn": package,
        "flash_attn.cute.interface": _flash_4(),
        "flash_attn_interface": ModuleType("flash_attn_interface"),
        "flash_attn.flash_attn_interface": _flash_2(),
    }
    flash_3 = torch.library.Library("flash_attn_3", "DEF")
    for schema in FLASH_3.split("\nbwd"):
        flash_3.define(" ".join((schema if schema.startswith("fwd") else f"bwd{schema}").split()))
    flash_3.impl("fwd", _forward_3, "CPU")
    flash_3.impl("bwd", _backward_3, "CPU")
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("_flash_attention_forward", _forward_torch, "CPU")
    aten.impl("_flash_attention_backward", _backward_torch, "CPU")
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        with mock.patch.object(flash_4, "version", {"flash-attn-4": flash_4.TESTED}.__getitem__):
            yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
        flash_3._destroy()
        aten._destroy()

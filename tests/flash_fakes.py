"""Fakes of the flash libraries on the CPU: the functions that the flash kernel calls, with their
real names, arguments, layouts and pitfalls, computed by the reference kernel.

They are at least as strict as the libraries: rows without keys or queries are NaN, as the libraries
differ in them.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
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

FLASH_4 = {
    "_flash_attn_fwd": """q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
        max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False,
        softcap=None, window_size_left=None, window_size_right=None, *, return_lse=False, num_splits=1""",
    "_flash_attn_bwd": """q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, *, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
        max_seqlen_k=None, deterministic=False""",
}
FLASH_2 = {
    "_flash_attn_varlen_forward": """q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False""",
    "_flash_attn_varlen_backward": """dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        deterministic, rng_state=None, zero_tensors=False""",
}
"""The functions that these packages have, with the names and order of their arguments."""

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
    """Does the checks of every library, and computes the keys that the queries of each sequence
    see."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, edges_q: Any, edges_k: Any, most_q: Any, most_k: Any
    ) -> None:
        for x in (q, k, v):
            assert x.dim() == 3 and x.stride(-1) == 1
        assert (
            q.shape[1] % k.shape[1] == 0 and k.shape[:2] == v.shape[:2] and q.shape[2] == k.shape[2]
        )
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
                lo, hi = (
                    None if left is None else shift - left,
                    None if right is None else shift + right,
                )
                made.append(Segment(q0, q1, k0, k1, lo, hi))
        return made

    def lonely(self) -> tuple[list[int], list[int]]:
        """Queries of sequences without keys, and keys of sequences without queries."""
        queries = [
            row
            for (q0, q1), (k0, k1) in zip(self.q, self.k, strict=True)
            if k0 == k1
            for row in range(q0, q1)
        ]
        keys = [
            row
            for (q0, q1), (k0, k1) in zip(self.q, self.k, strict=True)
            if q0 == q1
            for row in range(k0, k1)
        ]
        return queries, keys


def attend(
    sequences: Sequences, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, window: Any
) -> Any:
    out, lse = reference.forward(q, k, v, sequences.segments(*window), Options(scale, softcap))
    queries, _ = sequences.lonely()
    out[queries], lse[queries] = float("nan"), float("inf")
    return out, lse.T.contiguous()


def differentiate(
    sequences: Sequences, tensors: tuple[Tensor, ...], scale: float, softcap: float, window: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, out, lse = tensors
    assert (
        dout.stride(-1) == 1
        and out.stride(-1) == 1
        and dout.shape == out.shape == (*q.shape[:2], v.shape[2])
    )
    assert lse.shape == (q.shape[1], len(q)) and lse.is_contiguous() and lse.dtype == torch.float32
    dq, dk, dv = reference.backward(
        dout, q, k, v, out, lse.T, sequences.segments(*window), Options(scale, softcap)
    )
    queries, keys = sequences.lonely()
    dq[queries], dk[keys], dv[keys] = float("nan"), float("nan"), float("nan")
    return dq, dk, dv


def function(name: str, arguments: str, compute: Callable[[SimpleNamespace], Any]) -> Any:
    """A function with this name and these arguments, which calls `compute` with all of them,
    defaults included."""
    signature = inspect.signature(eval(f"(lambda {arguments}: None)"))

    def called(*values: Any, **named: Any) -> Any:
        bound = signature.bind(*values, **named)
        bound.apply_defaults()
        return compute(SimpleNamespace(**bound.arguments))

    vars(called).update(__name__=name, __signature__=signature)
    return called


def sequences_of(passed: SimpleNamespace) -> Sequences:
    edges = passed.cu_seqlens_q, passed.cu_seqlens_k
    return Sequences(passed.q, passed.k, passed.v, *edges, passed.max_seqlen_q, passed.max_seqlen_k)


def copied(passed: SimpleNamespace, gradients: tuple[Tensor, ...]) -> None:
    for into, gradient in zip((passed.dq, passed.dk, passed.dv), gradients, strict=True):
        into.copy_(gradient)


# flash-attn 4


def _window_4(passed: SimpleNamespace) -> tuple[int | None, int | None]:
    for side in (passed.window_size_left, passed.window_size_right):
        assert side is None or side >= 0, "flash-attn 4 does not support -1 for one side"
    assert passed.softmax_scale is not None
    return passed.window_size_left, 0 if passed.causal else passed.window_size_right


def _forward_4(passed: SimpleNamespace) -> Any:
    assert passed.return_lse
    tensors = passed.q, passed.k, passed.v
    attended = attend(
        sequences_of(passed),
        *tensors,
        passed.softmax_scale,
        passed.softcap or 0.0,
        _window_4(passed),
    )
    return (*attended, None, None, None)


def _backward_4(passed: SimpleNamespace) -> Any:
    deterministic_calls.append(("flash-attn 4", passed.deterministic))
    tensors = passed.dout, passed.q, passed.k, passed.v, passed.out, passed.lse
    return differentiate(
        sequences_of(passed), tensors, passed.softmax_scale, passed.softcap, _window_4(passed)
    )


# flash-attn 3


def _limits(left: int, right: int) -> tuple[int | None, int | None]:
    return None if left < 0 else left, None if right < 0 else right


def _window_3(passed: SimpleNamespace) -> tuple[int | None, int | None]:
    left = -1 if passed.window_size_left >= passed.max_seqlen_k - 1 else passed.window_size_left
    right = -1 if passed.window_size_right >= passed.max_seqlen_q - 1 else passed.window_size_right
    return _limits(left, 0 if passed.is_causal else right)


def _arguments_3(operator: Any, values: tuple[Any, ...]) -> SimpleNamespace:
    """Returns the arguments of an operator by name; torch leaves out trailing defaults."""
    defaults = {
        argument.name: argument.default_value for argument in operator.default._schema.arguments
    }
    passed = SimpleNamespace(**defaults | dict(zip(defaults, values, strict=False)))
    margins.append(passed.sm_margin)
    return passed


def _forward_3(*values: Any) -> tuple[Tensor, ...]:
    passed = _arguments_3(torch.ops.flash_attn_3.fwd, values)
    assert passed.num_splits == 1
    tensors = passed.q, passed.k, passed.v
    out, lse = attend(
        sequences_of(passed), *tensors, passed.softmax_scale, passed.softcap, _window_3(passed)
    )
    return out, lse, out.new_empty(0), out.new_empty(0)


def _backward_3(*values: Any) -> tuple[Tensor, ...]:
    passed = _arguments_3(torch.ops.flash_attn_3.bwd, values)
    deterministic_calls.append(("flash-attn 3", passed.deterministic))
    tensors = passed.dout, passed.q, passed.k, passed.v, passed.out, passed.softmax_lse
    copied(
        passed,
        differentiate(
            sequences_of(passed), tensors, passed.softmax_scale, passed.softcap, _window_3(passed)
        ),
    )
    return tuple(passed.q.new_empty(0) for _ in range(5))


# flash-attn 2 and torch's copy of it


def _check_2(
    sequences: Sequences, q: Tensor, k: Tensor, v: Tensor, window: Any, most_q: int
) -> None:
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


def _forward_2(passed: SimpleNamespace) -> tuple[Tensor, ...]:
    sequences = sequences_of(passed)
    window = _window_2(
        passed.causal, passed.window_size_left, passed.window_size_right, passed.max_seqlen_k
    )
    _check_2(sequences, passed.q, passed.k, passed.v, window, passed.max_seqlen_q)
    assert passed.dropout_p == 0.0
    out, lse = attend(
        sequences, passed.q, passed.k, passed.v, passed.softmax_scale, passed.softcap, window
    )
    return out, lse, out.new_empty(0), out.new_empty(0)


def _backward_2(passed: SimpleNamespace) -> Tensor:
    window = _window_2(
        passed.causal, passed.window_size_left, passed.window_size_right, passed.max_seqlen_k
    )
    assert passed.dropout_p == 0.0
    deterministic_calls.append(("flash-attn 2", passed.deterministic))
    tensors = passed.dout, passed.q, passed.k, passed.v, passed.out, passed.softmax_lse
    copied(
        passed,
        differentiate(sequences_of(passed), tensors, passed.softmax_scale, passed.softcap, window),
    )
    return passed.q.new_empty(0)


def _forward_torch(
    *values: Any, scale: float, window_size_left: int, window_size_right: int
) -> tuple[Tensor, ...]:
    q, k, v, *edges, dropout, is_causal, return_debug_mask = values
    sequences = Sequences(q, k, v, *edges)
    window = _window_2(is_causal, window_size_left, window_size_right, edges[3])
    _check_2(sequences, q, k, v, window, edges[2])
    assert dropout == 0.0 and not return_debug_mask
    return (*attend(sequences, q, k, v, scale, 0.0, window), *(q.new_empty(0) for _ in range(3)))


def _backward_torch(
    *values: Any, scale: float, window_size_left: int, window_size_right: int
) -> tuple[Tensor, ...]:
    dout, q, k, v, out, lse, *edges, dropout, is_causal, rng_state, _ = values
    window = _window_2(is_causal, window_size_left, window_size_right, edges[3])
    assert dropout == 0.0 and rng_state.dtype == torch.uint64
    asked = (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    deterministic_calls.append(("torch's flash operators", asked))
    return differentiate(Sequences(q, k, v, *edges), (dout, q, k, v, out, lse), scale, 0.0, window)


def module_of(
    name: str, functions: dict[str, str], *computations: Callable[[SimpleNamespace], Any]
) -> ModuleType:
    made = ModuleType(name)
    for (called, arguments), compute in zip(functions.items(), computations, strict=True):
        setattr(made, called, function(called, arguments, compute))
    return made


@contextmanager
def installed() -> Iterator[None]:
    """Makes all libraries appear installed, for tensors on the CPU."""
    package = ModuleType("flash_attn")
    vars(package)["__version__"] = "2.8.3"
    modules = {
        "flash_attn": package,
        "flash_attn.cute.interface": module_of(
            "flash_attn.cute.interface", FLASH_4, _forward_4, _backward_4
        ),
        "flash_attn_interface": ModuleType("flash_attn_interface"),
        "flash_attn.flash_attn_interface": module_of(
            "flash_attn.flash_attn_interface", FLASH_2, _forward_2, _backward_2
        ),
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

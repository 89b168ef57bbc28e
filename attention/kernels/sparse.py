"""Sparse kernels: those of other packages that read only the keys that were selected for each
query, on NVIDIA GPUs.

They compute latent attention in its absorbed form (DeepSeek V2, §2.1.2): each key is the latent and
the rotary key of a token, which all heads share, and its value is the latent. A package is used if
both its functions take what `FORWARD` and `BACKWARD` name, where `kv` are [keys, 1, latent +
rotary], `indices` int32 [queries, 1, most] are rows of them, below 0: none, and lse is in base 2.
"""

import inspect
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx.attention.kernels.contract import Gradients, Options
from longctx.attention.segments import Segment, Segments

log = logging.getLogger(__name__)

DEVICE = "cuda"
DTYPE = torch.bfloat16
LATENT, ROTARY = 512, 64
"""Sizes of a latent and of a rotary key that the packages have kernels for."""
HEADS_AT_ONCE = 64
"""More heads must be a multiple of it."""
FORWARD = ("q", "kv", "indices", "sm_scale", "d_v")
BACKWARD = ("q", "kv", "o", "do", "indices", "lse", "sm_scale")
_MEGATRON = "megatron.core.transformer.experimental_attention_variant.ops.tilelang_sparse_mla"
PACKAGES = (
    (f"{_MEGATRON}_fwd.sparse_mla_fwd_interface", f"{_MEGATRON}_bwd.sparse_mla_bwd"),
    ("flash_mla.flash_mla_sparse_fwd", "flash_mla.flash_mla_sparse_bwd"),
)
"""Forward and backward of TileLang's kernels in Megatron Core, and of FlashMLA, which has no
backward yet."""
READY = "HAVE_TILELANG"
"""What a module of Megatron says of a package that its functions need."""


class SparseFunctions(NamedTuple):
    """Forward and backward of a package."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


@cache
def sparse_functions() -> SparseFunctions | None:
    """Returns those of the first package that can be used; None if there is none. What is installed
    and cannot be used is logged once, with the reason."""
    for names in PACKAGES:
        try:
            forward = _function(names[0], takes=FORWARD)
            backward = _function(names[1], takes=BACKWARD)
        except _Unusable as error:
            log.warning("no sparse attention by %s", error)
            continue
        if forward is not None and backward is not None:
            log.info("sparse attention by %s", names[0])
            return SparseFunctions(forward, backward)
    return None


class _Unusable(Exception):
    """A function of an installed package that is not as it must be."""


def _function(name: str, takes: tuple[str, ...]) -> Callable[..., Any] | None:
    """Returns a function of a package; None if the package is not installed. Raises _Unusable."""
    module_name, _, function_name = name.rpartition(".")
    try:
        module: Any = import_module(module_name)
    except ImportError:
        return None
    if not getattr(module, READY, True):
        raise _Unusable(f"{name}: {READY} is false, install tilelang")
    function: Callable[..., Any] | None = getattr(module, function_name, None)
    if function is None:
        raise _Unusable(f"{name}: {module_name} has no such function")
    found = list(inspect.signature(function).parameters)
    if not set(takes) <= set(found):
        raise _Unusable(f"{name}: it takes {', '.join(found)}, not {', '.join(takes)}")
    return function


def usable(q: Tensor, first: Tensor, second: Tensor, *, deterministic: bool) -> bool:
    """Returns whether a package can attend from queries [tokens, heads, ..] to latents `first` and
    rotary keys `second` [tokens, ..]. Its backward adds up in any order, so not repeatably."""
    heads = q.shape[1]
    sizes = first.shape[1], second.shape[1]
    fits = heads <= HEADS_AT_ONCE or heads % HEADS_AT_ONCE == 0
    kind = q.device.type, first.dtype
    if deterministic or not fits or sizes != (LATENT, ROTARY) or kind != (DEVICE, DTYPE):
        return False
    return sparse_functions() is not None


@dataclass(frozen=True)
class SparseKernel:
    """Both passes of `contract` for one call by the functions of a package, of one KV head whose
    values are the first columns of its keys; all gradients of keys and values are those of keys.

    Attributes:
        functions: of the package.
        selected, positions, longest, has_selection: as in `SelectedKernel`, no position twice. The
            keys of other segments' queries are at most as many as are selected: they see all.
    """

    functions: SparseFunctions
    selected: Tensor
    positions: Tensor
    longest: int
    has_selection: Callable[[Segment], bool]

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        segments: Segments,
        options: Options,
    ) -> tuple[Tensor, Tensor]:
        """Implements `contract`; queries that see no key of the call get the lowest lse."""
        rows, heads, _ = q.shape
        lse = q.new_full((rows, heads), float("-inf"), dtype=_wide(q))
        if not segments:
            return q.new_zeros(rows, heads, v.shape[2]), lse
        indices = self._indices(rows, segments)
        out, *_, log2 = self.functions.forward(
            q=q.contiguous(),
            kv=k.contiguous(),
            indices=indices,
            sm_scale=options.scale,
            d_v=v.shape[2],
        )
        for segment in segments:
            lse[segment.queries] = torch.finfo(lse.dtype).min / 2
        sees = _sees(indices)
        out = out.masked_fill(~sees.unsqueeze(-1), 0)
        return out, torch.where(sees, log2.to(lse.dtype) * math.log(2), lse)

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
    ) -> Gradients:
        """Implements `contract`."""
        if not segments:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        indices = self._indices(len(q), segments)
        sees = _sees(indices)
        log2 = lse / math.log(2)
        dq, dk = self.functions.backward(
            q=q.contiguous(),
            kv=k.contiguous(),
            o=out.contiguous(),
            do=dout.masked_fill(~sees.unsqueeze(-1), 0),
            indices=indices,
            lse=log2.masked_fill(~sees, 0),
            sm_scale=options.scale,
        )
        return dq, dk, torch.zeros_like(v)

    def _indices(self, rows: int, segments: Segments) -> Tensor:
        """Returns the rows of the keys that each query sees, int32 [queries, 1, most]; -1: none."""
        most = self.selected.shape[1]
        device = self.selected.device
        indices = self.selected.new_full((rows, 1, most), -1)
        everything = torch.arange(most, device=device).unsqueeze(0)
        for segment in segments:
            # One more place is that of what is no position.
            row_of = self.selected.new_full((max(most, self.longest) + 1,), -1)
            keys = torch.arange(segment.k_start, segment.k_stop, device=device)
            row_of[self.positions[segment.keys]] = keys.to(row_of.dtype)
            wanted = everything
            if self.has_selection(segment):
                wanted = self.selected[segment.queries].long().clamp(min=-1)
            found = row_of[wanted]
            queries = torch.arange(segment.q_stop - segment.q_start, device=device)
            ahead = found - segment.k_start - queries.unsqueeze(1)
            hidden = found < 0
            if segment.lo is not None:
                hidden = hidden | (ahead < segment.lo)
            if segment.hi is not None:
                hidden = hidden | (ahead > segment.hi)
            found = found.expand_as(hidden)
            indices[segment.queries, 0] = found.masked_fill(hidden, -1)
        return indices


def _sees(indices: Tensor) -> Tensor:
    """Returns whether each query sees a key [queries, 1]."""
    return (indices >= 0).any(-1)


def _wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)

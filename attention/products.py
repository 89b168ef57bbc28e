"""Products: matrix products whose outputs recomputation takes from forward, without torch's Python
modes.

Recomputation must save the tensors that forward saved, which torch's own product does only by
running. These save them in functions of autograd, whose gradients are torch's own, bit by bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from longctx.attention import keeping


@dataclass(frozen=True)
class Products:
    """How a module multiplies.

    Attributes:
        linear: as `torch.nn.functional.linear`.
        grouped: as `torch.nn.functional.grouped_mm` of rows [rows, n], matrices [groups, n, m] and
            the ends of the groups' rows.
    """

    linear: Callable[..., Tensor]
    grouped: Callable[[Tensor, Tensor, Tensor], Tensor]


def _plain_grouped(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    out: Tensor = F.grouped_mm(rows, matrices, offs=ends)
    return out


def _is_torchs(x: Tensor) -> bool:
    """Returns whether torch computes a product of `x` itself, also when it is recomputed: in
    compiled blocks, under autocast, which casts, and of a vector."""
    return torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type) or x.dim() < 2


def _kept_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if _is_torchs(x) or not keeping.keeps_product():
        return F.linear(x, weight, bias)
    out: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]  # torch's own
    return out


def _kept_grouped(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    if _is_torchs(rows) or not keeping.keeps_product():
        return _plain_grouped(rows, matrices, ends)
    out: Tensor = _Grouped.apply(rows, matrices, ends)  # type: ignore[no-untyped-call]  # torch's own
    return out


PLAIN = Products(F.linear, _plain_grouped)
KEPT = Products(_kept_linear, _kept_grouped)


class _Linear(torch.autograd.Function):
    """x · Wᵀ + b of x [.., in], W [out, in] and b [out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        saved_x, saved_weight = _needed(ctx, x, weight)
        ctx.save_for_backward(saved_x, saved_weight)
        return keeping.run(lambda: F.linear(x, weight, bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = _as_rows(dout)
        dx = dweight = dbias = None
        if weight is not None:
            dx = rows @ weight
            if dout.dim() > 2:
                dx = dx.unflatten(0, dout.shape[:-1])
        if x is not None:
            dweight = rows.mT @ _as_rows(x)
        if ctx.needs_input_grad[2]:
            dbias = rows.sum(0)
        return dx, dweight, dbias


class _Grouped(torch.autograd.Function):
    """The products of groups of rows by their matrices."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
        saved_rows, saved_matrices = _needed(ctx, rows, matrices)
        ctx.save_for_backward(saved_rows, saved_matrices, ends)
        return keeping.run(lambda: _plain_grouped(rows, matrices, ends))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        rows, matrices, ends = ctx.saved_tensors
        drows = dmatrices = None
        if matrices is not None:
            drows = _plain_grouped(dout, matrices.mT, ends)
        if rows is not None:
            dmatrices = _plain_grouped(dout.mT, rows, ends).mT
        return drows, dmatrices, None


def _needed(ctx: Any, left: Tensor, right: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Returns what the gradients of a product need: each factor for that of the other."""
    left_needs, right_needs, _ = ctx.needs_input_grad
    saved_left = saved_right = None
    if right_needs:
        saved_left = left
    if left_needs:
        saved_right = right
    return saved_left, saved_right


def _as_rows(x: Tensor) -> Tensor:
    """Returns x [.., n] as [rows, n]; a DTensor of rows stays as it is split."""
    if x.dim() == 2:
        return x
    return x.flatten(0, -2)

"""Differentiable all-to-all of rows; torch's own differentiable forms are deprecated or not in
torch 2.11."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def exchange_rows(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Sends the first `sent[0]` of the rows [rows, ..] to the first rank, and so on. Returns those
    that arrive, in rank order.

    Collective; its gradients travel back. `received` are the numbers of rows from each rank.
    """
    arrived: torch.Tensor = _AllToAll.apply(rows, list(sent), list(received), group)  # type: ignore[no-untyped-call]  # torch's is untyped
    return arrived


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.given = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        sent, received, group = ctx.given
        return _all_to_all(gradient, received, sent, group), None, None, None


def _all_to_all(
    rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived

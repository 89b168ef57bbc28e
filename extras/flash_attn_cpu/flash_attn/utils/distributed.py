"""Collectives with a backward pass, as flash-attn's module of this name."""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable


class AllGatherFunc(torch.autograd.Function):
    """Joins the first dimension of all ranks; its gradient is summed over ranks and split."""

    @staticmethod
    def forward(
        ctx: Any, input_: torch.Tensor, process_group: dist.ProcessGroup | None
    ) -> torch.Tensor:
        ctx.group = process_group
        ranks = dist.get_world_size(process_group)
        joined = input_.new_empty(ranks * input_.shape[0], *input_.shape[1:])
        dist.all_gather_into_tensor(joined, input_.contiguous(), group=process_group)
        return joined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ranks = dist.get_world_size(ctx.group)
        mine = gradient.new_empty(gradient.shape[0] // ranks, *gradient.shape[1:])
        dist.reduce_scatter_tensor(mine, gradient.contiguous(), group=ctx.group)
        return mine, None


all_gather = AllGatherFunc.apply

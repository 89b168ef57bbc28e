"""Gradient norm over all processes, and clipping by it."""

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None, norm: float) -> None:
    """Scales all gradients, whose norm is `norm`, so that it is at most `max_norm` (None: no scaling)."""
    if max_norm is not None and norm > max_norm:
        torch._foreach_mul_([_local(each.grad) for each in parameters if each.grad is not None], max_norm / norm)


@torch.no_grad()
def sum_of_squares(tensors: Iterable[torch.Tensor]) -> float:
    """Returns the sum of squares of this process's parts of tensors sharded over all processes; replicas count once."""
    counted = [_local(tensor) for tensor in tensors if _is_first_copy(tensor)]
    # In float32 a CPU sums naively: over 10⁸ numbers the norm would be 2 % too small.
    squares = torch.stack(torch._foreach_norm(counted, dtype=torch.float64)).square().sum() if counted else torch.zeros(())
    return float(squares)


def norm_of(sums: torch.Tensor) -> float:
    """Returns the norm of tensors from the sums of squares of all processes, in their order: the same on each, bit by bit.

    Norm and factor must be, so that replicas of a weight stay equal.
    """
    return math.sqrt(math.fsum(sums.flatten().tolist()))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_first_copy(gradient: torch.Tensor) -> bool:
    """Returns True if this rank is the first of the ranks that hold this part of a gradient."""
    if not isinstance(gradient, DTensor):
        return True
    coordinate = gradient.device_mesh.get_coordinate()
    assert coordinate is not None
    return not any(place for place, placement in zip(coordinate, gradient.placements, strict=True) if placement.is_replicate())

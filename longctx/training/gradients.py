"""Gradient norm over all processes, and clipping by it."""

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from longctx.parallel.mesh import Mesh


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter], max_norm: float | None, mesh: Mesh, copy: nn.Parameter | None = None
) -> float:
    """Scales all gradients so that their norm is at most `max_norm` (None: no scaling). Returns the norm before scaling.

    `copy` is a parameter that another rank counts: a tied embedding on the last stage of a pipeline.

    Collective over all processes, each with its part of the model; replicas count once. Squares are summed in float64 in the
    order of the processes, so that norm and factor are bit-identical on all of them, and replicas of a weight stay equal.
    """
    gradients = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    norm = norm_over_mesh((gradient for parameter, gradient in gradients if parameter is not copy), mesh)
    if max_norm is not None and norm > max_norm:
        torch._foreach_mul_([_local(gradient) for _, gradient in gradients], max_norm / norm)
    return norm


@torch.no_grad()
def norm_over_mesh(tensors: Iterable[torch.Tensor], mesh: Mesh) -> float:
    """Returns the norm of tensors sharded over all processes, the same on each; replicas count once. Collective."""
    counted = [_local(tensor) for tensor in tensors if _is_first_copy(tensor)]
    # In float32 a CPU sums naively: over 10⁸ numbers the norm would be 2 % too small.
    squares = torch.stack(torch._foreach_norm(counted, dtype=torch.float64)).square().sum() if counted else torch.zeros(())
    return math.sqrt(math.fsum(mesh.gather([float(squares)]).flatten().tolist()))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_first_copy(gradient: torch.Tensor) -> bool:
    """Returns True if this rank is the first of the ranks that hold this part of a gradient."""
    if not isinstance(gradient, DTensor):
        return True
    coordinate = gradient.device_mesh.get_coordinate()
    assert coordinate is not None
    return not any(place for place, placement in zip(coordinate, gradient.placements, strict=True) if placement.is_replicate())

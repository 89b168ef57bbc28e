"""Gradients of a model that is spread over the mesh: their norm over all processes, and clipping by it."""

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from longctx.parallel.mesh import Mesh


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter], greatest: float | None, mesh: Mesh, copy: nn.Parameter | None = None
) -> float:
    """Scales all gradients so that their norm is at most `greatest` (None: not at all). Returns the norm before.

    `copy` is a parameter that a rank of another mesh counts: a tied embedding on the last stage of a pipeline.

    All processes call it with what they hold of the model; what several hold counts once. Squares are added up in float64 in
    the order of the processes, so norm and factor are the same on all of them bit by bit, and copies of a weight stay alike.
    """
    gradients = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    norm = norm_over_mesh((gradient for parameter, gradient in gradients if parameter is not copy), mesh)
    if greatest is not None and norm > greatest:
        torch._foreach_mul_([_local(gradient) for _, gradient in gradients], greatest / norm)
    return norm


@torch.no_grad()
def norm_over_mesh(tensors: Iterable[torch.Tensor], mesh: Mesh) -> float:
    """The norm of tensors that are spread over all processes, the same on each; what several hold counts once."""
    counted = [_local(tensor) for tensor in tensors if _is_first_copy(tensor)]
    # In float32 a CPU adds up naively: over 10⁸ numbers the norm would be 2 % too small.
    squares = torch.stack(torch._foreach_norm(counted, dtype=torch.float64)).square().sum() if counted else torch.zeros(())
    return math.sqrt(math.fsum(mesh.gather([float(squares)]).flatten().tolist()))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_first_copy(gradient: torch.Tensor) -> bool:
    """Whether this rank is the first of those that hold the same part of a gradient."""
    if not isinstance(gradient, DTensor):
        return True
    coordinate = gradient.device_mesh.get_coordinate()
    assert coordinate is not None
    return not any(place for place, placement in zip(coordinate, gradient.placements, strict=True) if placement.is_replicate())

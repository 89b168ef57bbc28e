"""AdamW with weight decay on matrices only; the learning rate, a pure function of the step; norm and clipping of gradients."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from longctx.config.settings import OptimizerSection


def make_optimizer(model: nn.Module, settings: OptimizerSection, device: torch.device) -> torch.optim.AdamW:
    """Makes AdamW over all trained parameters, without weight decay for norms (one-dimensional). Fused on CUDA."""
    groups: dict[tuple[bool, Any], list[nn.Parameter]] = {}  # fused operations need parameters on the same mesh
    for parameter in model.parameters():
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault((parameter.dim() > 1, mesh), []).append(parameter)
    decayed = [
        {"params": parameters, "weight_decay": settings.weight_decay if is_matrix else 0.0}
        for (is_matrix, _), parameters in groups.items()
    ]
    return torch.optim.AdamW(
        decayed, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, fused=device.type == "cuda"
    )


def state_bytes(settings: OptimizerSection) -> int:
    """Returns the bytes of optimizer state for every trained parameter: AdamW's two moments, in float32."""
    return 2 * torch.float32.itemsize


def learning_rate(step: int, steps: int, settings: OptimizerSection) -> float:
    """Returns the learning rate of step `step` (counted from 1) of `steps`: linear warm-up, then cosine decay.

    A warm-up longer than the run is shortened to it.
    """
    warmup = min(settings.warmup_steps, steps)
    if step <= warmup:
        return settings.learning_rate * step / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    cosine = (1 + math.cos(math.pi * min(1.0, progress))) / 2
    ratio = settings.min_learning_rate_ratio
    return settings.learning_rate * (ratio + (1 - ratio) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


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

"""AdamW with weight decay on matrices only, and the learning rate schedule, a pure function of the step."""

import math
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

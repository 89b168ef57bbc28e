"""The optimizer, with weight decay on matrices only; the learning rate, a pure function of the step; norm and clipping of
gradients.
"""

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from longctx.config.settings import OptimizerSection, ParameterGroup
from longctx.model.protocol import Model
from longctx.parallel.expert import sparse_layers
from longctx.parallel.sharding import local_part
from longctx.training.optimizers.muon import Muon, is_first_copy


def make_optimizer(
    model: Model, settings: OptimizerSection, device: torch.device, stage: dist.ProcessGroup | None = None
) -> torch.optim.Optimizer:
    """Makes the optimizer of all trained parameters, without weight decay for vectors: norms and biases. Fused on CUDA.

    `stage` is the group of all ranks with the same parameters or parts of them; None: this process alone. Collective for Muon.
    """
    matrices = matrices_of(model) if settings.name == "muon" else {}
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            chosen = group_of(name, settings)
            decay = settings.weight_decay if parameter.dim() > 1 else 0.0
            if chosen is not None and chosen.weight_decay is not None:
                decay = chosen.weight_decay
            options = {"weight_decay": decay, "learning_rate_ratio": 1.0 if chosen is None else chosen.learning_rate_ratio}
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            if parameter in matrices:
                options["momentum"] = settings.momentum
            # Fused operations need parameters on the same mesh.
            group = groups.setdefault((mesh, *options.items()), {"params": [], **options})
            group["params"].append(parameter)
    adamw: dict[str, Any] = {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.eps}
    optimizer: torch.optim.Optimizer
    if settings.name == "muon":
        optimizer = Muon(list(groups.values()), matrices, stage, device, **adamw, fused=device.type == "cuda")
    elif settings.name == "adamw-8bit":
        from longctx.training.optimizers.eight_bit import EightBit  # torchao takes seconds, and is in an extra

        optimizer = EightBit(list(groups.values()), **adamw)
    else:
        optimizer = torch.optim.AdamW(list(groups.values()), **adamw, fused=device.type == "cuda")
    return optimizer


def group_of(name: str, settings: OptimizerSection) -> ParameterGroup | None:
    """Returns the first group of the settings that matches the name of a parameter."""
    return next((group for group in settings.groups if re.search(group.match, name)), None)


def matrices_of(model: Model) -> dict[nn.Parameter, int]:
    """Returns the trained matrices of the blocks, and how many are stacked in each: one, or one per expert.

    Vectors are no matrices, nor are depthwise convolutions, which have a side of 1.
    """
    experts = {
        parameter: layer.gate.shape.num_experts for layer in sparse_layers(model) for parameter in layer.experts.parameters()
    }
    return {
        parameter: experts.get(parameter, parameter.shape[0] if parameter.dim() == 3 else 1)
        for parameter in model.layers.parameters()
        if parameter.requires_grad and parameter.dim() in (2, 3) and min(parameter.shape[-2:]) > 1
    }


def state_bytes(settings: OptimizerSection, parameters: int, matrices: int) -> int:
    """Returns the bytes of optimizer state of `parameters`, of which `matrices` are in matrices of blocks.

    AdamW has two moments in float32, or in 8 bits with a scale per block; Muon has one of matrices.
    """
    if settings.name == "adamw-8bit":
        return 2 * (parameters + parameters * torch.float32.itemsize // 256)
    moments = 2 * parameters - (matrices if settings.name == "muon" else 0)
    return moments * torch.float32.itemsize


DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
}
"""Shapes of decay, from 1 to 0 while progress goes from 0 to 1."""


def learning_rate(step: int, steps: int, settings: OptimizerSection) -> float:
    """Returns the learning rate of step `step` (counted from 1) of `steps`: linear warm-up, then the schedule.

    A warm-up longer than the run is shortened to it.
    """
    peak, ratio, schedule = settings.learning_rate, settings.min_learning_rate_ratio, settings.schedule
    warmup = settings.warmup_steps if settings.warmup_ratio is None else round(settings.warmup_ratio * steps)
    warmup = min(warmup, steps)
    if step <= warmup:
        return peak * step / warmup
    if schedule == "constant":
        return peak
    if schedule == "inverse_sqrt":
        return peak * max(ratio, math.sqrt(max(1, warmup) / step))
    begin, decay = warmup, DECAYS["linear" if schedule == "wsd" else schedule]
    if schedule == "wsd":
        begin = max(warmup, steps - round(settings.decay_share * steps))
    progress = (step - begin) / max(1, steps - begin)
    return peak * (ratio + (1 - ratio) * decay(min(1.0, max(0.0, progress))))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate of all groups, each times its ratio."""
    for group in optimizer.param_groups:
        own = rate * group["learning_rate_ratio"]
        group["lr"] = torch.full_like(group["lr"], own) if isinstance(group["lr"], torch.Tensor) else own


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None, norm: float) -> None:
    """Scales all gradients, whose norm is `norm`, so that it is at most `max_norm` (None: no scaling)."""
    gradients = [local_part(each.grad) for each in parameters if each.grad is not None]
    if max_norm is not None and norm > max_norm and gradients:
        torch._foreach_mul_(gradients, max_norm / norm)


@torch.no_grad()
def sum_of_squares(tensors: Iterable[torch.Tensor]) -> float:
    """Returns the sum of squares of this process's parts of tensors sharded over all processes; replicas count once."""
    counted = [local_part(tensor) for tensor in tensors if is_first_copy(tensor)]
    # In float32 a CPU sums naively: over 10⁸ numbers the norm would be 2 % too small.
    squares = torch.stack(torch._foreach_norm(counted, dtype=torch.float64)).square().sum() if counted else torch.zeros(())
    return float(squares)


def norm_of(sums: torch.Tensor) -> float:
    """Returns the norm of tensors from the sums of squares of all processes, in their order: the same on each, bit by bit.

    Norm and factor must be, so that replicas of a weight stay equal.
    """
    return math.sqrt(math.fsum(sums.flatten().tolist()))

"""The optimizer, with weight decay on matrices only; the learning rate, a pure function of the
step; norm and clipping of gradients.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from longctx.config.settings import OptimizerSection, ParameterGroup
from longctx.model.protocol import Model
from longctx.parallel.expert import sparse_layers
from longctx.parallel.sharding import local_part
from longctx.planning.cost import eight_bit
from longctx.planning.cost.spec import LayerSpec, Matrix, ModelSpec
from longctx.training.optimizers import muon

Matrices = dict[nn.Parameter, int]
"""Matrices of the blocks, and how many are stacked in each."""
MOMENTUM = 0.95
"""Decay rate of Muon's momentum, the default of torch.optim.Muon too."""


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer of the setting `optimizer.name`, and what it costs.

    Attributes:
        make: makes it of (groups of parameters, options of AdamW, device, matrices, group of all
            ranks with parts of them).
        state_bytes: bytes of its state of `parameters`, of which `matrices` are in matrices of
            blocks; `sizes` has how many matrices of each size they are a part of.
        working_bytes: bytes of temporary tensors, of a block's `layer` and `held` numbers of
            matrices on a rank.
        step_work: operations per rank of a model's updates on `ranks`, and numbers that it sends
            and receives for them, beside what AdamW takes.
        momentum: whether matrices of blocks have a momentum of their own.
        fused: whether CUDA updates all parameters without temporary tensors.
    """

    make: Callable[..., torch.optim.Optimizer]
    state_bytes: Callable[[int, int, Mapping[Matrix, int]], int]
    working_bytes: Callable[[LayerSpec, int], int] = lambda layer, held: 0
    step_work: Callable[[ModelSpec, int], tuple[float, float]] = lambda spec, ranks: (0.0, 0.0)
    momentum: bool = False
    fused: bool = True


def _eight_bit(groups: list[Any], options: dict[str, Any], *_: Any) -> torch.optim.Optimizer:
    # Torchao takes seconds, and is in an extra.
    from longctx.training.optimizers.eight_bit import EightBit

    optimizer: torch.optim.Optimizer = EightBit(groups, **options)
    return optimizer


FLOAT32 = torch.float32.itemsize
OPTIMIZERS = {
    "adamw": OptimizerKind(
        lambda groups, options, device, *_: torch.optim.AdamW(
            groups, **options, fused=device.type == "cuda"
        ),
        lambda parameters, matrices, sizes: 2 * FLOAT32 * parameters,
    ),
    "muon": OptimizerKind(
        lambda groups, options, device, matrices, stage: muon.Muon(
            groups, matrices, stage, device, **options, fused=device.type == "cuda"
        ),
        # One moment of matrices.
        lambda parameters, matrices, sizes: FLOAT32 * (2 * parameters - matrices),
        muon.working_bytes,
        muon.work_of_rank,
        momentum=True,
    ),
    "adamw-8bit": OptimizerKind(
        _eight_bit,
        lambda parameters, matrices, sizes: eight_bit.state_bytes(parameters, sizes),
        fused=False,
    ),
}
"""Optimizers by name; those that need a package are also in `_missing` of
`longctx.config.rules`."""


def make_optimizer(
    model: Model,
    settings: OptimizerSection,
    device: torch.device,
    stage: dist.ProcessGroup | None = None,
) -> torch.optim.Optimizer:
    """Makes the optimizer of all trained parameters, without weight decay for vectors: norms and
    biases. Fused on CUDA.

    `stage` is the group of all ranks with the same parameters or parts of them; None: this process
    alone. Collective for Muon.
    """
    kind = OPTIMIZERS[settings.name]
    matrices = matrices_of(model) if kind.momentum else {}
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            chosen = group_of(name, settings)
            decay = settings.weight_decay if parameter.dim() > 1 else 0.0
            if chosen is not None and chosen.weight_decay is not None:
                decay = chosen.weight_decay
            options = {
                "weight_decay": decay,
                "learning_rate_ratio": 1.0 if chosen is None else chosen.learning_rate_ratio,
            }
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            if parameter in matrices:
                options["momentum"] = MOMENTUM
            # Fused operations need parameters on the same mesh.
            group = groups.setdefault((mesh, *options.items()), {"params": [], **options})
            group["params"].append(parameter)
    adamw: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": settings.betas,
        "eps": settings.eps,
    }
    return kind.make(list(groups.values()), adamw, device, matrices, stage)


def group_of(name: str, settings: OptimizerSection) -> ParameterGroup | None:
    """Returns the first group of the settings that matches the name of a parameter."""
    return next((group for group in settings.groups if re.search(group.match, name)), None)


def matrices_of(model: Model) -> Matrices:
    """Returns the trained matrices of the blocks, and how many are stacked in each: one, or one per
    expert.

    Vectors are no matrices, nor are depthwise convolutions, which have a side of 1.
    """
    experts = {
        parameter: layer.gate.shape.num_experts
        for layer in sparse_layers(model)
        for parameter in layer.experts.parameters()
    }
    return {
        parameter: experts.get(parameter, parameter.shape[0] if parameter.dim() == 3 else 1)
        for parameter in model.layers.parameters()
        if parameter.requires_grad and parameter.dim() in (2, 3) and min(parameter.shape[-2:]) > 1
    }


DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "sqrt": lambda progress: 1 - math.sqrt(progress),
}
"""Shapes of decay, from 1 to 0 while progress goes from 0 to 1."""


def warmup_steps(given: float, steps: int) -> int:
    """Returns the steps of a warm-up that is `given` as steps, or below 1 as a share of `steps`."""
    if given < 1:
        return round(given * steps)
    return int(given)


def learning_rate(step: int, steps: int, settings: OptimizerSection) -> float:
    """Returns the learning rate of step `step` (counted from 1) of `steps`: linear warm-up, then
    the schedule.

    A warm-up longer than the run is shortened to it.
    """
    peak = settings.learning_rate
    ratio = settings.min_learning_rate_ratio
    schedule = settings.schedule
    warmup = min(warmup_steps(settings.warmup_steps, steps), steps)
    if step <= warmup:
        return peak * step / warmup
    if schedule == "constant":
        return peak
    if schedule == "inverse_sqrt":
        return peak * max(ratio, math.sqrt(max(1, warmup) / step))
    begin = warmup
    decay = DECAYS["linear" if schedule == "wsd" else schedule]
    if schedule == "wsd":
        begin = max(warmup, steps - round(settings.decay_share * steps))
    progress = (step - begin) / max(1, steps - begin)
    return peak * (ratio + (1 - ratio) * decay(min(1.0, max(0.0, progress))))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate of all groups, each times its ratio."""
    for group in optimizer.param_groups:
        own = rate * group["learning_rate_ratio"]
        group["lr"] = (
            torch.full_like(group["lr"], own) if isinstance(group["lr"], torch.Tensor) else own
        )


def leaves_out(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Returns whether an optimizer can leave out an update on `device`, as `unless_finite` asks,
    without the host's knowledge: fused AdamW, also beside Muon, of parameters there."""
    if not isinstance(optimizer, torch.optim.AdamW):
        return False
    for group in optimizer.param_groups:
        there = all(parameter.device.type == device.type for parameter in group["params"])
        if not (group["fused"] and there):
            return False
    return True


@contextmanager
def unless_finite(optimizer: torch.optim.Optimizer, finite: torch.Tensor) -> Iterator[None]:
    """Within this block a step of an optimizer that `leaves_out` updates does so if `finite`,
    bool [] on the device, is false: weights and state stay as they are."""
    # Torch's own way to skip, which GradScaler uses.
    optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]  # torch looks for it
    try:
        yield
    finally:
        delattr(optimizer, "found_inf")


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter], max_norm: float | None, norm: torch.Tensor
) -> None:
    """Scales all gradients, whose norm is `norm`, float64 [], so that it is at most `max_norm`
    (None: no scaling). The host does not read the norm."""
    gradients = [local_part(each.grad) for each in parameters if each.grad is not None]
    if max_norm is None or not gradients:
        return
    share = torch.full_like(norm, max_norm) / norm
    factor = share.where(norm > max_norm, 1.0)  # which leaves them as they are, bit by bit
    rounded = factor.to(gradients[0].device, torch.float32)
    torch._foreach_mul_(gradients, rounded)


@torch.no_grad()
def sum_of_squares(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns the sum of squares of this process's parts of tensors sharded over all processes,
    float64 [], where they are; replicas count once."""
    counted = [local_part(tensor) for tensor in tensors if muon.is_first_copy(tensor)]
    # In float32 a CPU sums naively: over 10⁸ numbers the norm would be 2 % too small.
    if counted:
        return torch.stack(torch._foreach_norm(counted, dtype=torch.float64)).square().sum()
    return torch.zeros((), dtype=torch.float64)


def norm_of(sums: torch.Tensor) -> torch.Tensor:
    """Returns the norm of tensors, float64 [], from the sums of squares of all processes, float64
    [processes]: the same on each, bit by bit.

    Norm and factor must be, so that replicas of a weight stay equal.
    """
    return _root_rounded_once(sum_rounded_once(sums))


def _root_rounded_once(value: torch.Tensor) -> torch.Tensor:
    """Returns the root, float64 [], that math.sqrt returns: torch's own may be off by the last
    bit."""
    root = value.sqrt()
    square = root * root
    # The rounding of the square, exactly: both halves of the root have 26 bits (Dekker 1971).
    scaled = root * (2.0**27 + 1)
    high = scaled - (scaled - root)
    low = root - high
    rounding = ((high * high - square) + 2 * high * low) + low * low
    corrected = root + ((value - square) - rounding) / (2 * root)
    return torch.where(corrected.isfinite(), corrected, root)  # not of 0 and infinite numbers


def sum_rounded_once(values: torch.Tensor) -> torch.Tensor:
    """Returns the sum, float64 [], of numbers that are not negative, float64 [n]: that of
    math.fsum, without the host.

    Numbers are added in pairs, and each sum carries what its rounding lost (Knuth's TwoSum; Dekker
    1971). The error before the last rounding is below 2⁻⁹⁸ of the sum: only a sum that near to the
    middle between two numbers may be rounded to the other one.
    """
    sums = values
    lost = torch.zeros_like(values)
    while len(sums) > 1:
        if len(sums) % 2:
            sums = F.pad(sums, (0, 1))
            lost = F.pad(lost, (0, 1))
        first, second = sums.view(-1, 2).unbind(1)
        added = first + second
        of_second = added - first
        rounding = (first - (added - of_second)) + (second - of_second)
        rest = lost.view(-1, 2).sum(1) + rounding
        sums = added + rest
        lost = rest - (sums - added)
    # Infinite numbers lose NaN.
    return torch.where(sums[0].isfinite(), sums[0], values.sum())

"""Optimizers on the ranks of a test, given the same gradients as torch's own on one process."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torchao.optim import AdamW8bit

from longctx.config.settings import OptimizerSection
from longctx.model.experts import Experts
from longctx.model.protocol import generator_of
from longctx.training.agreement import require_same_copies
from longctx.training.optimizer import set_learning_rate, state_bytes
from longctx.training.optimizers.eight_bit import EightBit, plain
from tests.training_cases import start

RATES = [0.01 / step for step in range(1, 11)]


def gradient(name: str, step: int, shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape, generator=generator_of(name, step, torch.device("cpu")))


def whole(weight: torch.Tensor) -> torch.Tensor:
    weight = weight.detach()
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).clone()


def largest_error(store: Path, run: Path, settings: list[str], steps: int = 4) -> float:
    """Returns the largest difference from weights that torch's optimizers make of the same gradients on one process."""
    trainer = start(store, run, settings)
    trainer.loader.close()
    model, section = trainer.model, trainer.config.optimizer
    before = {name: whole(weight) for name, weight in model.named_parameters()}
    for step, rate in enumerate(RATES[:steps]):
        for name, weight in model.named_parameters():
            made = gradient(name, step, weight.shape)
            weight.grad = distribute_tensor(made, weight.device_mesh, weight.placements, src_data_rank=None)
        set_learning_rate(trainer.optimizer, rate)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    require_same_copies(model, steps, trainer.mesh.control)
    after = {name: whole(weight) for name, weight in model.named_parameters()}
    counts = {
        f"{path}.{name}": module.count * (1 if trainer.mesh.experts is None else trainer.mesh.experts.size(0))
        for path, module in model.named_modules()
        if isinstance(module, Experts)
        for name, _ in module.named_parameters()
    }
    expected = torch_alone(before, counts, section, steps)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    return max(float((after[name] - expected[name]).abs().max()) for name in before)


def torch_alone(
    before: dict[str, torch.Tensor], counts: dict[str, int], section: OptimizerSection, steps: int
) -> dict[str, torch.Tensor]:
    """Returns the weights that torch's own optimizers make on one process; `counts` are numbers of stacked experts."""
    parts = {
        name: [nn.Parameter(part.clone()) for part in weight.chunk(counts.get(name, 1))] for name, weight in before.items()
    }
    adamw: list[dict[str, Any]] = []
    matrices = []
    for name, parameters in parts.items():
        grouped = next((group for group in section.groups if group.match in name), None)
        if grouped is not None:  # of these tests all have both, and are no matrices of blocks
            more = {"ratio": grouped.learning_rate_ratio, "weight_decay": grouped.weight_decay}
            adamw.append({"params": parameters, **more})
        elif section.name == "muon" and name.startswith("layers.") and parameters[0].dim() == 2:
            matrices += parameters
        else:
            adamw.append({"params": parameters, "weight_decay": section.weight_decay if parameters[0].dim() > 1 else 0.0})
    kind = AdamW8bit if section.name == "adamw-8bit" else torch.optim.AdamW
    optimizers: list[torch.optim.Optimizer] = [kind(adamw, betas=section.betas, eps=section.eps)]
    if matrices:
        decay = section.weight_decay
        muon = torch.optim.Muon(matrices, weight_decay=decay, momentum=section.momentum, adjust_lr_fn="match_rms_adamw")
        optimizers.append(muon)
    for step, rate in enumerate(RATES[:steps]):
        for name, parameters in parts.items():
            for parameter, part in zip(
                parameters, gradient(name, step, before[name].shape).chunk(len(parameters)), strict=True
            ):
                parameter.grad = part.clone()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                own = rate * group.get("ratio", 1.0)
                group["lr"] = torch.tensor(own) if isinstance(group["lr"], torch.Tensor) else own
            with torch.compiler.set_stance("force_eager"):
                optimizer.step()
    return {name: torch.cat([part.detach() for part in parameters]) for name, parameters in parts.items()}


def bytes_of_state(store: Path, run: Path, settings: list[str]) -> tuple[int, int]:
    """Returns the bytes of the optimizer's state after a step, but those of step counters, and what they should be."""
    trainer = start(store, run, settings)
    with trainer.loader:
        trainer.step()
    values = [value for state in trainer.optimizer.state.values() for value in state.values() if value.dim()]
    spec = trainer.model.spec
    expected = state_bytes(trainer.config.optimizer, spec.trained_parameters, spec.trained_matrices)
    return sum(value.numel() * value.element_size() for value in values), expected


def keys_of_moments(rows: int, columns: int) -> list[str]:
    """Returns what this rank would save of a parameter of this size, sharded by rows over all ranks, after a step."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = nn.Parameter(distribute_tensor(torch.randn(rows, columns), mesh, [Shard(0)]))
    weight.grad = distribute_tensor(torch.randn(rows, columns), mesh, [Shard(0)])
    optimizer = EightBit([weight], lr=0.1)
    optimizer.step()
    return sorted(plain({name: value for name, value in optimizer.state[weight].items() if name != "step"}))

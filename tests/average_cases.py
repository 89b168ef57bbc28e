"""Runs that average their weights, and the average that torch computes of the weights of every step on one process."""

from pathlib import Path
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from longctx.training.optimizers.average import AVERAGE, averaged
from longctx.training.saved.export import export
from tests.optimizer_cases import whole
from tests.training_cases import start

DECAY = 0.8


def run(store: Path, folder: Path, settings: list[str], steps: int, resume: bool = False) -> dict[str, Any]:
    """On each rank: weights after every step, averages, validation losses of both, and losses."""
    trainer = start(store, folder, [f"optimizer.ema_decay={DECAY}", *settings], resume=resume)
    model, optimizer, after, losses = trainer.model, trainer.optimizer, [], []
    with trainer.loader:
        for _ in range(steps):
            losses.append(trainer.step().loss)
            after.append({name: whole(weight) for name, weight in model.named_parameters()})
        names = {weight: name for name, weight in model.named_parameters()}
        averages = {names[weight]: whole(state[AVERAGE]) for weight, state in optimizer.state.items()}
        validated = []
        if trainer.validator is not None:
            validated.append(trainer.validator.validate().validation_loss)
            with averaged(optimizer):
                validated.append(trainer.validator.validate().validation_loss)
        assert all(torch.equal(after[-1][name], whole(weight)) for name, weight in model.named_parameters()), "not restored"
        trainer.save()
    return {"after": after, "averages": averages, "validated": validated, "losses": losses}


def average_of(after: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Returns torch's moving average of the weights after every step."""
    model = torch.nn.Module()
    names = {name.replace(".", "/"): name for name in after[0]}
    for key, name in names.items():
        model.register_parameter(key, torch.nn.Parameter(after[0][name].clone()))
    moving = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for weights in after:
        for key, name in names.items():
            getattr(model, key).data.copy_(weights[name])
        moving.update_parameters(model)
    return {name: getattr(moving.module, key).detach() for key, name in names.items()}


def exported(folder: Path, out: Path, last: bool) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    export(folder, out, last=last)
    return load_file(out / "model.safetensors")

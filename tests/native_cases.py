"""One step of the trainer on a checkpoint in the native decoder, over several ranks that split matrices or layers."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from longctx.config import load
from longctx.data.packing import StepBatch, pack_documents
from longctx.model.pretrained_decoder import PretrainedDecoder
from longctx.parallel.mesh import make_groups
from longctx.training.build import sizes_of_groups
from longctx.training.trainer import Trainer
from tests.data_cases import placed_plan
from tests.huggingface_cases import LENGTHS, make_documents
from tests.pretrained_cases import PLACEMENTS_OF, SETTINGS, whole

Tensors = dict[str, torch.Tensor]


def step(folder: Path, settings: list[str]) -> tuple[float, Tensors, Tensors]:
    """Returns on each rank the loss of a step, all gradients and all weights, by the names of transformers."""
    trainer = make_trainer(folder, settings)
    model = trainer.model
    assert isinstance(model, PretrainedDecoder)
    weights = everyones(model, {name: whole(weight).clone() for name, weight in model.named_parameters()})
    batch = make_batch(trainer)
    losses = trainer.passes.forward_backward(batch, trainer.passes.weigh(batch, trainer.objective))
    counted = trainer.mesh.gather([float(losses.double().sum()) if trainer.mesh.counts else 0.0]).sum()
    return float(counted), everyones(model, {name: whole(weight.grad) for name, weight in model.named_parameters()}), weights


def make_trainer(folder: Path, settings: list[str]) -> Trainer:
    given = [*SETTINGS, f"model.from_pretrained={folder}", *settings]
    config = load(None, given, world_size=dist.get_world_size())
    mesh = make_groups(torch.device("cpu"), timeout_s=60.0, **sizes_of_groups(config))
    return Trainer.build(config, mesh, config.model_source())


def make_batch(trainer: Trainer) -> StepBatch:
    mesh = trainer.mesh
    plan = placed_plan(LENGTHS, mesh.ranks, PLACEMENTS_OF[mesh.ranks])
    micro_batches, targets = pack_documents(plan, mesh.rank, make_documents(), pad_to_multiple_of=mesh.tensor.size())
    return StepBatch(1, plan, tuple(map(str, range(len(LENGTHS)))), sum(LENGTHS), targets, tuple(micro_batches))


def everyones(model: PretrainedDecoder, tensors: Tensors) -> Tensors:
    """Returns the tensors of all ranks of a pipeline, by the names of transformers."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, model.to_checkpoint(tensors))
    found: Tensors = {}
    for part in parts:
        for name, tensor in part.items():
            torch.testing.assert_close(found.setdefault(name, tensor), tensor, rtol=0, atol=0)
    return found

"""Live weights: the weights of a sharded model in training, as tensors of transformers, for an engine that samples.

One group at a time, a block or an embedding, is gathered on the ranks that hold it and converted as for an export; the ranks of
a pipeline then send its tensors on, one by one. So no rank ever holds the whole model.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from longctx.model.checkpoint_writer import Planned, planned
from longctx.model.lora import AdaptedModel
from longctx.model.protocol import Model
from longctx.parallel.mesh import Mesh
from longctx.parallel.sharding import reshard


def live_weights(model: Model, mesh: Mesh, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Returns an iterator of name and tensor, on the device of every rank; see `Trainer.weights`. Collective.

    Raises NoNativeModel on every rank, before the first tensor, if transformers has no equivalent of the model.
    """
    reshard(model)  # otherwise gathered parameters might take the place of shards
    values, plans = model.state_dict(), []
    for group in model.groups():
        without_values = {name: values[name].to("meta") for name in group}
        plans.append(planned(model.to_checkpoint(without_values), model.files, dtype))
    return _tensors(model, mesh, dtype, values, plans)


@torch.no_grad()
def _tensors(
    model: Model,
    mesh: Mesh,
    dtype: torch.dtype | None,
    values: Mapping[str, torch.Tensor],
    plans: Sequence[Sequence[Planned]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of all groups, of one stage of a pipeline after the other."""
    gathered = torch.float32 if dtype is None or isinstance(model, AdaptedModel) else dtype  # adapters are merged in float32
    groups, sent = model.groups(), set[str]()
    for stage, of_stage in enumerate(_stages(mesh, plans)):
        for number, plan in enumerate(of_stage):
            if any(tensor.name in sent for tensor in plan):  # a tied embedding, which the last stage has too
                continue
            sent |= {tensor.name for tensor in plan}
            held = {}
            if stage == mesh.pipeline_rank:
                whole = {name: _whole(values[name], mesh.device, gathered) for name in groups[number]}
                held = model.to_checkpoint(whole)
                del whole
            for tensor in plan:
                value = torch.empty(tensor.shape, dtype=tensor.dtype, device=mesh.device)
                if stage == mesh.pipeline_rank:
                    value.copy_(held.pop(tensor.name))  # which may be a part of a larger one
                if mesh.pipeline is not None:
                    dist.broadcast(value, dist.get_global_rank(mesh.pipeline, stage), group=mesh.pipeline)
                yield tensor.name, value


def _stages(mesh: Mesh, plans: Sequence[Sequence[Planned]]) -> Sequence[Sequence[Sequence[Planned]]]:
    """Returns the plans of all ranks of a pipeline, or that of this rank without one. Collective."""
    if mesh.pipeline is None:
        return [plans]
    tells = mesh.rank == 0 and mesh.tensor.get_local_rank() == 0
    return [plan for plan in mesh.gather_objects(plans if tells else None) if plan is not None]


def _whole(value: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Returns a copy of a whole parameter or buffer. Collective for the ranks that have a part of it."""
    copy = value.to(device, dtype if value.is_floating_point() else value.dtype, copy=True)
    return copy.full_tensor() if isinstance(copy, DTensor) else copy

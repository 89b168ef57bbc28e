"""Sharded data parallelism: FSDP2 over the domain, with gradients summed (never averaged), in
float32.

The mesh decides which ranks share a copy of the model: one axis shards it over all ranks; two axes
(replicas, shards) shard it within each replica, for example a node; if the second axis has one
rank, every rank has a whole copy.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from longctx.model.experts import Experts
from longctx.model.protocol import Model
from longctx.parallel.expert import shard_experts, sparse_layers
from longctx.parallel.mesh import Mesh


def shard(
    model: Model,
    mesh: Mesh,
    dtype: torch.dtype,
    reshard_after: str,
    stages: Sequence[nn.Module] | None,
    offload_optimizer: bool,
) -> None:
    """Shards every block and the rest of the model, or of each of its pipeline `stages`, over
    `mesh.weights`, in place.

    Weights are kept, and gradients accumulated and reduced, in float32; forward and backward
    compute in `dtype`. (Gradients of norms are summed over tensor ranks in `dtype` if the backward
    that computes them also reduces them.) Inputs of blocks are not cast: the tables of RoPE must
    stay float32. `reshard_after` says when a block frees its gathered weights: after its forward
    and again after its backward ("block"), only after its backward ("micro_batch"), or, with
    `reduce_gradients`, at the end of the step ("step"). With `offload_optimizer`, weights,
    gradients and optimizer state stay in host memory, where the optimizer computes.
    """
    offload = CPUOffloadPolicy() if offload_optimizer else OffloadPolicy()
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    options: dict[str, Any] = {
        "mp_policy": policy,
        "offload_policy": offload,
        "reshard_after_forward": reshard_after == "block",
    }
    for block in model.layers:
        if mesh.experts is not None:
            for layer in sparse_layers(block):
                shard_experts(layer, mesh.experts, **options)
        fully_shard(block, mesh=mesh.weights, **options)
        whole, *parts = sharded_modules(block)
        if parts:
            whole.set_modules_to_forward_prefetch(parts)  # else only once tokens have travelled
    for block in model.tower:
        fully_shard(block, mesh=mesh.weights, **options)
    for root in [model] if stages is None else stages:
        fully_shard(root, mesh=mesh.weights, **{**options, "reshard_after_forward": False})
        for module in sharded_modules(root):
            # A plain sum on gloo and NCCL needs both calls, and neither is recursive.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        if stages is not None and reshard_after == "block":
            # Torch's pipelines pass False before every backward, after which all blocks of a stage
            # would stay gathered.
            vars(root)["set_reshard_after_backward"] = lambda reshard: None
        _describe_as_split(root, mesh)


@torch.no_grad()
def _describe_as_split(root: nn.Module, mesh: Mesh) -> None:
    """Describes weights that tensor or expert parallelism splits as DTensors of the whole: each
    rank's part, sharded.

    FSDP describes parts of tensor ranks in the opposite order, which is wrong if a size is not
    divisible, and the experts of a rank as if there were no others: both would give wrong initial
    values and checkpoints. FSDP uses whatever parameter it finds in a module, so parameters are
    replaced.
    """
    described: dict[nn.Parameter, nn.Parameter] = {}
    for module in root.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight not in described:  # seen before if tied: an embedding with two names
                described[weight] = _as_split(weight, mesh, is_expert=isinstance(module, Experts))
            setattr(module, name, described[weight])


def _as_split(weight: nn.Parameter, mesh: Mesh, *, is_expert: bool) -> nn.Parameter:
    """Returns the description of a sharded weight; the weight itself if neither parallelism splits
    it."""
    assert isinstance(weight, DTensor)
    whole = mesh.experts if is_expert else mesh.copies
    shape = weight.shape
    if whole is None or (weight.device_mesh.ndim < whole.ndim and not is_expert):
        return weight
    if is_expert:
        placements = [Shard(0), *weight.placements]
        shape = torch.Size((shape[0] * whole.size(0), *shape[1:]))
    else:
        *sharded, tensor = weight.placements
        placements = [
            tensor,
            *(placement if placement.is_replicate() else Shard(0) for placement in sharded),
        ]
    local = weight.to_local()
    stride = weight.stride()
    made = DTensor.from_local(local, whole, placements, run_check=False, shape=shape, stride=stride)
    return nn.Parameter(made, weight.requires_grad)


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a tensor, in the same memory."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def reshard(model: nn.Module) -> None:
    """Frees gathered weights, which a pass without backward keeps."""
    for module in sharded_modules(model):
        module.reshard()


def gather_in_backward(part: nn.Module, values: torch.Tensor) -> None:
    """Makes FSDP gather, for the gradients of values that a part of a model has computed, weights
    that are sharded together with those of modules outside the part.

    FSDP itself gathers them for what the last of the modules returns, and lets them go after its
    gradients. Accelerate shards the last norm with the head: gradients of the norm that follow
    those of another call of the head would be computed from freed memory, which ends the process.
    """
    inside = set(part.modules())
    states = [module._get_fsdp_state() for module in sharded_modules(part)]
    for state in dict.fromkeys(states):  # in the same order on all ranks
        if not inside.issuperset(state._modules):
            state._register_pre_backward_hook(values)


def accumulate_gradients(root: nn.Module) -> None:
    """Adds gradients in the compute dtype to those in float32, which FSDP omits after a backward of
    weights only.

    From torch 2.15 on autograd itself adds them in float32, and FSDP has no such methods.
    """
    for module in sharded_modules(root):
        group = module._get_fsdp_state()._fsdp_param_group
        for parameter in group.fsdp_params if group else ():
            if hasattr(parameter, "accumulate_unsharded_grad_if_needed"):
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()


@torch.no_grad()
def initialize_sharded(
    model: Model,
    seed: int,
    device: torch.device,
    stages: Sequence[nn.Module] | None = None,
    keep_on: torch.device | None = None,
) -> None:
    """Allocates a sharded model on the meta device and sets initial values, which do not depend on
    the number of ranks.

    Every rank draws one whole parameter at a time, on `device`, and keeps its shard, so nothing is
    sent and no rank ever has the whole model. Shards are kept on `keep_on` if it is given, else on
    `device`.
    """
    for root in [model] if stages is None else stages:
        root.to_empty(device=keep_on or device)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        whole = model.initial_value(
            name, torch.empty(parameter.shape, dtype=parameter.dtype, device=device), seed
        )
        sharded = distribute_tensor(
            whole, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
        parameter.to_local().copy_(sharded.to_local())


def reduce_gradients(model: Model, in_this_backward: bool, keep_gathered: bool = False) -> None:
    """Sets whether the next backward reduces gradients to shards; until then each rank accumulates
    them whole, in float32.

    `keep_gathered`: keep weights gathered after this backward, for the forward of the next
    micro-batch.
    """
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_backward(not keep_gathered)
    model.set_is_last_backward(in_this_backward)
    model.set_requires_gradient_sync(in_this_backward)

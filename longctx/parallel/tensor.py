"""Tensor and sequence parallelism: which rank holds which part of every weight, by the model's own table of its modules.

Between blocks a rank of the `tp` axis holds its share of the tokens, [tokens / tp, hidden], so norms and residuals are split
too (sequence parallelism, Korthikanti et al., 2022). Attention and MLP gather all tokens at their entrance, and sum up and
scatter them at their exit. In between, a rank has its own heads and its own columns of the MLP as plain tensors, so ring
attention runs as it does alone, among the ranks of the domain with the same heads. Embedding and head are split by entries.

Where a size is not divisible, the last ranks hold less (as `torch.chunk`); only heads must be shared out evenly.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from longctx.model.protocol import StagedModel


def _gather_tokens(module: nn.Module) -> ParallelStyle:
    """Gathers the first input of a module, which is split over tokens; the others are the same on all ranks."""
    others = (None,) * (len(inspect.signature(module.forward).parameters) - 1)
    return PrepareModuleInput(input_layouts=(Shard(0), *others), desired_input_layouts=(Replicate(), *others))


STYLES: dict[str, Callable[[nn.Module], ParallelStyle]] = {
    "tokens": lambda _: SequenceParallel(sequence_dim=0),
    "residual": lambda _: SequenceParallel(sequence_dim=0, use_local_output=True),
    "heads": lambda _: SequenceParallel(sequence_dim=1, use_local_output=True),
    "gather": _gather_tokens,
    "columns": lambda _: ColwiseParallel(),
    "split columns": lambda _: ColwiseParallel(use_local_output=False),
    "rows": lambda _: RowwiseParallel(output_layouts=Shard(0)),
}
"""What a model's `tensor_plan` says of a module → what torch does for it.

tokens: a norm, applied to each rank's share of the tokens; residual: one whose output goes to the residual stream. heads: a
norm of every head, applied to each rank's heads. gather: takes all tokens. columns: a matrix of whose outputs a rank computes
its own, as plain tensors (heads), or (split columns) as DTensors, where sizes need not divide. rows: a matrix of whose inputs a
rank has its own; sums up, and splits over tokens.
"""

ENDS: dict[str, ParallelStyle] = {
    "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
    "norm": SequenceParallel(sequence_dim=0),
    "lm_head": ColwiseParallel(),
}
"""What is before and behind the blocks, or what a pipeline stage has of it. Of `lm_head` the loss uses the weight alone."""


def parallelize(model: StagedModel, mesh: DeviceMesh) -> None:
    """Splits every weight of a model on the meta device over the one-dimensional `mesh`, in place, before it is sharded.

    The model then takes the same tokens on every rank of the mesh, as many as are a multiple of its size, and gives its head
    hidden states that are split over tokens and a weight that is split over the vocabulary; see `vocabulary_part`.
    """
    for block in model.layers:
        modules = {name: module for name, module in block.named_modules() if next(module.parameters(), None) is not None}
        plan = {name: STYLES[kind](modules[name]) for name, kind in model.tensor_plan.items() if name in modules}
        parallelize_module(block, mesh, plan, src_data_rank=None)
    ends = {name: style for name, style in ENDS.items() if hasattr(model, name)}
    tied = model.spec.tie_word_embeddings and ends.pop("lm_head", None) is not None
    parallelize_module(model, mesh, ends, src_data_rank=None)
    if tied:  # the embedding's weight is another object now
        model.lm_head.weight = model.embed_tokens.weight


@dataclass(frozen=True)
class VocabularyPart:
    """The vocabulary entries `[first, first + weight.shape[0])` of a rank; `group` holds all of them."""

    group: dist.ProcessGroup
    first: int

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Every rank's `values`, [ranks, *values.shape], in the same order on all of them."""
        everyones = values.new_empty(self.group.size(), *values.shape)
        dist.all_gather(list(everyones.unbind()), values.contiguous(), group=self.group)
        return everyones


def vocabulary_part(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, VocabularyPart | None]:
    """All hidden states [tokens, hidden] and this rank's rows of the output weight, as plain tensors, and which rows these are.

    Without tensor parallelism these are the arguments, and None for all rows.

    Each rank's gradient of the hidden states is that of its rows of the weight; autograd sums these up and scatters them.
    """
    if not isinstance(weight, DTensor):
        return hidden, weight, None
    mesh = weight.device_mesh
    assert isinstance(hidden, DTensor)
    gathered = hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    largest = -(-weight.shape[0] // mesh.size())
    return gathered, weight.to_local(), VocabularyPart(mesh.get_group(), largest * mesh.get_local_rank())

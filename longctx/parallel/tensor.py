"""Tensor and sequence parallelism: splits every weight over ranks, by the model's `tensor_plan`.

Between blocks each rank of the `tp` axis has its share of the tokens, [tokens / tp, hidden], so
norms and residuals are split too (sequence parallelism, Korthikanti et al., 2022). Attention and
MLP gather all tokens on entry, and reduce-scatter them on exit. In between, each rank has its own
heads and its own columns of the MLP as plain tensors, so ring attention is unchanged and runs among
the ranks of the domain with the same heads. Embedding and head are split over the vocabulary, an
embedding of positions over positions.

If a size is not divisible, the last ranks have less (as in `torch.chunk`); only heads must be
divisible.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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

from longctx.model.decoder import rows_of
from longctx.model.protocol import StagedModel


def _gather_tokens(module: nn.Module) -> ParallelStyle:
    """Gathers the first input of a module, which is split over tokens; the others are the same on
    all ranks."""
    others = (None,) * (len(inspect.signature(module.forward).parameters) - 1)
    return PrepareModuleInput(
        input_layouts=(Shard(0), *others), desired_input_layouts=(Replicate(), *others)
    )


def _own_tokens(module: nn.Module) -> ParallelStyle:
    """Passes the first input of a module, which is split over tokens, as a plain tensor."""
    others = (None,) * (len(inspect.signature(module.forward).parameters) - 1)
    split = (Shard(0), *others)
    return PrepareModuleInput(
        input_layouts=split, desired_input_layouts=split, use_local_output=True
    )


STYLES: dict[str, Callable[[nn.Module], ParallelStyle]] = {
    "tokens": lambda _: SequenceParallel(sequence_dim=0),
    "residual": lambda _: SequenceParallel(sequence_dim=0, use_local_output=True),
    "heads": lambda _: SequenceParallel(sequence_dim=1, use_local_output=True),
    "gather": _gather_tokens,
    "own tokens": _own_tokens,
    "columns": lambda _: ColwiseParallel(),
    "split columns": lambda _: ColwiseParallel(use_local_output=False),
    "rows": lambda _: RowwiseParallel(output_layouts=Shard(0)),
}
"""Style of a module in `tensor_plan` → torch's style.

tokens: a norm over each rank's tokens; residual: the same, with output to the residual stream.
heads: a norm of every head, over each rank's heads. gather: a module that needs all tokens. own
tokens: one that takes each rank's own as a plain tensor. columns: a matrix split by outputs, which
are plain tensors (heads), or with "split columns" DTensors, whose sizes need not be divisible.
rows: a matrix split by inputs, with outputs summed over ranks and split over tokens.
"""


class SplitEmbedding(RowwiseParallel):
    """Splits an embedding over its entries, and its gradient too: torch's own rule makes a whole
    gradient on every rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        split = super()._apply(module, device_mesh)
        assert isinstance(split, nn.Embedding)
        vars(split)["forward"] = partial(_own_rows, split)
        return split


def _own_rows(embedding: nn.Embedding, tokens: DTensor) -> DTensor:
    """Returns the rows of this rank's entries, and zeros for other entries."""
    weight = embedding.weight
    assert isinstance(weight, DTensor)
    local = weight.to_local()
    entries = tokens.to_local() - first_entry(weight)
    held = (entries >= 0) & (entries < len(local))
    rows = rows_of(local, entries.where(held, 0)).where(held.unsqueeze(-1), 0)
    return DTensor.from_local(rows, weight.device_mesh, [Partial()], run_check=False)


ENDS: dict[str, ParallelStyle] = {
    "embed_tokens": SplitEmbedding(input_layouts=Replicate(), output_layouts=Shard(0)),
    "norm": SequenceParallel(sequence_dim=0),
    "lm_head": ColwiseParallel(),
}
"""Styles of the modules before and after the blocks, as far as a stage has them. The loss uses only
the weight of `lm_head`."""


def parallelize(model: StagedModel, mesh: DeviceMesh) -> None:
    """Splits every weight of a model on the meta device over the one-dimensional `mesh`, in place,
    before it is sharded.

    The model then takes the same tokens on every rank of the mesh, a multiple of its size, and
    calls its head with hidden states split over tokens and a weight split over the vocabulary; see
    `vocabulary_part`.
    """
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    for block in model.layers:
        modules = {
            name: module
            for name, module in block.named_modules()
            if next(module.parameters(), None) is not None
        }
        plan = {
            name: STYLES[kind](modules[name])
            for name, kind in model.tensor_plan.items()
            if name in modules
        }
        parallelize_module(block, mesh, plan, src_data_rank=None)
    ends = {name: style for name, style in ENDS.items() if hasattr(model, name)}
    tied = model.spec.tie_word_embeddings and ends.pop("lm_head", None) is not None
    parallelize_module(model, mesh, ends, src_data_rank=None)
    if tied:  # the embedding's weight is a new object
        model.lm_head.weight = model.embed_tokens.weight
    # torch's SequenceParallel makes new ones, which are trained.
    for name, weight in model.named_parameters():
        weight.requires_grad_(name in trained)


@dataclass(frozen=True)
class VocabularyPart:
    """Vocabulary entries `[first, first + weight.shape[0])` of a rank; the ranks of `group`
    together have all entries."""

    group: dist.ProcessGroup
    first: int

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the `values` of all ranks, [ranks, *values.shape], in the same order on every
        rank."""
        everyones = values.new_empty(self.group.size(), *values.shape)
        dist.all_gather(list(everyones.unbind()), values.contiguous(), group=self.group)
        return everyones


def vocabulary_part(
    hidden: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, VocabularyPart | None]:
    """Returns all hidden states [tokens, hidden], this rank's rows of the output weight, and their
    place in the vocabulary.

    Without tensor parallelism these are the arguments and None. With it, each rank computes the
    gradient of the hidden states from its rows of the weight; autograd sums these gradients over
    ranks and scatters them.
    """
    if not isinstance(weight, DTensor):
        return hidden, weight, None
    mesh = weight.device_mesh
    assert isinstance(hidden, DTensor)
    gathered = hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return gathered, weight.to_local(), VocabularyPart(mesh.get_group(), first_entry(weight))


def first_entry(weight: DTensor) -> int:
    largest = -(-weight.shape[0] // weight.device_mesh.size())
    return largest * weight.device_mesh.get_local_rank()

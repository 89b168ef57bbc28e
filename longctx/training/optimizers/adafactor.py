"""Adafactor (Shazeer and Stern, 2018): torch.optim.Adafactor's update of parameters whose parts are on several ranks.

Of a matrix only means of squared gradients by row and by column are kept. They are small, so every rank has all of them. The
sums of squares of all parameters are added up over the ranks in one message, and the norms that limit updates in another one.
Of a parameter with three dimensions torch takes means over each matrix and norms over all; of stacked experts, each is a
parameter by itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import pad

from longctx.parallel.sharding import local_part
from longctx.planning.cost.spec import LayerSpec, ModelSpec
from longctx.training.optimizers.muon import begin_of, is_first_copy

BETA2_DECAY, LEAST_RMS, LARGEST_UPDATE = -0.8, 1e-3, 1.0
"""Defaults of torch.optim.Adafactor: decay of means, least scale of a parameter, and RMS to which updates are scaled down."""
EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True, eq=False)
class _Part:
    """This rank's part of a parameter, as [rows, columns]; a vector is one column.

    Attributes:
        row, column: where it begins in the whole, of `shape`.
        matrices, blocks: number of matrices along the rows, each with means of its own, and of parts with norms of their own.
        counts: whether no earlier rank has the same part.
    """

    parameter: nn.Parameter
    row: int
    column: int
    shape: tuple[int, int]
    matrices: int
    blocks: int
    counts: bool

    @classmethod
    def of(cls, parameter: nn.Parameter, stacked: int) -> "_Part":
        """Describes a parameter of `stacked` experts, or of one."""
        whole = torch.Size((*parameter.shape, 1) if parameter.dim() == 1 else parameter.shape)
        matrices = stacked if stacked > 1 else whole[:-2].numel()
        shape = whole[:-1].numel(), whole[-1]
        return cls(parameter, *begin_of(parameter), shape, matrices, stacked, is_first_copy(parameter))

    @property
    def factored(self) -> bool:
        return self.parameter.dim() > 1

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of the parameter, or of a tensor like it."""
        local = local_part(tensor)
        return local.flatten(0, -2) if self.factored else local.unsqueeze(-1)

    def squares(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns the sums of squares of this part's rows and columns, placed among those of the whole parameter, flat."""
        by_row, by_column = gradient.new_zeros(self.shape[0]), gradient.new_zeros(self.matrices, self.shape[1])
        if self.counts and gradient.numel():
            squared = gradient.square()
            by_row[self.row : self.row + len(gradient)] = squared.sum(1)
            first, sums = self._sums(squared, self.matrices)
            by_column[first : first + len(sums), self.column : self.column + gradient.shape[1]] = sums
        return torch.cat([by_row, by_column.flatten()])

    def norms(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sums of squares of this part's blocks, float64 [blocks]; of others 0."""
        of_blocks = values.new_zeros(self.blocks, dtype=torch.float64)
        if self.counts and values.numel():
            first, sums = self._sums(values.square().sum(1, keepdim=True, dtype=torch.float64), self.blocks)
            of_blocks[first : first + len(sums)] = sums[:, 0]
        return of_blocks

    def _sums(self, rows: torch.Tensor, count: int) -> tuple[int, torch.Tensor]:
        """Returns the number of the first of `count` equal parts of the whole that has rows here, and the sums over each."""
        if count == 1:
            return 0, rows.sum(0, keepdim=True)
        each = self.shape[0] // count
        before, after = self.row % each, -(self.row + len(rows)) % each
        return self.row // each, pad(rows, (0, 0, before, after)).unflatten(0, (-1, each)).sum(1)

    def spread(self, values: torch.Tensor, rows: int) -> torch.Tensor:
        """Returns for each of this part's `rows` the value [parts, ..] of the equal part of the whole that it is in."""
        each = self.shape[0] // len(values)
        return values[torch.arange(self.row, self.row + rows, device=values.device) // each] if len(values) > 1 else values


class Adafactor(torch.optim.Optimizer):
    """torch.optim.Adafactor. A step is the learning rate, but at most 1 / √step, times the RMS of the parameter.

    The state of a matrix is `row_variance` [rows] and `column_variance` [matrices, columns], whole on every rank; that of a
    vector is `variance`, sharded like it.

    Args:
        groups: groups of parameters, as torch's optimizers take them.
        stacked: numbers of experts stacked along the rows of parameters, where there are several.
        ranks: group of all ranks that hold parts of the parameters; None: this process holds all of them.
        device: where sums are added up.
    """

    def __init__(
        self, groups: Any, stacked: Mapping[nn.Parameter, int], ranks: dist.ProcessGroup | None, device: torch.device, lr: float
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.ranks, self.device = ranks, device
        self.parts = [_Part.of(each, stacked.get(each, 1)) for group in self.param_groups for each in group["params"]]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure
        """Updates the parameters with a gradient, on all ranks the same ones, and makes gradients the updates. Collective."""
        gradients = []
        for part in self.parts:
            given = part.parameter.grad
            gradients.append(part.rows(torch.zeros_like(part.parameter) if given is None else given))
        weights = [part.rows(part.parameter) for part in self.parts]
        every = list(zip(self.parts, gradients, strict=True))
        sums = self._sum([part.squares(gradient) if part.factored else gradient.new_zeros(0) for part, gradient in every])
        sizes = self._sum([part.norms(weight) for part, weight in zip(self.parts, weights, strict=True)])
        for (part, gradient), squares in zip(every, sums, strict=True):
            if part.parameter.grad is not None:
                self._scale(part, gradient, squares.to(gradient.device))
        norms = self._sum([part.norms(update) for part, update in every])
        groups = [group for group in self.param_groups for _ in group["params"]]  # loading a state replaces them
        for group, part, weight, update, size, norm in zip(groups, self.parts, weights, gradients, sizes, norms, strict=True):
            if part.parameter.grad is None:
                continue
            rate, numbers = float(group["lr"]), part.shape[0] * part.shape[1] // part.blocks
            step = float(self.state[part.parameter]["step"])
            rates = (size / numbers).sqrt().clamp(min=LEAST_RMS) * min(rate, step**-0.5)
            rates /= ((norm / numbers).sqrt() / LARGEST_UPDATE).clamp(min=1)
            weight.mul_(1 - rate * group["weight_decay"])
            weight.sub_(update * part.spread(rates.to(weight).unsqueeze(-1), len(weight)))

    def _scale(self, part: _Part, gradient: torch.Tensor, squares: torch.Tensor) -> None:
        """Adds the squares to the means, and divides the gradient by their root."""
        state = self.state[part.parameter]
        if not state:
            state["step"] = torch.zeros(())
            if part.factored:
                state["row_variance"] = gradient.new_zeros(part.shape[0])
                state["column_variance"] = gradient.new_zeros(part.matrices, part.shape[1])
            else:
                state["variance"] = torch.zeros_like(part.parameter)
        state["step"] += 1
        fresh = float(state["step"]) ** BETA2_DECAY
        if part.factored:
            by_row, by_column = state["row_variance"], state["column_variance"]
            of_rows, of_columns = squares.split([by_row.numel(), by_column.numel()])
            by_row.lerp_(of_rows / part.shape[1], fresh)
            by_column.lerp_(of_columns.view_as(by_column) * part.matrices / part.shape[0], fresh)
            means = by_row.view(part.matrices, -1).mean(1, keepdim=True).clamp(min=EPS)
            columns = (by_column / means)[:, part.column : part.column + gradient.shape[1]]
            estimate = by_row[part.row : part.row + len(gradient)].unsqueeze(1) * part.spread(columns, len(gradient))
        else:
            kept = part.rows(state["variance"])
            kept.lerp_(gradient.square(), fresh)
            estimate = kept.clone()
        gradient.mul_(estimate.clamp_(min=EPS * EPS).rsqrt_())

    def _sum(self, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Adds up tensors over all ranks, in one message. Collective."""
        if not values:  # nothing to train on the ranks of a stage of a pipeline
            return []
        flat = torch.cat([each.to(self.device) for each in values])
        if self.ranks is not None:
            dist.all_reduce(flat, group=self.ranks)
        return list(flat.split([len(each) for each in values]))


def state_numbers(spec: ModelSpec, layers: Sequence[LayerSpec], vocabulary_matrices: int) -> int:
    """Returns the numbers of the state of blocks and vocabulary matrices: rows and columns of matrices, and all of vectors.

    Of adapters, whose matrices are narrow, these are at most as many as their parameters.
    """
    if spec.adapted:
        return sum(layer.adapter_parameters for layer in layers)
    matrices = sum(count * (rows + columns) for layer in layers for count, rows, columns in layer.matrix_shapes)
    others = sum(layer.other_parameters + (layer.experts and layer.experts + layer.hidden_size) for layer in layers)
    assert spec.vocab_size is not None
    outside = vocabulary_matrices * (spec.vocab_size + spec.hidden_size) + spec.norm_parameters + spec.position_parameters
    return matrices + others + outside + spec.prediction_parameters

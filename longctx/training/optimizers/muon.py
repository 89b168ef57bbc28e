"""Muon: torch.optim.Muon's update of whole matrices whose parts are on several ranks, and AdamW for
all other parameters.

Each matrix has an owner among the ranks that hold parts of it, assigned by size. Parts of the
momentum travel to the owner, which orthogonalises, and parts of the update travel back to all
copies. Torch computes the update in bfloat16, so both travel in bfloat16 without loss: the weights
are those of one process, bit by bit, and copies stay equal.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim._muon import (
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    DEFAULT_NS_STEPS,
    EPS,
    _adjust_lr,
    _zeropower_via_newtonschulz,
)

from longctx.parallel.all_to_all import exchange_rows
from longctx.parallel.sharding import local_part
from longctx.planning.cost.spec import LayerSpec, ModelSpec

AT_ONCE = 1 << 26
"""Numbers that a rank gathers at once, if a single matrix has no more."""


class Part(NamedTuple):
    """Part of a matrix on a rank: where it is `in_matrix` and `in_shard` (rows and columns); `sent`
    by the first copy only."""

    in_matrix: tuple[slice, slice]
    in_shard: tuple[slice, slice]
    size: int
    sent: bool


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix: the number of its parameter, its shape, and its parts by rank."""

    parameter: int
    shape: tuple[int, int]
    parts: Mapping[int, Part]


class Muon(torch.optim.AdamW):
    """torch.optim.Muon of the `matrices`, and torch.optim.AdamW of all other parameters.

    Learning rates of matrices are adjusted to the size of AdamW's updates ("Muon is scalable for
    LLM training", 2025, §2.2). The state of a matrix is `momentum_buffer`, sharded like it.

    Args:
        groups: groups of parameters, as torch's optimizers take them; those of matrices have their
            `momentum`.
        matrices: the parameters of matrices, in the same order on all ranks, and how many are
            stacked along the rows of each.
        ranks: group of all ranks that hold parts of them; None: this process holds all of them.
    """

    found_inf: torch.Tensor | None = None
    """Whether to leave out the next update, float32 []: 1 or 0. Torch's fused AdamW looks for it,
    too."""

    def __init__(
        self,
        groups: Any,
        matrices: Mapping[nn.Parameter, int],
        ranks: dist.ProcessGroup | None,
        device: torch.device,
        **settings: Any,
    ) -> None:
        super().__init__(groups, **settings)
        self.matrices = list(matrices)
        self.ranks = ranks
        self.device = device
        self.rank = 0
        shards = [[_place(parameter) for parameter in matrices]]
        if ranks is not None:
            self.rank = ranks.rank()
            mine = shards[0]
            shards = [[] for _ in range(ranks.size())]
            dist.all_gather_object(shards, mine, group=ranks)
        self.turns = _turns(_matrices(matrices, shards), len(shards))

    def __setstate__(self, state: dict[str, Any]) -> None:
        # AdamW's own expects its moments of every parameter.
        torch.optim.Optimizer.__setstate__(self, state)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure
        """Updates all parameters, and removes the gradients of matrices. Collective.

        Weights and state stay as they are if `found_inf` is 1.
        """
        left_out = None if self.found_inf is None else self.found_inf > 0
        group_of = {
            parameter: group for group in self.param_groups for parameter in group["params"]
        }
        directions = [
            self._direction(parameter, group_of[parameter]["momentum"], left_out)
            for parameter in self.matrices
        ]
        for owned in self.turns:
            for matrix, part, update in self._updates(owned, directions):
                parameter = self.matrices[matrix.parameter]
                group = group_of[parameter]
                weight = _rows(parameter)[part.in_shard]
                kept = 1 - group["lr"] * group["weight_decay"]
                rate = _adjust_lr(group["lr"], "match_rms_adamw", torch.Size(matrix.shape))
                change = update.view_as(weight).to(weight.device)
                if left_out is not None:
                    kept = torch.where(left_out, 1.0, kept)
                    change = change.masked_fill(left_out, 0.0)
                weight.mul_(kept)
                weight.add_(change, alpha=-rate)
        of_others: Any = torch.optim.AdamW.step  # of the parameters that still have gradients
        # Torch has seen an AdamW, and would run the hooks of this step again.
        if getattr(of_others, "hooked", False):
            of_others = of_others.__wrapped__
        of_others(self)

    def _direction(
        self, parameter: nn.Parameter, momentum: float, left_out: torch.Tensor | None
    ) -> torch.Tensor:
        """Adds the gradient to the momentum, unless `left_out`, and removes it. Returns this rank's
        rows of what is orthogonalised (Nesterov)."""
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = _rows(state["momentum_buffer"])
        gradient = torch.zeros_like(buffer) if parameter.grad is None else _rows(parameter.grad)
        parameter.grad = None
        if left_out is not None:
            gradient = torch.where(left_out, buffer, gradient)  # with which the momentum stays
        buffer.lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum).bfloat16()

    def _updates(
        self, owned: Sequence[Sequence[Matrix]], directions: Sequence[torch.Tensor]
    ) -> Iterable[tuple[Matrix, Part, torch.Tensor]]:
        """Returns this rank's parts of the updates of the matrices that each rank has `owned` in a
        turn. Collective."""
        mine = owned[self.rank]
        here = [_parts(matrices, self.rank) for matrices in owned]
        leaving = [
            [directions[matrix.parameter][part.in_shard] for matrix, part in parts if part.sent]
            for parts in here
        ]
        there = [_parts(mine, rank) for rank in range(len(owned))]
        arriving = [[(matrix, part) for matrix, part in parts if part.sent] for parts in there]
        updates = {
            matrix: torch.empty(matrix.shape, dtype=torch.bfloat16, device=self.device)
            for matrix in mine
        }
        for matrix, part, piece in self._exchange(leaving, arriving):
            whole = updates[matrix][part.in_matrix]
            whole.copy_(piece.view_as(whole))
        for matrix, direction in updates.items():
            coefficients = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
            updates[matrix] = _zeropower_via_newtonschulz(
                direction, coefficients, DEFAULT_NS_STEPS, EPS
            )
        return self._exchange(
            [[updates[matrix][part.in_matrix] for matrix, part in parts] for parts in there], here
        )

    def _exchange(
        self,
        leaving: Sequence[Sequence[torch.Tensor]],
        arriving: Sequence[Sequence[tuple[Matrix, Part]]],
    ) -> Iterable[tuple[Matrix, Part, torch.Tensor]]:
        """Sends each rank the tensors that are `leaving` for it. Returns the parts `arriving` from
        each, flat. Collective."""
        pieces = [piece.reshape(-1).to(self.device) for pieces in leaving for piece in pieces]
        rows = torch.cat([torch.empty(0, dtype=torch.bfloat16, device=self.device), *pieces])
        if self.ranks is not None:
            sent = [sum(piece.numel() for piece in pieces) for pieces in leaving]
            rows = exchange_rows(
                rows, sent, [sum(part.size for _, part in parts) for parts in arriving], self.ranks
            )
        expected = list(itertools.chain.from_iterable(arriving))
        split = rows.split([part.size for _, part in expected])
        return [
            (matrix, part, piece) for (matrix, part), piece in zip(expected, split, strict=True)
        ]


def is_first_copy(tensor: torch.Tensor) -> bool:
    """Returns True if this rank is the first of the ranks that hold this part of a tensor."""
    if not isinstance(tensor, DTensor):
        return True
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return not any(
        place
        for place, placement in zip(coordinate, tensor.placements, strict=True)
        if placement.is_replicate()
    )


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a parameter, or of a tensor like it, as [rows of all its
    matrices, columns]."""
    return local_part(tensor).flatten(0, -2)


def _place(parameter: nn.Parameter) -> tuple[int, int, int, int, bool]:
    """Returns the first row, of all matrices one below the other, first column, rows and columns of
    this rank's part of a parameter; whether it is the first copy."""
    offset: Sequence[int] = [0] * parameter.dim()
    if isinstance(parameter, DTensor):
        _, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
    first_row = offset[0] * parameter.shape[1:-1].numel()
    return first_row, offset[-1], *_rows(parameter).shape, is_first_copy(parameter)


def _matrices(
    stacked: Mapping[nn.Parameter, int], shards: Sequence[Sequence[tuple[int, int, int, int, bool]]]
) -> list[Matrix]:
    """Returns the matrices of all parameters, of which the ranks have these `shards`."""
    matrices = []
    for number, (parameter, count) in enumerate(stacked.items()):
        shape = parameter.shape[:-1].numel() // count, parameter.shape[-1]
        for first in range(0, count * shape[0], shape[0]):
            parts = {}
            for rank, places in enumerate(shards):
                row, column, rows, columns, sent = places[number]
                begin = max(first, row)
                end = min(first + shape[0], row + rows)
                if begin < end and columns:
                    in_matrix = slice(begin - first, end - first), slice(column, column + columns)
                    in_shard = slice(begin - row, end - row), slice(0, columns)
                    parts[rank] = Part(in_matrix, in_shard, (end - begin) * columns, sent)
            matrices.append(Matrix(number, shape, parts))
    return matrices


def _turns(matrices: Sequence[Matrix], ranks: int) -> list[list[list[Matrix]]]:
    """Assigns each matrix to an owner, and to a turn in which its owner gathers it:
    [turns][ranks][matrices]."""
    work = [0] * ranks
    held = [0] * ranks
    turns: list[list[list[Matrix]]] = []
    for matrix in sorted(matrices, key=lambda matrix: -orthogonalisation(matrix.shape)):
        owner = min(matrix.parts, key=lambda rank: (work[rank], rank))
        while len(turns) <= held[owner] // AT_ONCE:
            turns.append([[] for _ in range(ranks)])
        turns[held[owner] // AT_ONCE][owner].append(matrix)
        work[owner] += orthogonalisation(matrix.shape)
        held[owner] += matrix.shape[0] * matrix.shape[1]
    return turns


def _parts(matrices: Iterable[Matrix], rank: int) -> list[tuple[Matrix, Part]]:
    return [(matrix, matrix.parts[rank]) for matrix in matrices if rank in matrix.parts]


def orthogonalisation(shape: tuple[int, int]) -> int:
    """Returns the operations of the update of a matrix: five iterations of three products."""
    short, long = sorted(shape)
    return DEFAULT_NS_STEPS * 2 * short * short * (2 * long + short)


def work_of_rank(spec: ModelSpec, ranks: int) -> tuple[float, float]:
    """Returns the operations of the updates per rank, and the numbers that it sends, and receives,
    to compute them."""
    matrices = [matrix for layer in spec.layers for matrix in layer.model_matrices]
    operations = sum(
        matrix.count * orthogonalisation((matrix.rows, matrix.columns)) for matrix in matrices
    )
    return operations / ranks, sum(matrix.count * matrix.size for matrix in matrices) / ranks


def working_bytes(layer: LayerSpec, held: int) -> int:
    """Returns the most temporary memory of a rank that has `held` numbers of matrices: gathered
    matrices and their updates.

    What is orthogonalised takes less than the gradient that it replaces.
    """
    largest = max(matrix.size for matrix in layer.model_matrices)
    gathered = min(held, AT_ONCE) + largest
    return torch.bfloat16.itemsize * (4 * gathered + 4 * largest)

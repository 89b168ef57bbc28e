"""AdamW with moments in 8 bits, by the codes of torchao. Numbers with a common scale are in one row
of a matrix, 256 or what is left of the row, so that shards of rows never cut them: weights do not
depend on the number of ranks. The state has codes and scales as plain tensors, sharded as the
matrix is; checkpoints go on on any number of ranks.
"""

from collections.abc import Iterable
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchao.optim.quant_utils import create_dynamic_map, quantize_8bit_with_qmap, scale_tensor

from longctx.errors import UserError
from longctx.parallel.sharding import local_part
from longctx.planning.cost.eight_bit import BLOCK, blocks_of_row, cuts_blocks, in_8_bits

MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Names of the moments, and whether they have a sign."""
CODES = ".codes"
SCALE = ".scale"


class EightBit(torch.optim.Optimizer):
    """AdamW as torchao's, with moments in 8 bits of all matrices but small ones, of whatever number
    of columns.

    The state of such a matrix is `exp_avg.codes` and `exp_avg_sq.codes`, one byte for each of its
    numbers, and `exp_avg.scale` and `exp_avg_sq.scale`, [.., blocks of a row]; of others `exp_avg`
    and `exp_avg_sq`.
    """

    def __init__(
        self,
        groups: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        """Raises UserError if ranks have parts of a row that are no whole blocks."""
        rate = torch.tensor(lr)  # a number would be compiled into the update
        super().__init__(
            groups, {"lr": rate, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        for group in self.param_groups:
            for parameter in group["params"]:
                _check_part(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure
        """Updates all parameters that have a gradient. The update is compiled for GPUs."""
        with torch._dynamo.utils.disable_cache_limit():  # one program for each size
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, local_part(parameter.grad), group)

    def _update(
        self, parameter: nn.Parameter, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        state = self.state[parameter]
        if not state:
            state.update(_zeros(parameter))
        state["step"] += 1
        weight = local_part(parameter.detach())
        if not weight.numel():  # this rank has no rows
            return
        moments = [_moment(state, name, signed) for name, signed in MOMENTS.items()]
        update = _compiled() if weight.is_cuda else _adamw
        betas = group["betas"]
        decay = group["weight_decay"]
        eps = group["eps"]
        update(
            weight,
            gradient,
            moments=moments,
            step=state["step"],
            rate=group["lr"],
            betas=betas,
            decay=decay,
            eps=eps,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's own, which would make floating-point numbers of the codes."""
        names = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        ours = chain.from_iterable(group["params"] for group in self.param_groups)
        by_name = dict(zip(names, ours, strict=True))
        super().load_state_dict({**state_dict, "state": {}})
        for name, values in state_dict["state"].items():
            self.state[by_name[name]] = dict(values)


def _check_part(parameter: nn.Parameter) -> None:
    """Raises UserError if tensor parallelism cuts blocks of a matrix."""
    if not (isinstance(parameter, DTensor) and in_8_bits(parameter.shape)):
        return
    columns = parameter.shape[-1]
    last = parameter.dim() - 1
    ranks = 1
    for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
        ranks *= size if placement.is_shard(last) else 1
    if cuts_blocks(columns, ranks):
        raise UserError(
            f"optimizer.name is adamw-8bit, but a rank has {-(-columns // ranks)} of {columns} "
            f"columns of a parameter, no multiple of {BLOCK}, which have a common scale: lower "
            "parallel.tensor_parallel_size, or use adamw"
        )


def _zeros(parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """Returns the state of a parameter before its first update."""
    state = {"step": torch.tensor(0.0)}
    for name in MOMENTS:
        if not in_8_bits(parameter.shape):
            state[name] = torch.zeros_like(parameter)
            continue
        local = local_part(parameter)
        whole = parameter.shape
        codes = torch.zeros_like(local, dtype=torch.uint8)
        scale = torch.zeros(*local.shape[:-1], blocks_of_row(local.shape[-1]), device=local.device)
        scales = torch.Size((*whole[:-1], blocks_of_row(whole[-1])))
        state[name + CODES] = _like(parameter, codes, whole)
        state[name + SCALE] = _like(parameter, scale, scales)
    return state


def _like(parameter: nn.Parameter, local: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Returns a tensor of this `shape` that is sharded like a parameter, of which this rank has the
    part `local`."""
    if not isinstance(parameter, DTensor):
        return local
    mesh = parameter.device_mesh
    placements = parameter.placements
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


Moment = tuple[torch.Tensor, ...]
"""Values of a moment on this rank; or their codes, scales, and the value of each code."""


def _moment(state: dict[str, torch.Tensor], name: str, signed: bool) -> Moment:
    if name in state:
        return (local_part(state[name]),)
    codes = local_part(state[name + CODES])
    scale = local_part(state[name + SCALE])
    return codes, scale, _code_values(signed, codes.device)


@cache
def _code_values(signed: bool, device: torch.device) -> torch.Tensor:
    return torch.tensor(create_dynamic_map(signed), device=device)


@cache
def _compiled() -> Any:
    return torch.compile(_adamw, fullgraph=True, dynamic=False)


def _adamw(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    *,
    moments: list[Moment],
    step: torch.Tensor,
    rate: torch.Tensor,
    betas: tuple[float, float],
    decay: float,
    eps: float,
) -> None:
    """Updates a weight and its moments in place. The weight is updated by moments that are not yet
    rounded, as in torchao."""
    (beta1, beta2), gradient = betas, gradient.float()
    mean = _read(moments[0]).lerp(gradient, 1 - beta1)
    squares = _read(moments[1]).lerp(gradient.square(), 1 - beta2)
    _write(moments[0], mean)
    _write(moments[1], squares)
    before = weight.float()
    decayed = before - rate * decay * before
    root = squares.sqrt() / (1 - beta2**step).sqrt() + eps
    weight.copy_(decayed - rate * (mean / (1 - beta1**step)) / root)


def _read(moment: Moment) -> torch.Tensor:
    """Returns the values of a moment."""
    if len(moment) == 1:
        return moment[0]
    codes, scale, values = moment
    read: list[torch.Tensor] = []
    for part, its_scale in _parts(codes, scale):
        scaled = values[part.int()].unflatten(-1, (its_scale.shape[-1], -1))
        read.append((scaled * its_scale.unsqueeze(-1)).flatten(-2))
    if len(read) > 1:
        return torch.cat(read, -1)
    return read[0]


def _write(moment: Moment, value: torch.Tensor) -> None:
    """Rounds the values of a moment to codes, by the largest of each block."""
    if len(moment) == 1:
        moment[0].copy_(value)
        return
    codes, scale, values = moment
    begin = 0
    for part, its_scale in _parts(codes, scale):
        width = part.shape[-1]
        block = width // its_scale.shape[-1]
        scaled, largest = scale_tensor(value[..., begin : begin + width].reshape(-1, block), block)
        part.copy_(quantize_8bit_with_qmap(scaled, values).view(part.shape))
        its_scale.copy_(largest.view(its_scale.shape))
        begin += width


def _parts(codes: torch.Tensor, scale: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns codes and scales of the whole blocks of all rows, and of what is left of them, in the
    same memory.

    Each part is a product of its own: torch 2.13 compiles scales that are repeated and then cut to
    wrong values.
    """
    whole = codes.shape[-1] // BLOCK
    begin = whole * BLOCK
    parts = [(codes[..., :begin], scale[..., :whole]), (codes[..., begin:], scale[..., whole:])]
    return [part for part in parts if part[0].shape[-1]]

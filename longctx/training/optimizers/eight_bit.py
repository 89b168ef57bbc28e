"""8-bit AdamW by torchao. Blocks of moments with a common scale lie within the rows of a parameter, so that shards never cut
them: weights do not depend on the number of ranks, and checkpoints, which have codes and scales as plain tensors, go on on any.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchao.optim import AdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit

from longctx.errors import UserError
from longctx.parallel.sharding import local_part

BLOCK = 256
SMALLEST = 4096
"""Parameters with fewer numbers have moments in float32, as in torchao."""


class EightBit(AdamW8bit):  # type: ignore[misc]  # torchao is untyped
    """torchao's AdamW, whose moments are in 8 bits where the rows of a parameter are whole blocks, however it is split."""

    def _new_buffer(self, p: torch.Tensor, signed: bool) -> torch.Tensor:
        local = local_part(p)
        if not _in_8_bits(p) or not local.numel():
            return torch.zeros_like(p)
        if local.shape[-1] % BLOCK:
            raise UserError(
                f"optimizer.name is adamw-8bit, but a rank has {local.shape[-1]} of {p.shape[-1]} columns of a parameter, no "
                f"multiple of {BLOCK}, which have a common scale: lower parallel.tensor_parallel_size, or use adamw"
            )
        zeros = OptimState8bit.zeros(local.shape, signed, BLOCK, local.device, dtype=local.dtype)
        return like(p, zeros, p.shape) if isinstance(p, DTensor) else zeros

    def step(self, closure: None = None) -> None:
        """Updates all parameters. torchao compiles the update, which runs as it is where all parameters are on a CPU."""
        on_gpu = any(parameter.is_cuda for group in self.param_groups for parameter in group["params"])
        with torch.compiler.set_stance("default" if on_gpu else "force_eager"):
            super().step(closure)


def _in_8_bits(p: torch.Tensor) -> bool:
    return p.numel() >= SMALLEST and p.shape[-1] % BLOCK == 0


def plain(moments: dict[str, Any]) -> dict[str, Any]:
    """Returns moments by name, of which 8-bit ones are replaced by their codes and scales, in the same memory."""
    result = {}
    for name, value in moments.items():
        local = local_part(value)
        *rows, columns = local.shape or (0,)
        if isinstance(local, OptimState8bit):
            codes, scale = local.codes, local.scale.view(*rows, columns // BLOCK)
        elif value.dim() and _in_8_bits(value) and not local.numel():  # this rank has no rows, of which torchao makes none
            codes, scale = local.to(torch.uint8), local.new_empty(*rows, columns // BLOCK)
        else:
            result[name] = value
            continue
        whole = value.shape
        result[f"{name}.codes"] = like(value, codes, whole) if isinstance(value, DTensor) else codes
        shape = torch.Size((*whole[:-1], whole[-1] // BLOCK))
        result[f"{name}.scale"] = like(value, scale, shape) if isinstance(value, DTensor) else scale
    return result


def like(tensor: DTensor, local: torch.Tensor, shape: torch.Size) -> DTensor:
    """Returns a tensor of this `shape` that is sharded like another one, of which this rank has the part `local`."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride)

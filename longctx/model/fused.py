"""Fused operations for blocks that are not compiled, from liger-kernel: norms, and activation times product in gated MLPs.

Two of Liger's operations are not used. Its RoPE writes into queries and keys, which recomputation may have kept. Its loss makes
the host wait for the number of labels, and weighs tokens only by computing everything twice: the trainer compiles its own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from longctx.errors import UserError
from longctx.model.decoder import Decoder, OffsetNorm
from longctx.model.mlp import ACTIVATIONS, MLP


def check_device(device: torch.device) -> None:
    """Raises UserError on a CPU, unless Triton interprets its kernels."""
    import triton

    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise UserError("train.fused is set, but this run is on a CPU, where liger-kernel does not run: omit it")


def fuse(model: Decoder) -> None:
    """Replaces norms and gated products of the blocks, in place. They compute in float32 and round once; zero tokens work."""
    from liger_kernel.ops.geglu import LigerGELUMulFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    gated = {ACTIVATIONS["silu"]: LigerSiLUMulFunction.apply, ACTIVATIONS["gelu"]: LigerGELUMulFunction.apply}
    for module in model.layers.modules():
        if isinstance(module, nn.RMSNorm):
            vars(module)["forward"] = _norm(module)
        elif isinstance(module, MLP):
            vars(module)["gated"] = _unless_empty(gated[module.activation], module.gated)


def _norm(module: nn.RMSNorm) -> Callable[[torch.Tensor], torch.Tensor]:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    offset = 1.0 if isinstance(module, OffsetNorm) else 0.0

    def forward(x: torch.Tensor) -> torch.Tensor:
        # Not in place: the gradient of a norm's output may also go to the residual stream.
        out: torch.Tensor = LigerRMSNormFunction.apply(x, module.weight, module.eps, offset, "gemma", False)
        return out

    return _unless_empty(forward, module.forward)


def _unless_empty(fused: Callable[..., Any], plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Calls `plain` for zero tokens, for which a kernel cannot be started."""

    def forward(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (fused if x.numel() else plain)(x, *others)
        return out

    return forward

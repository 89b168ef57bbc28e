"""Compilation: torch.compile of every block, the same program for all layers and micro-batches."""

from collections.abc import Callable
from typing import Any

import torch

from longctx.model.protocol import Model

Forward = Callable[..., torch.Tensor]


def compile_blocks(model: Model, backend: str = "inductor") -> None:
    """Compiles the blocks, in place, after recomputation and tensor parallelism are applied and before they are sharded.

    Attention is one operator in them and breaks no graph. Token counts and layer numbers are symbols, so that neither another
    micro-batch nor another layer is compiled anew (but for layers 0 and 1, which torch takes for constants). A rank that has no
    token or a single one, which torch would compile anew too, runs the block as it is.
    """
    config = torch._dynamo.config
    config.allow_unspec_int_on_nn_module = True  # else every layer's number is a constant of its program
    config.capture_dynamic_output_shape_ops = True  # how many rows attention receives is known only when it runs
    for block in model.layers:
        block.forward = _from_two_tokens(torch.compile(block.forward, backend=backend, dynamic=True), block.forward)


def _from_two_tokens(compiled: Forward, plain: Forward) -> Forward:
    def forward(x: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        return (compiled if x.shape[-2] > 1 else plain)(x, *others, **named)

    return forward

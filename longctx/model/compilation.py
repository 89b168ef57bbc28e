"""Compilation: torch.compile of every block, with one program for all layers and micro-batches."""

from collections.abc import Callable
from typing import Any

import torch

from longctx.model.protocol import Model

Forward = Callable[..., torch.Tensor]


def compile_blocks(model: Model, backend: Any = "inductor") -> None:
    """Compiles the blocks, in place, after recomputation and tensor parallelism are applied and
    before they are sharded.

    Attention is a single operator in them and causes no graph break. Token counts and layer numbers
    are symbolic, so that other micro-batches and layers are not recompiled (except layers 0 and 1,
    which torch treats as constants). Blocks with zero tokens or one token, which torch would also
    recompile, run uncompiled, as do blocks with experts, whose numbers of rows depend on data.
    """
    config = torch._dynamo.config
    # Otherwise the numbers of each layer are constants of its program; other numbers, such as the
    # size of heads, are one.
    torch.compiler.config.dynamic_sources = r".*\.(layer(_idx|_id|_number)?|expand_kv\.handle)$"
    # The number of rows that attention receives is known only at run time.
    config.capture_dynamic_output_shape_ops = True
    for block in model.layers:
        if hasattr(block, "moe"):
            continue
        block.forward = _from_two_tokens(
            torch.compile(block.forward, backend=backend, dynamic=True), block.forward
        )


def _from_two_tokens(compiled: Forward, plain: Forward) -> Forward:
    def forward(x: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        if x.shape[-2] < 2:
            return plain(x, *others, **named)
        for table in others:
            # Of the native decoder: [tokens, ..].
            if isinstance(table, torch.Tensor) and x.dim() == 2:
                torch._dynamo.mark_static(table, list(range(1, table.dim())))
        return compiled(x, *others, **named)

    return forward

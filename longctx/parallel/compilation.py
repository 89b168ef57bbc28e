"""Compilation: torch.compile of every block, the same program for all layers and micro-batches."""

import torch

from longctx.model.transformer import Transformer


def compile_blocks(model: Transformer, backend: str = "inductor") -> None:
    """Compiles the blocks, in place, after recomputation and tensor parallelism are applied and before they are sharded.

    Attention is one operator in them and breaks no graph. Token counts and layer numbers are symbols, so that neither another
    micro-batch nor another layer is compiled anew (but for layers 0 and 1, which torch takes for constants).
    """
    config = torch._dynamo.config
    config.allow_unspec_int_on_nn_module = True  # else every layer's number is a constant of its program
    config.capture_dynamic_output_shape_ops = True  # how many rows attention receives is known only when it runs
    for block in model.layers:
        block.compile(backend=backend, dynamic=True)

"""Activation checkpointing: backward recomputes activations instead of keeping them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from longctx.attention import OPERATORS
from longctx.errors import UserError
from longctx.model.protocol import Model
from longctx.parallel.offload import Offload

MODES = ("none", "selective", "full")


def apply_recompute(model: Model, mode: str, *, mlp_tile_tokens: int | None = None, offload: Offload | None = None) -> None:
    """Applies activation checkpointing to every block, in place, before the block is sharded.

    Modes: none keeps all activations. selective recomputes all but attention, so that attention and its exchange run once; it
    keeps the block's input, the attention output and its log-sum-exp. full keeps only the block's input and repeats attention.
    With `mlp_tile_tokens`, the MLP processes that number of tokens at a time and is recomputed tile by tile, in every mode.
    With `offload`, inputs of recomputed blocks are kept in host memory.

    Raises ValueError for another mode, and UserError if `mlp_tile_tokens` is set but a block has no module `mlp`.
    """
    if mode not in MODES:
        raise ValueError(f"recompute is {mode!r}: must be one of {', '.join(MODES)}")
    for block in model.layers:
        if mlp_tile_tokens is not None:
            mlp = getattr(block, "mlp", None)
            if not isinstance(mlp, nn.Module):
                raise UserError(
                    f"train.mlp_tile_tokens is {mlp_tile_tokens}, but {type(block).__name__} has no module `mlp` to tile: "
                    "remove it"
                )
            mlp.forward = partial(_in_tiles, _recomputed(mlp.forward, selective=False), mlp_tile_tokens)
        if mode == "none":
            continue
        forward = _recomputed(block.forward, selective=mode == "selective")
        block.forward = forward if offload is None else partial(offload, forward)


def _recomputed(forward: Callable[..., torch.Tensor], *, selective: bool) -> Callable[..., torch.Tensor]:
    contexts: dict[str, Any] = {"context_fn": partial(create_selective_checkpoint_contexts, OPERATORS)} if selective else {}

    def recomputed(
        *given: Any, **named: Any
    ) -> torch.Tensor:  # a function, as torch.compile skips the frame of a partial of `checkpoint`
        out: torch.Tensor = checkpoint(forward, *given, use_reentrant=False, preserve_rng_state=False, **contexts, **named)
        return out

    return recomputed


def _in_tiles(forward: Callable[[torch.Tensor], torch.Tensor], tokens: int, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([forward(tile) for tile in x.split(tokens, dim=-2)], dim=-2)

"""Recomputation: what backward computes again instead of keeping it."""

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
    """Makes every block recompute, in place, before it is sharded.

    none: everything is kept. selective: all but attention is recomputed, so attention and its exchange run once; kept are the
    block's input, the attention output and its log-sum-exp. full: only the block's input is kept, attention is repeated.
    With `mlp_tile_tokens` the MLP takes so many tokens at a time and is recomputed tile by tile, in every mode. With `offload`
    inputs of blocks that recompute are kept in host memory.
    """
    if mode not in MODES:
        raise ValueError(f"recompute is {mode!r}: must be one of {', '.join(MODES)}")
    for block in model.layers:
        if mlp_tile_tokens is not None:
            mlp = getattr(block, "mlp", None)
            if not isinstance(mlp, nn.Module):
                raise UserError(f"train.mlp_tile_tokens: {type(block).__name__} has no module `mlp`; leave it out")
            mlp.forward = partial(_in_tiles, _recomputed(mlp.forward, selective=False), mlp_tile_tokens)
        if mode == "none":
            continue
        forward = _recomputed(block.forward, selective=mode == "selective")
        block.forward = forward if offload is None else partial(offload, forward)


def _recomputed(forward: Callable[..., torch.Tensor], *, selective: bool) -> Callable[..., torch.Tensor]:
    contexts: dict[str, Any] = {"context_fn": partial(create_selective_checkpoint_contexts, OPERATORS)} if selective else {}

    def recomputed(
        *given: Any, **named: Any
    ) -> torch.Tensor:  # a partial of `checkpoint` is a frame that torch.compile passes over
        out: torch.Tensor = checkpoint(forward, *given, use_reentrant=False, preserve_rng_state=False, **contexts, **named)
        return out

    return recomputed


def _in_tiles(forward: Callable[[torch.Tensor], torch.Tensor], tokens: int, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([forward(tile) for tile in x.split(tokens, dim=-2)], dim=-2)

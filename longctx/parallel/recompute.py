"""Recomputation: what backward computes again instead of keeping it."""

from functools import partial

from torch.utils.checkpoint import checkpoint

from longctx.model.transformer import Transformer

MODES: dict[str, tuple[str, ...]] = {"none": (), "selective": ("before", "after"), "full": ("forward",)}
"""The methods of a block that each mode repeats in backward."""


def apply_recompute(model: Transformer, mode: str) -> None:
    """Makes every block recompute, in place, before it is sharded.

    none: everything is kept. selective: all but attention is recomputed, so attention and its exchange run once; kept are
    the block's input, q, k, v and the attention output. full: only the block's input is kept, attention is repeated.
    """
    for block in model.layers:
        for name in MODES[mode]:
            setattr(block, name, partial(checkpoint, getattr(block, name), use_reentrant=False, preserve_rng_state=False))

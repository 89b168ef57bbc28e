"""Recomputation: what backward computes again instead of keeping it."""

from functools import partial

from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from longctx.attention import OPERATORS
from longctx.model.transformer import Transformer

MODES = ("none", "selective", "full")


def apply_recompute(model: Transformer, mode: str) -> None:
    """Makes every block recompute, in place, before it is sharded.

    none: everything is kept. selective: all but attention is recomputed, so attention and its exchange run once; kept are the
    block's input, the attention output and its log-sum-exp. full: only the block's input is kept, attention is repeated.
    """
    if mode not in MODES:
        raise ValueError(f"recompute is {mode!r}: must be one of {', '.join(MODES)}")
    if mode == "none":
        return
    repeat = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if mode == "selective":
        repeat = partial(repeat, context_fn=partial(create_selective_checkpoint_contexts, OPERATORS))
    for block in model.layers:
        block.forward = partial(repeat, block.forward)

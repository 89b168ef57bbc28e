"""Block diffusion of one document at a time, as published: a noisy copy beside the clean one, a
dense mask, and the loss in the words of public implementations."""

from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from longctx.data.diffusion import Noise, NoisyDocument

MASK = 63


class NoisyCopy(NamedTuple):
    """The whole noisy copy of a document, which tokens are masked in it, and the level of noise of
    each."""

    tokens: torch.Tensor
    masked: torch.Tensor
    level: torch.Tensor


def noisy_copy(document: NoisyDocument, clean: torch.Tensor) -> NoisyCopy:
    """Where a tree leaves out the noisy copy of a block, nothing is masked."""
    noisy = clean.clone()
    masked = torch.zeros(len(clean), dtype=torch.bool)
    level = torch.ones(len(clean))
    for number, node in enumerate(document.tree.nodes):
        tokens = torch.from_numpy(document.tokens[node.start : node.stop])
        labels = document.labels[node.start : node.stop]
        if node.both_ways and (labels >= 0).any():
            rows = slice(*node.positions)
            noisy[rows] = tokens
            masked[rows] = torch.from_numpy(labels >= 0)
            level[rows] = 1 / document.tree.weights[number]
    return NoisyCopy(noisy, masked, level)


def published_mask(
    length: int, block: int, *, causal: bool = False, window: int | None = None
) -> torch.Tensor:
    """Returns what tokens of [noisy; clean] see [2·length, 2·length]: arXiv 2503.09573, appendix
    B.6, where noisy blocks see themselves (block-diagonal) and earlier clean ones (offset
    block-causal), clean ones see clean ones up to themselves (block-causal), or tokens (causal).

    With a window, tokens see earlier ones only so far, and later ones of their own block as before.
    """
    of = torch.arange(length) // block
    own = of[:, None] == of[None]
    before = of[:, None] > of[None]
    upto = torch.ones(length, length).tril().bool() if causal else own | before
    none = torch.zeros_like(own)
    seen = torch.cat([torch.cat([own, before], 1), torch.cat([none, upto], 1)])
    if window is not None:
        position = torch.arange(length).repeat(2)
        seen &= position[:, None] - position[None] < window
    return seen


def alone(
    model: Any, document: NoisyDocument, clean: torch.Tensor, *, block: int, noise: Noise
) -> torch.Tensor:
    """Returns the sum of the loss of a document alone, by a dense mask.

    Masked tokens: cross-entropy over the probability to be masked, as in ML-GSAI/LLaDA,
    GUIDELINES.md, and kuleshov-group/bd3lms, diffusion.py (`loss_scale` is -1/t there).
    """
    noisy, masked, level = noisy_copy(document, clean)
    length = len(clean)
    config = model.config
    masks = {}
    for kind in ("full_attention", "sliding_attention"):
        window = getattr(config, "sliding_window", None) if kind[0] == "s" else None
        seen = published_mask(length, block, causal=bool(noise.next_token), window=window)
        hidden = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
        masks[kind] = hidden.to(model.dtype)[None, None]
    mixed = len(set(getattr(config, "layer_types", None) or ())) > 1
    only = "sliding_attention" if config.model_type == "mistral" else "full_attention"
    logits = model(
        input_ids=torch.cat([noisy, clean])[None],
        position_ids=torch.arange(length).repeat(2)[None],
        attention_mask=masks if mixed else masks[only],
        use_cache=False,
    ).logits[0]
    logits = logits.double()
    losses = F.cross_entropy(logits[:length][masked], clean[masked], reduction="none")
    total = (losses / level[masked]).sum()
    if noise.next_token:
        following = F.cross_entropy(logits[length:-1], clean[1:], reduction="sum")
        total = total + noise.next_token * following
    return total

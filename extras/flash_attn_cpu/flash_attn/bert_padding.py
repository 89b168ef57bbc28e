"""Padded rows to packed tokens and back, as flash-attn's module of this name."""

from typing import Any

import torch
from torch.nn.functional import pad


def rearrange(tensor: torch.Tensor, pattern: str, **sizes: int) -> Any:
    """einops' function, which others import from here."""
    import einops  # type: ignore[import-not-found,unused-ignore]

    return einops.rearrange(tensor, pattern, **sizes)


def index_first_axis(values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Returns the entries of the first dimension at `indices`."""
    return values[indices]


def index_put_first_axis(
    values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int
) -> torch.Tensor:
    """Returns a tensor of `first_axis_dim` entries, 0 but for `values` at `indices`."""
    zeros = values.new_zeros(first_axis_dim, *values.shape[1:])
    return zeros.index_copy(0, indices, values)


def unpad_input(
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    unused_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Returns tokens without padding [tokens, ..], their places in the flattened rows, cumulative
    lengths of the rows (int32), the longest one, and how many tokens of each are used.

    `hidden_states` is [rows, length, ..]; the masks are [rows, length], 1 for a token that is used
    and 1 for one that keeps its room.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, cu_seqlens, int(lengths.max()), used


def pad_input(
    hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int
) -> torch.Tensor:
    """Returns [batch, seqlen, ..] of tokens at their places in the flattened rows, 0 elsewhere."""
    flat = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return flat.view(batch, seqlen, *hidden_states.shape[1:])

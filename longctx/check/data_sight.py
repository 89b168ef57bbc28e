"""Who sees whom in a batch, as causal LMs of transformers read its attention mask, positions and
lengths, without a model.

transformers 5.20 to 5.24: `create_causal_mask` makes the mask of eager, sdpa and flex attention;
`modeling_flash_attention_utils._flash_attention_forward` calls flash attention.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from transformers import modeling_flash_attention_utils

from .data_batches import Batch

ADDING = ("eager", "flex_attention")
"""Implementations that add a mask of four dimensions to scores."""
MASKED = ("eager", "sdpa", "flex_attention")
FLASH = "flash attention"
READINGS = (*MASKED, FLASH)
"""All ways in which a batch is read."""
LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""What flash attention takes the place of documents from, if all are given."""
HIDES = -1e3
"""Scores that have this added, or less, count nothing."""
UNSEEN = -1
"""Segment of keys that no token sees."""


@dataclass
class Sight:
    """The keys that tokens see, in a batch whose rows follow each other as one.

    Attributes:
        segments: [rows · tokens]; a token sees the keys up to its own that have its segment.
        seen: [rows, tokens, tokens], where a mask of four dimensions says it: in a row, whether a
            token (first) sees a key (second).
        unknown: why it is not known.
    """

    segments: torch.Tensor | None = None
    seen: torch.Tensor | None = None
    unknown: str = ""

    def sees(self, row: int, token: int, key: int, *, tokens: int) -> bool:
        """Returns whether a token sees a key of its row, of `tokens` tokens."""
        if self.seen is not None:
            return bool(self.seen[row, token, key])
        assert self.segments is not None
        segments = self.segments.view(-1, tokens)[row]
        return (
            key <= token
            and bool(segments[key] != UNSEEN)
            and bool(segments[key] == segments[token])
        )


def readings_of(attention: str) -> tuple[str, ...]:
    """Returns the readings of an implementation of transformers: all where none is given, and none
    of one that is not known."""
    if not attention:
        return READINGS
    if "flash" in attention:
        return (FLASH,)
    return tuple(reading for reading in MASKED if reading == attention)


def sight(batch: Batch, reading: str) -> Sight:
    """Returns who sees whom in a batch under one of READINGS."""
    mask = batch.given.get("attention_mask")
    positions = batch.given.get("position_ids")
    if isinstance(mask, dict):
        return Sight(unknown="the batch has a mask for each kind of layer")
    if positions is not None and positions.dim() > 2:
        return Sight(unknown="positions have several axes")
    if mask is not None and mask.dim() == 4:
        return _of_four(mask, reading)
    if mask is not None and mask.dim() != 2:
        return Sight(unknown=f"the attention mask has {mask.dim()} dimensions")
    if reading == FLASH:
        return _of_flash(batch)
    return _of_mask(batch)


def _of_four(mask: torch.Tensor, reading: str) -> Sight:
    """Returns who sees whom by a mask [rows, heads or 1, tokens, tokens] that goes to attention as
    it is."""
    if reading == FLASH:
        return Sight(unknown="flash attention takes no mask of four dimensions")
    of_first_head = mask[:, 0]
    if reading in ADDING or mask.is_floating_point():
        return Sight(seen=of_first_head.double() > HIDES)
    if mask.dtype != torch.bool:
        return Sight(unknown=f"sdpa takes no mask of {mask.dtype}")
    return Sight(seen=of_first_head)


def _of_mask(batch: Batch) -> Sight:
    """Returns who sees whom in eager, sdpa and flex attention: positions that begin anew part
    documents only without an attention mask."""
    rows, tokens = batch.ids.shape
    segments = torch.zeros(rows, tokens, dtype=torch.long)
    positions = batch.given.get("position_ids")
    if batch.given.get("attention_mask") is None and positions is not None:
        steps = positions.expand(rows, -1).diff(dim=-1)
        segments[:, 1:] = (steps != 1).cumsum(-1)
    segments = segments + tokens * torch.arange(rows)[:, None]
    hidden = ~batch.not_padded
    return Sight(segments=segments.masked_fill(hidden, UNSEEN).flatten())


def _of_flash(batch: Batch) -> Sight:
    """Returns who sees whom in flash attention: by a mask that hides a token, else by lengths, else
    by positions of a single row."""
    rows, tokens = batch.ids.shape
    of_rows = torch.arange(rows).repeat_interleave(tokens)
    kept = batch.not_padded.flatten()
    positions = batch.given.get("position_ids")
    if not kept.all():
        unpad = modeling_flash_attention_utils._get_unpad_data
        if unpad.__module__ != modeling_flash_attention_utils.__name__:
            return Sight(unknown=f"{unpad.__module__} replaces how transformers reads masks")
        return Sight(segments=of_rows.masked_fill(~kept, UNSEEN))
    if all(batch.given.get(name) is not None for name in LENGTHS):
        return Sight(segments=_of_lengths(batch.given["cu_seq_lens_q"], rows * tokens))
    if positions is not None and rows == 1 and tokens > 1:
        flat = positions.flatten()
        counted = torch.arange(tokens) + flat.min()
        if not torch.equal(counted, flat):
            begins = flat == flat.min()
            return Sight(segments=begins.cumsum(0))
    return Sight(segments=of_rows)


def beyond_lengths(batch: Batch) -> list[int]:
    """Returns the tokens of a batch, whose rows follow each other, that cumulated lengths for flash
    attention leave out: those after the last."""
    if not all(batch.given.get(name) is not None for name in LENGTHS):
        return []
    last = int(batch.given["cu_seq_lens_q"].max())
    return list(range(last, batch.ids.numel()))


def _of_lengths(cumulated: torch.Tensor, tokens: int) -> torch.Tensor:
    """Returns segments [tokens] of cumulated lengths; tokens beyond the last one are in none, and
    see nothing."""
    segments = torch.full((tokens,), UNSEEN)
    ends = cumulated.flatten().tolist()
    for number, (begin, end) in enumerate(pairwise(ends)):
        segments[begin:end] = number
    return segments


def marks(batch: Batch) -> Iterator[str]:
    """Yields the names of what says in a batch that a row has several documents."""
    rows = len(batch.ids)
    kept = batch.not_padded
    both = kept[:, 1:] & kept[:, :-1]
    mask = batch.given.get("attention_mask")
    positions = batch.given.get("position_ids")
    if positions is not None and positions.dim() == 2:
        steps = positions.expand(rows, -1).diff(dim=-1)
        if ((steps != 1) & both).any():
            yield "position_ids"
    if mask is not None and mask.dim() == 2 and len(mask[kept].unique()) > 1:
        yield "attention_mask"
    if mask is not None and mask.dim() == 4:
        yield "attention_mask"
    if batch.given.get("seq_idx") is not None and len(batch.given["seq_idx"].unique()) > 1:
        yield "seq_idx"
    lengths = batch.given.get(LENGTHS[0])
    if lengths is not None and len(lengths) > rows + 1:
        yield LENGTHS[0]

"""Where documents, padding and added tokens are in a batch, and who should see whom."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .data_batches import Batch
from .data_documents import Piece, Placing, gaps
from .data_roles import Tokenizer
from .data_sight import UNSEEN, Sight

FILL = -1
"""Piece of tokens that belong to no document."""
MIXED = "documents see each other"
CUT = "tokens do not see all of their document before them"
HIDDEN = "the attention mask hides tokens of documents"
BEYOND = "cu_seq_lens_q leave out the last tokens"
SEES_PADDING = "tokens see padding"
LATER = "tokens see later ones"
SIGHTS = (MIXED, LATER, SEES_PADDING, HIDDEN, BEYOND, CUT)
"""Faults of what tokens see, the most telling first."""


@dataclass
class Places:
    """Tokens of a batch, whose rows follow each other as one: [rows · tokens].

    Attributes:
        pieces: row and tokens of each document, or of a part of one.
        piece: number of each token's piece; FILL without one.
        padding: whether a token is padding.
        added: whether a token is in no document, and no padding.
        placing: what of the documents was found.
    """

    pieces: list[tuple[int, Piece]]
    piece: torch.Tensor
    padding: torch.Tensor
    added: torch.Tensor
    placing: Placing

    @property
    def placed(self) -> Counter[int]:
        """How many tokens of each document are there, of those that are there at all."""
        found = Counter[int]()
        for _, piece in self.pieces:
            if piece.document is not None:
                found[piece.document] += piece.end - piece.begin
        return found

    @property
    def unknown(self) -> int:
        """Tokens that the batch has together, but that no row had."""
        return sum(piece.end - piece.begin for _, piece in self.pieces if piece.document is None)


def places_of(batch: Batch, documents: list[list[int]], tokenizer: Tokenizer) -> Places:
    """Returns where documents are in a batch. Runs of other tokens that are no padding are pieces
    that only the batch knows; a single one is added."""
    placing = Placing(batch.ids.tolist(), documents, tokenizer.pad)
    piece_of = torch.full(batch.ids.shape, FILL)
    padding = torch.zeros(batch.ids.shape, dtype=torch.bool)
    pieces = list[tuple[int, Piece]]()
    for row, placed in enumerate(placing.pieces):
        of_row = list(placed)
        for begin, end in gaps(placed, batch.ids.shape[1]):
            padding[row, begin:end] = _padding(
                batch, row, begin=begin, end=end, tokenizer=tokenizer
            )
            of_row += _runs(batch, row, begin=begin, is_pad=padding[row, begin:end].tolist())
        of_row.sort(key=lambda piece: piece.begin)
        for piece in of_row:
            piece_of[row, piece.begin : piece.end] = len(pieces)
            pieces.append((row, piece))
    flat = piece_of.flatten()
    is_padding = padding.flatten()
    added = (flat == FILL) & ~is_padding
    return Places(pieces, piece=flat, padding=is_padding, added=added, placing=placing)


def _padding(batch: Batch, row: int, *, begin: int, end: int, tokenizer: Tokenizer) -> torch.Tensor:
    """Returns which tokens of a gap are padding. A single one that the mask keeps is a separator
    between documents, or an end where padding has no token of its own."""
    kept = batch.not_padded[row, begin:end]
    if end - begin == 1 and begin > 0 and kept[0]:
        is_inside = end < batch.ids.shape[1]
        if is_inside or tokenizer.pad == tokenizer.eos:
            return torch.zeros(1, dtype=torch.bool)
    if tokenizer.pad is None:
        return ~kept
    is_pad = batch.ids[row, begin:end] == tokenizer.pad
    others = (~is_pad).nonzero().flatten()
    if len(others):
        # Between tokens that no row had, one like padding may be as unknown.
        is_pad[int(others[0]) : int(others[-1])] = False
    return is_pad | ~kept


def _runs(batch: Batch, row: int, *, begin: int, is_pad: list[bool]) -> Iterator[Piece]:
    """Yields runs of two tokens or more that are no padding, apart where positions begin anew."""
    positions = batch.given.get("position_ids")
    if positions is not None and positions.dim() == 2:
        of_row = positions.expand(len(batch.ids), -1)[row].tolist()
    else:
        of_row = list(range(batch.ids.shape[1]))
    first: int | None = None
    for at, pad in enumerate([*is_pad, True], start=begin):
        if first is not None and not pad and of_row[at] == of_row[at - 1] + 1:
            continue
        if first is not None and at - first > 1:
            yield Piece(None, begin=first, end=at)
        first = None if pad else at


def wrong_sight(sight: Sight, places: Places, *, width: int) -> Iterator[tuple[str, list[int]]]:
    """Yields faults of what tokens see in a batch whose rows have `width` tokens: the kind, and the
    tokens of the batch that show it."""
    if sight.seen is not None:
        yield from _wrong_in_rows(sight.seen, places, width=width)
    elif sight.segments is not None:
        yield from _wrong_segments(sight.segments, places)


def _wrong_segments(segments: torch.Tensor, places: Places) -> Iterator[tuple[str, list[int]]]:
    """Yields faults of tokens that see those of their segment."""
    in_piece = places.piece != FILL
    visible = segments != UNSEEN
    real = (in_piece & visible).nonzero().flatten()
    yield MIXED, _after_another(real, group=segments, value=places.piece)
    yield CUT, _after_another(real, group=places.piece, value=segments)
    hidden = (in_piece & ~visible).nonzero().flatten()
    yield HIDDEN, _before_the_last(hidden, places)
    padded = (places.padding & visible).nonzero().flatten()
    yield SEES_PADDING, _after_one_of(padded, real, group=segments)


def _before_the_last(tokens: torch.Tensor, places: Places) -> list[int]:
    """Returns those of some tokens that are not the last of their piece."""
    in_piece = (places.piece != FILL).nonzero().flatten()
    piece_of = places.piece[in_piece]
    last = torch.zeros(len(places.pieces) + 1, dtype=torch.long)
    last = last.scatter_reduce(0, piece_of, in_piece, reduce="amax")
    last_of_own = last[places.piece[tokens]]
    found: list[int] = tokens[tokens < last_of_own].tolist()
    return found


def _after_one_of(before: torch.Tensor, tokens: torch.Tensor, *, group: torch.Tensor) -> list[int]:
    """Returns those of some tokens that are in a group with one of others, and after it."""
    first = dict[int, int]()
    for at in before.tolist():
        first.setdefault(int(group[at]), at)
    if not first:
        return []
    found = []
    for at, group_of_token in zip(tokens.tolist(), group[tokens].tolist(), strict=True):
        if group_of_token in first and first[group_of_token] < at:
            found.append(at)
    return found


def _after_another(tokens: torch.Tensor, *, group: torch.Tensor, value: torch.Tensor) -> list[int]:
    """Returns those of some tokens, in order, that have an earlier one of their group with another
    value than the first of the group, or have it themselves."""
    if not len(tokens):
        return []
    groups, group_of = group[tokens].unique(return_inverse=True)
    beyond = int(tokens[-1]) + 1
    nowhere = torch.full((len(groups),), beyond)
    first = nowhere.scatter_reduce(0, group_of, tokens, reduce="amin")
    first_value = value[first][group_of]
    differs = value[tokens] != first_value
    others = tokens[differs]
    first_other = nowhere.scatter_reduce(0, group_of[differs], others, reduce="amin")
    begin_of_others = first_other[group_of]
    found: list[int] = tokens[tokens >= begin_of_others].tolist()
    return found


def _wrong_in_rows(
    seen: torch.Tensor, places: Places, *, width: int
) -> Iterator[tuple[str, list[int]]]:
    """Yields faults of tokens that see what a mask [rows, tokens, tokens] says."""
    earlier = torch.ones(width, width, dtype=torch.bool).tril()
    for row, of_row in enumerate(seen):
        begin = row * width
        piece = places.piece[begin : begin + width]
        padding = places.padding[begin : begin + width]
        in_piece = piece != FILL
        same = (piece[:, None] == piece) & in_piece[:, None]
        both = in_piece[:, None] & in_piece
        wrong = {
            MIXED: of_row & both & ~same,
            LATER: of_row & same & ~earlier,
            SEES_PADDING: of_row & in_piece[:, None] & padding,
            CUT: ~of_row & same & earlier,
        }
        for kind, where in wrong.items():
            of_tokens = where.any(1).nonzero().flatten() + begin
            yield kind, of_tokens.tolist()

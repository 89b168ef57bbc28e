"""What the labels of a batch train, and what is wrong with them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from .data_batches import Batch
from .data_places import FILL, Places
from .data_roles import Tokenizer
from .loop import IGNORED

SHIFTED = "labels are shifted already, and models shift them again"
OTHER = "labels are not the tokens of the input"
PADDING_TRAINED = "padding is trained"
FROM_PADDING = "first tokens are predicted from padding"
NEXT_DOCUMENT = "last tokens predict the next document"
ENDS = "ends have no loss, as their token is also the padding"
BOS_TWICE = "documents begin with two tokens for the begin of a text"
NOTHING = "nothing is trained"
MOST = 0.9
"""Share of labels that are the next tokens where labels are shifted; by chance few are."""


@dataclass
class Ends:
    """Last special tokens of documents.

    Attributes:
        trained, untrained: how many are targets, or are not though the token before is one.
        missing: documents without one.
        tokens: ids, with how often each is an end.
    """

    trained: int = 0
    untrained: int = 0
    missing: int = 0
    tokens: Counter[int] = field(default_factory=Counter)


NEAR_THE_END = 3
"""Tokens at the end of a document of which one is special if it has an end: others may be a new
line."""


def wrong_labels(batch: Batch, places: Places) -> Iterator[tuple[str, list[int]]]:
    """Yields faults of labels of a batch: the kind, and its tokens that show it."""
    ids = batch.ids.flatten()
    labels = batch.labels.flatten()
    targets = batch.targets.flatten()
    other = (labels != IGNORED) & (labels != ids)
    if other.any():
        tokens = other.nonzero().flatten().tolist()
        if is_shifted(batch):
            yield SHIFTED, tokens
        else:
            yield OTHER, tokens
        return
    yield PADDING_TRAINED, (targets & places.padding).nonzero().flatten().tolist()
    first_ones = _begins(batch, places)
    trained = first_ones[targets[first_ones]]
    before = trained - 1
    yield FROM_PADDING, trained[places.padding[before]].tolist()
    yield NEXT_DOCUMENT, trained[places.piece[before] != FILL].tolist()


def is_shifted(batch: Batch) -> bool:
    """Returns whether most labels are the tokens after their own."""
    labelled = batch.labels[:, :-1] != IGNORED
    if not labelled.any():
        return False
    same = batch.labels[:, :-1] == batch.ids[:, 1:]
    return float(same[labelled].double().mean()) >= MOST


def _begins(batch: Batch, places: Places) -> torch.Tensor:
    """Returns the first tokens of documents, and of parts of some, that are not first in their
    row."""
    tokens = batch.ids.shape[1]
    found = [row * tokens + piece.begin for row, piece in places.pieces if piece.begin]
    return torch.tensor(found, dtype=torch.long)


def begins_twice(batch: Batch, places: Places, bos: int | None) -> list[int]:
    """Returns the first tokens of documents that begin with the begin of a text twice."""
    if bos is None:
        return []
    tokens = batch.ids.shape[1]
    found = []
    for row, piece in places.pieces:
        first_two = batch.ids[row, piece.begin : min(piece.end, piece.begin + 2)].tolist()
        if not piece.offset and first_two == [bos, bos]:
            found.append(row * tokens + piece.begin)
    return found


def add_ends(
    ends: Ends, batch: Batch, places: Places, *, whole: set[int], tokenizer: Tokenizer
) -> None:
    """Counts the ends of the pieces of a batch that are the ends of documents: of `whole`."""
    tokens = batch.ids.shape[1]
    targets = batch.targets
    for number, (row, piece) in enumerate(places.pieces):
        if number not in whole:
            continue
        end = piece.end
        added = row * tokens + end
        if end < tokens and places.added[added] and int(batch.ids[row, end]) in tokenizer.special:
            end += 1
        first = max(piece.begin, end - NEAR_THE_END)
        special = [at for at in range(first, end) if int(batch.ids[row, at]) in tokenizer.special]
        if not special:
            ends.missing += 1
            continue
        at = special[-1]
        ends.tokens[int(batch.ids[row, at])] += 1
        if targets[row, at]:
            ends.trained += 1
        elif at > piece.begin and targets[row, at - 1]:
            ends.untrained += 1


def masked_like_padding(batch: Batch, places: Places, pad: int | None) -> tuple[list[int], int]:
    """Returns the tokens of documents that are the padding's, and no targets though the token
    before is one, and how many such tokens are targets."""
    if pad is None:
        return [], 0
    targets = batch.targets.flatten()
    alike = (batch.ids.flatten() == pad) & (places.piece != FILL)
    goes_on = places.piece == places.piece.roll(1)
    lost = alike & ~targets & targets.roll(1) & goes_on
    return lost.nonzero().flatten().tolist(), int((alike & targets).sum())

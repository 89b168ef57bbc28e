"""Merging in training: the documents of a step that begin alike become trees, so that what they share is computed once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longctx.data import IGNORED_LABEL
from longctx.data.packing import Ids
from longctx.data.sampler import Piece
from longctx.data.store import Store
from longctx.data.trees import Merged, merge_prefixes

LEAST_SHARE = 8
"""Documents are merged if they share at least one part in so many of their mean length: trees have a price, as all of one must
be in the same micro-batch, and a chat template or a system prompt is common to all documents of a store."""


@dataclass(frozen=True)
class Merging:
    """Merges the documents of a step that begin alike.

    Attributes:
        most_tokens, tokens_per_rank: as in `merge_prefixes`.
    """

    most_tokens: int
    tokens_per_rank: int

    def of(self, store: Store, pieces: Sequence[Piece]) -> Merged | None:
        """Returns the documents that the pieces of a step are merged to; None if no two of them are. Reads all pieces."""
        assert not store.weighted, "weights of tokens may differ where documents are alike"
        sequences, labels = list[Ids](), list[Ids]()
        for piece in pieces:
            tokens, trained = store.tokens(piece.document, piece.start, piece.stop)
            sequences.append(tokens)
            labels.append(np.where(trained, tokens, IGNORED_LABEL))
        merged = merge_prefixes(
            sequences,
            labels,
            most_tokens=self.most_tokens,
            tokens_per_rank=self.tokens_per_rank,
            least_shared=sum(map(len, sequences)) // (LEAST_SHARE * len(sequences)),
        )
        return merged if merged.trees else None

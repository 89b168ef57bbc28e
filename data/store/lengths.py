"""Lengths in place of a store: documents that nobody has prepared yet, of which only the tokens are counted."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np

from longctx.data.records.tokenizer import Tokenizer
from longctx.data.store.store import Source, Store


class Lengths(Store):
    """Documents of these lengths for planning steps; every token is trained, and none can be read.

    Attributes as of `Store`; `said` describes the lengths, and the tokenizer has a size only.
    """

    def __init__(self, lengths: Sequence[int], said: str, vocab_size: int) -> None:
        self.lengths = np.array(lengths, dtype=np.int64)
        self.trained_tokens = np.maximum(self.lengths - 1, 0)
        self.path = Path(said)
        self.sources = (Source(self.path, "", range(len(self.lengths))),)
        self.tokenizer = cast(Tokenizer, SimpleNamespace(vocab_size=vocab_size))
        self._batches = ()

    @property
    def names(self) -> Iterator[str]:
        yield from map(self.name, range(len(self)))

    def name(self, document: int) -> str:
        return f"document {document + 1}"

"""Markup: encodes texts in which special tokens are meant as such, and marks the tokens to train on.

The text to train on is given as spans of characters, which the tokenizer's offsets compare with its tokens.
"""

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer as TokenizerJson

from longctx.data.records.tokenizer import TokenArray, Tokenizer, TokenWeights, encoded, token_weights

Spans = Sequence[tuple[int, int]]
"""Spans of characters start … stop - 1 of a text, in ascending order, without overlap."""
Weights = Sequence[float] | None
"""Weights of the spans of a text; None: 1 for all."""


class Marked(NamedTuple):
    """Tokens of a text with spans.

    Attributes:
        tokens: token ids `[tokens]`.
        trained: weights of the tokens that contain a character of a span; 0 for others.
        straddling: number of these that also contain characters outside.
    """

    tokens: TokenArray
    trained: TokenWeights
    straddling: int


class Markup:
    """Encodes rendered conversations as `transformers` does, without adding special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._inner = TokenizerJson.from_str(tokenizer.text)
        self._inner.no_truncation()
        self._inner.no_padding()
        self._inner.post_processor = None  # some exclude spaces from the offsets
        self._dtype, self._kept = tokenizer.dtype, tokenizer.kept
        added = self._inner.get_added_tokens_decoder()
        self.special = [token.content for token in added.values() if token.special]
        """Texts of the special tokens."""
        longest_first = sorted(filter(None, self.special), key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def special_tokens(self, text: str) -> list[str]:
        return self._spelled.findall(text)

    def pieces(self, text: str) -> list[str]:
        """Splits a text into its special tokens and the texts between them, without empty ones."""
        return [piece for piece in re.split(f"({self._spelled.pattern})", text) if piece]

    def encode_batch(
        self, texts: Sequence[str], spans: Sequence[Spans], weights: Sequence[Weights], *, workers: int | None = None
    ) -> list[Marked]:
        """Encodes several texts, each with its spans and their weights, in `workers` threads (None: one per core)."""
        with ThreadPoolExecutor(workers or os.cpu_count()) as threads:
            return list(threads.map(self.encode, texts, spans, weights))

    def encode(self, text: str, spans: Spans, weights: Weights = None) -> Marked:
        """Encodes one text. Raises TokenizerError if the tokenizer cannot encode it."""
        encoding = encoded(self._inner, text, "a conversation", self._kept, offsets=True)
        starts, stops = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        trained = np.zeros(len(starts), np.float32)
        straddling = 0
        for (start, stop), weight in zip(spans, weights or [1.0] * len(spans), strict=True):
            first = int(np.searchsorted(stops, start, side="right"))
            end = int(np.searchsorted(starts, stop, side="left"))
            if first < end:
                trained[first:end] = weight
                straddling += int(starts[first] < start) + int(stops[end - 1] > stop)
        return Marked(np.array(encoding.ids, self._dtype), token_weights(trained), straddling)

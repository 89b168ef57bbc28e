"""Markup: encodes texts in which special tokens are meant as such, and marks the tokens to train on.

The text to train on is given as spans of characters. Where the bytes of every token are known (byte-level BPE, and
SentencePiece with its space marker), token positions are sums of byte lengths, checked by comparing the joined bytes with the
text; elsewhere they are the tokenizer's own offsets, which are slower.
"""

import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer as TokenizerJson

from longctx.data.tokenizer import TokenArray, byte_vocabulary, ids_of
from longctx.data.weights import TokenWeights, token_weights

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
    """Encodes rendered conversations as `transformers` does, without adding special tokens. `text` is a tokenizer.json."""

    def __init__(self, text: str, dtype: np.dtype[Any]) -> None:
        self._inner = TokenizerJson.from_str(text)
        self._inner.no_truncation()
        self._inner.no_padding()
        self._inner.post_processor = None  # some exclude spaces from the offsets
        self._dtype = dtype
        content = json.loads(text)
        added = self._inner.get_added_tokens_decoder()
        self.special = [token.content for token in added.values() if token.special]
        """Texts of the special tokens."""
        self._spelled = _any_of(self.special)
        size = max(self._inner.get_vocab(with_added_tokens=True).values()) + 1
        self._pieces = _pieces(self._inner, content, size)
        self._bytes = np.array([len(piece) for piece in self._pieces], np.int64)

    def special_tokens(self, text: str) -> list[str]:
        """Returns the special tokens that a text contains."""
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
        ids = ids_of(self._inner, text, "a conversation")
        tokens = np.array(ids, self._dtype)
        trained, straddling = self._mark(text, ids, tokens, spans, weights)
        return Marked(tokens, trained, straddling)

    def _mark(self, text: str, ids: list[int], tokens: TokenArray, spans: Spans, weights: Weights) -> tuple[TokenWeights, int]:
        trained: TokenWeights = np.zeros(len(ids), np.bool_ if weights is None else np.float32)
        if not spans:
            return trained, 0
        edges = [edge for span in spans for edge in span]
        if b"".join(map(self._pieces.__getitem__, ids)) == text.encode():
            lengths = self._bytes[tokens]
            stops = lengths.cumsum()
            starts = stops - lengths
            if not text.isascii():
                between = [len(text[a:b].encode()) for a, b in zip([0, *edges], edges, strict=False)]
                edges = np.cumsum(between).tolist()
        else:
            (encoding,) = self._inner.encode_batch([text], add_special_tokens=False)
            starts, stops = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        straddling = 0
        for start, stop, weight in zip(edges[::2], edges[1::2], weights or [1.0] * len(spans), strict=True):
            first = int(np.searchsorted(stops, start, side="right"))
            end = int(np.searchsorted(starts, stop, side="left"))
            if first < end:
                trained[first:end] = weight
                straddling += int(starts[first] < start) + int(stops[end - 1] > stop)
        return trained if weights is None else token_weights(trained), straddling


def _any_of(words: Sequence[str]) -> re.Pattern[str]:
    """Returns a pattern that matches any of the words, longest first."""
    return re.compile("|".join(map(re.escape, sorted(filter(None, words), key=len, reverse=True))) or "(?!)")


def _pieces(inner: TokenizerJson, content: dict[str, Any], size: int) -> list[bytes]:
    """Returns the bytes that each token represents; a guess that is checked against every text."""
    byte_level = '"ByteLevel"' in json.dumps([content.get("normalizer"), content.get("pre_tokenizer")])
    by_character = byte_vocabulary()
    fallback = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)} if content["model"].get("byte_fallback") else {}
    added = {number: token.content for number, token in inner.get_added_tokens_decoder().items()}
    pieces = [b""] * size
    for piece, number in inner.get_vocab(with_added_tokens=True).items():
        if number in added:
            pieces[number] = added[number].encode()
        elif byte_level and all(character in by_character for character in piece):
            pieces[number] = bytes(by_character[character] for character in piece)
        else:
            pieces[number] = fallback.get(piece) or piece.replace("▁", " ").encode()
    return pieces

"""Lost text: counts the characters of a text that no token represents because the tokenizer lacks them.

Byte-level tokenizers and those that fall back to bytes represent every character, and cost nothing here. Of the others, those
with an unknown token use it for a character, a word or a whole text; BPE without one silently drops characters. White space is
not counted, since many tokenizers drop it on purpose; nor are characters that a normalizer changes or removes.
"""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as TokenizerJson
from tokenizers import models

_SPACE = np.array([chr(code).isspace() for code in range(0x3002)])
"""Whether a code point is white space; the last entry is for all higher code points."""
_UNSEEN, _KEPT, _LOST = range(3)


class LostText:
    """Counts the characters that a tokenizer loses.

    `content` is its parsed tokenizer.json; `byte_characters` has the character of each byte in byte-level BPE.

    Attributes:
        possible: whether the tokenizer can lose characters; if not, `count` need not be called.
        unknown: id of the unknown token, or None.
    """

    def __init__(self, inner: TokenizerJson, content: dict[str, Any], byte_characters: list[str]) -> None:
        model = content["model"]
        self._inner, self._model = inner, inner.model
        self._affixes = model.get("continuing_subword_prefix") or "", model.get("end_of_word_suffix") or ""
        self._normalizer = inner.normalizer
        self._bytes: list[str] | None = None  # the token of each byte
        if '"ByteLevel"' in json.dumps([content.get("normalizer"), content.get("pre_tokenizer")]):
            self._bytes = byte_characters
        self._byte_level = self._bytes is not None
        if model.get("byte_fallback"):
            self._bytes = [f"<0x{byte:02X}>" for byte in range(256)]
        by_character = isinstance(self._model, models.BPE | models.Unigram)
        self.possible = not (by_character and self._bytes is not None and self._held(self._bytes))
        unknown = self._model.token_to_id(model["unk_token"]) if model.get("unk_token") else model.get("unk_id")
        self.unknown: int | None = unknown
        self._fate = np.zeros(0x110000 if self.possible and unknown is None else 0, np.uint8)

    def count(self, text: str, tokens: npt.NDArray[np.integer[Any]]) -> tuple[int, int]:
        """Returns the number of characters of a text that are not white space, and how many of these no token represents."""
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        visible = ~_SPACE[np.minimum(codes, len(_SPACE) - 1)]
        lost = self._dropped(codes) if self.unknown is None else self._replaced(text, tokens)
        return int(visible.sum()), int((visible & lost).sum())

    def _replaced(self, text: str, tokens: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.bool_]:
        """Returns which characters an unknown token represents; a text that has one is encoded again, with offsets."""
        unknown = tokens == self.unknown
        if not unknown.any():
            return np.zeros(len(text), np.bool_)
        (encoding,) = self._inner.encode_batch([text], add_special_tokens=False)
        starts, stops = np.array(encoding.offsets)[unknown].T
        depth = np.bincount(starts, minlength=len(text) + 1) - np.bincount(stops, minlength=len(text) + 1)
        covered: npt.NDArray[np.bool_] = depth.cumsum()[: len(text)] > 0
        return covered

    def _dropped(self, codes: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
        """Returns which characters BPE without an unknown token drops; offsets do not show them."""
        for code in np.unique(codes[self._fate[codes] == _UNSEEN]).tolist():
            self._fate[code] = _KEPT if self._keeps(chr(code)) else _LOST
        return np.equal(self._fate[codes], _LOST)

    def _keeps(self, character: str) -> bool:
        """Returns whether the vocabulary can represent a character."""
        if not self._byte_level:
            prefix, suffix = self._affixes
            normal = self._normalizer.normalize_str(character) if self._normalizer else character
            symbols = normal.replace("▁", "")  # the mark of a space comes from the normalizer, not from the character
            if all(self._held([s]) or self._held([prefix + s]) or self._held([s + suffix]) for s in symbols):
                return True
        return self._bytes is not None and self._held(self._bytes[byte] for byte in character.encode())

    def _held(self, tokens: Iterable[str]) -> bool:
        return all(self._model.token_to_id(token) is not None for token in tokens)

"""Tokenizer: byte-level BPE trained on the corpus, a given tokenizer.json, or plain bytes, in one
small class.

Every tokenizer is kept as the text of a `tokenizer.json` of the `tokenizers` library, so that other
tools can read it. Plain bytes are byte-level BPE without merges (ids 0-255 are the bytes, 256 ends
a document), recognized when loaded and encoded by NumPy alone.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Encoding, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as TokenizerJson

from longctx.errors import UserError
from longctx.pointers import complaint

TokenArray = npt.NDArray[np.integer[Any]]
TokenWeights = npt.NDArray[np.bool_] | npt.NDArray[np.float32]
"""Weight of every token as a target `[tokens]`: bool if all weights are 0 or 1, otherwise
float32."""
Spans = Sequence[tuple[int, int, float]]
"""Spans of characters start … stop - 1 of a text, in ascending order, without overlap, each with
the weight of its tokens."""
LEAST = float(np.finfo(np.float32).tiny)
MOST = float(np.finfo(np.float32).max)

END_OF_DOCUMENT = "<|endoftext|>"
KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>", "[SEP]")
"""End-of-document tokens to look for in a given tokenizer.json, in this order."""
ANOTHER_TOKENIZER = (
    "use a tokenizer that represents every character, such as --tokenizer bpe or bytes, or one "
    "with byte fallback"
)
LARGEST_VOCABULARY = (1 << 31) - 1
LARGEST_TRAINED = 1 << 24
SMALLEST_VOCABULARY = 257  # every byte, and the end of a document


class TokenizerError(UserError):
    """A tokenizer that cannot be trained, read or used."""


class Tokenizer:
    """Converts text to token ids 0 … vocab_size - 1, and back.

    `text` is the content of a tokenizer.json. `end_of_document` is the token that ends every
    document; by default the first of `KNOWN_ENDS` in the vocabulary. Raises TokenizerError if the
    text is not a tokenizer.json, has no end-of-document token, or drops characters without a trace.

    Attributes:
        unknown: id of the token that stands for text that the tokenizer lacks; None: it represents
            every character.
        kept: bytes of UTF-8 that it represents, if it drops others.
    """

    def __init__(self, text: str, end_of_document: str | None = None) -> None:
        try:
            self._inner = TokenizerJson.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(
                f"not a tokenizer.json of the `tokenizers` library: {error}"
            ) from error
        self.text = text
        _strip(self._inner)
        vocabulary = self._inner.get_vocab(with_added_tokens=True)
        # Not the number of entries: ids may have holes.
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if self.vocab_size > LARGEST_VOCABULARY:
            raise TokenizerError(
                f"token id {self.vocab_size - 1}: a store can hold ids below {LARGEST_VOCABULARY}; "
                "renumber them"
            )
        candidates = KNOWN_ENDS if end_of_document is None else (end_of_document,)
        self.end_of_document_token = next(
            (token for token in candidates if token in vocabulary), ""
        )
        if not self.end_of_document_token:
            raise TokenizerError(
                f"none of {', '.join(candidates)} is in the vocabulary: name the token that ends "
                "a document (--end-of-document TOKEN)"
            )
        self.end_of_document = vocabulary[self.end_of_document_token]
        content = json.loads(text)
        self.is_bytes = _is_bytes(content)
        self.unknown, self.kept = _unknown(self._inner, content)

    @classmethod
    def bytes(cls) -> "Tokenizer":
        """Returns the tokenizer of plain bytes: 257 tokens."""
        inner = _byte_level(models.BPE(vocab=byte_vocabulary(), merges=[]))
        inner.add_special_tokens([AddedToken(END_OF_DOCUMENT, special=True, normalized=False)])
        return cls(inner.to_str())

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Trains byte-level BPE. The same texts in the same order give the same tokenizer.

        A small corpus may give fewer than `vocab_size` tokens. Raises TokenizerError if
        `vocab_size` is below 257 (every byte and the end of a document) or above `LARGEST_TRAINED`.
        """
        if not SMALLEST_VOCABULARY <= vocab_size <= LARGEST_TRAINED:
            raise TokenizerError(
                f"vocabulary size is {vocab_size}: byte-level BPE needs at least "
                f"{SMALLEST_VOCABULARY} (256 bytes and the end of a document; for less, use "
                f"--tokenizer bytes), and it must be at most {LARGEST_TRAINED}; 4096 to 262144 "
                "are usual"
            )
        inner = _byte_level(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_DOCUMENT],
            initial_alphabet=list(byte_vocabulary()),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        return cls(inner.to_str())

    @classmethod
    def load(cls, path: Path, end_of_document: str | None = None) -> "Tokenizer":
        """Reads a tokenizer.json. Raises TokenizerError naming the path."""
        if said := complaint([path]):
            raise TokenizerError(said)
        try:
            return cls(path.read_text("utf-8"), end_of_document)
        except OSError as error:
            raise TokenizerError(
                f"{path} cannot be read as a tokenizer.json: {error.strerror}"
            ) from error
        except ValueError as error:
            raise TokenizerError(f"{path}: {error}") from error

    @cached_property
    def special(self) -> dict[int, str]:
        """Texts of the special tokens by their ids."""
        added = self._inner.get_added_tokens_decoder().items()
        return {number: token.content for number, token in added if token.special}

    def save(self, path: Path) -> None:
        """Writes the tokenizer.json, byte for byte as it was given."""
        path.write_text(self.text, "utf-8", newline="")

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the tokenizer.json; see the function `fingerprint`."""
        return fingerprint(self.text)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Smallest integer type of a store that holds every id."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.int32)

    @cached_property
    def _literal(self) -> TokenizerJson:
        """Reads special tokens in texts as characters. A copy, as threads use both."""
        inner = TokenizerJson.from_str(self.text)
        _strip(inner)
        inner.encode_special_tokens = True
        return inner

    @cached_property
    def _spelled(self) -> re.Pattern[str]:
        longest_first = sorted(filter(None, self.special.values()), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def special_tokens(self, text: str) -> list[str]:
        """Returns the special tokens that a text contains."""
        return self._spelled.findall(text)

    def pieces(self, text: str) -> list[str]:
        """Splits a text into its special tokens and the texts between them, without empty ones."""
        return [piece for piece in re.split(f"({self._spelled.pattern})", text) if piece]

    def encode(self, text: str, *, special: bool = False) -> TokenArray:
        """Returns the token ids `[tokens]` of a text, without special tokens around it. Raises
        TokenizerError if it cannot.

        Special tokens that the text contains become their own ids, as in transformers, if
        `special`, and characters otherwise.
        """
        if self.is_bytes and not (special and self.special_tokens(text)):
            return np.frombuffer(text.encode(), np.uint8).astype(self.dtype)
        self._require_kept(text)
        return np.array(_encoding(self._inner if special else self._literal, text).ids, self.dtype)

    def encode_spans(
        self, text: str, spans: Spans, *, special: bool = True
    ) -> tuple[TokenArray, TokenWeights, int]:
        """Encodes a text, with special tokens as `encode` has them, and finds the tokens of its
        spans by their characters.

        Returns token ids, weights of the tokens that contain a character of a span (of two spans,
        that of the later one; 0 of others), and the number of these that also contain characters
        outside. A span of weight 0 is none.
        """
        self._require_kept(text)
        encoding = _encoding(self._inner if special else self._literal, text, offsets=True)
        starts, stops = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        trained = np.zeros(len(starts), np.float32)
        straddling: set[int] = set()
        for start, stop, weight in filter(itemgetter(2), spans):
            first = int(np.searchsorted(stops, start, side="right"))
            end = int(np.searchsorted(starts, stop, side="left"))
            if first < end:
                trained[first:end] = weight
                straddling |= {first} if starts[first] < start else set()
                straddling |= {end - 1} if stops[end - 1] > stop else set()
        return np.array(encoding.ids, self.dtype), token_weights(trained), len(straddling)

    def _require_kept(self, text: str) -> None:
        """Raises TokenizerError for a text with bytes that the tokenizer drops."""
        if self.kept and (lost := text.encode().translate(None, self.kept)):
            raise TokenizerError(
                f"the tokenizer would drop bytes of a text that begins with {text[:40]!r}: it "
                f"lacks {lost[:4]!r}; remove the characters, or {ANOTHER_TOKENIZER}"
            )

    def covered(self, text: str) -> tuple[int, int]:
        """Returns how many characters of a text are not white space, and how many of these a token
        comes from.

        Normalizers and pre-tokenizers can remove text.
        """
        encoding = _encoding(self._inner, text, offsets=True)
        seen = np.zeros(len(text), np.bool_)
        for start, stop in encoding.offsets:
            seen[start:stop] = True
        visible = np.array([not character.isspace() for character in text], np.bool_)
        return int(visible.sum()), int((visible & seen).sum())

    def encode_markup(self, text: str) -> TokenArray:
        """Returns the token ids of a text in which special tokens of the vocabulary are meant as
        such.

        Raises TokenizerError if the tokenizer lacks characters of the text.
        """
        tokens = self.encode(text, special=True)
        if self.unknown in tokens.tolist():
            raise TokenizerError(
                f"the tokenizer lacks characters of the marker {text!r}: {ANOTHER_TOKENIZER}"
            )
        return tokens

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of token ids; special tokens appear by name."""
        return str(self._inner.decode([int(token) for token in tokens], skip_special_tokens=False))


def _strip(inner: TokenizerJson) -> None:
    """Removes what a tokenizer.json may add to tokens, or take from their offsets."""
    inner.no_truncation()
    inner.no_padding()
    inner.post_processor = None  # some exclude spaces from the offsets


def _encoding(inner: TokenizerJson, text: str, *, offsets: bool = False) -> Encoding:
    try:
        encode = inner.encode_batch if offsets else inner.encode_batch_fast  # which release the GIL
        (encoding,) = encode([text], add_special_tokens=False)
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(
            f"the tokenizer cannot encode a text that begins with {text[:40]!r}: {error}; "
            f"{ANOTHER_TOKENIZER}"
        ) from error
    return encoding


def _unknown(inner: TokenizerJson, content: dict[str, Any]) -> tuple[int | None, bytes]:
    """Returns the id of the unknown token, None if there is none, and the bytes of UTF-8 of a
    byte-level BPE that drops others.

    Raises TokenizerError for BPE that drops other characters, or printable ASCII, or after a
    normalizer, which changes bytes.
    """
    model = content["model"]
    known = inner.model.token_to_id
    unknown: int | None = (
        model.get("unk_id") if model.get("unk_token") is None else known(model["unk_token"])
    )
    if unknown is not None or not isinstance(inner.model, models.BPE):
        return unknown, b""
    if model.get("byte_fallback"):
        of_bytes = {f"<0x{byte:02X}>": byte for byte in range(256)}
    else:
        of_bytes = {}
    if by_byte := '"ByteLevel"' in json.dumps(
        [content.get("normalizer"), content.get("pre_tokenizer")]
    ):
        of_bytes = byte_vocabulary()
    lacking = {byte for token, byte in of_bytes.items() if known(token) is None}
    seen = by_byte and not content.get("normalizer") and not lacking & {*b"\n", *range(0x20, 0x7F)}
    if not of_bytes or (lacking and not seen):
        raise TokenizerError(
            "it drops characters that its vocabulary lacks without a trace: set unk_token in its "
            f"model, or {ANOTHER_TOKENIZER}"
        )
    return unknown, bytes(set(range(256)) - lacking) if lacking else b""


def added_tokens(text: str) -> dict[str, int]:
    """Returns the added tokens of a tokenizer.json, special ones included, with their ids."""
    return {token["content"]: token["id"] for token in json.loads(text).get("added_tokens") or ()}


def without_added(text: str, tokens: Collection[str]) -> str:
    """Returns a tokenizer.json without these added tokens."""
    content = json.loads(text)
    kept = [token for token in content.get("added_tokens") or () if token["content"] not in tokens]
    return json.dumps({**content, "added_tokens": kept})


def same_tokens(one: str, other: str) -> bool:
    """Returns whether two tokenizer.json give texts the same tokens. Post-processors are ignored:
    they are not used here, and transformers adds one on saving."""
    without = ({**json.loads(text), "post_processor": None} for text in (one, other))
    return fingerprint(json.dumps(next(without))) == fingerprint(json.dumps(next(without)))


def fingerprint(text: str) -> str:
    """Returns the SHA-256 (hex) of a tokenizer.json, independent of formatting, and of padding and
    truncation (not used here).

    Raises TokenizerError if the text is not a JSON object.
    """
    try:
        content = {
            key: value
            for key, value in json.loads(text).items()
            if key not in ("padding", "truncation")
        }
    except (ValueError, AttributeError) as error:
        raise TokenizerError(f"not a tokenizer.json: {error}") from error
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _byte_level(model: models.Model) -> TokenizerJson:
    inner = TokenizerJson(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def byte_vocabulary() -> dict[str, int]:
    """Returns the byte of each printable character in byte-level BPE (GPT-2's table), in order of
    the bytes."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = [byte for byte in range(256) if byte not in printable]
    return {
        chr(byte) if byte in printable else chr(256 + others.index(byte)): byte
        for byte in range(256)
    }


def _is_bytes(content: dict[str, Any]) -> bool:
    """Returns whether a tokenizer.json maps every byte to its own value and does nothing else."""
    pre_tokenizer = content.get("pre_tokenizer") or {}
    return (
        content["model"].get("vocab") == byte_vocabulary()
        and not content["model"].get("merges")
        and not content.get("normalizer")
        and pre_tokenizer.get("type") == "ByteLevel"
        and not pre_tokenizer.get("add_prefix_space")
    )


def token_weights(values: npt.ArrayLike) -> TokenWeights:
    """Returns weights of tokens in the smaller of the two types that holds them."""
    weights = np.asarray(values, np.float32)
    some = weights != 0
    only_ones = bool((weights[some] == 1).all())
    return some if only_ones else weights


def is_weight(value: Any) -> bool:
    """Returns whether a value is 0 or a positive number that float32 holds."""
    return isinstance(value, bool | int | float) and bool(are_weights(value))


def are_weights(values: Any) -> Any:
    """Returns whether a number, or each of an array, is 0 or a positive number that float32
    holds."""
    return (values == 0) | ((values >= LEAST) & (values <= MOST))

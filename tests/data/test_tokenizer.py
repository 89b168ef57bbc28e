"""Every tokenizer restores the text, and never encodes text as a special token."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as TokenizerJson
from tokenizers import models, normalizers, pre_tokenizers

from longctx.data.records.chat import ChatML
from longctx.data.records.messages import parse_messages
from longctx.data.records.tokenizer import (
    END_OF_DOCUMENT,
    Tokenizer,
    TokenizerError,
    byte_vocabulary,
    fingerprint,
    same_tokens,
)
from longctx.data.store.prepare import prepare
from tests.data_cases import CONVERSATION, text_of

TEXTS = [text_of(400, seed) + " the theory of the thing" for seed in range(20)]
BPE = Tokenizer.train(TEXTS, 320)
BYTES = Tokenizer.bytes()


@pytest.mark.parametrize("tokenizer", [BPE, BYTES], ids=["bpe", "bytes"])
@given(text=st.text())
@example(text=END_OF_DOCUMENT)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokens.tolist() == tokenizer.encode(text).tolist() and tokenizer.unknown is None
    assert tokenizer.end_of_document in tokenizer.encode_markup(text + END_OF_DOCUMENT)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.end_of_document not in tokens
    assert tokens.dtype == np.uint16
    assert all(0 <= token < tokenizer.vocab_size for token in tokens)


@given(text=st.text())
@example(text=END_OF_DOCUMENT)
def test_bytes_are_bytes_and_agree_with_the_tokenizers_library(text: str) -> None:
    assert BYTES.encode(text).tolist() == list(text.encode())
    plain = TokenizerJson.from_str(BYTES.text)
    plain.encode_special_tokens = True
    assert plain.encode(text).ids == list(text.encode())


def test_what_is_put_around_a_text_makes_no_other_tokens() -> None:
    text = Tokenizer.bytes().text
    around = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {},
    }
    assert same_tokens(text, json.dumps({**json.loads(text), "post_processor": around}))
    assert not same_tokens(text, json.dumps({**json.loads(text), "normalizer": {"type": "NFC"}}))


def test_training_is_deterministic_and_compresses() -> None:
    again = Tokenizer.train(TEXTS, 320)
    assert again.fingerprint == BPE.fingerprint
    assert BPE.vocab_size == 320
    assert len(BPE.encode("the theory of the thing")) < len("the theory of the thing") / 2
    assert Tokenizer.train(TEXTS, 321).fingerprint != BPE.fingerprint


def test_little_text_gives_a_small_vocabulary() -> None:
    assert Tokenizer.train(["ab"], 4096).vocab_size < 300


@pytest.mark.parametrize("tokenizer", [BPE, BYTES], ids=["bpe", "bytes"])
def test_save_and_load(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.fingerprint == tokenizer.fingerprint
    assert (loaded.vocab_size, loaded.end_of_document) == (
        tokenizer.vocab_size,
        tokenizer.end_of_document,
    )
    assert loaded.is_bytes == tokenizer.is_bytes
    assert loaded.encode("some text").tolist() == tokenizer.encode("some text").tolist()


def test_given_tokenizer_json(tmp_path: Path) -> None:
    inner = TokenizerJson(models.WordLevel({"a": 0, "b": 7, "stop": 3}, unk_token="b"))
    inner.enable_truncation(1)
    inner.enable_padding(length=9)
    file = tmp_path / "tokenizer.json"
    inner.save(str(file))
    with pytest.raises(
        TokenizerError, match=r"tokenizer\.json: none of <\|endoftext\|>.*--end-of-document TOKEN"
    ):
        Tokenizer.load(file)
    tokenizer = Tokenizer.load(file, "stop")
    assert tokenizer.end_of_document == 3
    assert tokenizer.vocab_size == 8  # ids may have holes
    assert tokenizer.encode("a").tolist() == [0]  # neither cut nor padded
    with pytest.raises(TokenizerError, match="none of end is in the vocabulary"):
        Tokenizer.load(file, "end")


def tokenizer_of(
    model: models.Model, pre_tokenizer: Any = None, normalizer: Any = None
) -> Tokenizer:
    inner = TokenizerJson(model)
    if pre_tokenizer is not None:
        inner.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        inner.normalizer = normalizer
    return Tokenizer(inner.to_str(), "</s>")


LETTERS = {letter: number for number, letter in enumerate("abcdeÃ▁")} | {"</s>": 7, "<unk>": 8}
FEWER_BYTES = {
    token: byte for token, byte in byte_vocabulary().items() if byte not in (4, 0xF1, 0xC0)
} | {"</s>": 256}
HEX = {f"<0x{byte:02X}>": 9 + byte for byte in range(256)}
PIECES: list[tuple[str, float]] = [
    ("<unk>", 0.0),
    *((piece, -1.0) for piece in LETTERS if piece != "<unk>"),
]


@pytest.mark.parametrize(
    ("model", "pre_tokenizer", "text", "unknown"),
    [
        # One unknown token for all of a text, for a word, or for each character.
        (models.WordLevel(LETTERS, unk_token="<unk>"), None, "abc déf ü", 1),
        (
            models.WordLevel(LETTERS, unk_token="<unk>"),
            pre_tokenizers.Whitespace(),
            "a fün b\n日本 c",
            2,
        ),
        (models.WordPiece(LETTERS, unk_token="<unk>"), pre_tokenizers.Whitespace(), "a fün b", 1),
        (models.BPE(LETTERS, [], unk_token="<unk>"), None, "abcdéf", 2),
        (models.BPE(LETTERS, [], unk_token="<unk>", fuse_unk=True), None, "abc日本語ed", 1),
        (models.Unigram(PIECES, 0, False), pre_tokenizers.Metaspace(), "abxx cz", 2),
        (
            models.BPE(LETTERS | {"<0xC3>": 9}, [], unk_token="<unk>", byte_fallback=True),
            None,
            "abÃü",
            1,
        ),
        (models.BPE(LETTERS | HEX, [], byte_fallback=True), None, "abc日本", 0),
    ],
)
def test_unknown_tokens_are_known(model: Any, pre_tokenizer: Any, text: str, unknown: int) -> None:
    tokenizer = tokenizer_of(model, pre_tokenizer)
    assert (
        tokenizer.encode(text)
        .tolist()
        .count(-1 if tokenizer.unknown is None else tokenizer.unknown)
        == unknown
    )


@pytest.mark.parametrize(
    ("model", "pre_tokenizer", "normalizer"),
    [
        (models.BPE(LETTERS, []), pre_tokenizers.Metaspace(), None),
        (models.BPE(LETTERS, []), pre_tokenizers.ByteLevel(add_prefix_space=False), None),
        (models.BPE(LETTERS | {"<0xC3>": 9}, [], byte_fallback=True), None, None),
        (
            models.BPE(FEWER_BYTES, []),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            normalizers.NFC(),
        ),
    ],
)
def test_a_tokenizer_that_drops_characters_is_refused(
    model: Any, pre_tokenizer: Any, normalizer: Any
) -> None:
    with pytest.raises(
        TokenizerError,
        match="drops characters that its vocabulary lacks without a trace: set unk_token in its",
    ):
        tokenizer_of(model, pre_tokenizer, normalizer)


def test_a_tokenizer_that_cannot_encode_a_text_says_so() -> None:
    with pytest.raises(TokenizerError, match=r"begins with 'ab': .*UNK.*--tokenizer bpe or bytes"):
        tokenizer_of(models.WordLevel({"a": 0, "</s>": 1})).encode("ab")


def test_conversations_need_their_markers() -> None:
    """Roles encoded as unknown tokens could not be distinguished."""
    vocabulary = LETTERS | {
        letter: 20 + number for number, letter in enumerate("fghijklmnopqrstuvwxyzGAß.B_? ü\nI")
    }
    inner = TokenizerJson(models.BPE(vocabulary, [], unk_token="<unk>"))
    messages = parse_messages(CONVERSATION)
    contents = [np.zeros(1, np.uint16)] * len(messages)
    with pytest.raises(
        TokenizerError,
        match=r"lacks characters of the marker '<\|im_start\|>system.n': use a tokenizer",
    ):
        ChatML(Tokenizer(inner.to_str(), "</s>")).join(messages, contents, {2, 4})
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    assert len(ChatML(Tokenizer(inner.to_str(), "</s>")).join(messages, contents, {2, 4})[0]) > len(
        messages
    )


def test_fingerprint_ignores_formatting_padding_and_truncation() -> None:
    content = json.loads(BPE.text)
    assert fingerprint(json.dumps(content, indent=7)) == BPE.fingerprint
    assert fingerprint(json.dumps({**content, "truncation": {"max_length": 3}})) == BPE.fingerprint
    content["model"]["merges"] = content["model"]["merges"][:-1]
    assert fingerprint(json.dumps(content)) != BPE.fingerprint


def test_unusable_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(
        TokenizerError, match="vocabulary size is 256: byte-level BPE needs at least 257"
    ):
        Tokenizer.train(TEXTS, 256)
    with pytest.raises(TokenizerError, match=r"nowhere.* cannot be read as a tokenizer.json"):
        Tokenizer.load(tmp_path / "nowhere")
    for name, content in [("text", b"not JSON"), ("list", b"[]"), ("binary", b"\xff\xfe")]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TokenizerError, match=name):
            Tokenizer.load(tmp_path / name)


def test_chat_markers_use_the_special_tokens_that_a_tokenizer_has() -> None:
    inner = TokenizerJson.from_str(BPE.text)
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = Tokenizer(inner.to_str())
    messages = parse_messages(CONVERSATION)
    contents = [tokenizer.encode(message["content"]) for message in messages]
    tokens, trained = ChatML(tokenizer).join(messages, contents, {2, 4})
    stop = tokenizer.encode_markup("<|im_end|>")
    assert len(stop) == 1
    assert (tokens == stop).sum() == len(messages)  # the user's own "<|im_end|>" is only text
    assert (tokens[trained] == stop).sum() == 2


def test_a_tokenizer_that_removes_the_text_is_refused(tmp_path: Path) -> None:
    content = json.loads(Tokenizer.bytes().text)
    content["normalizer"] = {"type": "Replace", "pattern": {"Regex": "[a-z]+"}, "content": ""}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    (tmp_path / "text.txt").write_text("lorem ipsum, " * 75, "utf-8")
    with pytest.raises(TokenizerError, match="makes no token of 750 of the first 825 characters"):
        prepare(tmp_path / "text.txt", tmp_path / "out", tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="must be at most 16777216"):
        Tokenizer.train(["a"], 1 << 31)


def test_a_byte_level_tokenizer_may_lack_bytes_of_no_text() -> None:
    """As SmolLM2's, which lacks control characters."""
    tokenizer = tokenizer_of(
        models.BPE(FEWER_BYTES, []), pre_tokenizers.ByteLevel(add_prefix_space=False)
    )
    assert tokenizer.encode("a\nö").tolist() == list("a\nö".encode())
    with pytest.raises(
        TokenizerError, match=r"would drop bytes of a text that begins with 'a.*': it lacks b'.x04'"
    ):
        tokenizer.encode("a\x04")

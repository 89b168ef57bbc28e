"""Encode: documents → tokens and masks of targets, each document in a thread of its own."""

import os
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from longctx.data import TRUNCATED
from longctx.data.records.chat import TOOLS_WAY_OUT, ChatError, ChatML, Parts, trained_turns
from longctx.data.records.formats import PAIRS, Document
from longctx.data.records.left_out import EMPTY, left_out
from longctx.data.records.messages import leaves
from longctx.data.records.template import Rendered
from longctx.data.records.token_ids import Ids
from longctx.data.records.tokenizer import (
    TokenArray,
    Tokenizer,
    TokenizerError,
    TokenWeights,
    token_weights,
)
from longctx.data.store.request import StoreRequest


class EncodedDocument(NamedTuple):
    """A document of the store.

    Attributes:
        tokens: token ids `[tokens]`.
        trained: weights of the tokens as targets; None: 1 for all.
        spelled: number of special tokens that its texts contain, which are encoded as such.
        straddling: number of target tokens that also contain text that is not trained on.
        left_out: names of what the conversation says and the template does not show.
        thoughts: number of turns that the template begins with an empty thought, which is not
            trained on.
    """

    document: Document
    tokens: TokenArray
    trained: TokenWeights | None
    spelled: int = 0
    straddling: int = 0
    left_out: Collection[str] = ()
    thoughts: int = 0
    truncated: bool = False


class Encoder:
    """Turns documents into rows, as a request says, in `workers` threads (None: one per core).

    `tokenizer` is that of texts, and of conversations in ChatML.
    """

    def __init__(
        self, tokenizer: Tokenizer, request: StoreRequest, workers: int | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.request = request
        self.workers = workers
        known = request.pretrained
        self._begin = np.zeros(0, tokenizer.dtype) if known is None else known.begin
        self._begin_text = "".join(tokenizer.decode([token]) for token in self._begin)
        self._end = np.array([tokenizer.end_of_document], tokenizer.dtype)
        self._chatml = ChatML(tokenizer)
        self._special = np.array(
            sorted(tokenizer.special.keys() - {tokenizer.unknown}), tokenizer.dtype
        )

    def render(self, documents: Sequence[Document]) -> list[Rendered | None]:
        """Returns the rendering of each conversation by the checkpoint's template; None for texts,
        token ids and ChatML.

        Raises ChatError naming the first conversation that the template cannot render.
        """
        return [self._rendered(document) if document.messages else None for document in documents]

    def _rendered(self, document: Document) -> Rendered | None:
        is_pair = document.format in PAIRS and not document.first_trained
        *before, prompt, answer = document.texts if is_pair else ("", "")
        special = [] if self.request.special_as_text else self.tokenizer.special_tokens(prompt)
        # Not <image> alone.
        if (len({*special}) > 1 or self._begin_text in special) and prompt.lstrip().startswith(
            special[0]
        ):
            if before or document.tools:
                raise ChatError(
                    f"{document.name}: the prompt is rendered, with {special[0]!r}: write system "
                    "and tools into it"
                )
            prompt = self._begin_text + prompt
            if self.request.train_on == "all":
                spans = None
            else:
                spans = [(len(prompt), len(prompt + answer), 1.0)]
            missing = [
                "rendering of prompts that are rendered already",
                *[EMPTY] * (not answer.strip()),
            ]
            return Rendered(prompt + answer, spans, missing, end=1.0)
        if self.request.template is None:
            return None
        try:
            return self.request.template.render(
                document.messages,
                document.tools,
                first_trained=document.first_trained,
                message_weights=document.message_weights,
            )
        except ChatError as error:
            raise ChatError(f"{document.name}: {error}") from error

    def encode(
        self, documents: Sequence[Document], rendered: Sequence[Rendered | None]
    ) -> list[EncodedDocument | None]:
        """Encodes a batch of documents and their renderings. Returns rows; None for a conversation
        dropped as too long.

        Raises ChatError naming the first conversation that cannot be trained on, and TokenizerError
        for texts that cannot be encoded and ids out of range.
        """
        with ThreadPoolExecutor(self.workers or os.cpu_count()) as threads:
            return list(threads.map(self._row, documents, rendered))

    def _row(self, document: Document, rendered: Rendered | None) -> EncodedDocument | None:
        if document.ids is not None:
            row = self._with_ids(document, document.ids)
        elif rendered is not None:
            row = self._templated(document, rendered)
        elif document.text is not None:
            row = self._text(document, document.text)
        else:
            row = self._in_chatml(document)
        if row.trained is not None and not row.trained[1:].any():
            raise ChatError(
                f"{document.name}: this conversation has no token to train on: remove it"
            )
        return self._cut(row)

    def _cut(self, row: EncodedDocument) -> EncodedDocument | None:
        """Returns a row, cut if it is a conversation that is too long; None: it is dropped. Raises
        ChatError if it must not."""
        limit = self.request.max_length
        if (
            limit is None
            or len(row.tokens) <= limit
            or not (row.document.messages or row.document.learned is not None)
        ):
            return row
        if self.request.long_documents == "drop":
            return None
        if self.request.long_documents not in TRUNCATED:
            raise ChatError(
                f"{row.document.name} has {len(row.tokens):,} tokens, more than --max-length "
                f"{limit:,}: give --long-documents drop, truncate_left (keeps the end) or "
                "truncate_right, or raise --max-length"
            )
        if self.request.long_documents == "truncate_left":
            span = slice(-limit, None)
        else:
            span = slice(limit)
        trained = None if row.trained is None else row.trained[span]
        if trained is not None and not trained[1:].any():
            return None
        return row._replace(tokens=row.tokens[span], trained=trained, truncated=True)

    def _templated(self, document: Document, rendered: Rendered) -> EncodedDocument:
        spelled = sum(
            len(self.tokenizer.special_tokens(text))
            for text in leaves([document.messages, document.tools])
        )
        if spelled and self.request.special_as_text:
            raise ChatError(
                f"{document.name}: a message contains a special token, which stays one in the "
                "chat template's text: remove it, give --chat-template chatml, which keeps it as "
                "text, or omit --special-tokens-as-text"
            )
        spans = rendered.spans or ()
        tokens, trained, straddling = self.tokenizer.encode_spans(rendered.text, spans)
        if rendered.end and len(end := self._ending(tokens)):
            tokens = np.append(tokens, end)
            trained = token_weights(np.append(trained, rendered.end))
        targets = None if rendered.spans is None else trained
        return EncodedDocument(
            document,
            tokens,
            trained=targets,
            spelled=spelled,
            straddling=straddling,
            left_out=rendered.left_out,
            thoughts=rendered.thoughts,
        )

    def _ending(self, tokens: TokenArray) -> TokenArray:
        """Returns the end of a document, or nothing if the tokens end with it already."""
        return self._end[: not (len(tokens) and tokens[-1] == self._end[0])]

    def _with_ids(self, document: Document, ids: Ids) -> EncodedDocument:
        """Takes the tokens as they are, without a begin and an end."""
        size = self.tokenizer.vocab_size
        if (wrong := (ids < 0) | (ids >= size)).any():
            place = int(wrong.argmax())
            raise TokenizerError(
                f"{document.name} has token {ids[place]} at position {place}, but the tokenizer "
                f"has {size:,} tokens: name the tokenizer that the token ids are from "
                "(--tokenizer)"
            )
        return EncodedDocument(document, ids.astype(self.tokenizer.dtype), document.learned)

    def _encoded(self, text: str) -> tuple[TokenArray, int]:
        """Returns the tokens of a text, and the number of special ones that it contains."""
        tokens = self.tokenizer.encode(text, special=not self.request.special_as_text)
        return tokens, int(np.isin(tokens, self._special).sum())

    def _text(self, document: Document, text: str) -> EncodedDocument:
        tokens, spelled = self._encoded(text)
        return EncodedDocument(
            document, np.concatenate([self._begin, tokens, self._ending(tokens)]), None, spelled
        )

    def _in_chatml(self, document: Document) -> EncodedDocument:
        contents = [self._encoded(text) for text in document.texts]
        parted = {
            index: text
            for index, text in enumerate(document.texts)
            if isinstance(text, Parts) and text.weighted
        }
        within = {}
        straddling = 0
        for index, text in parted.items():
            _, within[index], more = self.tokenizer.encode_spans(
                text, text.spans, special=not self.request.special_as_text
            )
            straddling += more
        try:
            if document.tools:
                raise ChatError(
                    f"the record has tools, which ChatML does not support: {TOOLS_WAY_OUT}"
                )
            weights = document.message_weights
            turns = trained_turns(
                document.messages, document.first_trained, self.request.train_on, weights
            )
            tokens, mask = self._chatml.join(
                document.messages, [tokens for tokens, _ in contents], turns, weights, within
            )
            missing = left_out(
                "\0".join(document.texts), document.messages, tools=None, trained=turns, by="ChatML"
            )
        except ChatError as error:
            raise ChatError(f"{document.name}: {error}") from error
        trained = None if self.request.train_on == "all" else np.append(mask, mask[-1])
        spelled = sum(count for _, count in contents)
        tokens = np.concatenate([tokens, self._end])
        return EncodedDocument(
            document,
            tokens,
            trained=trained,
            spelled=spelled,
            straddling=straddling,
            left_out=missing,
        )

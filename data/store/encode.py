"""Encode: documents → tokens and masks of targets. All texts of a batch are tokenized in one call, by several threads."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from longctx.data import TRUNCATED
from longctx.data.records.chat import TOOLS_WAY_OUT, ChatError, ChatML, trained_turns
from longctx.data.records.formats import Document
from longctx.data.records.left_out import EMPTY, left_out
from longctx.data.records.markup import Marked, Markup
from longctx.data.records.messages import leaves
from longctx.data.records.template import Rendered
from longctx.data.records.token_ids import Ids
from longctx.data.records.tokenizer import TokenArray, Tokenizer, TokenizerError, TokenWeights, token_weights
from longctx.data.store.request import StoreRequest


class EncodedDocument(NamedTuple):
    """A document of the store.

    Attributes:
        tokens: token ids `[tokens]`.
        trained: weights of the tokens as targets; None: 1 for all.
        spelled: number of special tokens that its texts contain, which are encoded as such.
        straddling: number of target tokens that also contain text that is not trained on.
        left_out: names of what the conversation says and the template does not show.
        thoughts: number of turns that the template begins with an empty thought, which is not trained on.
    """

    document: Document
    tokens: TokenArray
    trained: TokenWeights | None
    spelled: int = 0
    straddling: int = 0
    left_out: Collection[str] = ()
    thoughts: int = 0
    truncated: bool = False


@dataclass
class Encoder:
    """Turns documents into rows, as a request says, in `workers` threads (None: one per core).

    `tokenizer` is that of texts, and of conversations in ChatML.
    """

    tokenizer: Tokenizer
    request: StoreRequest
    workers: int | None = None

    def __post_init__(self) -> None:
        self.template, known = self.request.template, self.request.pretrained
        self.begin = np.zeros(0, self.tokenizer.dtype) if known is None else known.begin
        self._chatml = ChatML(self.tokenizer)
        self._end = np.array([self.tokenizer.end_of_document], self.tokenizer.dtype)
        self._markup = self.template.markup if self.template else Markup(self.tokenizer)
        self._begin = "".join(self.tokenizer.decode([token]) for token in self.begin)
        self._special = np.array(sorted(self.tokenizer.special.keys() - {self.tokenizer.unknown}), self.tokenizer.dtype)

    def render(self, documents: Sequence[Document]) -> list[Rendered | None]:
        """Returns the rendering of each conversation by the checkpoint's template; None for texts, token ids and ChatML.

        Raises ChatError naming the first conversation that the template cannot render.
        """
        return [self._rendered(document) if document.messages else None for document in documents]

    def _rendered(self, document: Document) -> Rendered | None:
        is_pair = document.format in ("prompt-completion", "instruction-output") and not document.first_trained
        *before, prompt, answer = document.texts if is_pair else ("", "")
        special = [] if self.request.special_as_text else self._markup.special_tokens(prompt)
        if (len({*special}) > 1 or self._begin in special) and prompt.lstrip().startswith(special[0]):  # not <image> alone
            if before or document.tools:
                raise ChatError(f"{document.name}: the prompt is rendered, with {special[0]!r}: write system and tools into it")
            prompt = self._begin + prompt
            spans = None if self.request.train_on == "all" else [(len(prompt), len(prompt + answer))]
            missing = ["rendering of prompts that are rendered already", *[EMPTY] * (not answer.strip())]
            return Rendered(prompt + answer, spans, missing, unended=True)
        if self.template is None:
            return None
        try:
            options = document.first_trained, document.message_weights
            return self.template.render(document.messages, document.tools, *options)
        except ChatError as error:
            raise ChatError(f"{document.name}: {error}") from error

    def encode(
        self, documents: Sequence[Document], conversations: Sequence[Rendered | None]
    ) -> tuple[list[EncodedDocument], int]:
        """Encodes a batch and its rendered conversations. Returns rows and the number of conversations dropped as too long.

        Raises ChatError naming the first conversation that cannot be trained on, and TokenizerError for ids out of range.
        """
        rendered = [each for each in conversations if each is not None]
        spans = [each.spans or () for each in rendered], [each.weights for each in rendered]
        marked = iter(self._markup.encode_batch([each.text for each in rendered], *spans, workers=self.workers))
        encoded = iter(
            self.tokenizer.encode_batch(
                [text for each, by in zip(documents, conversations, strict=True) if by is None for text in each.texts],
                special=not self.request.special_as_text,
                workers=self.workers,
            )
        )
        rows = []
        for document, rendering in zip(documents, conversations, strict=True):
            if document.ids is not None:
                row = self._with_ids(document, document.ids)
            elif rendering is not None:
                row = self._templated(document, rendering, next(marked))
            else:
                row = self._plain(document, list(islice(encoded, len(document.texts))))
            if row.trained is not None and not row.trained[1:].any():
                raise ChatError(f"{document.name}: this conversation has no token to train on: remove it")
            rows.append(row)
        kept = [row for row in map(self._cut, rows) if row is not None]
        return kept, len(rows) - len(kept)

    def _cut(self, row: EncodedDocument) -> EncodedDocument | None:
        """Returns a row, cut if it is a conversation that is too long; None: it is dropped. Raises ChatError if it must not."""
        limit = self.request.max_length
        if limit is None or len(row.tokens) <= limit or not (row.document.messages or row.document.learned is not None):
            return row
        if self.request.long_documents == "drop":
            return None
        if self.request.long_documents not in TRUNCATED:
            raise ChatError(
                f"{row.document.name} has {len(row.tokens):,} tokens, more than --max-length {limit:,}: give --long-documents "
                "drop, truncate_left (keeps the end) or truncate_right, or raise --max-length"
            )
        span = slice(-limit, None) if self.request.long_documents == "truncate_left" else slice(limit)
        trained = None if row.trained is None else row.trained[span]
        if trained is not None and not trained[1:].any():
            return None
        return row._replace(tokens=row.tokens[span], trained=trained, truncated=True)

    def _templated(self, document: Document, rendered: Rendered, marked: Marked) -> EncodedDocument:
        spelled = sum(len(self._markup.special_tokens(text)) for text in leaves([document.messages, document.tools]))
        if spelled and self.request.special_as_text:
            raise ChatError(
                f"{document.name}: a message contains a special token, which stays one in the chat template's text: remove it, "
                "give --chat-template chatml, which keeps it as text, or omit --special-tokens-as-text"
            )
        end = self._ending(marked.tokens)[: rendered.unended]
        last = rendered.weights[-1] if rendered.weights else 1.0
        trained = token_weights(np.append(marked.trained, [last] * len(end)))
        return EncodedDocument(
            document,
            np.append(marked.tokens, end),
            None if rendered.spans is None else trained,
            spelled,
            marked.straddling,
            rendered.left_out,
            rendered.thoughts,
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
                f"{document.name} has token {ids[place]} at position {place}, but the tokenizer has {size:,} tokens: name the "
                "tokenizer that the token ids are from (--tokenizer)"
            )
        return EncodedDocument(document, ids.astype(self.tokenizer.dtype), document.learned)

    def _plain(self, document: Document, texts: Sequence[TokenArray]) -> EncodedDocument:
        """Joins the tokens of a text, or of a conversation in ChatML."""
        spelled = sum(int(np.isin(tokens, self._special).sum()) for tokens in texts)
        if document.text is not None:
            return EncodedDocument(document, np.concatenate([self.begin, texts[0], self._ending(texts[0])]), None, spelled)
        try:
            if document.tools:
                raise ChatError(f"the record has tools, which ChatML does not support: {TOOLS_WAY_OUT}")
            weights = document.message_weights
            turns = trained_turns(document.messages, document.first_trained, self.request.train_on, weights)
            tokens, mask = self._chatml.join(document.messages, texts, turns, weights)
            missing = left_out("\0".join(document.texts), document.messages, None, turns, "ChatML")
        except ChatError as error:
            raise ChatError(f"{document.name}: {error}") from error
        trained = None if self.request.train_on == "all" else np.append(mask, mask[-1])
        return EncodedDocument(document, np.concatenate([tokens, self._end]), trained, spelled, left_out=missing)

"""ChatML: the chat template for tokenizers that come without one.

Every message becomes `<|im_start|>ROLE\\n CONTENT <|im_end|> \\n` (without the spaces); the
assistant's CONTENT and the <|im_end|> after it are trained on. Markers are special tokens if the
tokenizer has them, else text: then the end of the document after the assistant's last turn is
trained on too, as generation can stop only at a single token. Contents are encoded separately, so
that no token spans a marker and a content.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from longctx.data.records.tokenizer import Spans, TokenArray, Tokenizer, TokenWeights, token_weights
from longctx.errors import UserError

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}"
)
"""The same template in Jinja, for transformers."""
TEMPLATE_FILE = "chat_template.jinja"
"""File in which transformers looks for a chat template first."""
ROLES = ("system", "developer", "user", "assistant", "tool")
TRAIN_ON = ("assistant", "last", "all")
"""Parts of a conversation to train on: the assistant's turns, the last of these turns, or every
token."""

Message = dict[str, Any]
"""`role`, `content` and other keys that a template may use, such as `tool_calls`; checked by
`longctx.data.records.formats`."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message's reasoning, of which a template knows one."""
TEXTS = ("content", *REASONING)
"""Keys of a message whose value is a text, or a list of texts."""
TOOLS_WAY_OUT = (
    "use the tokenizer of a checkpoint whose chat template supports tools (--tokenizer FOLDER), "
    "or give such a template with it (--chat-template FILE)"
)


class ChatError(UserError):
    """A value that is not a conversation, or a conversation that cannot be trained on."""


class Parts(str):
    """The joined text of a content that is a list.

    Attributes:
        parts: its texts, for templates that read lists.
        weights: weight of each part in the loss, by which that of its message is multiplied.
    """

    parts: list[dict[str, Any]]
    weights: tuple[float, ...]

    @classmethod
    def of(cls, parts: list[dict[str, Any]], weights: Sequence[float] | None = None) -> "Parts":
        text = cls("".join(part["text"] for part in parts))
        text.parts = parts
        text.weights = (1.0,) * len(parts) if weights is None else tuple(weights)
        return text

    @property
    def weighted(self) -> bool:
        """Whether a part has another weight than its message."""
        return any(weight != 1 for weight in self.weights)

    @property
    def spans(self) -> Spans:
        """Spans of the characters that have a loss, with their weights."""
        stops = list(accumulate(len(part["text"]) for part in self.parts))
        each = zip([0, *stops[:-1]], stops, self.weights, strict=True)
        return cut([(0, len(self), 1.0)], [span for span in each if span[2] != 1])


def cut(spans: Spans, areas: Spans) -> list[tuple[int, int, float]]:
    """Returns the spans, with their weights multiplied by those of the areas; spans of weight 0 are
    left out."""
    found = []
    for start, stop, weight in spans:
        for first, end, factor in areas:
            first = max(first, start)
            end = min(end, stop)
            if first >= end:
                continue
            if start < first:
                found.append((start, first, weight))
            if factor:
                found.append((first, end, weight * factor))
            start = end
        if start < stop:
            found.append((start, stop, weight))
    return found


def weighted_texts(message: Message) -> dict[str, Parts]:
    """Returns the texts of a message, by key, of which parts have weights of their own."""
    texts = {key: message.get(key) for key in TEXTS}
    return {key: text for key, text in texts.items() if isinstance(text, Parts) and text.weighted}


def trained_turns(
    messages: Sequence[Message],
    first_trained: int,
    train_on: str,
    weights: Mapping[int, float] | None = None,
) -> list[int]:
    """Returns the indices of the assistant's messages to train on, by the `weights` of some; raises
    ChatError if none are."""
    weights = weights or {}
    turns = [
        index
        for index, message in enumerate(messages)
        if message["role"] == "assistant" and index >= first_trained
    ]
    if train_on == "all":
        for index, weight in weights.items():
            what = f"weight {weight:g}" if weight else "no loss"
            raise ChatError(
                f"message {index} has {what}, but --train-on all trains on every token: use "
                "assistant"
            )
        for index, message in enumerate(messages):
            if weighted_texts(message):
                what = "parts with a loss of their own"
                raise ChatError(
                    f"message {index} has {what}, but --train-on all trains on every token: use "
                    "assistant"
                )
        return turns
    if not turns:
        raise ChatError(
            "the conversation has no assistant message to train on: add one, or remove the "
            "conversation"
        )
    trained = [
        turn for turn in (turns[-1:] if train_on == "last" else turns) if weights.get(turn, 1)
    ]
    if not trained:
        raise ChatError(
            f"message {turns[-1]} has no loss, but --train-on last trains on it alone: use "
            "assistant"
        )
    return trained


def check_role(index: int, role: str, template: str = "") -> None:
    """Raises ChatError for a role that neither is usual nor named in the Jinja template."""
    if role not in ROLES and not re.search(rf"['\"]{re.escape(role)}['\"]", template):
        raise ChatError(
            f"message {index} has role {role!r}: it must be one of {', '.join(ROLES)}, or in the "
            "chat template"
        )


class ChatML:
    """ChatML for one tokenizer; its markers are encoded on first use."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _markers(self) -> tuple[dict[str, TokenArray], TokenArray, TokenArray]:
        """Start of a message by role, end of a message, and the line break after it."""
        encode = self._tokenizer.encode_markup
        return (
            {role: encode(f"<|im_start|>{role}\n") for role in ROLES},
            encode("<|im_end|>"),
            encode("\n"),
        )

    @property
    def matches_rendering(self) -> bool:
        """Whether `join` gives the tokens of the text that `CHATML` renders, checked with one short
        conversation.

        It does not if the tokenizer merges a marker with adjacent text, or begins every text with a
        space.
        """
        messages = [
            {"role": role, "content": content}
            for role, content in (("user", "Is it?"), ("assistant", "Yes."))
        ]
        contents = [self._tokenizer.encode(message["content"]) for message in messages]
        rendered = "".join(
            f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
            for message in messages
        )
        return np.array_equal(
            self.join(messages, contents, ())[0], self._tokenizer.encode_markup(rendered)
        )

    def join(
        self,
        messages: Sequence[Message],
        contents: Sequence[TokenArray],
        trained: Collection[int],
        weights: Mapping[int, float] | None = None,
        within: Mapping[int, TokenWeights] | None = None,
    ) -> tuple[TokenArray, TokenWeights]:
        """Joins the encoded `contents` of `messages`.

        Returns token ids `[tokens]` and their weights as targets: messages with the indices
        `trained` have `weights`, or 1, times those of the tokens of their content, `within` some
        messages. The last token is a target if the end of the document that follows it shall be
        one. Raises TokenizerError if the tokenizer lacks characters of the markers, as roles would
        be indistinguishable, and ChatError for tool calls and other roles, which ChatML does not
        support.
        """
        heads, stop, newline = self._markers
        parts: list[TokenArray] = []
        mask: list[npt.NDArray[np.float32]] = []
        for index, (message, content) in enumerate(zip(messages, contents, strict=True)):
            check_role(index, message["role"])
            if "tool_calls" in message:
                raise ChatError(
                    f"message {index} calls a tool, which ChatML does not support: {TOOLS_WAY_OUT}"
                )
            parts += [heads[message["role"]], content, stop, newline]
            closes = len(stop) > 1 and index == len(messages) - 1  # no single token ends a message
            weight = (weights or {}).get(index, 1.0) if index in trained else 0.0
            own = np.full(len(content), weight, np.float32)
            if within and index in within:
                own *= within[index]
            mask.append(np.zeros(len(heads[message["role"]]), np.float32))
            mask.append(own)
            mask.append(np.full(len(stop), weight, np.float32))
            mask.append(np.full(len(newline), weight * closes, np.float32))
        return np.concatenate(parts), token_weights(np.concatenate(mask))

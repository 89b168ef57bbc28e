"""Conversations: `messages` checked, and turned into tokens with a mask that says which of them are to be learnt.

The template is ChatML. Every message becomes

    <|im_start|>ROLE\\n CONTENT <|im_end|> \\n          (without the spaces)

and the assistant's CONTENT and the <|im_end|> that ends it are the only targets. A tokenizer that has the two markers as
special tokens uses them; any other spells them out. Contents are encoded one by one, so that no token straddles a marker, and
never yield a special token, whatever a user has typed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from longctx.data.tokenizer import TokenArray, Tokenizer
from longctx.errors import UserError

ROLES = ("system", "user", "assistant", "tool")


class ChatError(UserError):
    """A `messages` value that is not a conversation."""


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str


def parse_messages(value: Any) -> tuple[Message, ...]:
    """Checks a list of {"role": .., "content": ..}. Raises ChatError naming the message, counted from 0, and the rule."""
    if not isinstance(value, list) or not value:
        raise ChatError("`messages` must be a list with at least one message")
    messages = []
    for index, item in enumerate(value):
        role, content = (item.get("role"), item.get("content")) if isinstance(item, dict) else (None, None)
        if role not in ROLES:
            raise ChatError(f"message {index} has role {role!r}: it must be one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise ChatError(f"message {index} has content of type {type(content).__name__}: it must be text")
        messages.append(Message(role, content))
    if all(message.role != "assistant" for message in messages):
        raise ChatError("no message is the assistant's, so there is nothing to learn from: leave this conversation out")
    return tuple(messages)


class Template:
    """The template for one tokenizer, its markers encoded once, when there is a conversation."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _markers(self) -> tuple[dict[str, TokenArray], TokenArray, TokenArray]:
        """The head of a message by role, its end, and the line break behind it."""
        encode = self._tokenizer.encode_markup
        return {role: encode(f"<|im_start|>{role}\n") for role in ROLES}, encode("<|im_end|>"), encode("\n")

    def join(self, messages: Sequence[Message], contents: Sequence[TokenArray]) -> tuple[TokenArray, npt.NDArray[np.bool_]]:
        """Joins the encoded `contents` of `messages`. Returns tokens and, of the same length, which of them are targets.

        Raises TokenizerError if the tokenizer lacks characters of the markers: roles could not be told apart.
        """
        heads, stop, newline = self._markers
        parts: list[TokenArray] = []
        learnt: list[bool] = []
        for message, content in zip(messages, contents, strict=True):
            assistant = message.role == "assistant"
            parts += [heads[message.role], content, stop, newline]
            learnt += [False, assistant, assistant, False]
        return np.concatenate(parts), np.repeat(learnt, [len(part) for part in parts])

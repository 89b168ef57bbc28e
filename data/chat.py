"""ChatML: the template of conversations for tokenizers that bring none.

Every message becomes

    <|im_start|>ROLE\\n CONTENT <|im_end|> \\n          (without the spaces)

and the assistant's CONTENT and the <|im_end|> that ends it are what is learnt. A tokenizer that has the two markers as special
tokens uses them; any other spells them out. Contents are encoded one by one, so that no token straddles a marker, and never
yield a special token, whatever a user has typed.
"""

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from longctx.data.tokenizer import TokenArray, Tokenizer
from longctx.errors import UserError

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The same in Jinja, for transformers."""
TEMPLATE_FILE = "chat_template.jinja"
"""Where transformers looks for it first."""
ROLES = ("system", "user", "assistant", "tool")
TRAIN_ON = ("assistant", "last", "all")
"""What is learnt of a conversation: the assistant's turns, the last one of them, or every token."""

Message = dict[str, Any]
"""`role`, `content` and whatever else a template may ask for, `tool_calls` among it; checked by `longctx.data.formats`."""
TOOLS_WAY_OUT = (
    "take the tokenizer of a checkpoint whose template has one (--tokenizer FOLDER), or a template of your own beside it "
    "(--chat-template FILE)"
)


class ChatError(UserError):
    """A value that is not a conversation, or a conversation that cannot be learnt as one."""


def learnt_turns(messages: Sequence[Message], first_trained: int, train_on: str) -> list[int]:
    """Which messages are to be learnt, counted from 0. Raises ChatError if there is none."""
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant" and index >= first_trained]
    if not turns:
        raise ChatError("no message is the assistant's, so there is nothing to learn from: leave this conversation out")
    return turns[-1:] if train_on == "last" else turns


class ChatML:
    """The template for one tokenizer, its markers encoded once, when there is a conversation."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _markers(self) -> tuple[dict[str, TokenArray], TokenArray, TokenArray]:
        """The head of a message by role, its end, and the line break behind it."""
        encode = self._tokenizer.encode_markup
        return {role: encode(f"<|im_start|>{role}\n") for role in ROLES}, encode("<|im_end|>"), encode("\n")

    @property
    def is_its_rendering(self) -> bool:
        """Whether the tokens of a conversation are those of its rendering by `CHATML`, as far as one conversation shows.

        They are not where a tokenizer joins a marker and what stands beside it to a token, or begins every text with a space.
        """
        messages = [{"role": role, "content": content} for role, content in (("user", "Is it?"), ("assistant", "Yes."))]
        contents = [self._tokenizer.encode(message["content"]) for message in messages]
        rendered = "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)
        return np.array_equal(self.join(messages, contents, ())[0], self._tokenizer.encode_markup(rendered))

    def join(
        self, messages: Sequence[Message], contents: Sequence[TokenArray], learnt: Collection[int]
    ) -> tuple[TokenArray, npt.NDArray[np.bool_]]:
        """Joins the encoded `contents` of `messages`. Returns tokens and, of the same length, which of them are targets: those
        of the messages `learnt`, counted from 0.

        Raises TokenizerError if the tokenizer lacks characters of the markers: roles could not be told apart. Raises ChatError
        for tool calls, which have no form here.
        """
        heads, stop, newline = self._markers
        parts: list[TokenArray] = []
        mask: list[bool] = []
        for index, (message, content) in enumerate(zip(messages, contents, strict=True)):
            if "tool_calls" in message:
                raise ChatError(f"message {index} calls a tool, and ChatML has no form for that: {TOOLS_WAY_OUT}")
            parts += [heads[message["role"]], content, stop, newline]
            mask += [False, index in learnt, index in learnt, False]
        return np.concatenate(parts), np.repeat(mask, [len(part) for part in parts])

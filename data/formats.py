"""Formats: parses one record of JSONL, Parquet or a dataset into a text or conversations.

A record has the first of these formats that its keys allow (keys whose value is null are ignored):

    chosen-rejected     a preference pair, `chosen` and `rejected`: completions (texts or messages) of a `prompt` (text or
                        messages), or whole conversations whose common first messages are the prompt; only the completions
                        are trained on
    messages            [{"role": .., "content": .., "tool_calls": ..}, ..]
    conversations       ShareGPT: [{"from": "human", "value": ..}, ..], with an optional `system`
    prompt-completion   `prompt` and `completion` or `response`: texts, or lists of messages; only the completion is trained on
    instruction-output  `instruction`, optional `input`, and `output` or `response`
    text                one text, all of it trained on

A text column given by name takes precedence over all of them. Conversations may have `tools` (a list, or its JSON), and any
record a `weight` (a positive number).
"""

import json
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from longctx.data.chat import ROLES, ChatError, Message
from longctx.errors import UserError

PAIRS = "chosen-rejected"
"""Format of preference pairs: a record yields two documents, one after the other."""
SIDES = ("chosen", "rejected")
FORMATS = {
    PAIRS: (SIDES,),
    "messages": (("messages",),),
    "conversations": (("conversations",),),
    "prompt-completion": (("prompt", "completion"), ("prompt", "response")),
    "instruction-output": (("instruction", "output"), ("instruction", "response")),
}
"""Required keys of each conversation format."""
BESIDE = ("system", "input", "tools", "weight")
"""Optional keys."""
FROM = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bing", "bard", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "function_response", "observation"), "tool"),
    "system": "system",
}
"""Role of each value of `from` in ShareGPT."""


class FormatError(UserError):
    """A record that contains no document, or is malformed."""


@dataclass(frozen=True, slots=True)
class Document:
    """One document: a `text`, or, if `text` is None, the `messages` of a conversation.

    Attributes:
        name: place in the source.
        source_bytes: its share of the source's bytes.
        format: format of its record.
        tools: tool descriptions for the chat template; None if the record has none.
        first_trained: index of the first message that may be trained on.
        weight: weight of each of its tokens in the loss.
    """

    name: str
    source_bytes: float
    text: str | None
    messages: tuple[Message, ...] = ()
    tools: list[Any] | None = None
    first_trained: int = 0
    weight: float = 1.0
    format: str = "text"

    @property
    def texts(self) -> list[str]:
        """The text, or the content of every message."""
        return [message.get("content", "") for message in self.messages] if self.text is None else [self.text]


def columns_of(names: Collection[str], text_column: str | None) -> list[str]:
    """Returns the columns of a table to read. Raises FormatError if they contain no document."""
    keys = {key for keys in FORMATS.values() for group in keys for key in group}
    _detect(names, names, text_column)
    if text_column in names:
        return [name for name in names if name in (text_column, "weight")]
    return [name for name in names if name in {"text", *keys, *BESIDE}]


def parse_record(record: dict[str, Any], name: str, source_bytes: float, text_column: str | None) -> list[Document]:
    """Returns the documents of a record; `text_column` is the key of the text, if given.

    That is one document, except for a preference pair: two, NAME#chosen and NAME#rejected, or none if the completions are
    equal or one is empty. Raises FormatError or ChatError naming the key and the rule.
    """
    present = [key for key, value in record.items() if value is not None]
    kind = _detect(present, record, text_column)
    weight = _weight(record.get("weight"))
    if kind == "text":
        column = text_column or "text"
        text = record[column]
        if not isinstance(text, str):
            raise FormatError(f"{column!r} is of type {type(text).__name__}: it must be text")
        documents = [Document(name, source_bytes, text, weight=weight)]
    else:
        names = [f"{name}#{side}" for side in SIDES] if kind == PAIRS else [name]
        conversations = _pair(record) if kind == PAIRS else [_conversation(record, kind)]
        tools = _tools(record.get("tools"))
        documents = []
        for own, (messages, first) in zip(names, conversations, strict=bool(conversations)):
            if kind != "messages" and record.get("system") and messages[0]["role"] != "system":
                messages, first = [{"role": "system", "content": _text(record, "system")}, *messages], first and first + 1
            share = source_bytes / len(names)
            documents.append(Document(own, share, None, tuple(messages), tools, first, weight, kind))
    for part in leaves([[document.text, document.messages, document.tools] for document in documents]):
        try:
            part.encode("utf-8")
        except UnicodeEncodeError as error:
            raise FormatError(f"unpaired surrogate \\u{ord(part[error.start]):x}: this is not valid text") from error
    return documents


def parse_messages(value: Any, key: str = "messages") -> list[Message]:
    """Checks a list of messages and normalizes it for templates: contents to text, arguments of tool calls to objects.

    Raises ChatError naming the message (from 0) and the rule.
    """
    if isinstance(value, str):
        value = _json(f"`{key}`", value)
    if not isinstance(value, list) or not value:
        raise ChatError(f"`{key}` must be a list with at least one message")
    return [_message(index, item) for index, item in enumerate(value)]


def leaves(value: Any) -> Iterator[str]:
    """Yields every text in a JSON value, keys of objects excluded."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from leaves(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from leaves(part)


def without_nulls(value: Any) -> Any:
    """Returns a value of an Arrow table without null members, which Arrow adds for keys that other records have."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def _detect(present: Collection[str], names: Collection[str], text_column: str | None) -> str:
    if text_column in names:
        return "text"
    for kind, groups in FORMATS.items():
        if any(set(group) <= set(present) for group in groups):
            return kind
    for kind in ("text", *FORMATS) if text_column is None else FORMATS:  # so that a null value is reported as such
        if kind in names:
            return kind
    if "input_ids" in names:
        raise FormatError(
            "has input_ids: tokens of another program are not read yet; give the texts or messages they come from"
        )
    raise FormatError(
        f"has neither {text_column or 'text'!r} nor messages, conversations, prompt and completion, instruction and output, or "
        "chosen and rejected, "
        f"only {', '.join(names) or 'nothing'}: name the text column with --text-column"
    )


def _conversation(record: dict[str, Any], kind: str) -> tuple[list[Message], int]:
    """Returns the messages and the index of the first one that may be trained on."""
    if kind == "messages":
        return parse_messages(record["messages"]), 0
    if kind == "conversations":
        return _sharegpt(record["conversations"]), 0
    answer = next(key for key in ("completion", "output", "response") if record.get(key) is not None)
    if kind == "instruction-output":
        asked = _text(record, "instruction")
        if record.get("input"):
            asked = f"{asked}\n\n{_text(record, 'input')}"
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": _text(record, answer)}], 0
    if isinstance(record["prompt"], str) and isinstance(record[answer], str):
        return [{"role": "user", "content": record["prompt"]}, {"role": "assistant", "content": record[answer]}], 0
    prompt, completion = _messages(record, "prompt", "user"), _messages(record, answer, "assistant")
    return [*prompt, *completion], len(prompt)


def _pair(record: dict[str, Any]) -> list[tuple[list[Message], int]]:
    """Returns the messages of both sides and the index of the first one to train on; [] if there is no preference."""
    prompt = [] if record.get("prompt") is None else _messages(record, "prompt", "user")
    sides = [_messages(record, side, "assistant") for side in SIDES]
    if not prompt and any(isinstance(record[side], str) for side in SIDES):
        raise FormatError("`chosen` and `rejected` are texts without a `prompt`: add the key `prompt`, or give messages")
    if prompt and all(messages[0]["role"] == "assistant" for messages in sides):
        sides = [[*prompt, *messages] for messages in sides]
        first = len(prompt)
    else:  # whole conversations, possibly with the prompt repeated as a key
        first = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*sides, strict=False)))
        if not first:
            raise ChatError("the first messages of `chosen` and `rejected` differ: both must begin with the same prompt")
        if any(message not in sides[0][:first] for message in prompt):
            raise ChatError(
                "`prompt` is not among the common first messages of `chosen` and `rejected`, and these do not begin with the "
                "assistant's answer: remove the prompt, or the messages before the answer"
            )
    completions = [messages[first:] for messages in sides]
    if completions[0] == completions[1] or not all(any(map(_says_something, messages)) for messages in completions):
        return []
    return [(messages, first) for messages in sides]


def _says_something(message: Message) -> bool:
    return bool(message.get("content", "").strip() or "tool_calls" in message)


def _messages(record: dict[str, Any], key: str, role: str) -> list[Message]:
    """Returns a list of messages; a text becomes one message with this role."""
    return [{"role": role, "content": record[key]}] if isinstance(record[key], str) else parse_messages(record[key], key)


def _message(index: int, item: Any) -> Message:
    role = item.get("role") if isinstance(item, dict) else None
    if role not in ROLES:
        raise ChatError(f"message {index} has role {role!r}: it must be one of {', '.join(ROLES)}")
    message = {key: value for key, value in item.items() if value is not None}
    content = message.get("content")
    if isinstance(content, list):
        content = message["content"] = _joined(index, content)
    calls = message.get("tool_calls")
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise ChatError(f"message {index} has `tool_calls`: they must be a list, in a message of the assistant")
        message["tool_calls"] = [_call(f"message {index}, tool call {number}", call) for number, call in enumerate(calls)]
    else:
        message.pop("tool_calls", None)
    if not isinstance(content, str) and (content is not None or not calls):
        raise ChatError(f"message {index} has content of type {type(content).__name__}: it must be text")
    return message


def _joined(index: int, parts: list[Any]) -> str:
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ChatError(f"message {index} has a part of type {kind!r} in its content: only text is supported")
    return "".join(part["text"] for part in parts)


def _call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ChatError(f'{where} must be an object such as {{"function": {{"name": .., "arguments": {{..}}}}}}')
    arguments = function.get("arguments", {})
    arguments = _json(f"`arguments` of {where}", arguments) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict):
        raise ChatError(f"{where} has arguments of type {type(arguments).__name__}: they must be an object, or its JSON")
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else {"type": "function", "function": function}


def _sharegpt(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise ChatError("`conversations` must be a list with at least one message")
    messages: list[Message] = []
    for index, item in enumerate(value):
        if isinstance(item, dict) and "role" in item:
            messages.append(_message(index, item))
            continue
        speaker, text = (item.get("from"), item.get("value")) if isinstance(item, dict) else (None, None)
        if speaker not in FROM:
            raise ChatError(f"message {index} is from {speaker!r}: it must be one of {', '.join(FROM)}")
        if not isinstance(text, str):
            raise ChatError(f"message {index} has a value of type {type(text).__name__}: it must be text")
        if speaker == "function_call":
            call = _call(f"message {index}", _json(f"`value` of message {index}", text))
            messages.append({"role": "assistant", "tool_calls": [call]})
        else:
            messages.append({"role": FROM[speaker], "content": text})
    return messages


def _tools(value: Any) -> list[Any] | None:
    if isinstance(value, str):
        value = _json("`tools`", value) if value.strip() else None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ChatError("`tools` must be a list of objects, one per tool, or its JSON")
    return value


def _weight(value: Any) -> float:
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise FormatError(f"`weight` is {value!r}: it must be a positive number; remove documents that should not count")
    return float(value)


def _text(record: dict[str, Any], key: str) -> str:
    if not isinstance(record[key], str):
        raise FormatError(f"{key!r} is of type {type(record[key]).__name__}: it must be text")
    return str(record[key])


def _json(what: str, text: str) -> Any:
    try:
        return parse_json(text)
    except FormatError as error:
        raise ChatError(f"{what} is {error}") from error


def parse_json(text: str) -> Any:
    """Returns the value of JSON. Raises FormatError, which begins with "not JSON", for whatever is wrong with it."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise FormatError(f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}") from error
    except RecursionError as error:
        raise FormatError("not JSON that can be read: it is nested too deeply") from error
    except ValueError as error:  # Python's limit on digits
        raise FormatError("not JSON that can be read: a number has thousands of digits") from error

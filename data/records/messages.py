"""Messages of conversations in the forms that data sets have: checked, with the usual roles, texts
and tool calls."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from longctx.data.records.chat import REASONING, TEXTS, ChatError, Message, Parts
from longctx.data.records.loss_flags import has_flags
from longctx.errors import UserError, shortened

CALLS = ("function_call", "tool_call")
"""Roles of messages that are a tool call in JSON."""
SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bing", "bard", *CALLS), "assistant"),
    **dict.fromkeys(
        ("tool", "function", "function_response", "tool_response", "observation", "ipython"), "tool"
    ),
    "system": "system",
    "developer": "developer",
}
"""Role of each speaker, in lower case."""
SHAREGPT = {"from": "role", "value": "content"}
BY_ONE_CALL = "by longctx.trainers.dynamic_context_parallel (docs/trainers.md)"
WITH_IMAGES = f"train conversations with images or videos inside TRL's SFTTrainer, {BY_ONE_CALL}"


_SPEAKS = re.compile(r"['\"](role|from)['\"]\s*:")
_OBJECTS = re.compile(r"\s*(\[\s*)?\{\s*['\"].*[}\]]\s*", re.DOTALL)


class FormatError(UserError):
    """A record that contains no document, or is malformed."""


def parse_messages(value: Any, key: str = "messages") -> list[Message]:
    """Checks a list of messages and normalizes it for templates: roles to the usual names, contents
    to text.

    Raises ChatError naming the message (from 0) and the rule.
    """
    value = json_in(f"`{key}`", value)
    if not isinstance(value, list) or not value:
        raise ChatError(
            f"`{key}` is {shortened(repr(value), 80)}: it must be a list with at least one message"
        )
    return [_message(index, item) for index, item in enumerate(value)]


def _message(index: int, item: Any) -> Message:
    if isinstance(item, dict):
        given = {key: value for key, value in item.items() if value is not None}
    else:
        given = {}
    names = {name: key for name, key in SHAREGPT.items() if key not in given}
    message = {names.get(key, key): value for key, value in given.items()}
    role = message.get("role")
    if (
        not isinstance(role, str)
        or not role
        or ("role" not in given and role.lower() not in SPEAKERS)
    ):
        raise ChatError(
            f"message {index} has role {role!r}: it must be one of {', '.join(SPEAKERS)}"
        )
    message["role"] = SPEAKERS.get(role.lower(), role)
    for key in TEXTS:
        if isinstance(message.get(key), list):
            message[key] = _joined(index, key, message[key])
    for key in REASONING:
        if not isinstance(message.get(key, ""), str):
            what = shortened(repr(message[key]), 80)
            raise ChatError(
                f"message {index} has the {key} {what}: it must be a text, or a list of texts"
            )
    content = message.get("content")
    if role.lower() in CALLS and isinstance(content, str):
        if isinstance(content, Parts) and any(map(has_flags, content.parts)):
            raise ChatError(
                f"message {index} is a tool call of which a part says whether it has a loss: say "
                "it of the message"
            )
        calls = json_in(f"the tool call of message {index}", message.pop("content"))
        message["tool_calls"] = calls if isinstance(calls, list) else [calls]
    elif message.get("function_call") and not message.get("tool_calls"):
        message["tool_calls"] = [message.pop("function_call")]
    calls = message.get("tool_calls")
    if calls:
        if message["role"] != "assistant" or not isinstance(calls, list):
            raise ChatError(
                f"message {index} has `tool_calls`: they must be a list, in a message of the "
                "assistant"
            )
        message["tool_calls"] = [
            _call(f"message {index}, tool call {number}", call) for number, call in enumerate(calls)
        ]
    else:
        message.pop("tool_calls", None)
    if not isinstance(message.get("content", None if not calls else ""), str):
        raise ChatError(
            f"message {index} has the content {shortened(repr(content), 80)}: it must be a text; "
            "write an object as its JSON"
        )
    return message


def _joined(index: int, key: str, given: list[Any]) -> Parts:
    """Returns the texts of a value that is a list. Raises ChatError for other parts."""
    parts = []
    for part in given:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            way_out = 'it must be {"type": "text", "text": ".."}'
            way_out = WITH_IMAGES if kind in ("image", "image_url", "video") else way_out
            raise ChatError(f"message {index} has a part of type {kind!r} in its {key}: {way_out}")
        parts.append({name: value for name, value in part.items() if value is not None})
    return Parts.of(parts)


def _call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ChatError(
            f'{where} must be an object such as {{"function": {{"name": .., "arguments": {{..}}}}}}'
        )
    if has_flags(call) or has_flags(function):
        raise ChatError(
            f"{where} says whether it has a loss: say it of the message, and write other calls "
            "into another one"
        )
    arguments = function.get("arguments", {})
    parsed = parse_arguments(where, arguments)
    if not isinstance(parsed, dict):
        raise ChatError(
            f"{where} has arguments of type {type(parsed).__name__}: they must be an object, or "
            "its JSON"
        )
    function = {**function, "arguments": arguments}
    if "function" in call:
        return {**call, "function": function}
    return {"type": "function", "function": function}


def parse_arguments(where: str, arguments: Any) -> Any:
    """Returns the arguments of a tool call as an object; no text means no arguments."""
    if not isinstance(arguments, str):
        return arguments
    if arguments.strip():
        return json_in(f"`arguments` of {where}", arguments)
    return {}


def leaves(value: Any, but: str | None = None) -> Iterator[str]:
    """Yields every text in a JSON value, keys of objects excluded, and the values of the key
    `but`."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from leaves([part for key, part in value.items() if key != but], but)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from leaves(part, but)


def json_in(what: str, text: Any) -> Any:
    """Returns the value of a JSON text called `what`, or of no text itself. Raises ChatError."""
    try:
        if isinstance(text, str):
            return parse_json(text)
        return text
    except FormatError as error:
        raise ChatError(f"{what} is {error}") from error


def listed(what: str, value: Any) -> Any:
    """Returns the messages that a text called `what` is in JSON; any other value as it is. Raises
    ChatError for no JSON."""
    if not isinstance(value, str) or not _OBJECTS.fullmatch(value):
        return value
    try:
        items = json_in(what, value)
    except ChatError:
        if _SPEAKS.search(value):
            raise
        return value
    each = items if isinstance(items, list) else [items]
    if all(isinstance(item, dict) and {"role", "from"} & item.keys() for item in each):
        return items
    return value


def parse_json(text: str) -> Any:
    """Returns the value of JSON. Raises FormatError, which begins with "not JSON", for whatever is
    wrong with it."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        if text[error.pos : error.pos + 1] == "'":
            way_out = "; write it in JSON, not as Python or numpy prints it"
        else:
            way_out = ""
        raise FormatError(
            f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}{way_out}"
        ) from error
    except RecursionError as error:
        raise FormatError("not JSON that can be read: it is nested too deeply") from error
    except ValueError as error:  # of `_object`, or Python's limit on digits
        digits = FormatError("not JSON that can be read: a number has thousands of digits")
        raise error if isinstance(error, FormatError) else digits from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object of JSON. Raises FormatError for a key that it has twice, of which one would
    be lost."""
    if len(value := dict(pairs)) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise FormatError(
            f"not JSON with one meaning: an object has the key {twice!r} twice: remove one of the "
            "two"
        )
    return value

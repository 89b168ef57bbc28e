"""Left out: names what a conversation says and its rendering does not show.

Every text of messages and tools is looked for in the rendering: as it is, stripped, or escaped as
in JSON; else its lines and what stands between its tags are. Each place counts once: long texts
come before short ones ("5"), contents before results of tools. Each search begins where the last
one ended: together they cost a few passes over the rendering.
"""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any

from longctx.data.records.chat import ChatError, Message, Parts
from longctx.data.records.messages import leaves

SHORT = 16  # maximum characters of a text that is looked for after the others
CONTENTS = ("content of user messages", "content of assistant messages")
EMPTY = "all but the end of answers that say nothing"
IDENTIFYING = ("name", "tool_calls.id", "tool_call_id", "id")
"""Parts of a message that are not what it says; they are looked for last."""
SAID_OF_CALLS = ("function", "name", "arguments", "id")
"""Keys of a tool call that are looked for by themselves."""
TYPES = "type"
"""Key of names of types, which templates write in their own ways."""
_THINK = re.compile("</?think>")
# Lines and tags, at which templates cut.
_BETWEEN = re.compile(r"\n|<[^<>\n]+>|\[/?[A-Z_]+\]")
_WORD = re.compile(r"\w")


def left_out(
    text: str,
    messages: Sequence[Message],
    tools: list[Any] | None,
    trained: Collection[int],
    by: str,
) -> set[str]:
    """Returns the names of the parts of a conversation that its rendering `text` by the template
    `by` does not show.

    Raises ChatError if it shows nothing of what a message of `trained` says: only the message's end
    would be trained on.
    """
    rest = bytearray(text, "utf-8")
    missing: set[str] = set()
    shown: set[int] = set()
    parts: list[list[tuple[int, str, str]]] = [[], [], [], [], []]
    for index, name, part in _parts(messages, tools):
        if part := part.strip():
            rank = 2 * (len(part) <= SHORT) + (name not in CONTENTS)
            parts[4 if name in IDENTIFYING else rank].append((index, name, part))
    for group in parts:
        start = 0
        for index, name, part in group:
            if name in missing and (index in shown or index not in trained):
                continue
            stop = _take(rest, part, start)
            start = stop or start
            if stop:
                pieces = []
            else:
                pieces = [piece.strip() for piece in _BETWEEN.split(part) if _WORD.search(piece)]
            shown_pieces = [piece for piece in pieces if _take(rest, piece, start)]
            if stop or shown_pieces:
                shown.add(index)
            if not stop and (not shown_pieces or shown_pieces != pieces):
                missing.add(name)
    for turn in trained:
        names = sorted({name for group in parts[:4] for index, name, _ in group if index == turn})
        if not names:
            missing.add(EMPTY)
        if names and turn not in shown:
            raise ChatError(
                f"message {turn} would be an empty answer, as {by} leaves out its "
                f"{' and '.join(names)}: use a template that shows them (--chat-template FILE), "
                "or remove the conversation"
            )
    return missing


def _take(rest: bytearray, part: str, start: int) -> int:
    """Overwrites a text of a rendering, looked for from `start` on, then everywhere. Returns its
    end; 0 if it is not there."""
    for escaped in (None, False, True):
        form = (part if escaped is None else json.dumps(part, ensure_ascii=escaped)[1:-1]).encode()
        place = rest.find(form, start)
        place = rest.find(form) if place < 0 < start else place
        if place >= 0:
            rest[place : place + len(form)] = bytes(len(form))
            return place + len(form)
    return 0


def _parts(messages: Sequence[Message], tools: list[Any] | None) -> Iterator[tuple[int, str, str]]:
    """Yields the index of the message (-1: none), the name and the text of every part of a
    conversation."""
    yield from ((-1, "tools", part) for part in leaves(tools, TYPES))
    for index, message in enumerate(messages):
        for key, value in message.items():
            if key == "content":
                parts = value.parts if isinstance(value, Parts) else [{"text": value}]
                yield from ((index, *said) for part in parts for said in _beside(part))
                for text in [part["text"] for part in parts]:
                    *thoughts, answer = (
                        _THINK.split(text) if message["role"] == "assistant" else [text]
                    )
                    yield from ((index, "reasoning", thought) for thought in thoughts)
                    yield index, f"content of {message['role']} messages", answer
            elif key == "tool_calls":
                yield from (
                    (index, key, part) for call in value for part in leaves(call["function"], TYPES)
                )
                # They may stand elsewhere by chance, so they do not show that the message is there.
                yield from (
                    (-1, key, part)
                    for call in value
                    for part in _values(call["function"]["arguments"])
                )
                yield from (
                    (index, "tool_calls.id", part)
                    for call in value
                    for part in leaves(call.get("id"))
                )
                beside = [
                    (name, part)
                    for call in value
                    for name, part in call.items()
                    if name not in (*SAID_OF_CALLS, TYPES)
                ]
                yield from (
                    (index, f"tool_calls.{name}", part)
                    for name, said in beside
                    for part in leaves(said)
                )
            elif key != "role" and value not in ("", [], {}):
                yield from (
                    (index, key, part)
                    for part in list(leaves(value)) or [json.dumps(value, default=str)]
                )


def _beside(part: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields names and texts of what a part of a content says besides its text."""
    for key, value in part.items():
        if key not in ("type", "text") and value not in ("", [], {}):
            texts = list(leaves(value)) or [json.dumps(value, default=str)]
            yield from ((f"{key} of parts", text) for text in texts)


def _values(arguments: Any) -> Iterator[str]:
    """Yields the names and numbers of the arguments of a tool call."""
    if isinstance(arguments, dict):
        yield from chain(arguments, *map(_values, arguments.values()))
    elif isinstance(arguments, int | float) and not isinstance(arguments, bool):
        yield json.dumps(arguments)

"""Formats: parses one record of JSONL, Parquet or a dataset into a text, a conversation or token
ids.

A record has the first of these formats that its keys allow (keys whose value is null are ignored,
and may leave it empty):

    messages            [{"role": .., "content": .., "tool_calls": ..}, ..]
    conversations       ShareGPT: [{"from": "human", "value": ..}, ..], with an optional `system`
    prompt-completion   `prompt` and `completion` or `response`: texts, or lists of
                        messages; only the completion is trained on
    instruction-output  Alpaca: `instruction`, optional `input`, and `output` or `response`
    text                one text, all of it trained on
    token-ids           `input_ids`, tokens that another program made, with the loss by `labels` or
                        a mask (see `token_ids`)

A text column given by name takes precedence over all of them. Conversations may have a `system`
text and `tools` (a list, or its JSON), and any record a `weight` (a positive number). `history` is
a list of questions and answers before an instruction or prompt, which may be called `query`. A
message, or a part of its text, whose `weight`, `train`, `training` or `loss` is 0 or false has no
loss; any other `weight` multiplies it. Keys with a known meaning are obeyed or refused;
`Document.unused` names the others, except those of messages, which a template may print (see
`longctx.data.records.left_out`).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from longctx.data.records.chat import ChatError, Message
from longctx.data.records.loss_flags import EXPLICIT, message_weights
from longctx.data.records.media import mark_beside
from longctx.data.records.messages import (
    BY_ONE_CALL,
    WITH_IMAGES,
    FormatError,
    json_in,
    leaves,
    listed,
    parse_messages,
)
from longctx.data.records.nulls import without_impossible
from longctx.data.records.token_ids import IDS_KEYS, Ids, token_ids
from longctx.data.records.tokenizer import TokenWeights, is_weight
from longctx.errors import shortened

TOKEN_IDS = "token-ids"
WITHOUT_TEMPLATE = {"text", TOKEN_IDS}
"""Formats that no chat template prints; the others are conversations."""
CONVERSATION_FORMATS = {
    "messages": (("messages",),),
    "conversations": (("conversations",),),
    "prompt-completion": (("prompt", "completion"), ("prompt", "response")),
    "instruction-output": (("instruction", "output"), ("instruction", "response")),
}
"""Required keys of each conversation format."""
PAIRS = ("prompt-completion", "instruction-output")
"""Formats of a prompt and an answer."""
_REQUIRED = {key for groups in CONVERSATION_FORMATS.values() for group in groups for key in group}
BESIDE = ("system", "tools", "functions", "weight")
"""Optional keys of every conversation."""
PREFERENCE = f"makes a preference pair: train it inside TRL's DPOTrainer, {BY_ONE_CALL}"
REJECTED = ("rejected", "rejected_response", "rejected_messages")
"""Keys of a rejected answer beside a conversation."""
UNSUPPORTED = {
    **dict.fromkeys(("audio", "audios"), "only text is: remove the record"),
    **dict.fromkeys(("image", "images", "video", "videos"), WITH_IMAGES),
    **dict.fromkeys(("mask", "loss_mask"), EXPLICIT),
    "documents": "write the documents into a message",
    "chat_template_kwargs": "use --template-set, which applies to all conversations",
}
"""Keys of conversations that are refused if they have a value, and the way out."""
MARKS = ("label", "kto_tag")
"""Keys that mark an answer as good or bad."""
RATINGS = ("rating", "feedback")
"""Keys that mark an answer as bad by a word, false or -1; their numbers are of unknown scales."""
BAD = (
    "false",
    "-1",
    "no",
    "bad",
    "negative",
    "rejected",
    "undesirable",
    "dislike",
    "thumbs_down",
    "👎",
)


@dataclass(frozen=True, slots=True)
class Document:
    """One document: a `text`, the `messages` of a conversation, or the token `ids` of another
    program.

    Attributes:
        tools: tool descriptions for the chat template; None if the record has none.
        first_trained: index of the first message that may be trained on.
        weight: weight of each of its tokens in the loss.
        message_weights: weights of messages, by index; 0: it must not be trained on. All others
            have 1.
        unused: keys of the record that are not used.
        nulls: what is left out, and what stays, of null members, with counts.
        ids: token ids `[tokens]`, and `learned`: their weights as targets; None: all 1.
    """

    name: str
    source_bytes: float
    text: str | None
    messages: tuple[Message, ...] = ()
    tools: list[Any] | None = None
    first_trained: int = 0
    weight: float = 1.0
    format: str = "text"
    message_weights: Mapping[int, float] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    nulls: Mapping[str, int] = field(default_factory=dict)
    ids: Ids | None = None
    learned: TokenWeights | None = None

    @property
    def size(self) -> int:
        """Number of characters, or of token ids."""
        if self.ids is None:
            return sum(map(len, self.texts))
        return len(self.ids)

    @property
    def bytes(self) -> int:
        """Bytes of the texts in UTF-8, or of the token ids, 4 each."""
        if self.ids is None:
            return sum(len(text.encode()) for text in self.texts)
        return 4 * len(self.ids)

    @property
    def is_empty(self) -> bool:
        return not self.messages and not self.size

    @property
    def texts(self) -> list[str]:
        """The text, or the content of every message; nothing of token ids."""
        if self.text is None:
            return [message.get("content", "") for message in self.messages]
        return [self.text]

    @property
    def has_loss(self) -> bool:
        """Whether an assistant's message may be trained on, or there is none; of token ids, whether
        one may be a target."""
        if self.learned is not None:
            return bool(self.learned[1:].any())
        turns = {
            place for place, message in enumerate(self.messages) if message["role"] == "assistant"
        }
        return not turns or any(
            turn >= self.first_trained and self.message_weights.get(turn, 1) for turn in turns
        )


def columns_of(names: Collection[str], text_column: str | None) -> list[str]:
    """Returns the columns of a table to read. Raises FormatError if they contain no document."""
    usual = [*names] if text_column in names else [_usual(name, names) for name in names]
    if _detect(usual, usual, text_column) == TOKEN_IDS:
        return [name for name in names if name in (*IDS_KEYS, "weight")]
    if text_column in names:
        return [name for name in names if name in (text_column, "weight")]
    known = {
        "text",
        "input",
        "history",
        *_REQUIRED,
        *BESIDE,
        *REJECTED,
        *UNSUPPORTED,
        *MARKS,
        *RATINGS,
    }
    return [name for name in names if _usual(name, names) in known]


def _usual(key: str, keys: Collection[str]) -> str:
    """Returns `prompt` for the `query` of a response, as ms-swift calls it, and any other key as it
    is."""
    if key == "query" and "response" in keys and not {"prompt", "instruction"} & set(keys):
        return "prompt"
    return key


def parse_record(
    record: dict[str, Any], name: str, source_bytes: float, text_column: str | None
) -> Document:
    """Returns the document of a record; `text_column` is the key of the text, if given.

    Raises FormatError or ChatError naming the key and the rule.
    """
    if text_column not in record:
        record = {_usual(key, record): value for key, value in record.items()}
    present = [key for key, value in record.items() if value is not None and value is not ...]
    kind = _detect(present, record, text_column)
    document = Document(name, source_bytes, None, weight=_weight(record.get("weight")), format=kind)
    used = {"weight"}
    if kind == "text":
        column = text_column or "text"
        document = replace(document, text=_as_text(column, record.get(column)))
        used = {*used, column}
    elif kind == TOKEN_IDS:
        ids, learned, keys = token_ids(record)
        document = replace(document, ids=ids, learned=learned)
        used = {*used, *keys}
    else:
        document, used = _conversation(record, document)
    if text_column not in record:
        _refuse_media(record, document)
    unused = tuple(
        key for key, value in record.items() if key not in used and value not in (None, "", [], {})
    )
    for part in leaves([document.text, document.messages, document.tools]):
        try:
            part.encode("utf-8")
        except UnicodeEncodeError as error:
            raise FormatError(
                f"unpaired surrogate \\u{ord(part[error.start]):x}: this is not valid text"
            ) from error
    return replace(document, unused=unused)


def _refuse_media(record: Mapping[str, Any], document: Document) -> None:
    """Raises FormatError for the mark of an image or another file in a text, beside a key for such
    files."""
    found = mark_beside(record, document.texts)
    if found is not None:
        mark, key = found
        if document.format == "text":
            way_out = "name the text column (--text-column text)"
        else:
            way_out = f"remove `{key}`"
        raise FormatError(
            f"a text has the mark {mark!r}, and the record the key `{key}`, but no file is read, "
            f"so that the mark would be learnt as a text: {WITH_IMAGES}, or remove the record; if "
            f"the mark is a text, {way_out}"
        )


def _refuse_marks(record: Mapping[str, Any]) -> None:
    """Raises FormatError for a rejected answer beside a conversation, and for marks of bad
    answers."""
    for key in filter(record.get, REJECTED):
        raise FormatError(f"`{key}` {PREFERENCE}")
    for key in (*MARKS, *RATINGS):
        mark = str(record.get(key)).lower().removesuffix(".0")
        if mark in BAD or (key in MARKS and mark in ("0", "1")):
            raise FormatError(
                f"`{key}` is {record[key]!r}, which may mark a bad answer: remove the record or "
                f"the key, or train with it inside TRL's KTOTrainer, {BY_ONE_CALL}"
            )


def _conversation(record: dict[str, Any], document: Document) -> tuple[Document, set[str]]:
    """Returns the document with the conversation of a record, and the keys used."""
    for key, way_out in UNSUPPORTED.items():
        if record.get(key):
            raise FormatError(f"`{key}` is not supported: {way_out}")
    _refuse_marks(record)
    messages, first, used = _turns(record, document.format)
    if record.get("history") and "history" not in used:
        raise FormatError(
            "`history` is only read before an instruction or a prompt that is a text: write it "
            "into the messages"
        )
    tools = _tools(record, "tools") or _tools(record, "functions")
    if text := _text(record, "system"):
        system = {"role": "system", "content": text}
        if messages[0]["role"] != "system":
            messages = [system, *messages]
            first = first and first + 1
        elif messages[0].get("content") != system["content"]:
            raise FormatError(
                "`system` differs from the system message at the start: remove one of the two"
            )
    messages, weights = message_weights(messages, first)
    messages, tools, nulls = without_impossible(messages, tools)
    document = replace(
        document,
        messages=tuple(messages),
        tools=tools,
        first_trained=first,
        message_weights=weights,
    )
    document = replace(document, nulls=+nulls)
    return document, {
        *used,
        *BESIDE,
        *(key for key in MARKS if str(record.get(key)).lower() == "true"),
    }


def _detect(present: Collection[str], names: Collection[str], text_column: str | None) -> str:
    alone = (text_column or "text",)
    if text_column in present:
        return "text"
    if text_column not in names:
        if {"chosen", "rejected"} <= set(present):
            raise FormatError(f"`rejected` beside `chosen` {PREFERENCE}")
        for kind, groups in {
            **CONVERSATION_FORMATS,
            "text": (alone,),
            TOKEN_IDS: (("input_ids",),),
        }.items():
            if any(set(group) <= set(present) for group in groups):
                return kind
    if any(
        set(group) <= set(names)
        for group in (alone, *chain(*CONVERSATION_FORMATS.values()), ("input_ids",))
    ):
        return "text"  # of a record that has null there: it is empty
    raise FormatError(
        f"has neither {text_column or 'text'!r} nor messages, conversations, prompt and "
        f"completion, instruction and output, or input_ids, only {', '.join(names) or 'nothing'}: "
        "name the text column with --text-column, or rename the keys of a conversation"
    )


def _turns(record: dict[str, Any], kind: str) -> tuple[list[Message], int, set[str]]:
    """Returns the messages, the index of the first one that may be trained on, and the keys
    used."""
    if kind in ("messages", "conversations"):
        return parse_messages(record[kind], kind), 0, {kind}
    answer = next(key for _, key in CONVERSATION_FORMATS[kind] if record.get(key) is not None)
    if kind == "instruction-output":
        answered = {"role": "assistant", "content": _text(record, answer)}
        asked = "\n\n".join(filter(None, (_text(record, "instruction"), _text(record, "input"))))
        used = {"instruction", "input", "history", answer}
        return [*_history(record), {"role": "user", "content": asked}, answered], 0, used
    record = {**record, **{key: listed(f"`{key}`", record[key]) for key in ("prompt", answer)}}
    if isinstance(record["prompt"], str) and isinstance(record[answer], str):
        prompt = [*_history(record), {"role": "user", "content": record["prompt"]}]
        used = {"prompt", "history", answer}
        return (
            [*prompt, {"role": "assistant", "content": record[answer]}],
            len(prompt) if len(prompt) > 1 else 0,
            used,
        )
    prompt = _messages(record, "prompt", "user")
    completion = _messages(record, answer, "assistant")
    return [*prompt, *completion], len(prompt), {"prompt", answer}


def _history(record: dict[str, Any]) -> list[Message]:
    history = _listing(record, "history")
    if not isinstance(history, list) or not all(
        isinstance(turn, list) and [type(text) for text in turn] == [str, str] for turn in history
    ):
        raise FormatError(
            "`history` must be a list of questions and answers, each [question, answer]"
        )
    return [
        {"role": role, "content": text}
        for turn in history
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]


def _messages(record: dict[str, Any], key: str, role: str) -> list[Message]:
    """Returns a list of messages; a text becomes one message with this role."""
    value = record[key]
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return parse_messages([value] if isinstance(value, dict) else value, key)


def _tools(record: dict[str, Any], key: str) -> list[Any] | None:
    """Returns the descriptions of tools; OpenAI's older `functions` lack the outer object."""
    value = _listing(record, key)
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ChatError(f"`{key}` must be a list of objects, one per tool, or its JSON")
    if value and key == "tools" and record.get("functions"):
        raise ChatError("the record has both `tools` and `functions`: remove one of the two")
    functions = [
        tool if key == "tools" or "function" in tool else {"type": "function", "function": tool}
        for tool in value
    ]
    return functions or None


def _listing(record: dict[str, Any], key: str) -> Any:
    """Returns a value of a record, or what its JSON says; an empty list if there is none."""
    value = record.get(key)
    value = None if value == "" else json_in(f"`{key}`", value)
    if value in (None, {}):
        return []
    return value


def _weight(value: Any) -> float:
    if value is None:
        return 1.0
    if isinstance(value, bool) or not is_weight(value) or not value:
        raise FormatError(
            f"`weight` is {value!r}: it must be a positive number; remove documents that should "
            "not count"
        )
    return float(value)


def _text(record: dict[str, Any], key: str) -> str:
    return _as_text(key, listed(f"`{key}`", record.get(key)))


def _as_text(key: str, value: Any) -> str:
    """Returns a text of a record; an empty one if it is null."""
    if not isinstance(value, str | None):
        raise FormatError(
            f"{key!r} is {shortened(repr(value), 80)}: it must be text; messages go into `messages`"
        )
    return value or ""

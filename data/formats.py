"""Formats: parses one record of JSONL, Parquet or a dataset into a text or conversations.

A record has the first of these formats that its keys allow (keys whose value is null are ignored):

    chosen-rejected     a preference pair, `chosen` and `rejected`: completions (texts or messages) of a `prompt` (text or
                        messages), or whole conversations whose common first messages are the prompt; only the completions
                        are trained on
    messages            [{"role": .., "content": .., "tool_calls": ..}, ..]
    conversations       ShareGPT: [{"from": "human", "value": ..}, ..], with an optional `system`
    prompt-completion   `prompt` and `completion` or `response`: texts, or lists of messages; only the completion is trained on;
                        or else `source` and `target`, or `document` and `summary`
    instruction-output  `instruction`, optional `input`, and `output` or `response`
    text                one text, all of it trained on
    token-ids           `input_ids`, tokens that another program made, with the loss by `labels` or a mask (see `token_ids`)

A text column given by name takes precedence over all of them. Conversations may have a `system` text and `tools` (a list, or
its JSON), and any record a `weight` (a positive number). `history` is a list of questions and answers before an instruction or
prompt, which may be called `query`. A rejected answer beside a conversation makes a preference pair, whose chosen answer is
the last message; `rejected_messages` are a whole conversation. Conversations may have images (see `image_sources`). A message
whose `weight`, `train`, `training` or `loss` is 0 or false has no loss; any other `weight` multiplies it. Keys with a known
meaning are obeyed or refused; `Document.unused` names the others, except those of messages, which a template may print (see
`longctx.data.left_out`).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from longctx.data.chat import ChatError, Message
from longctx.data.image_sources import MEDIA_KEYS, frames_of, place_images
from longctx.data.messages import FormatError, json_in, leaves, parse_messages, sharegpt
from longctx.data.token_ids import IDS_KEYS, Ids, token_ids
from longctx.data.weights import TokenWeights, is_weight

PAIRS = "chosen-rejected"
"""Format of preference pairs: a record yields two documents, one after the other."""
TOKEN_IDS = "token-ids"
WITHOUT_TEMPLATE = {"text", TOKEN_IDS}
"""Formats that no chat template prints; the others are conversations."""
SIDES = ("chosen", "rejected")
FORMATS = {
    PAIRS: (SIDES,),
    "messages": (("messages",),),
    "conversations": (("conversations",),),
    "prompt-completion": (("prompt", "completion"), ("prompt", "response")),
    "instruction-output": (("instruction", "output"), ("instruction", "response")),
}
"""Required keys of each conversation format."""
OTHER_NAMES = (("source", "target"), ("document", "summary"))
"""Names of a prompt and its completion in data for encoder-decoders."""
_REQUIRED = {key for groups in FORMATS.values() for group in groups for key in group}
BESIDE = ("system", "tools", "functions", "weight")
"""Optional keys of every conversation."""
REJECTED = ("rejected", "rejected_response", "rejected_messages")
"""Keys of a rejected answer beside a conversation; the last one is a whole conversation."""
_EXPLICIT = "tools differ in what it means: write `train: true` or `train: false` into each message instead"
UNSUPPORTED = {
    **dict.fromkeys(("audio", "audios"), "only text, images and videos are supported: remove the record"),
    **dict.fromkeys(("mask", "loss_mask"), _EXPLICIT),
    "documents": "write the documents into a message",
    "chat_template_kwargs": "use --template-set, which applies to all conversations",
}
"""Keys of conversations that are refused if they have a value, and the way out."""
KTO = ("label", "kto_tag")
"""Keys that mark an answer as good or bad."""
RATINGS = ("rating", "feedback")
"""Keys that mark an answer as bad by a word, false or -1; their numbers are of unknown scales."""
BAD = ("false", "-1", "no", "bad", "negative", "rejected", "undesirable", "dislike", "thumbs_down", "👎")
BAD_ANSWERS = ("error", "drop", "train")
"""What may happen to an answer that its record marks as bad."""
LOSS_KEYS = ("weight", "train", "training", "loss")
"""Keys of a message that say whether it has a loss."""
UNCLEAR_LOSS_KEYS = ("mask", "masked", "loss_mask", "loss_scale", "loss_weight", "train_detail", "training_detail")


@dataclass(frozen=True, slots=True)
class Document:
    """One document: a `text`, the `messages` of a conversation, or the token `ids` of another program.

    Attributes:
        name: place in the source.
        source_bytes: its share of the source's bytes.
        format: format of its record.
        tools: tool descriptions for the chat template; None if the record has none.
        first_trained: index of the first message that may be trained on.
        weight: weight of each of its tokens in the loss.
        message_weights: weights of messages, by index; 0: it must not be trained on. All others have 1.
        unused: keys of the record that are not used.
        is_bad: whether its record marks it as a bad answer.
        ids: token ids `[tokens]`, and `learned`: their weights as targets; None: all 1.
        images: images and videos of a conversation, in whose messages `IMAGE` or `VIDEO` stands for each; see `image_sources`.
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
    is_bad: bool = False
    ids: Ids | None = None
    learned: TokenWeights | None = None
    images: tuple[Any, ...] = ()

    @property
    def size(self) -> int:
        """Number of characters and bytes of images, or of token ids."""
        images = sum(len(image) if isinstance(image, bytes) else image.stat().st_size for image in frames_of(self.images))
        return sum(map(len, self.texts)) + images if self.ids is None else len(self.ids)

    @property
    def bytes(self) -> int:
        """Bytes of the texts in UTF-8, or of the token ids, 4 each."""
        return sum(len(text.encode()) for text in self.texts) if self.ids is None else 4 * len(self.ids)

    @property
    def is_empty(self) -> bool:
        return not self.messages and not self.size

    @property
    def texts(self) -> list[str]:
        """The text, or the content of every message; nothing of token ids."""
        return [message.get("content", "") for message in self.messages] if self.text is None else [self.text]

    @property
    def has_loss(self) -> bool:
        """Whether an assistant's message may be trained on, or there is none; of token ids, whether one may be a target."""
        if self.learned is not None:
            return bool(self.learned[1:].any())
        turns = {place for place, message in enumerate(self.messages) if message["role"] == "assistant"}
        return not turns or any(turn >= self.first_trained and self.message_weights.get(turn, 1) for turn in turns)


def columns_of(names: Collection[str], text_column: str | None) -> list[str]:
    """Returns the columns of a table to read. Raises FormatError if they contain no document."""
    usual = [*names] if text_column in names else [_usual(name, names) for name in names]
    if _detect(usual, usual, text_column) == TOKEN_IDS:
        return [name for name in names if name in (*IDS_KEYS, "weight")]
    if text_column in names:
        return [name for name in names if name in (text_column, "weight")]
    known = {"text", "input", "history", *_REQUIRED, *BESIDE, *REJECTED, *UNSUPPORTED, *KTO, *RATINGS, *MEDIA_KEYS}
    return [name for name in names if _usual(name, names) in known]


def _usual(key: str, keys: Collection[str]) -> str:
    """Returns `prompt` for the `query` of a response, as ms-swift calls it, and any other key as it is.

    Without keys of another format, `source` and `target`, or `document` and `summary`, are a prompt and its completion.
    """
    for pair in OTHER_NAMES:
        if key in pair and set(pair) <= set(keys) and not set(keys) & {"text", "input_ids", *_REQUIRED}:
            return ("prompt", "completion")[pair.index(key)]
    return "prompt" if key == "query" and "response" in keys and not {"prompt", "instruction"} & set(keys) else key


def parse_record(
    record: dict[str, Any], name: str, source_bytes: float, text_column: str | None, bad_answers: str = "error"
) -> list[Document]:
    """Returns the documents of a record; `text_column` is the key of the text, if given. `bad_answers`: see `BAD_ANSWERS`.

    That is one document, except for a preference pair: two, NAME#chosen and NAME#rejected, or none if the completions are
    equal or one is empty. Raises FormatError or ChatError naming the key and the rule.
    """
    if text_column not in record:
        record = {_usual(key, record): value for key, value in record.items()}
    present = [key for key, value in record.items() if value is not None and value is not ...]
    kind = _detect(present, record, text_column)
    weight = _weight(record.get("weight"))
    if kind == "text":
        column = text_column or "text"
        text = record[column]
        if not isinstance(text, str):
            raise FormatError(f"{column!r} is of type {type(text).__name__}: it must be text")
        documents, used = [Document(name, source_bytes, text, weight=weight)], {column, "weight"}
    elif kind == TOKEN_IDS:
        ids, learned, used = token_ids(record)
        used |= {"weight"}
        documents = [Document(name, source_bytes, None, weight=weight, format=kind, ids=ids, learned=learned)]
    else:
        documents, used = _conversations(record, kind, name, source_bytes, weight, bad_answers)
    if unused := tuple(key for key, value in record.items() if key not in used and value not in (None, "", [], {})):
        documents[:1] = [replace(document, unused=unused) for document in documents[:1]]
    for part in leaves([[document.text, document.messages, document.tools] for document in documents]):
        try:
            part.encode("utf-8")
        except UnicodeEncodeError as error:
            raise FormatError(f"unpaired surrogate \\u{ord(part[error.start]):x}: this is not valid text") from error
    return documents


def _conversations(
    record: dict[str, Any], kind: str, name: str, source_bytes: float, weight: float, bad_answers: str
) -> tuple[list[Document], set[str]]:
    """Returns the conversation, or two of a preference pair, and the keys used."""
    for key, way_out in UNSUPPORTED.items():
        if record.get(key):
            raise FormatError(f"`{key}` is not supported: {way_out}")
    is_bad = False
    if kind == PAIRS:
        asked = next((key for key in ("prompt", "messages", "conversations", "instruction") if record.get(key)), "prompt")
        prompt = _instruction(record) if asked == "instruction" else record.get(asked)
        used, sides = {*SIDES, asked, *["input"] * (asked == "instruction")}, _pair({**record, "prompt": prompt})
    else:
        messages, first, used = _conversation(record, kind)
        sides = [(messages, first)]
        marks = {key: good for key in (*KTO, *RATINGS) if (good := _is_good(record, key, bad_answers)) is not None}
        is_bad, used = not all(marks.values()), used | marks.keys()
        for key in filter(record.get, REJECTED):
            whole = {"chosen": messages, "rejected": record[key]}
            answer = {"prompt": messages[:-1], "chosen": messages[-1:], "rejected": record[key]}
            sides = _pair(whole if key == "rejected_messages" else answer)
            kind, used = PAIRS, used | {key}
            break
    if record.get("history") and "history" not in used:
        raise FormatError("`history` is only read before an instruction or a prompt that is a text: write it into the messages")
    tools = _tools(record, "tools") or _tools(record, "functions")
    documents: list[Document] = []
    for side, (messages, first) in zip(SIDES, sides, strict=False):
        messages, images = place_images(record, messages)
        if images and kind == PAIRS:
            raise FormatError("preference pairs with images are not supported: remove the record")
        if record.get("system"):
            system = {"role": "system", "content": _text(record, "system")}
            if messages[0]["role"] != "system":
                messages, first = [system, *messages], first and first + 1
            elif messages[0].get("content") != system["content"]:
                raise FormatError("`system` differs from the system message at the start: remove one of the two")
        messages, weights = _loss(messages)
        document_name, share = (f"{name}#{side}", source_bytes / 2) if kind == PAIRS else (name, source_bytes)
        rest = first, weight, kind, weights, (), is_bad
        documents.append(Document(document_name, share, None, tuple(messages), tools, *rest, images=tuple(images)))
        if kind == PAIRS and not documents[-1].has_loss:
            raise FormatError(f"the {side} answer has no loss, which its messages switch off: remove the record")
        if kind == PAIRS and (weighted := [each for each in weights.items() if each[1]]):
            index, own = weighted[0]
            raise FormatError(
                f"message {index} of the {side} answer has `weight` {own}: the probabilities of whole answers are compared, so "
                "messages of pairs weigh 0 or 1; give the record a `weight` instead"
            )
    return documents, {*used, *BESIDE, *MEDIA_KEYS}


def _is_good(record: dict[str, Any], key: str, bad_answers: str) -> bool | None:
    """Returns whether a key marks the answer as good; None if it says nothing. Under `error`, raises FormatError if not."""
    mark = str(record.get(key)).lower().removesuffix(".0")
    if mark not in BAD and (key not in KTO or mark not in ("true", "0", "1")):
        return None
    if bad_answers == "error" and mark != "true":
        raise FormatError(
            f"`{key}` is {record[key]!r}, which may mark a bad answer: remove the record, or give --bad-answers drop to leave "
            f"out bad ones, or train to learn them like good ones{' (0 is bad then, and 1 good)' * (mark in '01')}"
        )
    return mark in ("true", "1")


def _loss(messages: list[Message]) -> tuple[list[Message], dict[int, float]]:
    """Returns the messages without the keys on loss, and the weights of those that have another one than 1."""
    weights: dict[int, float] = {}
    for index, message in enumerate(messages):
        for key in message.keys() & {*LOSS_KEYS, *UNCLEAR_LOSS_KEYS}:
            value = message[key]
            where = f"message {index}, of role {message['role']}, has `{key}` {value!r}"
            if key in UNCLEAR_LOSS_KEYS:
                raise ChatError(f"{where}: {_EXPLICIT}")
            if value not in (0, 1) and not (key == "weight" and is_weight(value)):
                rule = "; only a `weight` may be any number from 0 that float32 holds"
                raise ChatError(f"{where}: it must be 0 or false for no loss, or 1 or true{rule}")
            if value and message["role"] != "assistant":
                raise ChatError(f"{where}, but only the assistant's messages have a loss: remove the key")
            if value != 1:
                weights[index] = weights.get(index, 1) * value
    return [{key: value for key, value in m.items() if key not in LOSS_KEYS} for m in messages], weights


def _detect(present: Collection[str], names: Collection[str], text_column: str | None) -> str:
    if text_column in names:
        return "text"
    for kind, groups in FORMATS.items():
        if any(set(group) <= set(present) for group in groups):
            return kind
    if "input_ids" in present and not (text_column is None and "text" in present):
        return TOKEN_IDS
    for kind in ("text", *FORMATS) if text_column is None else FORMATS:  # so that a null value is reported as such
        if kind in names:
            return kind
    raise FormatError(
        f"has neither {text_column or 'text'!r} nor messages, conversations, prompt and completion, instruction and output, "
        "chosen and rejected, source and target, or input_ids, "
        f"only {', '.join(names) or 'nothing'}: name the text column with --text-column, or rename the keys of a conversation"
    )


def _conversation(record: dict[str, Any], kind: str) -> tuple[list[Message], int, set[str]]:
    """Returns the messages, the index of the first one that may be trained on, and the keys used."""
    if kind == "messages":
        return parse_messages(record["messages"]), 0, {"messages"}
    if kind == "conversations":
        return sharegpt(record["conversations"]), 0, {"conversations"}
    answer = next(key for _, key in FORMATS[kind] if record.get(key) is not None)
    if kind == "instruction-output":
        answered = {"role": "assistant", "content": _text(record, answer)}
        used = {"instruction", "input", "history", answer}
        return [*_history(record), {"role": "user", "content": _instruction(record)}, answered], 0, used
    if isinstance(record["prompt"], str) and isinstance(record[answer], str):
        prompt, used = [*_history(record), {"role": "user", "content": record["prompt"]}], {"prompt", "history", answer}
        return [*prompt, {"role": "assistant", "content": record[answer]}], len(prompt) if len(prompt) > 1 else 0, used
    prompt, completion = _messages(record, "prompt", "user"), _messages(record, answer, "assistant")
    return [*prompt, *completion], len(prompt), {"prompt", answer}


def _instruction(record: dict[str, Any]) -> str:
    asked = _text(record, "instruction")
    return f"{asked}\n\n{_text(record, 'input')}" if record.get("input") else asked


def _history(record: dict[str, Any]) -> list[Message]:
    """Returns the questions and answers before the last question."""
    history = record.get("history") or []
    if not isinstance(history, list) or not all(
        isinstance(turn, list) and [type(text) for text in turn] == [str, str] for turn in history
    ):
        raise FormatError("`history` must be a list of questions and answers, each [question, answer]")
    return [{"role": role, "content": text} for turn in history for role, text in zip(("user", "assistant"), turn, strict=True)]


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
    """Returns a list of messages, of ShareGPT too; a text becomes one message with this role."""
    value = [record[key]] if isinstance(record[key], dict) else record[key]
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    shares = isinstance(value, list) and value and isinstance(value[0], dict) and "from" in value[0]
    return sharegpt(value) if shares else parse_messages(value, key)


def _tools(record: dict[str, Any], key: str) -> list[Any] | None:
    """Returns the descriptions of tools; OpenAI's older `functions` lack the outer object."""
    value = record.get(key)
    if isinstance(value, str):
        value = json_in(f"`{key}`", value) if value.strip() else None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ChatError(f"`{key}` must be a list of objects, one per tool, or its JSON")
    if key == "tools" and record.get("functions"):
        raise ChatError("the record has both `tools` and `functions`: remove one of the two")
    return [tool if key == "tools" or "function" in tool else {"type": "function", "function": tool} for tool in value]


def _weight(value: Any) -> float:
    if value is None:
        return 1.0
    if isinstance(value, bool) or not is_weight(value) or not value:
        raise FormatError(f"`weight` is {value!r}: it must be a positive number; remove documents that should not count")
    return float(value)


def _text(record: dict[str, Any], key: str) -> str:
    if not isinstance(record[key], str):
        raise FormatError(f"{key!r} is of type {type(record[key]).__name__}: it must be text")
    return str(record[key])

"""Records that cannot be read or trained as they say: each is refused in words that name what is
wrong, and the way out."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from longctx.data.records.corpus import CorpusError
from longctx.data.records.formats import columns_of, parse_record
from longctx.data.records.sources import open_corpus
from longctx.errors import UserError
from tests.data_cases import written
from tests.template_cases import TOOLS, call, chat

Q, GOOD = chat("Q", "good")
BAD = {**GOOD, "content": "bad"}
SHARED = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "good"}]
PAIR, CHAT = {"prompt": "Q", "completion": "good"}, {"messages": [Q, GOOD]}
IDS, MASK, LABELS = [72, 105, 33, 10, 256], [0, 0, 1, 1, 1], [-100, -100, 33, 10, 256]
AS_PYTHON = "is not JSON: .*, not as Python or numpy prints it"
LIST_OF_IDS = "`input_ids` must be a list of whole numbers, one for each token of one document"


def asked(**turn: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", **turn}]}


def calling(**call: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "tool_calls": [call]}]}


PREFERENCES: list[dict[str, Any]] = [
    {"messages": [Q], "chosen": [GOOD], "rejected": [BAD]},
    {"prompt": "Q", "chosen": [Q, GOOD], "rejected": [Q, BAD], "score_chosen": 8.5},
    {"conversations": SHARED[:1], "chosen": SHARED[1], "rejected": {"from": "gpt", "value": "bad"}},
    {"chosen": "Human: Q Assistant: good", "rejected": "Human: Q Assistant: bad", "text": "Q"},
    {**CHAT, "rejected_response": "bad"},
    {"conversations": SHARED, "rejected_messages": [Q, BAD]},
    {"query": "Q", "response": "good", "rejected": "bad"},
]
MARKED: list[dict[str, Any]] = [
    *({**PAIR, "label": mark} for mark in (False, "bad", "Undesirable", "No", -1)),
    {"instruction": "Q", "output": "bad", "kto_tag": 0},
    {"messages": [Q, BAD], "label": "False"},
    {"conversations": SHARED, "label": 1.0},
    {"messages": [Q, BAD], "rating": -1},
    {"messages": [Q, BAD], "feedback": "thumbs_down"},
]
LOOKING: list[dict[str, Any]] = [
    {"messages": [{**Q, "content": "<image>What?"}, GOOD]},
    {
        "messages": [
            {
                **Q,
                "content": [{"type": "text", "text": "<image>"}, {"type": "text", "text": "What?"}],
            },
            GOOD,
        ]
    },
    {"conversations": [{"from": "human", "value": "<image>\nWhat?"}, SHARED[1]]},
    {"prompt": "<image>What?", "completion": "good"},
    {"query": "<image>What?", "response": "good"},
    {"instruction": "<image>What?", "output": "good"},
    {"messages": [Q, {**GOOD, "content": "See <image>"}]},
]
EMPTY_MEDIA: list[tuple[dict[str, Any], str]] = [
    (
        {key: value},
        rf"a text has the mark '<image>', and the record the key `{key}`, but no file is read.* "
        r"inside TRL's SFTTrainer",
    )
    for key, value in (
        ("images", []),
        ("image", None),
        ("image", ""),
        ("videos", []),
        ("image_path", "a.png"),
        ("imageUrl", ...),
    )
]
MEDIA_MARKS = [
    *(
        "<image>",
        "<|image_pad|>",
        "<|vision_start|>",
        "<|image_1|>",
        "<image 1>",
        "<start_of_image>",
        "<image_soft_token>",
    ),
    *(
        "<fake_token_around_image>",
        "<IMG_CONTEXT>",
        "<ImageHere>",
        "[IMG]",
        "[IMG_BREAK]",
        "<video>",
        "<|AUDIO|>",
        "<|audio_bos|>",
    ),
]
PARTS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"train": "no"},
        {},
        "message 1, of role assistant, part 0 of its content, has `train` 'no': it must be 0 or "
        "false",
    ),
    ({"train": 0.5}, {}, "has `train` 0.5: it must be 0 or false"),
    ({"weight": -1}, {}, "has `weight` -1: it must be 0 or false"),
    ({"weight": math.nan}, {}, "has `weight` nan: it must be 0 or false"),
    ({"weight": 1e30}, {"weight": 1e30}, "weights whose product float32 does not hold"),
    (
        {"train": True},
        {"train": False},
        "part 0 of its content, has `train` True, but the message has no loss",
    ),
    ({"weight": 0.5}, {"weight": 0}, "has `weight` 0.5, but the message has no loss"),
    (
        {"train": True, "training": False},
        {},
        "has `train` True and `training` False, which say opposite things",
    ),
    *(
        ({key: 1}, {}, f"part 0 of its content, has `{key}` 1: tools differ")
        for key in ("mask", "loss_mask", "train_detail")
    ),
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(
        (record, "makes a preference pair: train it inside TRL's DPOTrainer, by longctx.trainers")
        for record in PREFERENCES
    ),
    *(
        (
            record,
            "may mark a bad answer: .* or train with it inside TRL's KTOTrainer, by "
            "longctx.trainers",
        )
        for record in MARKED
    ),
    (
        {"body": "x"},
        "has neither 'text' nor messages, conversations, prompt and completion, .* only body",
    ),
    ({"prompt": "x"}, "has neither 'text' nor messages, .* only prompt"),
    ({"conversation": SHARED}, "only conversation: name the text column"),
    # --- texts and weights
    ({"text": ["a", "b"]}, r"'text' is \['a', 'b'\]: it must be text"),
    ({"text": math.nan}, "'text' is nan: it must be text"),
    ({"query": "Q", "completion": "A"}, "and output, or input_ids, only query, completion"),
    ({"text": "\ud800"}, "surrogate"),
    *(
        ({"text": "x", "weight": weight}, f"`weight` is {weight!r}: it must be a pos")
        for weight in (-1, 0, math.nan, "2", True)
    ),
    ({"text": "x", "weight": math.inf}, "`weight` is inf"),
    # --- messages
    ({"messages": []}, "at least one message"),
    ({"messages": "[{"}, "`messages` is not JSON"),
    ({"messages": str([Q, GOOD])}, f"`messages` {AS_PYTHON}"),
    (
        {"messages": {"role": ["user"], "content": ["x"]}},
        "`messages` is {'role': .*: it must be a list with",
    ),
    ({"messages": [{"role": 3, "content": "x"}]}, "message 0 has role 3"),
    (asked(), "message 0 has the content None: it must be a text"),
    (asked(content=[{"type": "audio"}]), "message 0 has a part of type 'audio'"),
    (asked(content=[{"type": "image"}]), "inside TRL's SFTTrainer"),
    (asked(content=[{"type": "text", "text": ["x"]}]), "a part of type 'text' .* it must be {"),
    (asked(content="x", tool_calls=[{}]), "must be a list, in a message of the assistant"),
    (
        {"messages": [Q, {"role": "tool", "content": {"ok": 1}}]},
        "has the content {'ok': 1}: .* write an object as its JSON",
    ),
    ({"conversations": []}, "at least one message"),
    (
        {"conversations": [{"from": "bot", "value": "x"}]},
        "message 0 has role 'bot': it must be one of human, user, gpt",
    ),
    (
        {"conversations": [{"from": "human", "value": 3}]},
        "message 0 has the content 3: it must be a text",
    ),
    (
        {"conversations": [{"from": "function_call", "value": "add(2)"}]},
        "the tool call of message 0 is not JSON",
    ),
    *(
        (
            calling(**at_call, function={"name": "f", "arguments": {}, **at_function}),
            "tool call 0 says whether",
        )
        for at_call, at_function in (
            ({"train": False}, {}),
            ({"weight": 0}, {}),
            ({}, {"loss": 1}),
            ({"mask": 1}, {}),
        )
    ),
    (
        calling(name="f", arguments={"a": 1}, train=False),
        "tool call 0 says whether it has a loss: say it of the message",
    ),
    (calling(id=1), "message 0, tool call 0 must be an object such as"),
    (calling(name="f", arguments="x"), "tool call 0 is not JSON"),
    (calling(name="f", arguments=[1]), "arguments of type list"),
    (calling(function={"name": "f", "arguments": "null"}), "arguments of type NoneType"),
    (calling(**call("f", a="\ud800")), "surrogate"),
    # --- prompts and instructions
    ({"prompt": "x", "completion": 3}, "message 0 has role None|must be a list"),
    (
        {"prompt": "x", "completion": True},
        "`completion` is True: it must be a list with at least one message",
    ),
    ({"prompt": "Q", "completion": str([GOOD])}, f"`completion` {AS_PYTHON}"),
    ({"prompt": f"[{Q}\n {GOOD}]", "completion": "x"}, f"`prompt` {AS_PYTHON}"),
    ({"instruction": "x", "output": 3}, "'output' is 3: it must be text"),
    ({"instruction": "x", "input": 0, "output": "y"}, "'input' is 0: it must be text"),
    (
        {"instruction": json.dumps([Q]), "output": "x"},
        "'instruction' is .*: it must be text; messages go into `messages`",
    ),
    ({"instruction": "x", "output": str([GOOD])}, f"`output` {AS_PYTHON}"),
    ({**PAIR, "history": False}, "`history` must be a list of questions and answers"),
    (
        {"instruction": "Q", "output": "A", "history": [["Q"]]},
        "`history` must be a list of questions and answers",
    ),
    (
        {"instruction": "Q", "output": "A", "history": "Q"},
        "`history` is not JSON: Expecting value at column 1",
    ),
    ({**CHAT, "history": [["Q", "A"]]}, "`history` is only read before an instruction or a prompt"),
    # --- beside a conversation
    ({**CHAT, "system": False}, "'system' is False: it must be text"),
    (
        {"messages": chat("Q", "A", system="S"), "system": "T"},
        "`system` differs from the system message at the start",
    ),
    ({**CHAT, "tools": "{}x"}, "`tools` is not JSON"),
    ({**CHAT, "tools": str(TOOLS)}, f"`tools` {AS_PYTHON}"),
    *(({**CHAT, "tools": tools}, "`tools` must be a list of objects") for tools in (["add"], 0)),
    ({**CHAT, "functions": ["add"]}, "`functions` must be a list of objects"),
    (
        {**CHAT, "tools": TOOLS, "functions": [TOOLS[0]["function"]]},
        "has both `tools` and `functions`",
    ),
    (
        {**CHAT, "documents": [{"text": "D"}]},
        "`documents` is not supported: write the documents into a message",
    ),
    (
        {**CHAT, "images": ["cat.png"]},
        "`images` is not supported: train conversations with images .* TRL's SFTTrainer",
    ),
    ({**PAIR, "audio": "a.wav"}, "`audio` is not supported: only text is"),
    ({"conversations": SHARED, "video": "v.mp4"}, "inside TRL's SFTTrainer, by longctx.trainers"),
    ({**CHAT, "loss_mask": [0, 1]}, "`loss_mask` is not supported: tools differ in what it means"),
    ({"conversations": SHARED, "mask": "User"}, "`mask` is not supported: tools differ"),
    (
        {**CHAT, "chat_template_kwargs": {"x": 1}},
        "`chat_template_kwargs` is not supported: use --template-set",
    ),
    *(({**record, **beside}, says) for record in LOOKING for beside, says in EMPTY_MEDIA),
    (
        {"text": "<|image_pad|>", "image": None},
        r"a text has the mark '<\|image_pad\|>', .* \(--text-column text\)",
    ),
    *(
        (
            {"messages": [{**Q, "content": f"x {mark}\nWhat?"}, GOOD], "images": []},
            rf"a text has the mark '{re.escape(mark)}'",
        )
        for mark in MEDIA_MARKS
    ),
    # --- which messages have a loss
    *(
        (
            {"messages": [Q, {**GOOD, "weight": weight}]},
            rf"message 1, of role assistant, has `weight` {weight!r}: it must be 0 or",
        )
        for weight in (-0.5, math.nan, math.inf, 1e-50, "0.5", 10**400)
    ),
    (
        {"prompt": [Q], "completion": [{**GOOD, "weight": -1}]},
        "message 1, of role assistant, .*; only a `weight` may be any num",
    ),
    (
        {"conversations": [*SHARED[:1], {**SHARED[1], "weight": -1}]},
        "message 1, of role assistant, has `weight` -1",
    ),
    (
        {"messages": [Q, {**GOOD, "train": 0.5}]},
        "has `train` 0.5: it must be 0 or false for no loss, or 1 or true",
    ),
    ({"messages": [Q, {**GOOD, "train": "no"}]}, "has `train` 'no': it must be 0 or false"),
    (
        {"messages": [{**Q, "train": True}, GOOD]},
        "message 0, of role user, has `train` True, but only the assistant's",
    ),
    *(
        (
            {"messages": [Q, {**GOOD, key: 1}]},
            f"has `{key}` 1: tools differ in what it means: write `train: true` or",
        )
        for key in ("mask", "masked", "loss_mask", "loss_scale", "train_detail")
    ),
    *(
        (
            {
                "messages": [
                    Q,
                    {**GOOD, "content": [{"type": "text", "text": "x", **flag}], **message},
                ]
            },
            says,
        )
        for flag, message, says in PARTS
    ),
    (
        {"messages": [{**Q, "content": [{"type": "text", "text": "x", "train": True}]}, GOOD]},
        "message 0, of role user, part 0 of",
    ),
    (
        {"prompt": [Q, {**GOOD, "train": True}, Q], "completion": [GOOD]},
        "has `train` True, but only the completion has a loss",
    ),
    (
        {"prompt": [Q, {**GOOD, "weight": 0.5}, Q], "completion": [GOOD]},
        "`weight` 0.5, but only the completion has a loss",
    ),
    (
        {"messages": [Q, {**GOOD, "train": True, "loss": False}]},
        "has `train` True and `loss` False, which say opposite things",
    ),
    (
        {"messages": [Q, {**GOOD, "reasoning_content": {"a": 1}}]},
        "has the reasoning_content {'a': 1}: it must be a text",
    ),
    (
        {
            "conversations": [
                SHARED[0],
                {
                    "from": "function_call",
                    "value": [{"type": "text", "text": "{}", "train": False}],
                },
            ]
        },
        "message 1 is a tool call of which a part says whether it has a loss: say it of the "
        "message",
    ),
    # --- token ids
    *(
        ({"input_ids": ids}, LIST_OF_IDS)
        for ids in ([IDS, IDS], "72 105", [72, None], [True, False], [72.0, 105.0])
    ),
    (
        {"input_ids": [1, 1, 1, 1, 1], "labels": [True] * 5},
        "`labels` must be a list of whole numbers",
    ),
    (
        {"input_ids": IDS, "labels": [*IDS[1:], -100]},
        "`labels` has 105 at position 0, where `input_ids` has 72: labels must",
    ),
    (
        {"input_ids": IDS, "labels": LABELS, "loss_mask": MASK},
        "`labels` and `loss_mask` both say which tokens have a loss",
    ),
    (
        {"input_ids": IDS, "labels": LABELS, "weights": MASK},
        "`labels` and `weights` both say which tokens have a loss",
    ),
    ({"input_ids": IDS, "labels": LABELS[1:]}, "`labels` has 4 numbers, but `input_ids` has 5"),
    ({"input_ids": IDS, "labels": 1}, "`labels` must be a list of whole numbers"),
    (
        {"input_ids": IDS, "assistant_masks": [0, 0, 2, 1, 1]},
        "`assistant_masks` is 2 at position 2: it must be 1 for a loss",
    ),
    (
        {"input_ids": IDS, "completion_mask": [0, 0, 0.5, 1, 1]},
        "`completion_mask` must be a list of whole numbers",
    ),
    *(
        (
            {"input_ids": IDS, key: [0, 0, wrong, 1, 1]},
            f"`{key}` is {wrong} at position 2: it must be a weight of 0 or more",
        )
        for key, wrong in (
            ("loss_mask", -0.5),
            ("weights", 1e-50),
            ("weights", math.nan),
            ("weights", math.inf),
        )
    ),
    ({"input_ids": IDS, "weights": [0.5] * 4}, "`weights` has 4 numbers, but `input_ids` has 5"),
    ({"input_ids": IDS, "weights": ["a"] * 5}, "`weights` must be a list of numbers"),
    (
        {"input_ids": IDS, "attention_mask": [1, 1, 1, 1, 0]},
        "`attention_mask` is 0 at position 4: remove the padding",
    ),
    ({"input_ids": IDS, "attention_mask": [1, 1, 2, 2, 2]}, "give a record per document"),
    (
        {"input_ids": IDS, "position_ids": [0, 1, 0, 1, 2]},
        "`position_ids` shows that several documents are packed",
    ),
    (
        {"input_ids": IDS, "seq_lengths": [2, 3]},
        "`seq_lengths` shows that several documents are packed",
    ),
]


def as_row(record: dict[str, Any]) -> dict[str, Any]:
    """The record as a table gives it, of which only some columns are read."""
    return {
        name: record[name] if name in columns_of(list(record), None) else ... for name in record
    }


@pytest.mark.parametrize(
    ("record", "says"), REFUSED, ids=[str(number) for number in range(len(REFUSED))]
)
def test_a_record_is_refused(record: dict[str, Any], says: str) -> None:
    """Also if it is read from a table, of which only some columns are."""
    with pytest.raises(UserError, match=says):
        parse_record(record, "r", 1.0, None)
    with pytest.raises(UserError, match=says):
        parse_record(as_row(record), "r", 1.0, None)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_the_place_of_the_record_is_named(tmp_path: Path, suffix: str) -> None:
    source = written(tmp_path, [{**CHAT, "rating": None}, {**CHAT, "rating": "bad"}], suffix)
    place = rf"s\.{suffix}{':2' if suffix == 'jsonl' else ', row 1'}"
    with pytest.raises(
        CorpusError, match=rf"{place}: `rating` is 'bad', which may mark a bad answer"
    ):
        list(open_corpus(str(source)).documents())


@pytest.mark.parametrize("beside", [{}, {"id": "x"}, {"images": [], "text": "plain"}])
def test_a_text_on_marks_is_a_text(tmp_path: Path, beside: dict[str, Any]) -> None:
    """Without a key for files, or without a mark."""
    asked = (
        "What is <image> in HTML, and [IMG]?"
        if "images" not in beside
        else "5 < image > 3, images[0]"
    )
    (document,) = open_corpus(
        str(written(tmp_path, [{"messages": [{**Q, "content": asked}, GOOD], **beside}]))
    ).documents()
    assert document.messages[0]["content"] == asked
    source = written(tmp_path, [{"text": "<image> <video>", "images": ["a.png"]}])
    (document,) = open_corpus(str(source), text_column="text").documents()
    assert document.unused == ("images",)

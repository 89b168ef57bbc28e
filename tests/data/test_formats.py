"""Records of every format become the same conversations, and errors name what is malformed."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest

from longctx.cli import main
from longctx.data.records.formats import Document, columns_of
from longctx.data.records.readers import CorpusError
from longctx.data.records.sources import open_corpus
from longctx.data.store import index
from longctx.data.store.prepare import prepare
from longctx.data.store.store import Store
from tests.data_cases import documents, made, write_jsonl, written
from tests.template_cases import TOOLS, call

ASKED, ANSWERED = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}
RECORDS: dict[str, list[dict[str, Any]]] = {
    "messages": [
        {"messages": [ASKED, ANSWERED]},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}],
                },
                {"role": "assistant", "content": [{"type": "text", "text": "Hi."}]},
            ]
        },
        {"messages": json.dumps([ASKED, ANSWERED]), "text": "of both, the conversation is read"},
        {
            "messages": [{**ASKED, "tool_calls": None, "content": "Hello"}, ANSWERED],
            "conversations": None,
        },
        {"messages": [{"from": "human", "value": "Hello"}, ANSWERED]},
    ],
    "conversations": [
        {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi."}]},
        {"conversations": [ASKED, ANSWERED]},
        {
            "conversations": [
                {"role": "user", "value": "Hello"},
                {"from": "gpt", "content": "Hi.", "value": None},
            ]
        },
    ],
    "prompt-completion": [
        {"prompt": "Hello", "completion": "Hi."},
        {"prompt": "Hello", "response": "Hi."},
        {"prompt": [ASKED], "completion": [ANSWERED]},
        {"prompt": json.dumps([ASKED]), "completion": json.dumps([ANSWERED], indent=1)},
        {"prompt": f" {json.dumps(ASKED)}\n", "response": json.dumps([ANSWERED])},
        {"prompt": json.dumps([{"from": "human", "value": "Hello"}]), "completion": [ANSWERED]},
    ],
    "instruction-output": [
        {"instruction": "Hello", "output": "Hi."},
        {"instruction": "Hello", "input": "", "output": "Hi.", "text": "Hello Hi."},
        {"instruction": "Hello", "response": "Hi."},
        {"instruction": "", "input": "Hello", "output": "Hi."},
    ],
}


def read(source: Path) -> list[Document]:
    return list(open_corpus(str(source)).documents())


@pytest.mark.parametrize(
    ("kind", "record"), [(kind, record) for kind, records in RECORDS.items() for record in records]
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "dataset"])
def test_every_format_is_the_same_conversation(
    tmp_path: Path, kind: str, record: dict[str, Any], suffix: str
) -> None:
    (document,) = documents(tmp_path, [record], suffix)
    assert (document.format, document.text, list(document.messages)) == (
        kind,
        None,
        [ASKED, ANSWERED],
    )
    assert document.first_trained == (1 if record.get("prompt", "Hello") != "Hello" else 0)


def test_systems_tools_and_inputs_are_kept(tmp_path: Path) -> None:
    said = [
        {"from": "human", "value": "2 + 3?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": "{\\"a\\": 2}"}'},
    ]
    said += [{"from": "observation", "value": "5"}, {"from": "gpt", "value": "5."}]
    records = [
        {"conversations": said, "system": "Calculate.", "tools": json.dumps(TOOLS)},
        {"instruction": "Add", "input": "2 + 3", "output": "5", "system": "Calculate."},
        {
            "messages": [
                ASKED,
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2}'}}],
                },
            ]
        },
        {"prompt": [ASKED], "completion": [ANSWERED], "system": "Brief."},
    ]
    first, second, third, fourth = documents(tmp_path, records)
    assert [message["role"] for message in first.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert first.messages[2]["tool_calls"] == [
        {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    ]
    assert first.tools == TOOLS and second.tools is None
    assert [message["content"] for message in second.messages] == [
        "Calculate.",
        "Add\n\n2 + 3",
        "5",
    ]
    assert third.messages[1] == {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2}'}}],
    }
    assert (fourth.messages[0]["content"], fourth.first_trained) == ("Brief.", 2)


def test_tables_give_tool_calls_without_the_members_of_others(tmp_path: Path) -> None:
    calls = [
        {"role": "assistant", "tool_calls": [call("add", a=1)]},
        {"role": "assistant", "tool_calls": [call("say", word="x")]},
    ]
    records = [{"messages": [ASKED, one]} for one in calls]
    assert [document.messages[1] for document in documents(tmp_path, records, "parquet")] == calls


def test_a_text_column_that_is_asked_for_goes_first(tmp_path: Path) -> None:
    records = [{"text": "plain", "messages": [ASKED, ANSWERED]}]
    assert [document.text for document in documents(tmp_path, records)] == [None]
    assert [document.text for document in documents(tmp_path, records, text_column="text")] == [
        "plain"
    ]


@pytest.mark.parametrize(
    "text",
    [
        '["a", "b"]',
        '[{"name": "A", "age": 3}]',
        '{"role_of": "x"}',
        "[{'a': 1}]",
        "[1, 2] and [{}]",
        '[{"a": 1, "a": 2}]',
        '[{"role": "user"}, 3]',
        "[{ x",
        "[]",
        '[["Q", "A"]]',
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_answers_in_json_are_texts(tmp_path: Path, text: str, suffix: str) -> None:
    """Unless they are messages."""
    source = tmp_path / f"s.{suffix}"
    if suffix == "csv":
        with source.open("w", newline="") as stream:
            csv.writer(stream).writerows([["prompt", "completion"], [text, text]])
    else:
        write_jsonl(source, [{"prompt": text, "completion": text}])
    (document,) = read(source)
    assert document.texts == [text, text]


def test_lists_in_cells_are_read(tmp_path: Path) -> None:
    with (tmp_path / "s.csv").open("w", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(["prompt", "completion", "history"])
        table.writerow(["Q", "A", json.dumps([["Q0", "A0"]])])
        table.writerow(["Q", "A", ""])
    first, second = read(tmp_path / "s.csv")
    assert (first.texts, second.texts) == (["Q0", "A0", "Q", "A"], ["Q", "A"])


# --- keys that stand twice, and null


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('{"text": "a", "text": "b"}', "text"),
        (
            '{"messages": [{"role": "user", "content": "a", "content": "b"}, {"role": "assistant", '
            '"content": "c"}]}',
            "content",
        ),
        (
            json.dumps({"messages": '[{"role": "user", "role": "assistant", "content": "b"}]'}),
            "role",
        ),
        (
            json.dumps({"messages": [ASKED, ANSWERED], "tools": '[{"name": "f", "name": "g"}]'}),
            "name",
        ),
        ('{"text": "a", "id": {"x": 1, "y": 2, "x": 1}}', "x"),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_a_key_that_stands_twice_is_refused(
    tmp_path: Path, line: str, key: str, suffix: str
) -> None:
    """The last one would be taken in silence."""
    (tmp_path / f"s.{suffix}").write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(
        CorpusError,
        match=rf"s\.{suffix}:2: .*not JSON with one meaning: .* has the key '{key}' twice",
    ):
        read(tmp_path / f"s.{suffix}")
    (tmp_path / "list.json").write_text(f"[{line}]")
    with pytest.raises(
        CorpusError, match=rf"list\.json.*not JSON with one meaning: .* has the key '{key}' twice"
    ):
        read(tmp_path / "list.json")


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_columns_that_stand_twice_are_refused(tmp_path: Path, ending: str) -> None:
    table = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    write = pyarrow.parquet.write_table if ending == "parquet" else pyarrow.feather.write_feather
    write(table, tmp_path / f"s.{ending}")
    with pytest.raises(
        CorpusError, match=r"has several columns 'text': columns must have different names"
    ):
        read(tmp_path / f"s.{ending}")


NULLS: list[dict[str, Any]] = [
    {"text": None},
    {"prompt": None, "completion": "x"},
    {"prompt": "x", "completion": None},
    {"messages": None},
    {"conversations": None, "system": "S"},
    {"instruction": "x", "output": None},
    {"input_ids": None},
]


@pytest.mark.parametrize("record", NULLS)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "dataset"])
def test_records_that_are_null_are_left_out_and_counted(
    tmp_path: Path, record: dict[str, Any], suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As empty ones are; what else they have is named as not used."""
    full = dict.fromkeys(record, "full")
    full |= {"input_ids": [72, 256]} if "input_ids" in record else {}
    full |= {name: [ASKED, ANSWERED] for name in ("messages", "conversations") if name in record}
    source = written(tmp_path, [full, record, full], suffix)
    assert (
        main(
            [
                "prepare",
                "--source",
                str(source),
                "--tokenizer",
                "bytes",
                "--out",
                str(tmp_path / "store"),
            ]
        )
        == 0
    )
    told = capsys.readouterr().out
    assert "documents  2\n" in told and "dropped    1 documents that are empty or null" in told
    assert all(
        f"not used   {key} in 1 records" in told
        for key, value in record.items()
        if value is not None
    )


def test_a_column_of_text_that_is_null_is_left_out(tmp_path: Path) -> None:
    records = [{"body": None, "text": "no"}, {"body": "yes", "text": "no"}]
    assert [
        document.text for document in documents(tmp_path, records, "parquet", text_column="body")
    ] == ["yes"]
    with pytest.raises(CorpusError, match="has no document with text: 2 are empty"):
        prepare(
            open_corpus(str(written(tmp_path, [{"text": None}] * 2))),
            tmp_path / "out",
            tokenizer="bytes",
        )


# --- answers that say nothing


@pytest.mark.parametrize("template", [None, "SmolLM2"])
@pytest.mark.parametrize(("train_on", "told"), [("assistant", 2), ("last", 1)])
def test_empty_answers_are_told(
    tmp_path: Path, checkpoints: dict[str, Path], template: str | None, train_on: str, told: int
) -> None:
    empty = {**ANSWERED, "content": " "}
    records: list[dict[str, Any]] = [
        {"messages": [ASKED, empty]},
        {"messages": [ASKED, empty, ASKED, ANSWERED]},
        {"messages": [ASKED, {**empty, "weight": 0}, ASKED, ANSWERED]},
        {"prompt": "", "completion": "Hi."},
    ]
    store = made(
        tmp_path, records, checkpoints[template] if template else "bytes", train_on=train_on
    )
    assert store.manifest.left_out == {"all but the end of answers that say nothing": told}


# --- weights


def test_weights_are_stored(tmp_path: Path) -> None:
    store = made(tmp_path, [{"text": "a" * 9, "weight": weight} for weight in (0.5, 3, None)])
    assert store.weights.tolist() == [0.5, 3.0, 1.0]
    assert (store.manifest.lightest, store.manifest.heaviest) == (0.5, 3.0)
    # Made before there were weights.
    recorded = Store.open(Path(__file__).parents[1] / "recorded_run" / "store")
    assert recorded.weights.tolist() == [1.0] * len(recorded)


@pytest.mark.parametrize(("most", "kind"), [(1 << 16, np.uint16), (2, np.float64)])
def test_weights_of_few_values_have_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, kind: type
) -> None:
    monkeypatch.setattr(index, "MOST_VALUES", most)
    monkeypatch.setattr(index, "BLOCK", 4)
    weights = [0.1, 3.0, 1.0, 1e-7, 0.1, 3.0, 2 / 3, 0.1, 1.0]
    store = made(tmp_path, [{"text": "a" * 9, "weight": weight} for weight in weights])
    assert np.load(tmp_path / "store" / index.WEIGHTS).dtype == kind
    assert store.weights.tolist() == weights == [store.weight(number) for number in range(9)]
    assert [
        np.load(tmp_path / "store" / name).itemsize for name in (index.LENGTHS, index.NAMES)
    ] == [
        4,
        4,
    ]


# --- the command


def test_the_command_shows_what_is_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    records = [record for records in RECORDS.values() for record in records]
    records += [
        {"text": "b" * 300},
        {"messages": [ASKED, {**ANSWERED, "content": "a" * 900}], "weight": 2},
    ]
    records.append(
        {"messages": [ASKED, {**ANSWERED, "content": "nearly last " * 30}], "weight": 0.25}
    )
    write_jsonl(tmp_path / "my chats.jsonl", records)
    command = [
        "prepare",
        "--source=my chats.jsonl",
        "--tokenizer=bytes",
        "--max-length=500",
        "--long-documents=drop",
    ]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert out.startswith("stores/my chats: written in")
    for line in (
        "formats    3 conversations, 4 instruction-output, 7 messages, 6 prompt-completion, 1 text",
        "template   ChatML, as the tokenizer has no chat template",
        "loss on    the assistant's turns of conversations",
        "weights    0.25 to 1",
        "dropped    1 conversations of more than 500 tokens",
    ):
        assert line in out, line
    assert main([*command, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["out"], summary["dropped_documents"], summary["max_length"]) == (
        "stores/my chats",
        1,
        500,
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--max-length", "1"], "max_length is 1: it must be at least 2"),
        (["--workers", "0"], "--workers is 0"),
        (["--source", "nowhere"], "source 'nowhere' does not exist"),
        (["--vocab-size", "9"], "vocabulary size is 9"),
        (
            ["--chat-template", "nowhere.jinja"],
            "--chat-template nowhere.jinja needs the special tokens of a checkpoint",
        ),
        (
            ["--tokenizer", "../nowhere/to/be"],
            "neither a file, nor a folder, nor a name on the hub",
        ),
    ],
)
def test_the_command_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    source = write_jsonl(tmp_path / "s.jsonl", [{"messages": [ASKED, ANSWERED]}])
    assert (
        main(["prepare", "--source", str(source), "--out", str(tmp_path / "out"), *arguments]) == 2
    )
    error = capsys.readouterr().err
    assert error.startswith("longctx prepare: error: ") and says in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("names", "text_column", "read"),
    [
        (["id", "content", "weight", "query"], "content", ["content", "weight"]),
        (["id", "text", "weight"], None, ["text", "weight"]),
        (["id", "input_ids", "labels", "weight"], None, ["input_ids", "labels", "weight"]),
        (["id", "query", "response", "history"], None, ["query", "response", "history"]),
    ],
)
def test_of_a_table_only_columns_with_a_meaning_are_read(
    names: list[str], text_column: str | None, read: list[str]
) -> None:
    """A weight always has one."""
    assert columns_of(names, text_column) == read

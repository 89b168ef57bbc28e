"""Nulls that a table adds for members of other records are left out, and counted; others stay.
Columns of the type Json."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pandas
import pyarrow
import pyarrow.parquet
import pytest

from longctx.data.records.corpus import CorpusError
from longctx.data.records.formats import Document
from longctx.data.records.sources import open_corpus
from tests.data_cases import made, whole, write_jsonl
from tests.template_cases import TOOLS, call, chat


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
    }


def asking(described: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    """A record with a tool and a call of it."""
    calling = {
        "role": "assistant",
        "content": "",
        "tool_calls": [call(described["function"]["name"], **arguments)],
    }
    return {"tools": [described], "messages": [*chat("Q"), calling]}


ENUM = {"type": ["string", "null"], "enum": ["CET", None]}
RECORDS = [
    asking(tool("weather", city={"type": "string"}), city="Paris"),
    asking(tool("time", zone=ENUM, day={"type": "string", "default": "today"}), zone="CET"),
    asking(tool("add", a={"type": "number"}), a=2.5),
]
"""Of other tools, with other properties and arguments."""


def table() -> datasets.Dataset:
    return datasets.Dataset.from_list(RECORDS)


def of_pandas(folder: Path) -> Path:
    table().to_parquet(str(folder / "s.parquet"))
    frame = pandas.read_parquet(folder / "s.parquet")
    (folder / "s.parquet").unlink()
    frame.to_json(folder / "s.jsonl", orient="records", lines=True)
    return folder / "s.jsonl"


def of_datasets(folder: Path) -> Path:
    table().to_json(str(folder / "s.jsonl"))
    return folder / "s.jsonl"


def as_array(folder: Path) -> Path:
    (folder / "s.json").write_text(json.dumps(list(table())), "utf-8")
    return folder / "s.json"


def texts() -> list[dict[str, str]]:
    return [{key: json.dumps(value) for key, value in row.items()} for row in table()]


def texts_in_parquet(folder: Path) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(texts()), folder / "s.parquet")
    return folder / "s.parquet"


def texts_in_csv(folder: Path) -> Path:
    pandas.DataFrame(texts()).to_csv(folder / "s.csv", index=False)
    return folder / "s.csv"


def texts_in_dataset(folder: Path) -> Path:
    datasets.Dataset.from_list(texts()).save_to_disk(str(folder / "s"))
    return folder / "s"


def in_parquet(folder: Path) -> Path:
    table().to_parquet(str(folder / "s.parquet"))
    return folder / "s.parquet"


def in_dataset(folder: Path) -> Path:
    table().save_to_disk(str(folder / "s"))
    return folder / "s"


def in_shards(folder: Path) -> Path:
    """Of which one has null alone for a property of the others."""
    for number in range(3):
        table().shard(3, number).to_json(str(folder / f"s-{number:05d}-of-00003.jsonl"))
    return folder


WRITERS = [
    *(
        of_pandas,
        of_datasets,
        as_array,
        texts_in_parquet,
        texts_in_csv,
        texts_in_dataset,
        in_parquet,
        in_dataset,
        in_shards,
    ),
]


def read(source: Path) -> tuple[list[Document], dict[str, int]]:
    from longctx.data.records.corpus import SourceCounts

    counts = SourceCounts()
    return list(open_corpus(str(source)).documents(counts)), counts.noted


def said(document: Document) -> dict[str, Any]:
    return {"tools": document.tools, "messages": list(document.messages)}


@pytest.mark.parametrize("write", WRITERS)
def test_members_of_other_records_are_left_out(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    """A null element of a list stays. What is left out is counted."""
    documents, noted = read(write(tmp_path))
    assert [json.loads(json.dumps(said(document))) for document in documents] == RECORDS
    what = "null members of {} that a table added, left out"
    assert (
        set(noted) == {what.format("tools"), what.format("messages")} and min(noted.values()) >= 6
    ), noted


@pytest.mark.parametrize("write", WRITERS)
def test_the_prompt_has_none_of_them(
    tmp_path: Path, write: Callable[[Path], Path], checkpoints: dict[str, Path]
) -> None:
    from longctx.data.store.prepare import prepare
    from longctx.data.store.store import Store

    (tmp_path / "in").mkdir()
    prepare(write(tmp_path / "in"), tmp_path / "out", tokenizer=str(checkpoints["Qwen 3"]))
    store = Store.open(tmp_path / "out")
    plain = made(tmp_path, RECORDS, checkpoints["Qwen 3"])
    assert [whole(store, number) for number in range(3)] == [
        whole(plain, number) for number in range(3)
    ]


def test_files_of_several_writers_are_several_tables(tmp_path: Path) -> None:
    """A dump of another data set, and a file by hand."""
    of_datasets(tmp_path).rename(tmp_path / "a.jsonl")
    other = [
        asking(tool("f", x={"type": "string"}), x="1"),
        asking(tool("g", y={"type": "string"}), y="2"),
    ]
    datasets.Dataset.from_list(other).to_json(str(tmp_path / "b.jsonl"))
    by_hand = [
        asking(tool("time", zone=ENUM), zone=None),
        asking(tool("time", zone={"default": None}), zone="CET"),
    ]
    write_jsonl(tmp_path / "c.jsonl", by_hand)
    for number, record in enumerate(by_hand):
        (tmp_path / f"d{number}.json").write_text(json.dumps(record), "utf-8")
    documents, noted = read(tmp_path)
    assert [json.loads(json.dumps(said(document))) for document in documents] == [
        *RECORDS,
        *other,
        *by_hand,
        *by_hand,
    ]
    assert sum("that a table added" in what for what in noted) == 2


def test_no_property_is_null_whatever_wrote_it(tmp_path: Path) -> None:
    """A dump with a record by hand below: what may be meant stays, and is counted, too."""
    more = asking(tool("f", x={"type": "string", "default": None}), x=None)
    with of_datasets(tmp_path).open("a") as file:
        file.write(json.dumps(more) + "\n")
    documents, noted = read(tmp_path)
    *three, last = documents
    assert said(last) == more
    for document, record in zip(three, RECORDS, strict=True):
        names = [
            list(each["tools"][0]["function"]["parameters"]["properties"])
            for each in (said(document), record)
        ]
        assert names[0] == names[1]
        assert said(document)["messages"] == record["messages"]
    assert noted["null properties of tools, left out"] == 8
    assert noted["null arguments that the called tool does not have, left out"] == 6
    assert (
        noted["null arguments of calls, which stay"] == 1
        and noted["null members of tools, which stay"] >= 1
    )


@pytest.mark.parametrize("limit", [{"max_documents": 1}, {"max_bytes": 1}])
def test_all_records_tell_where_reading_stops_before(tmp_path: Path, limit: dict[str, int]) -> None:
    source = of_datasets(tmp_path)
    with source.open("a") as file:
        file.write("no JSON\n")
    (document,) = open_corpus(str(source), **limit).documents()
    assert said(document) == RECORDS[0]


MEANT: list[tuple[list[dict[str, Any]], str]] = [
    (
        [asking(tool("f", a={"type": ["string", "null"], "default": None}), a="x")],
        "a default, in one record",
    ),
    ([asking(tool("f", a={"const": None}), a="x")] * 2, "a constant, in all records"),
    (
        [
            asking(tool("f", a={"type": "string"}), a=None),
            asking(tool("f", a={"type": "string"}), a="x"),
        ],
        "an argument",
    ),
    (
        [asking(tool("f", a={"default": {"b": None}}), a="x"), asking(tool("g", b={}), b=[None])],
        "within a default",
    ),
    ([*RECORDS, asking(tool("f", zone={"default": None}), zone=None)], "among others"),
]


@pytest.mark.parametrize("records", [case[0] for case in MEANT], ids=[case[1] for case in MEANT])
@pytest.mark.parametrize("as_text", [False, True])
def test_a_null_that_a_record_says_stays(
    tmp_path: Path, records: list[dict[str, Any]], as_text: bool
) -> None:
    rows = (
        [{key: json.dumps(value) for key, value in record.items()} for record in records]
        if as_text
        else records
    )
    documents, noted = read(write_jsonl(tmp_path / "s.jsonl", rows))
    assert [json.loads(json.dumps(said(document))) for document in documents] == records
    assert all(what.endswith("which stay") for what in noted)


def test_a_null_that_all_rows_of_a_table_say_stays(tmp_path: Path) -> None:
    records = [asking(tool("f", a={"type": ["string", "null"], "default": None}), a="x")] * 2
    datasets.Dataset.from_list(records).to_parquet(str(tmp_path / "s.parquet"))
    documents, noted = read(tmp_path / "s.parquet")
    assert [said(document) for document in documents] == records
    assert noted == {"null members of tools, which stay": 2}


@pytest.mark.parametrize("key", ["arguments", "completion", "text"])
def test_texts_in_json_stay_as_they_are(tmp_path: Path, key: str) -> None:
    """An answer in JSON, and arguments as OpenAI has them."""
    answers = ['{"city": "Paris", "zone": null}', '{"city": null, "zone": "CET"}']
    if key == "arguments":
        records: list[dict[str, Any]] = [asking(TOOLS[0]) for _ in answers]
        for record, answer in zip(records, answers, strict=True):
            record["messages"][1]["tool_calls"][0]["function"]["arguments"] = answer
    else:
        records = [
            {"prompt": "Q", "completion": answer} if key == "completion" else {"text": answer}
            for answer in answers
        ]
    for source in (write_jsonl(tmp_path / "s.jsonl", records), tmp_path / "s.parquet"):
        if source.suffix == ".parquet":
            datasets.Dataset.from_list(records).to_parquet(str(source))
        documents, noted = read(source)
        assert [
            answer in json.dumps(document.messages or document.text).replace("\\", "")
            for document, answer in zip(documents, answers, strict=True)
        ] == [True] * 2
        assert not noted


@pytest.mark.parametrize("depth", [300, 480, 900])
def test_what_is_nested_too_deeply_is_refused_by_its_place(tmp_path: Path, depth: int) -> None:
    deep = '{"a": ' * depth + "null" + "}" * depth
    lines = [
        json.dumps(RECORDS[0]),
        f'{{"messages": {json.dumps(chat("Q", "A"))}, "tools": [{deep}]}}',
    ]
    (tmp_path / "s.jsonl").write_text("\n".join(lines), "utf-8")
    if depth == 300:
        assert len(read(tmp_path / "s.jsonl")[0]) == 2
        return
    with pytest.raises(CorpusError, match=r"s\.jsonl:2: .*nested too deeply"):
        read(tmp_path / "s.jsonl")


# --- the type Json


JSON = {
    "all": datasets.Features({"tools": datasets.Json(), "messages": datasets.Json()}),
    "inside": datasets.Features(
        {
            "tools": datasets.List(datasets.Json()),
            "messages": datasets.List(
                {
                    "role": datasets.Value("string"),
                    "content": datasets.Value("string"),
                    "tool_calls": datasets.List(
                        {
                            "id": datasets.Value("string"),
                            "type": datasets.Value("string"),
                            "function": {
                                "name": datasets.Value("string"),
                                "arguments": datasets.Json(),
                            },
                        }
                    ),
                }
            ),
        }
    ),
    "messages": datasets.Features(
        {"tools": datasets.List(datasets.Json()), "messages": datasets.List(datasets.Json())}
    ),
}


def json_table(kind: str, records: list[dict[str, Any]]) -> datasets.Dataset:
    columns = {key: [record[key] for record in records] for key in ("tools", "messages")}
    return datasets.Dataset.from_dict(columns, features=JSON[kind])


@pytest.mark.parametrize("kind", JSON)
@pytest.mark.parametrize("suffix", ["parquet", "arrow", "stream", "dataset", "jsonl"])
def test_columns_of_json_are_read(tmp_path: Path, kind: str, suffix: str) -> None:
    """With the nulls that they have: the type is there so that no member is added."""
    records = [*RECORDS, asking(tool("f", zone={"default": None}), zone=None)]
    data = json_table(kind, records)
    path = tmp_path / ("s.arrow" if suffix == "stream" else f"s.{suffix}")
    if suffix == "parquet":
        data.to_parquet(str(path))
    elif suffix == "dataset":
        data.save_to_disk(str(path))
    elif suffix == "jsonl":
        data.to_json(str(path))
    else:
        new = pyarrow.ipc.new_stream if suffix == "stream" else pyarrow.ipc.new_file
        arrow = data.with_format("arrow")[:]
        with new(str(path), arrow.schema) as writer:
            writer.write_table(arrow)
    documents, noted = read(path)
    assert [json.loads(json.dumps(said(document))) for document in documents] == records
    assert all(what.endswith("which stay") for what in noted)


def test_a_text_of_type_json_is_a_text(tmp_path: Path) -> None:
    data = datasets.Dataset.from_dict(
        {"text": ["one", "two"]}, features=datasets.Features({"text": datasets.Json()})
    )
    data.to_parquet(str(tmp_path / "s.parquet"))
    assert [document.text for document in read(tmp_path / "s.parquet")[0]] == ["one", "two"]


def test_json_that_is_none_is_refused_with_its_row(tmp_path: Path) -> None:
    storage = pyarrow.array(["[]", "{x"], pyarrow.string())
    column = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), storage)
    pyarrow.parquet.write_table(pyarrow.table({"messages": column}), tmp_path / "s.parquet")
    with pytest.raises(
        CorpusError,
        match=r"s\.parquet, row \d.*(a value of type Json is not JSON|at least one message)",
    ):
        read(tmp_path / "s.parquet")


def test_maps_are_objects(tmp_path: Path) -> None:
    """Whose nulls are their own."""
    kind = pyarrow.list_(
        pyarrow.struct(
            {
                "name": pyarrow.string(),
                "parameters": pyarrow.map_(pyarrow.string(), pyarrow.string()),
            }
        )
    )
    functions = pyarrow.array([[{"name": "f", "parameters": [("a", "number"), ("b", None)]}]], kind)
    messages = pyarrow.array([chat("Q", "A")])
    pyarrow.parquet.write_table(
        pyarrow.table({"functions": functions, "messages": messages}), tmp_path / "s.parquet"
    )
    (document,), noted = read(tmp_path / "s.parquet")
    assert document.tools == [
        {"type": "function", "function": {"name": "f", "parameters": {"a": "number", "b": None}}}
    ]
    assert noted == {"null members of tools, which stay": 1}

"""Why JSON, CSV and texts are read by readers of ours: what pyarrow and `datasets` change in
silence. Once one of these tests fails, a reader of theirs can take the place of ours."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.csv
import pyarrow.json
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longctx.data.records.messages import FormatError
from longctx.data.records.readers import CorpusError, read_span
from longctx.data.records.sources import open_corpus

READ = pyarrow.csv.ParseOptions(newlines_in_values=True)


def json_by_pyarrow(text: str) -> list[dict[str, Any]]:
    return pyarrow.json.read_json(io.BytesIO(text.encode())).to_pylist()


def json_by_us(folder: Path, text: str) -> list[dict[str, Any]]:
    file = folder / "s.jsonl"
    file.write_text(text, "utf-8")
    records = read_span(file, "s.jsonl", None, start=0, stop=file.stat().st_size)
    return [record.values for record in records]


def csv_by_pyarrow(text: str, names: list[str]) -> list[dict[str, str]]:
    texts = pyarrow.csv.ConvertOptions(
        column_types=dict.fromkeys(names, pyarrow.string()), strings_can_be_null=False
    )
    table = pyarrow.csv.read_csv(
        io.BytesIO(text.encode()), parse_options=READ, convert_options=texts
    )
    return table.to_pylist()


def csv_by_us(folder: Path, text: str) -> list[str]:
    file = folder / "s.csv"
    file.write_text(text, "utf-8", newline="")
    return [document.texts[0] for document in open_corpus(str(file)).documents()]


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(['{"a": "2020-01-01"}'], id="a text becomes a date"),
        pytest.param(['{"a": 9007199254740993}', '{"a": 1.5}'], id="an integer loses a digit"),
        pytest.param(['{"a": 123456789012345678901}'], id="a large integer loses digits"),
        pytest.param(['{"a": 1}', "{}"], id="a member that is missing becomes null"),
        pytest.param(['{"m": [{"x": 1}, {"y": 2}]}'], id="objects get each other's members"),
        pytest.param(['{"b": 1, "a": 2}', '{"a": 3, "b": 4}'], id="members change their order"),
    ],
)
def test_pyarrow_changes_json_in_silence(tmp_path: Path, lines: list[str]) -> None:
    text = "\n".join(lines)
    exact = [json.dumps(json.loads(line)) for line in lines]
    assert [json.dumps(record) for record in json_by_us(tmp_path, text)] == exact
    assert [json.dumps(record, default=str) for record in json_by_pyarrow(text)] != exact


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(['{"a": 1}', '{"a": "x"}'], id="types that change"),
        pytest.param(['{"a": [1, "x"]}'], id="types in a list"),
        pytest.param([r'{"a": "\ud800"}'], id="half a surrogate pair"),
    ],
)
def test_pyarrow_refuses_json_that_we_read(tmp_path: Path, lines: list[str]) -> None:
    text = "\n".join(lines)
    assert json_by_us(tmp_path, text) == [json.loads(line) for line in lines]
    with pytest.raises(pyarrow.ArrowInvalid):
        json_by_pyarrow(text)


def test_pyarrow_reads_two_records_in_a_line(tmp_path: Path) -> None:
    text = '{"a": "x"}{"a": "y"}\n'
    assert len(json_by_pyarrow(text)) == 2
    with pytest.raises((FormatError, CorpusError), match="not JSON"):
        json_by_us(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param('text\n"say \\"x\\" again"\n', id="quotes escaped by backslashes"),
        pytest.param('text\none\n"two\nthree\nfour\n', id="a quote that is not closed"),
    ],
)
def test_pyarrow_takes_csv_that_is_none(tmp_path: Path, text: str) -> None:
    csv_by_pyarrow(text, ["text"])
    with pytest.raises(CorpusError, match="not CSV"):
        csv_by_us(tmp_path, text)


PIECES = [*'ab",;\n\r\t\\ é', "NaN", "null", "2020-01-01", "007"]
CELLS = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)


@given(rows=st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=5), quoted=st.booleans())
def test_of_other_csv_both_read_the_same(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], quoted: bool
) -> None:
    stream = io.StringIO(newline="")
    style = csv.QUOTE_ALL if quoted else csv.QUOTE_MINIMAL
    table = csv.writer(stream, quoting=style)
    table.writerows([("text", "other"), *rows])
    found = csv_by_pyarrow(stream.getvalue(), ["text", "other"])
    assert [(row["text"], row["other"]) for row in found] == rows
    texts = [text for text, _ in rows if text.strip()]
    if texts:
        ours = csv_by_us(tmp_path_factory.mktemp("csv"), stream.getvalue())
        assert [text for text in ours if text.strip()] == texts


def test_datasets_cuts_texts_into_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n", "utf-8")
    rows = datasets.Dataset.from_text(str(tmp_path / "a.txt"), cache_dir=str(tmp_path / "cache"))
    assert rows["text"] == ["one", "", "two"]
    (document,) = open_corpus(str(tmp_path / "a.txt")).documents()
    assert list(document.texts) == ["one\n\ntwo\n"]

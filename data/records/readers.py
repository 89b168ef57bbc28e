"""Readers: the records of one file or data set, by its ending.

Of tables, they read the columns that a format needs; `text_column` is that of the text, if given.
Errors name file and line, row or record.
"""

import csv
import io
import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from longctx.data.records.formats import columns_of
from longctx.data.records.megatron import read_megatron
from longctx.data.records.messages import FormatError, parse_json
from longctx.data.records.nulls import rows
from longctx.data.records.slices import lines_in
from longctx.errors import UserError, brief
from longctx.remote import RemotePath

MEGATRON = (".idx", ".bin")
PARQUET_BLOCK = 1 << 16
"""Bytes that are read at once of a Parquet file, whose columns are far from each other."""
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
"""Compression by the last ending of a file of lines or JSON."""


class CorpusError(UserError):
    """A source that is missing, empty or malformed."""


class Record(NamedTuple):
    """A record of a source.

    Attributes:
        values: values by key; a column that is not read has `...`.
        name: place in the source.
        where: path of the file, and line, row or record there, for messages.
        source_bytes: its share of the source's bytes.
        added: number of null members that a table has added and that are left out, by column.
    """

    values: dict[str, Any]
    name: str
    where: str
    source_bytes: float
    added: Mapping[str, int] = MappingProxyType({})


def read_text(file: Path) -> str | None:
    """Returns the text, or None if the file is not UTF-8 text. A NUL byte is valid UTF-8, but
    indicates a binary file."""
    content = file.read_bytes()
    if b"\0" in content:
        return None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def ending_of(file: Path) -> str:
    """Returns the ending that decides how a file is read, in lower case: of compressed records,
    that before .gz or .zst.

    A .bin file is only read beside the .idx file that describes it.
    """
    ending = file.suffix.lower()
    if ending == MEGATRON[1] and not file.with_suffix(MEGATRON[0]).exists():
        return ""
    inner = Path(file.stem).suffix.lower() if ending in COMPRESSED else ""
    if inner in PACKABLE:
        return inner
    return ending


def lines(file: Path) -> Iterator[bytes]:
    """Yields the lines of a file, compressed or not."""
    if file.suffix.lower() not in COMPRESSED:
        with file.open("rb") as stream:
            yield from stream
        return
    import pyarrow

    try:
        with io.BufferedReader(
            pyarrow.input_stream(file.open("rb"), COMPRESSED[file.suffix.lower()]), 1 << 20
        ) as stream:
            yield from stream
    except OSError as error:
        raise CorpusError(
            f"{file} is damaged, or not compressed as its ending says: {error}; write it again"
        ) from error


def _read_jsonl(file: Path, name: str, text_column: str | None) -> Iterator[Record]:
    yield from _records_of(lines(file), name, str(file))


def read_span(
    file: Path, name: str, text_column: str | None, *, start: int, stop: int
) -> Iterator[Record]:
    """Reads the lines of a file of JSON Lines, or the row groups of a Parquet file, that begin at
    bytes start … stop - 1.

    The lines of a later span are counted from its start, as nobody knows how many are before it;
    rows are counted from that of the file.
    """
    if ending_of(file) == ".parquet":
        yield from _read_table(file, name, text_column, span=range(start, stop))
        return
    at = f"@{start}" if start else ""
    with file.open("rb") as stream:
        yield from _records_of(lines_in(stream, start, stop), f"{name}{at}", f"{file}{at}")


def _records_of(its_lines: Iterable[bytes], name: str, file: str) -> Iterator[Record]:
    """Yields the records of lines of JSON."""
    for number, line in enumerate(its_lines, start=1):
        # Of several files in a row, each may begin with a byte-order mark.
        text = _decoded(line, f"{file}:{number}")
        if not text.strip():
            continue
        try:
            record = parse_json(text)
        except FormatError as error:
            raise CorpusError(f"{file}:{number}: {error}") from error
        if not isinstance(record, dict):
            raise CorpusError(f'{file}:{number}: a line must be an object such as {{"text": ".."}}')
        yield Record(record, f"{name}:{number}", f"{file}:{number}", len(line))


def _read_json(file: Path, name: str, text_column: str | None) -> Iterator[Record]:
    """Reads a list of records, one record, an object with one list of records, or JSON Lines."""
    text = _decoded(b"".join(lines(file)), str(file))
    try:
        content = parse_json(text)
    except FormatError as error:
        # JSON may contain other line breaks.
        first = next((line for line in text.split("\n") if line.strip()), "")
        try:
            parse_json(first)
        except FormatError:
            raise CorpusError(f"{file}: {error}") from error
        yield from _read_jsonl(file, name, text_column)
        return
    others: dict[str, Any] = {}
    if isinstance(content, dict):
        content, others = _records_in(content, text_column, file)
    if not isinstance(content, list):
        raise CorpusError(
            f"{file} is a {type(content).__name__}: it must be a list of records, one record, or "
            "JSON Lines"
        )
    for number, record in enumerate(content, start=1):
        if not isinstance(record, dict):
            raise CorpusError(
                f'{file}, record {number}: it must be an object such as {{"text": ".."}}'
            )
        share = file.stat().st_size / len(content)
        yield Record({**others, **record}, f"{name}:{number}", f"{file}, record {number}", share)
        others = {}


def _records_in(
    content: dict[str, Any], text_column: str | None, file: Path
) -> tuple[list[Any], dict[str, Any]]:
    """Returns the records of an object (itself, or those of its only list of objects) and its other
    keys, as not used."""
    lists = [
        key
        for key, value in content.items()
        if isinstance(value, list) and value and isinstance(value[0], dict)
    ]
    try:
        columns_of(list(content), text_column)
    except FormatError as error:
        if len(lists) != 1:
            several = (
                f"has several lists of records, {', '.join(lists)}: put each into a file of its own"
            )
            raise CorpusError(f"{file}: {several if lists else error}") from error
        return content[lists[0]], dict.fromkeys(content.keys() - lists, ...)
    return [content], {}


def _read_csv(file: Path, name: str, text_column: str | None) -> Iterator[Record]:
    """Reads a table with a header; of weights, an empty cell is null."""
    csv.field_size_limit(sys.maxsize)
    stream = io.StringIO(_decoded(b"".join(lines(file)), str(file)), newline="")
    table = csv.DictReader(
        stream, delimiter="\t" if ending_of(file) == ".tsv" else ",", strict=True
    )
    try:
        rows: list[dict[str, Any]] = list(table)
    except csv.Error as error:
        raise CorpusError(f"{file}, line {table.line_num}: not CSV: {error}") from error
    names = list(table.fieldnames or ())
    if len(set(names)) < len(names) or (len(names) == 1 and re.search("[;\t]", names[0])):
        rule = "columns must have different names, and be separated by commas (.tsv: by tabs)"
        raise CorpusError(f"{file} has the columns {', '.join(names)}: {rule}")
    _columns(names, text_column, str(file))
    for number, row in enumerate(rows):
        if None in row or None in row.values():
            raise CorpusError(
                f"{file}, row {number}: it must have {len(names)} cells, as the header has"
            )
        row = {key: _cell(key, cell) for key, cell in row.items()}
        yield Record(
            row, f"{name}:{number}", f"{file}, row {number}", file.stat().st_size / len(rows)
        )


def _cell(key: str, cell: str) -> Any:
    """Returns a weight as a number, and any other cell as text."""
    try:
        if key == "weight":
            if cell:
                return float(cell)
            return None
        return cell
    except ValueError:
        return cell


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        wrong = f"{where}: not UTF-8 at byte {error.start}, which is {content[error.start]:#x}"
        raise CorpusError(
            f"{wrong}: save the file in UTF-8 (iconv -f ENCODING -t UTF-8)"
        ) from error


class _Table(NamedTuple):
    """Schema of a table, its number of rows, the first row that is read, and what makes batches of
    some `columns`."""

    schema: Any
    in_all: int
    first: int
    batches: Callable[..., Any]


def _open_table(file: Path, span: range | None) -> _Table:
    """Opens a table, of a Parquet file the row groups that begin at the bytes of a span (None:
    all).

    An Arrow file may be a stream, as `datasets` writes it; a compressed one is decompressed as a
    whole.
    """
    import pyarrow.parquet

    if ending_of(file) == ".parquet":
        parquet = pyarrow.parquet.ParquetFile(file.open("rb", PARQUET_BLOCK), pre_buffer=True)
        groups = _groups_in(parquet.metadata, span)
        first = sum(parquet.metadata.row_group(number).num_rows for number in range(groups.start))
        read = partial(parquet.iter_batches, 256, row_groups=list(groups))
        return _Table(parquet.schema_arrow, parquet.metadata.num_rows, first, batches=read)
    if isinstance(file, RemotePath):
        source = pyarrow.PythonFile(file.open("rb"))
    else:
        source = pyarrow.memory_map(str(file))
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    table = (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(source).read_all()

    def batches(columns: list[str]) -> Any:
        return table.select(columns).to_batches(256)

    return _Table(table.schema, table.num_rows, 0, batches=batches)


def _groups_in(metadata: Any, span: range | None) -> range:
    """Returns the row groups of a Parquet file that begin at the bytes of a span. Raises ValueError
    if they are not one behind the other."""
    begins = []
    for number in range(metadata.num_row_groups):
        column = metadata.row_group(number).column(0)
        begins.append(column.dictionary_page_offset or column.data_page_offset)
    if span is None:
        return range(len(begins))
    if begins != sorted(begins):
        raise ValueError("its row groups are not in the order of their bytes")
    return range(bisect_left(begins, span.start), bisect_left(begins, span.stop))


def _read_table(
    file: Path, name: str, text_column: str | None, span: range | None = None
) -> Iterator[Record]:
    import pyarrow

    row = first = 0
    try:
        schema, count, first, batches = _open_table(file, span)
        row = first
        if twice := next((name for name in schema.names if schema.names.count(name) > 1), None):
            raise CorpusError(
                f"{file} has several columns {twice!r}: columns must have different names"
            )
        names = _columns(schema.names, text_column, str(file))
        # So that records count them as not used.
        unread = dict.fromkeys(set(schema.names) - set(names), ...)
        share = file.stat().st_size / max(1, count)
        for batch in batches(columns=names):
            for values, added in rows(batch):
                yield Record(
                    values | unread,
                    f"{name}:{row}",
                    where=f"{file}, row {row}",
                    source_bytes=share,
                    added=added,
                )
                row += 1
    except FormatError as error:
        raise CorpusError(f"{file}, row {row}: a value of type Json is {error}") from error
    except UserError:
        raise
    except (
        pyarrow.ArrowException,
        ValueError,
        OSError,
        OverflowError,
        TypeError,
        KeyError,
    ) as error:
        kind = "a Parquet file" if ending_of(file) == ".parquet" else "an Arrow file"
        where = f"is damaged after row {row - 1}" if row > first else f"is not {kind}, or damaged"
        raise CorpusError(f"{file} {where}: {brief(error)}; write it again") from error


def _read_megatron(file: Path, name: str, text_column: str | None) -> Iterator[Record]:
    """Reads the documents of an .idx file and the .bin file beside it; of the .bin file itself,
    nothing."""
    if file.suffix.lower() == MEGATRON[1]:
        return
    try:
        for number, tokens in enumerate(read_megatron(file)):
            yield Record(
                {"input_ids": tokens},
                f"{name}:{number}",
                f"{file}, document {number}",
                tokens.nbytes,
            )
    except (ValueError, OSError, OverflowError) as error:
        raise CorpusError(
            f"{file}: {error}: give both files of Megatron's preprocess_data.py as it wrote them, "
            "NAME.idx and NAME.bin"
        ) from error


def read_dataset(folder: Path, text_column: str | None, size: int) -> Iterator[Record]:
    import datasets

    saved = f"{folder} looks like a saved dataset, but `datasets` cannot read it", "save it again"
    return _read_rows(
        lambda: datasets.load_from_disk(str(folder)),
        str(folder),
        text_column=text_column,
        size=size,
        wrong=saved,
    )


def read_hub(hub: "HubDataset", text_column: str | None, *, streamed: bool) -> Iterator[Record]:
    wrong = f"`datasets` cannot read {hub.name}", "run the command again, which goes on from there"
    return _read_rows(
        lambda: hub.open(streamed), hub.name, text_column=text_column, size=0, wrong=wrong
    )


def _read_rows(
    load: Callable[[], Any], where: str, text_column: str | None, size: int, wrong: tuple[str, str]
) -> Iterator[Record]:
    """Reads a `Dataset` or `IterableDataset`; `wrong`: what is said of an error, and the way
    out."""
    row = 0
    try:
        dataset = load()
        names = dataset.column_names or []  # a stream may not know them
        read = _columns(names, text_column, where) if names else []
        unread = dict.fromkeys(set(names) - set(read), ...)
        share = size / len(dataset) if size else 0
        dataset = dataset.select_columns(read) if read else dataset
        # Tables have the bytes of images, not what PIL makes of them, and types, which tell who has
        # which members.
        for table in dataset.with_format("arrow").iter(batch_size=256):
            for values, added in rows(table):
                yield Record(
                    values | unread,
                    f"row:{row}",
                    where=f"{where}, row {row}",
                    source_bytes=share,
                    added=added,
                )
                row += 1
    except FormatError as error:
        raise CorpusError(f"{where}, row {row}: a value of type Json is {error}") from error
    except UserError:
        raise
    except (
        Exception
    ) as error:  # the library checks none of its files: damage raises whatever Python raises
        raise CorpusError(
            f"{wrong[0]} ({type(error).__name__}: {brief(error)}): {wrong[1]}"
        ) from error


@dataclass(frozen=True)
class HubDataset:
    """A split of a data set on the hub.

    Attributes:
        name, subset, split, revision: as given; `subset` is what `datasets` also calls a
            configuration.
        commit: what `datasets` distinguishes versions by: the commit of the hub.
    """

    name: str
    subset: str | None
    split: str
    revision: str | None
    commit: str

    @classmethod
    def look_up(
        cls, name: str, subset: str | None, split: str, revision: str | None
    ) -> "HubDataset":
        """Asks the hub, or the cache, for the version. Raises CorpusError if neither has the data
        set."""
        import datasets

        builder = _asked(
            name, lambda: datasets.load_dataset_builder(name, subset, revision=revision)
        )
        return cls(name, subset, split=split, revision=revision, commit=str(builder.hash))

    def open(self, streamed: bool) -> Any:
        """Returns the split: an `IterableDataset` if it is streamed, or a `Dataset` in the cache.
        Raises CorpusError."""
        import datasets

        options = {"split": self.split, "revision": self.revision, "streaming": streamed}
        return _asked(self.name, lambda: datasets.load_dataset(self.name, self.subset, **options))


def _asked(name: str, ask: Callable[[], Any]) -> Any:
    import datasets

    try:
        return ask()
    except Exception as error:  # of the network, the hub and the data set
        raise CorpusError(
            f"source {name!r} is no file or folder, and `datasets` cannot read it from the hub "
            f"({type(error).__name__}: {brief(error)}): correct the path, or the name, --subset, "
            "--split or --revision. Without a network, a data set must be in the cache "
            f"{datasets.config.HF_DATASETS_CACHE} (copy it, or set HF_HOME), or in a folder that "
            "`save_to_disk` wrote: give that folder"
        ) from error


def _columns(names: list[str], text_column: str | None, where: str) -> list[str]:
    try:
        return columns_of(names, text_column)
    except FormatError as error:
        raise CorpusError(f"{where}: {error}") from error


Reader = Callable[[Path, str, str | None], Iterator[Record]]
READERS: dict[str, Reader] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    **dict.fromkeys((".parquet", ".arrow"), _read_table),
    **dict.fromkeys(MEGATRON, _read_megatron),
    ".csv": _read_csv,
    ".tsv": _read_csv,
}
"""What reads the records of a file, by its ending."""
PACKABLE = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
"""Endings of records that may be compressed."""

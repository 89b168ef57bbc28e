"""Corpus: a source of text, whatever its form, as a sequence of named documents in a fixed order.

A source is the word `python-stdlib` (the standard library of the Python that runs this: real source code, nothing to
download), a file, a folder of files, or a dataset that `datasets` saved on disk. A file is read by its suffix: `.jsonl` one
document a line, `.parquet` one a row, anything else one text. In a folder, files and folders whose names begin with a dot are
left out, and files that are not UTF-8 text are skipped and counted; anything else unreadable is an error naming the place.
"""

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longctx.data.chat import ChatError, Message, parse_messages
from longctx.errors import UserError

STANDARD_LIBRARY = "python-stdlib"
_NOT_STANDARD = {"site-packages", "dist-packages", "__pycache__"}


class CorpusError(UserError):
    """A source that is missing, empty or malformed."""


@dataclass(frozen=True, slots=True)
class Document:
    """One document: `text`, or (then None) the `messages` of a conversation. `source_bytes`: its share of the source."""

    name: str
    text: str | None
    messages: tuple[Message, ...]
    source_bytes: float

    @property
    def texts(self) -> list[str]:
        """What there is to tokenise: the text, or the content of every message."""
        return [message.content for message in self.messages] if self.text is None else [self.text]


@dataclass
class Skipped:
    """What a pass over the source left out: files that are not UTF-8 text, by name, and the number of empty documents."""

    not_text: list[str] = field(default_factory=list)
    empty: int = 0


@dataclass(frozen=True)
class Corpus:
    """A source whose files are known and not yet read.

    Attributes:
        source: what was asked for.
        kind: python-stdlib, files or dataset.
        root: what document names are relative to.
        files: every file of the source, in the order of their names.
        text_column: the column or key of the text, in JSONL, Parquet and datasets.
    """

    source: str
    kind: str
    root: Path
    files: tuple[Path, ...]
    text_column: str = "text"

    @property
    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def fingerprint(self) -> str:
        """SHA-256 (hex) of names and contents of all files: the same on every machine, and changed by any change."""
        digest = hashlib.sha256(f"{self.kind}\n{self.text_column}\n".encode())
        for file in self.files:
            with file.open("rb") as stream:
                content = hashlib.file_digest(stream, "sha256").hexdigest()
            digest.update(f"{self._name(file)}\n{content}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def documents(self, skipped: Skipped | None = None) -> Iterator[Document]:
        """All documents with at least one character, always in the same order. Fills `skipped` on the way.

        Raises CorpusError naming file and line or row of the first malformed record.
        """
        skipped = skipped if skipped is not None else Skipped()
        for document in self._all_documents(skipped):
            if document.text == "":
                skipped.empty += 1
            else:
                yield document

    def _all_documents(self, skipped: Skipped) -> Iterator[Document]:
        if self.kind == "dataset":
            yield from _read_dataset(self.root, self.text_column, self.bytes)
            return
        for file in self.files:
            name = self._name(file)
            if self.kind != STANDARD_LIBRARY and file.suffix == ".jsonl":
                yield from _read_jsonl(file, name, self.text_column)
            elif self.kind != STANDARD_LIBRARY and file.suffix == ".parquet":
                yield from _read_parquet(file, name, self.text_column)
            elif (text := _read_text(file)) is not None:
                yield Document(name, text, (), file.stat().st_size)
            else:
                skipped.not_text.append(name)

    def _name(self, file: Path) -> str:
        return file.relative_to(self.root).as_posix()


def open_corpus(source: str, *, text_column: str = "text") -> Corpus:
    """Finds the files of a source. Raises CorpusError if there is nothing at `source`."""
    if source == STANDARD_LIBRARY:
        root = Path(sysconfig.get_path("stdlib"))
        files = [file for file in _walk(root, leave_out=_NOT_STANDARD) if file.suffix == ".py"]
        if not files:
            raise CorpusError(f"this Python has no source of its standard library in {root}: give another --source")
        return Corpus(source, STANDARD_LIBRARY, root, tuple(files), text_column)
    path = Path(source)
    if path.is_file():
        return Corpus(source, "files", path.parent, (path,), text_column)
    if not path.is_dir():
        raise CorpusError(f"source {source!r} does not exist: give `{STANDARD_LIBRARY}`, a file, a folder, or a saved dataset")
    if (path / "dataset_dict.json").exists():
        try:
            splits = json.loads((path / "dataset_dict.json").read_text("utf-8"))["splits"]
        except (ValueError, KeyError, TypeError) as error:
            raise CorpusError(f"{path / 'dataset_dict.json'} is damaged: {error}; give the folder of one split") from error
        ways_out = " or ".join(str(path / split) for split in splits)
        raise CorpusError(f"source {source!r} is a dataset with several splits: choose one, {ways_out}")
    files = list(_walk(path))
    if not files:
        raise CorpusError(f"source {source!r} is a folder without files: put text, .jsonl or .parquet files there")
    is_dataset = {"dataset_info.json", "state.json"} <= {file.name for file in files if file.parent == path}
    return Corpus(source, "dataset" if is_dataset else "files", path, tuple(files), text_column)


def _walk(root: Path, leave_out: set[str] | frozenset[str] = frozenset()) -> Iterator[Path]:
    """Files under `root` in the order of their relative names, without hidden ones and the folders named in `leave_out`."""
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in leave_out and not name.startswith(".")]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    # By the parts, not by the operating system's order, so that every machine has the same.
    return iter(sorted((file for file in found if file.is_file()), key=lambda file: file.relative_to(root).parts))


def _read_text(file: Path) -> str | None:
    """The text, or None if the file is not UTF-8 text. A NUL byte is valid UTF-8, but a mark of binary files."""
    content = file.read_bytes()
    if b"\0" in content:
        return None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _read_jsonl(file: Path, name: str, column: str) -> Iterator[Document]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise CorpusError(f"{file}:{number}: not UTF-8 at byte {error.start} of the line") from error
            except json.JSONDecodeError as error:
                raise CorpusError(f"{file}:{number}: not JSON: {error.msg} at column {error.colno}") from error
            if not isinstance(record, dict):
                raise CorpusError(f'{file}:{number}: a line must be an object like {{"{column}": ".."}}')
            yield _document(record, f"{name}:{number}", f"{file}:{number}", column, len(line))


def _read_parquet(file: Path, name: str, column: str) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise CorpusError(f"{file} is not a Parquet file: {error}") from error
    wanted = _wanted_column(table.schema_arrow.names, column, str(file))
    share = file.stat().st_size / max(1, table.metadata.num_rows)
    row = 0
    for batch in table.iter_batches(batch_size=256, columns=[wanted]):
        for record in batch.to_pylist():
            yield _document(record, f"{name}:{row}", f"{file}, row {row}", column, share)
            row += 1


def _read_dataset(folder: Path, column: str, size: int) -> Iterator[Document]:
    import datasets
    import pyarrow

    try:
        dataset = datasets.load_from_disk(str(folder))
    except (pyarrow.ArrowInvalid, ValueError, KeyError) as error:
        raise CorpusError(f"{folder} looks like a saved dataset, and `datasets` cannot load it: {error}") from error
    rows = dataset.select_columns([_wanted_column(dataset.column_names, column, str(folder))])
    for row, record in enumerate(rows):
        yield _document(record, f"{folder.name}:{row}", f"{folder}, row {row}", column, size / len(rows))


def _wanted_column(columns: list[str], column: str, where: str) -> str:
    for wanted in (column, "messages"):
        if wanted in columns:
            return wanted
    raise CorpusError(f"{where} has neither column {column!r} nor 'messages', only {', '.join(columns)}: use --text-column")


def _document(record: dict[str, Any], name: str, where: str, column: str, source_bytes: float) -> Document:
    """One record of JSONL, Parquet or a dataset: its text, or else its messages."""
    text: str | None = None
    messages: tuple[Message, ...] = ()
    if column in record:
        text = record[column]
        if not isinstance(text, str):
            raise CorpusError(f"{where}: {column!r} is of type {type(text).__name__}: it must be text")
    elif "messages" in record:
        try:
            messages = parse_messages(record["messages"])
        except ChatError as error:
            raise CorpusError(f"{where}: {error}") from error
    else:
        keys = ", ".join(record) or "nothing"
        raise CorpusError(f"{where}: has neither {column!r} nor 'messages', only {keys}: use --text-column")
    document = Document(name, text, messages, source_bytes)
    for part in document.texts:
        try:
            part.encode("utf-8")
        except UnicodeEncodeError as error:
            raise CorpusError(f"{where}: holds half of a surrogate pair (\\u{ord(part[error.start]):x}): not text") from error
    return document

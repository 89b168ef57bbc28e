"""Corpus: a text source of any kind as a sequence of named documents in a fixed order.

A source is `python-stdlib` (the standard library of the running Python: real source code, no download), a file, a folder of
files, or a dataset that `datasets` saved on disk. The suffix of a file decides how it is read: `.jsonl` has one record per
line, `.parquet` one per row, any other file is one text; `longctx.data.formats` describes records. In a folder, files and
folders whose names begin with a dot are ignored, and files that are not UTF-8 text are skipped and counted; any other
unreadable file or record is an error that names the place.
"""

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longctx.data.chat import ChatError
from longctx.data.formats import PAIRS, Document, FormatError, columns_of, parse_json, parse_record, without_nulls
from longctx.errors import UserError, brief

STANDARD_LIBRARY = "python-stdlib"
_NOT_STANDARD = {"site-packages", "dist-packages", "__pycache__"}


class CorpusError(UserError):
    """A source that is missing, empty or malformed."""


@dataclass
class Found:
    """Counts of one pass over the source.

    Attributes:
        not_text: names of skipped files, which are not UTF-8 text.
        empty: number of empty documents, which are left out.
        useless_pairs: number of pairs without a preference, which are left out.
        formats: number of documents of each format.
        untrained: number of conversations whose turns all switch off the loss, which are left out.
        unused: number of records with each key that is not used.
        read_anew: whether earlier versions may have read a record differently.
    """

    not_text: list[str] = field(default_factory=list)
    empty: int = 0
    useless_pairs: int = 0
    formats: dict[str, int] = field(default_factory=dict)
    untrained: int = 0
    unused: dict[str, int] = field(default_factory=dict)
    read_anew: bool = False


@dataclass(frozen=True)
class Corpus:
    """A source whose files are known but not yet read.

    Attributes:
        source: the source as given.
        kind: python-stdlib, files or dataset.
        root: folder that document names are relative to.
        files: every file of the source, sorted by name.
        text_column: column or key of the text, if given; None: the keys of each record determine its format.
    """

    source: str
    kind: str
    root: Path
    files: tuple[Path, ...]
    text_column: str | None = None

    @property
    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def fingerprint(self) -> str:
        """Returns the SHA-256 (hex) of the names and contents of all files, the same on every machine."""
        column = {None: "text", "text": "text, and nothing else"}.get(self.text_column, self.text_column)
        digest = hashlib.sha256(f"{self.kind}\n{column}\n".encode())
        for file in self.files:
            with file.open("rb") as stream:
                content = hashlib.file_digest(stream, "sha256").hexdigest()
            digest.update(os.fsencode(file.relative_to(self.root).as_posix()) + f"\n{content}\n".encode())
        return digest.hexdigest()

    def documents(self, found: Found | None = None) -> Iterator[Document]:
        """Yields all documents with at least one character, always in the same order, and counts in `found`.

        Raises CorpusError naming file and line or row of the first malformed record, or the first document of another format
        if the source has preference pairs.
        """
        found = found if found is not None else Found()
        for documents in self._records(found):
            found.useless_pairs += not documents
            for document in documents:
                found.read_anew |= document.read_anew
                for key in document.unused:
                    found.unused[key] = found.unused.get(key, 0) + 1
                if document.text == "" or not document.has_loss:
                    found.empty += document.text == ""
                    found.untrained += not document.has_loss
                    continue
                found.formats[document.format] = found.formats.get(document.format, 0) + 1
                if PAIRS in found.formats and len(found.formats) > 1:
                    raise CorpusError(
                        f"{document.name} has format {document.format}, but the source has {' and '.join(found.formats)}: "
                        "preference pairs need another loss and cannot be mixed with other formats; prepare them separately"
                    )
                yield document

    def _records(self, found: Found) -> Iterator[list[Document]]:
        """Yields the documents of every record; an empty list for a pair without a preference."""
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
                yield [Document(name, file.stat().st_size, text)]
            else:
                found.not_text.append(name)

    def _name(self, file: Path) -> str:
        """Returns the name of a file, in which bytes that are not UTF-8 are written as \\xff."""
        return os.fsencode(file.relative_to(self.root).as_posix()).decode("utf-8", "backslashreplace")


def open_corpus(source: str, *, text_column: str | None = None) -> Corpus:
    """Finds the files of a source. Raises CorpusError if `source` does not exist or cannot be a source."""
    if source == STANDARD_LIBRARY:
        root = Path(sysconfig.get_path("stdlib"))
        files = [file for file in _walk(root, leave_out=_NOT_STANDARD) if file.suffix == ".py"]
        if not files:
            raise CorpusError(f"the source of Python's standard library is not in {root}: give another --source")
        return Corpus(source, STANDARD_LIBRARY, root, tuple(files), text_column)
    path = Path(source)
    if path.is_file():
        if path.suffix == ".json" and text_column is None:
            _refuse_records(path)
        return Corpus(source, "files", path.parent, (path,), text_column)
    if not path.is_dir():
        raise CorpusError(f"source {source!r} does not exist: give `{STANDARD_LIBRARY}`, a file, a folder, or a saved dataset")
    if (path / "dataset_dict.json").exists():
        try:
            splits = json.loads((path / "dataset_dict.json").read_text("utf-8"))["splits"]
            ways_out = " or ".join(str(path / split) for split in splits)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CorpusError(
                f"{path / 'dataset_dict.json'} is damaged: {brief(error)}; give the folder of one split"
            ) from error
        raise CorpusError(f"source {source!r} is a dataset with several splits: choose one, {ways_out}")
    files = list(_walk(path))
    if not files:
        raise CorpusError(f"source {source!r} is a folder without files: put text, .jsonl or .parquet files there")
    is_dataset = {"dataset_info.json", "state.json"} <= {file.name for file in files if file.parent == path}
    return Corpus(source, "dataset" if is_dataset else "files", path, tuple(files), text_column)


def _refuse_records(file: Path) -> None:
    """Raises CorpusError for a JSON list of records, which would otherwise be read as one text."""
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return
    if isinstance(content, list) and content and isinstance(content[0], dict):
        raise CorpusError(
            f"{file} is a list of {len(content):,} records, but records must be in a .jsonl file, one per line: "
            f"jq -c '.[]' {file} > {file.with_suffix('.jsonl')}"
        )


def _walk(root: Path, leave_out: set[str] | frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yields the files under `root`, sorted by relative name, without hidden ones and the folders named in `leave_out`."""
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in leave_out and not name.startswith(".")]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    # Sorted by path parts: the order of the file system differs between machines.
    return iter(sorted((file for file in found if file.is_file()), key=lambda file: file.relative_to(root).parts))


def _read_text(file: Path) -> str | None:
    """Returns the text, or None if the file is not UTF-8 text. A NUL byte is valid UTF-8, but indicates a binary file."""
    content = file.read_bytes()
    if b"\0" in content:
        return None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _read_jsonl(file: Path, name: str, column: str | None) -> Iterator[list[Document]]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                record = parse_json(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                raise CorpusError(f"{file}:{number}: not UTF-8 at byte {error.start} of the line") from error
            except FormatError as error:
                raise CorpusError(f"{file}:{number}: {error}") from error
            if not isinstance(record, dict):
                raise CorpusError(f'{file}:{number}: a line must be an object such as {{"text": ".."}}')
            yield _documents(record, f"{name}:{number}", f"{file}:{number}", column, len(line))


def _read_parquet(file: Path, name: str, column: str | None) -> Iterator[list[Document]]:
    import pyarrow
    import pyarrow.parquet

    row = 0
    try:
        table = pyarrow.parquet.ParquetFile(file)
        wanted = _columns(table.schema_arrow.names, column, str(file))
        unread = dict.fromkeys(set(table.schema_arrow.names) - set(wanted), ...)  # so that records count them as not used
        share = file.stat().st_size / max(1, table.metadata.num_rows)
        for batch in table.iter_batches(batch_size=256, columns=wanted):
            for record in batch.to_pylist():
                yield _documents(_row(record) | unread, f"{name}:{row}", f"{file}, row {row}", column, share)
                row += 1
    except UserError:
        raise
    except (pyarrow.ArrowException, ValueError, OSError, OverflowError, TypeError, KeyError) as error:
        where = f"is damaged after row {row - 1}" if row else "is not a Parquet file, or damaged"
        raise CorpusError(f"{file} {where}: {brief(error)}; write it again") from error


def _read_dataset(folder: Path, column: str | None, size: int) -> Iterator[list[Document]]:
    import datasets

    try:
        dataset = datasets.load_from_disk(str(folder))
        rows = dataset.select_columns(_columns(dataset.column_names, column, str(folder)))
        unread = dict.fromkeys(set(dataset.column_names) - set(rows.column_names), ...)
        for row, record in enumerate(rows):
            yield _documents(_row(record) | unread, f"row:{row}", f"{folder}, row {row}", column, size / len(rows))
    except UserError:
        raise
    except Exception as error:  # the library checks none of its files: damage raises whatever Python raises
        said = f"{type(error).__name__}: {brief(error)}"
        raise CorpusError(
            f"{folder} looks like a saved dataset, but `datasets` cannot read it ({said}): save it again"
        ) from error


def _row(record: dict[str, Any]) -> dict[str, Any]:
    return {key: without_nulls(value) for key, value in record.items()}


def _columns(names: list[str], column: str | None, where: str) -> list[str]:
    try:
        return columns_of(names, column)
    except FormatError as error:
        raise CorpusError(f"{where}: {error}") from error


def _documents(record: dict[str, Any], name: str, where: str, column: str | None, source_bytes: float) -> list[Document]:
    try:
        return parse_record(record, name, source_bytes, column)
    except (FormatError, ChatError) as error:
        raise CorpusError(f"{where}: {error}") from error

"""Corpus: a text source of any kind as a sequence of named documents in a fixed order.
`longctx.data.records.sources` opens one.

A source is `python-stdlib` (this Python's standard library: real source code, no download), a file,
a folder, a dataset that `datasets` saved, or one of the hub. The ending of a file decides whether
it is read as records (`READERS`) or as one text (`TEXT_ENDINGS`, or all with `as_text`). Of several
splits, one is read. Everything else in a folder is counted in `Corpus.not_read` with the reason,
but for names that begin with a dot. Texts that are not UTF-8 are skipped and counted; any other
unreadable file or record is an error that names the place.
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from longctx.data.records.chat import ChatError
from longctx.data.records.formats import Document, parse_record
from longctx.data.records.messages import FormatError
from longctx.data.records.nulls import AddedMembers, may_have_added
from longctx.data.records.once import named
from longctx.data.records.readers import (
    READERS,
    CorpusError,
    HubDataset,
    Reader,
    Record,
    ending_of,
    read_dataset,
    read_hub,
    read_span,
    read_text,
)
from longctx.data.records.slices import Slice, joined_digests, slices_of, version_of
from longctx.data.records.splits import PLAIN

STANDARD_LIBRARY = "python-stdlib"
SKIPPED_NAMES = 10
"""Number of skipped files that are named."""
JSON = (".jsonl", ".ndjson", ".json")
LOOKED_AT = 10_000
"""Least number of records that tell whether a table wrote them, where reading stops at a limit."""


@dataclass(kw_only=True)
class SourceCounts:
    """Counts of one pass over the source.

    Attributes:
        skipped_files: number of files that are left out because they are not UTF-8 text;
            `skipped_names` are the first.
        empty_documents: number of documents that are left out because they have no text.
        formats: number of documents of each format, including documents dropped later.
        noted: number of other things that a reader should know, by what they are, such as text
            files that are split.
        untrained_documents: number of documents that switch off the loss of everything, which are
            left out.
        unused: number of records with each key that is not used.
    """

    skipped_files: int = 0
    skipped_names: list[str] = field(default_factory=list)
    empty_documents: int = 0
    formats: dict[str, int] = field(default_factory=dict)
    noted: dict[str, int] = field(default_factory=dict)
    untrained_documents: int = 0
    unused: dict[str, int] = field(default_factory=dict)

    def plus(self, later: "SourceCounts") -> "SourceCounts":
        """Returns the counts of this pass and a later one."""
        names = [*self.skipped_names, *later.skipped_names]
        return SourceCounts(
            skipped_files=self.skipped_files + later.skipped_files,
            skipped_names=names[:SKIPPED_NAMES],
            empty_documents=self.empty_documents + later.empty_documents,
            formats=_summed(self.formats, later.formats),
            noted=_summed(self.noted, later.noted),
            untrained_documents=self.untrained_documents + later.untrained_documents,
            unused=_summed(self.unused, later.unused),
        )

    def skip(self, name: str) -> None:
        """Counts a file that is not text."""
        self.skipped_files += 1
        self.skipped_names += [name] * (self.skipped_files <= SKIPPED_NAMES)


@dataclass(frozen=True)
class Corpus:
    """A source whose files are known but not yet read.

    Attributes:
        kind: python-stdlib, files, dataset or hub.
        root: folder that document names are relative to.
        files: every file that is read, sorted by name.
        not_read: number of other files by reason.
        max_documents: stop after this number of documents; None: read all.
        max_bytes: stop after the document with which there are so many bytes of UTF-8, or of token
            ids, 4 each.
        text_column: column or key of the text, if given; None: the keys of each record determine
            its format.
        separator: what separates documents in files that are one text each, if given; "": nothing
            does.
        noted: what else a reader should know of the files, such as shards that are missing, with
            counts.
        ends: tokens of which the first that a plain text file (.txt) contains separates its
            documents, without `separator`.
    """

    source: str
    kind: str
    root: Path
    files: tuple[Path, ...]
    text_column: str | None = None
    not_read: Mapping[str, int] = field(default_factory=dict)
    as_text: bool = False
    max_documents: int | None = None
    max_bytes: int | None = None
    hub: HubDataset | None = None
    separator: str | None = None
    ends: tuple[str, ...] = ()
    noted: dict[str, int] = field(default_factory=dict)

    @property
    def limits(self) -> dict[str, int]:
        limits = {"max_documents": self.max_documents, "max_bytes": self.max_bytes}
        return {name: value for name, value in limits.items() if value is not None}

    @cached_property
    def bytes(self) -> int:
        """Size of the files; 0 of a data set on the hub."""
        return sum(file.stat().st_size for file in self.files)

    @cached_property
    def slices(self) -> list[Slice]:
        """Parts that can be read alone, in order: one where reading stops at a limit, and of data
        sets."""
        if self.kind == "files" and not self.limits:
            return slices_of(self.files, cut=not self.as_text)
        return [Slice(self.files)]

    def fingerprint(self, digests: Mapping[str, str] | None = None) -> str:
        """Returns the SHA-256 (hex) of the names and contents of all files, the same on every
        machine. `digests`: those of the files, by path from the root, if they are known."""
        digests = self.digests if digests is None else digests
        digest = hashlib.sha256(
            f"{self.kind}\n{self.text_column}\n{self.separator!r} {self.ends}\n".encode()
        )
        if self.limits or self.hub:
            digest.update(
                f"{self.limits} {self.hub and replace(self.hub, revision=None)}\n".encode()
            )
        for file in self.files:
            path = self._path(file)
            kind = "text" if self._is_text(file) else "records"
            digest.update(os.fsencode(path) + f"\n{digests[path]}\n{kind}\n".encode())
        return digest.hexdigest()

    @cached_property
    def digests(self) -> dict[str, str]:
        """Digest of every file, by path from the root. Reads all of them."""
        return joined_digests([self.digests_of(slice_) for slice_ in self.slices])

    def digests_of(self, slice_: Slice) -> dict[str, str]:
        """Returns the SHA-256 (hex) of every file of a slice, or of its span, by path."""
        return {self._path(file): slice_.digest(file) for file in slice_.files}

    def listing(self, *, with_times: bool) -> str:
        """Returns the SHA-256 (hex) of how the source is read, and of names and sizes of all files,
        with the times of their last change if wanted. Reads none of them."""
        files = []
        for file in self.files:
            state = file.stat()
            changed: int | str = 0
            if with_times:
                changed = version_of(file)
            files.append((self._path(file), state.st_size, changed, self._is_text(file)))
        hub = self.hub and replace(self.hub, revision=None)
        how = (self.kind, self.text_column, self.separator, self.ends, self.limits, hub)
        return hashlib.sha256(repr((how, files)).encode()).hexdigest()

    def same_texts(self, digests: Mapping[str, str] | None = None) -> dict[str, int]:
        """Returns what to know of files with the text of another file, with their number. They are
        read. `digests`: those of all files; None: files of equal size are read."""
        if self.kind != "files":
            return {}
        texts = [file for file in self.files if self._is_text(file) and file.stat().st_size]
        if digests is None:
            sizes = Counter(file.stat().st_size for file in texts)
            texts = [file for file in texts if sizes[file.stat().st_size] > 1]
            digests = self.digests_of(Slice(tuple(texts)))
        first: dict[str, Path] = {}
        same = [file for file in texts if first.setdefault(digests[self._path(file)], file) != file]
        if same:
            return {
                named("texts that are the same as another file, all read", same, self.root): len(
                    same
                )
            }
        return {}

    def documents(self, counts: SourceCounts | None = None) -> Iterator[Document]:
        """Yields all documents with at least one character, always in the same order, and adds to
        `counts`.

        Raises CorpusError naming file and line or row of the first malformed record.
        """
        if counts is None:
            counts = SourceCounts()
        else:
            counts.noted.update(self.noted | self.same_texts())
        for slice_ in self.slices:
            yield from self.documents_of(slice_, counts)

    def documents_of(self, slice_: Slice, counts: SourceCounts) -> Iterator[Document]:
        """Yields the documents of a slice, as `documents` does, and adds what is in it to
        `counts`."""
        taken = size = 0
        for document in self._read(slice_, counts):
            _count(counts.unused, *document.unused)
            for what, number in document.nulls.items():
                counts.noted[what] = counts.noted.get(what, 0) + number
            if document.is_empty or not document.has_loss:
                counts.empty_documents += document.is_empty
                counts.untrained_documents += not document.is_empty
                continue
            _count(counts.formats, document.format)
            yield document
            size += document.bytes if self.max_bytes is not None else 0
            taken += 1
            if taken == self.max_documents or (
                self.max_bytes is not None and size >= self.max_bytes
            ):
                return

    def _read(self, slice_: Slice, counts: SourceCounts) -> Iterator[Document]:
        if self.kind == "dataset" or self.hub is not None:
            for record in self._rows():
                yield self._document(record, counts)
            return
        if slice_.is_span:
            (file,) = slice_.files
            span = {"start": slice_.start, "stop": slice_.stop}
            for record in read_span(file, self._name(file), self.text_column, **span):
                yield self._document(record, counts, file)
            return
        for file in slice_.files:
            if (reader := self._reader(file)) is not None:
                for record in reader(file, self._name(file), self.text_column):
                    yield self._document(record, counts, file)
            elif (text := read_text(file)) is not None:
                yield from self._separated(file, text, counts)
            else:
                counts.skip(self._name(file))

    def _separated(self, file: Path, text: str, counts: SourceCounts) -> Iterator[Document]:
        """Yields the documents of a text file; a line break beside a separator is part of it."""
        if file.suffix.lower() in PLAIN:
            found = next((end for end in self.ends if end in text), "")
        else:
            found = ""
        separator = found if self.separator is None else self.separator
        if separator:
            pieces = re.split(rf"(?:\r?\n)?{re.escape(separator)}(?:\r?\n)?", text)
        else:
            pieces = [text]
        name = self._name(file)
        size = file.stat().st_size
        if len(pieces) == 1:
            yield Document(name, size, text)
            return
        _count(counts.noted, f"text files split where {separator!r} ends a document")
        numbered = [(number, piece) for number, piece in enumerate(pieces, start=1) if piece]
        yield from (
            Document(f"{name}:{number}", size / len(numbered), piece) for number, piece in numbered
        )

    def _rows(self) -> Iterator[Record]:
        """Yields the rows of a data set."""
        if self.hub is None:
            return read_dataset(self.root, self.text_column, self.bytes)
        return read_hub(self.hub, self.text_column, streamed=bool(self.limits))

    @cached_property
    def _added(self) -> dict[str, AddedMembers]:
        """Null members that tables have added to JSON, by file: by all records, or the first where
        reading stops at a limit."""
        most = max(LOOKED_AT, self.max_documents or 0) if self.limits else None
        if self.kind == "dataset" or self.hub is not None:
            return {"": AddedMembers(_values(islice(self._rows(), most)), together=False)}
        added: dict[str, AddedMembers] = {}
        for file in self.files:
            if (reader := self._reader(file)) is not None:
                records = islice(reader(file, self._name(file), self.text_column), most)
                members = AddedMembers(_values(records), together=ending_of(file) in JSON)
                for other in added.values():
                    members.join(other)
                added[str(file)] = members
        return added

    def _document(self, record: Record, counts: SourceCounts, file: Path | None = None) -> Document:
        try:
            values = self._without_added(record, counts, file)
            return parse_record(values, record.name, record.source_bytes, self.text_column)
        except (FormatError, ChatError) as error:
            raise CorpusError(f"{record.where}: {error}") from error
        except RecursionError as error:
            raise CorpusError(
                f"{record.where}: a value is nested too deeply: remove the record"
            ) from error

    def _without_added(
        self, record: Record, counts: SourceCounts, file: Path | None
    ) -> dict[str, Any]:
        """Returns the values of a record without null members that a table added, which are
        counted."""
        values = record.values
        added = Counter(record.added)
        if self.text_column not in values and may_have_added(values):
            values, more = self._added["" if file is None else str(file)].remove(values)
            added += more
        for column, number in added.items():
            what = f"null members of {column} that a table added, left out"
            counts.noted[what] = counts.noted.get(what, 0) + number
        return values

    def _reader(self, file: Path) -> Reader | None:
        """Returns what reads the records of a file; None: it is one text."""
        if self.kind == STANDARD_LIBRARY or self.as_text:
            return None
        return READERS.get(ending_of(file))

    def _is_text(self, file: Path) -> bool:
        return self._reader(file) is None

    def _path(self, file: Path) -> str:
        """Returns the path of a file from the root, the same on every machine."""
        return file.relative_to(self.root).as_posix()

    def _name(self, file: Path) -> str:
        """Returns the name of a file, in which bytes that are not UTF-8 are written as \\xff."""
        return os.fsencode(self._path(file)).decode("utf-8", "backslashreplace")


def _values(records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    """Yields the values of records up to one that cannot be read, which is told where it is read as
    a document."""
    with suppress(CorpusError):
        for record in records:
            yield record.values


def _summed(counts: Mapping[str, int], later: Mapping[str, int]) -> dict[str, int]:
    """Returns the sums by name, in the order in which names are first counted."""
    result = dict(counts)
    for name, count in later.items():
        result[name] = result.get(name, 0) + count
    return result


def _count(counts: dict[str, int], *names: str) -> None:
    for name in names:
        counts[name] = counts.get(name, 0) + 1

"""Corpus: a text source of any kind as a sequence of named documents in a fixed order.

A source is `python-stdlib` (this Python's standard library: real source code, no download), a file,
a folder, a dataset that `datasets` saved, or one of the hub. The ending of a file decides whether
it is read as records (`READERS`) or as one text (`TEXT_ENDINGS`, or all with `as_text`). Of several
splits, one is read. Everything else in a folder is counted in `Corpus.not_read` with the reason,
but for names that begin with a dot. Texts that are not UTF-8 are skipped and counted; any other
unreadable file or record is an error that names the place.
"""

import hashlib
import json
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from longctx.arguments import a_path, checked, flag, kind, or_none, whole
from longctx.data.records.chat import ChatError
from longctx.data.records.formats import Document, parse_record
from longctx.data.records.messages import FormatError
from longctx.data.records.nulls import AddedMembers, may_have_added
from longctx.data.records.once import check_pointers, check_tables, finished, named, once, told
from longctx.data.records.readers import (
    MEGATRON,
    READERS,
    CorpusError,
    HubDataset,
    Reader,
    Record,
    ending_of,
    read_dataset,
    read_hub,
    read_text,
)
from longctx.errors import brief
from longctx.paths import expanded

STANDARD_LIBRARY = "python-stdlib"
_NOT_STANDARD = {"site-packages", "dist-packages", "__pycache__"}
_ENDINGS = """
    txt text md markdown rst adoc org tex bib htm html xhtml xml srt vtt
    py pyi pyx c h cc cpp cxx hh hpp hxx inl cu cuh cl rs go java kt kts scala groovy clj
    js mjs cjs jsx ts tsx vue css scss less rb php pl pm lua jl r m mm swift cs fs vb hs
    ml mli ex exs erl elm lean v sv vhd f f90 f95 pas asm s sh bash zsh fish ps1 bat
    sql proto thrift graphql yaml yml toml ini cfg conf cmake mk diff patch jinja j2
"""
TEXT_ENDINGS = frozenset(f".{ending}" for ending in _ENDINGS.split())
"""Endings of files that are one text each."""
PLAIN = (".txt", ".text")
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Split by the word in the path of a file of records, as `datasets` has it."""
_SPLIT = re.compile(rf"(?<![^\W_])(({'|'.join(SPLITS)})(?![^\W\d_])\w*)", re.IGNORECASE)
SKIPPED_NAMES = 10
"""Number of skipped files that are named."""
JSON = (".jsonl", ".ndjson", ".json")
LOOKED_AT = 10_000
"""Least number of records that tell whether a table wrote them, where reading stops at a limit."""
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]*[\w-]")
_SHARD = re.compile(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}")
_ABOUT = re.compile(r"(readme|licen[cs]e|notice|citation|changelog|requirements)\b", re.IGNORECASE)


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

    def fingerprint(self) -> str:
        """Returns the SHA-256 (hex) of the names and contents of all files, the same on every
        machine."""
        digest = hashlib.sha256(
            f"{self.kind}\n{self.text_column}\n{self.separator!r} {self.ends}\n".encode()
        )
        if self.limits or self.hub:
            digest.update(
                f"{self.limits} {self.hub and replace(self.hub, revision=None)}\n".encode()
            )
        for file, content in self._digests.items():
            kind = "text" if self._reader(file) is None else "records"
            digest.update(
                os.fsencode(file.relative_to(self.root).as_posix())
                + f"\n{content}\n{kind}\n".encode()
            )
        return digest.hexdigest()

    @cached_property
    def _digests(self) -> dict[Path, str]:
        """SHA-256 (hex) of every file."""
        digests = {}
        for file in self.files:
            with file.open("rb") as stream:
                digests[file] = hashlib.file_digest(stream, "sha256").hexdigest()
        return digests

    def _same_texts(self) -> dict[str, int]:
        """Returns what to know of texts that are those of another file, with their number. They are
        read."""
        if self.kind != "files":
            return {}
        first: dict[str, Path] = {}
        texts = [file for file in self.files if self._reader(file) is None and file.stat().st_size]
        same = [file for file in texts if first.setdefault(self._digests[file], file) != file]
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
        counts = counts if counts is not None else SourceCounts()
        counts.noted.update(self.noted | self._same_texts())
        taken = size = 0
        for document in self._read(counts):
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

    def _read(self, counts: SourceCounts) -> Iterator[Document]:
        if self.kind == "dataset" or self.hub is not None:
            for record in self._rows():
                yield self._document(record, counts)
            return
        for file in self.files:
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

    def _name(self, file: Path) -> str:
        """Returns the name of a file, in which bytes that are not UTF-8 are written as \\xff."""
        return os.fsencode(file.relative_to(self.root).as_posix()).decode(
            "utf-8", "backslashreplace"
        )


def _values(records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    """Yields the values of records up to one that cannot be read, which is told where it is read as
    a document."""
    with suppress(CorpusError):
        for record in records:
            yield record.values


def _count(counts: dict[str, int], *names: str) -> None:
    for name in names:
        counts[name] = counts.get(name, 0) + 1


_TEXT = kind("a text", str)


@checked(
    CorpusError,
    source=a_path,
    text_column=or_none(_TEXT),
    split=or_none(_TEXT),
    as_text=flag,
    subset=or_none(_TEXT),
    revision=or_none(_TEXT),
    max_documents=or_none(whole(least=1)),
    max_bytes=or_none(whole(least=1)),
    document_separator=or_none(_TEXT),
)
def open_corpus(
    source: str,
    *,
    text_column: str | None = None,
    split: str | None = None,
    as_text: bool = False,
    subset: str | None = None,
    revision: str | None = None,
    max_documents: int | None = None,
    max_bytes: int | None = None,
    document_separator: str | None = None,
) -> Corpus:
    """Finds the files of a source, or a data set on the hub, if there is no file of that name.

    `split` is the split to read, where files or a dataset have several; None: train. `as_text`
    reads every file as one text. `subset` and `revision` are those of a data set on the hub. With
    `max_documents` or `max_bytes`, reading stops there, and a data set of the hub is streamed.
    `document_separator` separates documents in files that are one text each. Raises CorpusError if
    `source` does not exist or cannot be a source, or has no such split.
    """
    source = expanded(source)
    if source != STANDARD_LIBRARY:
        _check_there(Path(source))
    if source != STANDARD_LIBRARY and _HUB_NAME.fullmatch(source) and not Path(source).exists():
        if as_text:
            raise CorpusError(
                f"source {source!r} is no file or folder to read as text: omit --as-text, or "
                "correct it"
            )
        hub = HubDataset.look_up(source, subset, split or "train", revision)
        corpus = Corpus(source, "hub", root=Path(), files=(), text_column=text_column, hub=hub)
    elif subset is not None or revision is not None:
        raise CorpusError(f"{source!r} is no OWNER/NAME of the hub: omit --subset and --revision")
    else:
        corpus = _local(source, text_column, split, as_text)
    return replace(
        corpus, max_documents=max_documents, max_bytes=max_bytes, separator=document_separator
    )


def _local(source: str, text_column: str | None, split: str | None, as_text: bool) -> Corpus:
    if source == STANDARD_LIBRARY:
        root = Path(sysconfig.get_path("stdlib"))
        library = [file for file in _walk(root, Counter(), _NOT_STANDARD) if file.suffix == ".py"]
        if not library:
            raise CorpusError(
                f"the source of Python's standard library is not in {root}: give another --source"
            )
        return Corpus(
            source, STANDARD_LIBRARY, root=root, files=tuple(library), text_column=text_column
        )
    path = Path(source)
    not_read = Counter[str]()
    if split is not None and (as_text or not path.is_dir()):
        raise CorpusError(
            f"split {split!r} cannot be chosen: {source!r} is one file, or is read as text; omit "
            "--split"
        )
    if path.is_file():
        if not (as_text or ending_of(path) in READERS or path.suffix.lower() in TEXT_ENDINGS):
            raise CorpusError(
                f"{path} is read neither as records ({', '.join(READERS)}) nor as text (such as "
                ".txt, .md, .py) by its ending: "
                "rename it (only records may be compressed, as .gz or .zst), or give --as-text to "
                "read it as one text"
            )
        if ending_of(path) in MEGATRON and not as_text:
            both = [path.with_suffix(ending) for ending in MEGATRON]
        else:
            both = [path]
        there = tuple(filter(Path.exists, both))
        check_pointers(there)
        return Corpus(
            source, "files", root=path.parent, files=there, text_column=text_column, as_text=as_text
        )
    if not path.is_dir():
        raise CorpusError(
            f"source {source!r} does not exist: give `{STANDARD_LIBRARY}`, a file, a folder, a "
            "saved dataset, or OWNER/NAME"
        )
    if (path / "dataset_dict.json").exists():
        folders = _splits_of(path / "dataset_dict.json")
        name = _chosen(source, split, folders)
        not_read.update(f"split {other}" for other in folders if other != name)
        path = path / name
    files = finished(list(_walk(path, not_read)), path, not_read)
    if {"dataset_info.json", "state.json"} <= {file.name for file in files if file.parent == path}:
        if split is not None and path == Path(source):
            raise CorpusError(
                f"split {split!r} cannot be chosen: {source!r} is one saved dataset; omit --split"
            )
        check_pointers(files)
        return Corpus(
            source,
            "dataset",
            root=path,
            files=tuple(files),
            text_column=text_column,
            not_read=not_read,
        )
    if saved := sorted(
        str(f.parent)
        for f in files
        if f.name == "state.json" and f.with_name("dataset_info.json") in files
    ):
        raise CorpusError(
            f"source {source!r} is a folder of saved datasets: give one of them, "
            f"{' or '.join(saved)}"
        )
    check_pointers(file for file in files if file.suffix.lower() == ".dvc")
    if not as_text:
        files = _records_and_texts(source, path, files=files, split=split, not_read=not_read)
    if not files:
        others = "".join(f"; {count:,} × {reason}" for reason, count in sorted(not_read.items()))
        raise CorpusError(
            f"source {source!r} is a folder without files to read{others}: put text, "
            f"{', '.join(READERS)} files there, or give "
            "--as-text to read every file as one text"
        )
    check_pointers(files)
    files = once(files, path, not_read, as_text=as_text)
    noted = {} if as_text else told(files, path)
    return Corpus(
        source,
        "files",
        root=path,
        files=tuple(files),
        text_column=text_column,
        not_read=not_read,
        as_text=as_text,
        noted=noted,
    )


def _check_there(path: Path) -> None:
    """Raises CorpusError for a source that only a pointer stands for, or a link."""
    check_pointers([path, path.with_name(f"{path.name}.dvc")])
    if path.is_symlink() and not path.exists():
        raise CorpusError(
            f"source {path} is a link to {path.readlink()}, which does not exist: correct the "
            "link, or the source"
        )


def _records_and_texts(
    source: str, root: Path, files: list[Path], split: str | None, not_read: Counter[str]
) -> list[Path]:
    """Returns the files to read: texts by their endings, and the records of one split. Counts the
    others in `not_read`."""
    records = {
        file
        for file in files
        if ending_of(file) in READERS and not file.stem.lower().startswith("dataset_info")
    }
    # train.txt, valid.txt.
    whole = (file for file in files if file.suffix.lower() in PLAIN and file.stem.lower() in SPLITS)
    named = {file: _named_splits(file, root) for file in (*records, *whole)}
    if all(kind != "train" for kind, _ in named.values()):
        named = {file: each if all(each) else ("train", "train") for file, each in named.items()}
    own = (split or "train") in {name for _, name in named.values()}
    split_of = {file: names[own] for file, names in named.items()}
    splits = {*split_of.values()}
    names = sorted({name for each in named.values() for name in each if name})
    if len(splits) > 1 or split is not None:
        chosen = _chosen(source, split, names)
    else:
        chosen = "".join(splits)
    several = sorted({name for kind, name in named.values() if kind == chosen})
    if split is None and not own and len(several) > 1:
        raise CorpusError(
            f"source {source!r} has {' and '.join(several)}: choose one with --split; --split "
            f"{chosen} reads all"
        )
    read = []
    for file in files:
        if split_of.get(file, chosen) != chosen:
            not_read[
                f"split {split_of[file]}"
                if split_of[file]
                else "no split in the name, beside train"
            ] += 1
        elif file in split_of:
            read.append(file)
        elif records and (file.suffix.lower() not in (*PLAIN, ".md") or _ABOUT.match(file.name)):
            not_read[
                f"{file.name if _ABOUT.match(file.name) or not file.suffix else file.suffix} "
                "beside records"
            ] += 1
        elif file.suffix.lower() in TEXT_ENDINGS:
            read.append(file)
        else:
            not_read[f"ending {file.suffix.lower()}" if file.suffix else "no ending"] += 1
    return read


def _named_splits(file: Path, root: Path) -> tuple[str, str]:
    """Returns the split of a file, and its own name: train and train_sft of `train_sft/a.parquet`;
    empty if it has none."""
    shard = _SHARD.match(file.name) if file.parent.name == "data" else None
    own, word = [("", ""), *_SPLIT.findall(str(file.relative_to(root)))][-1]
    name = shard[1] if shard else own.rstrip("_0123456789")
    return SPLITS.get(word.lower(), name), SPLITS.get(name.lower(), name)


def _chosen(source: str, split: str | None, splits: Iterable[str]) -> str:
    """Returns the split to read. Raises CorpusError if there is none of that name."""
    name = split or "train"
    name = name if name in splits else SPLITS.get(name.lower(), name)
    if name not in splits:
        raise CorpusError(
            f"source {source!r} has no split {name!r}: choose one with --split, "
            f"{' or '.join(splits) or 'none'}"
        )
    return name


def _splits_of(file: Path) -> list[str]:
    try:
        return [str(split) for split in json.loads(file.read_text("utf-8"))["splits"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorpusError(
            f"{file} is damaged: {brief(error)}; give the folder of one split"
        ) from error


def _unreadable(error: OSError) -> None:
    """Raises CorpusError for a folder that cannot be listed."""
    raise CorpusError(
        f"folder {error.filename} cannot be read: {error.strerror}: change its permissions, or "
        "remove it"
    ) from error


def _walk(
    root: Path, not_read: Counter[str], leave_out: set[str] | frozenset[str] = frozenset()
) -> Iterator[Path]:
    """Yields the files under `root`, sorted by relative name, without hidden ones and the folders
    named in `leave_out`.

    Links to folders are followed, each folder once, but not where folders are left out. Broken
    links are counted in `not_read`.
    """
    files: list[Path] = []
    again: list[Path] = []
    entered = {root.resolve()}
    for folder, folders, names in os.walk(root, onerror=_unreadable, followlinks=not leave_out):
        kept = []
        check_tables(Path(folder), folders, names)
        for name in sorted(folders, key=lambda name: (Path(folder, name).is_symlink(), name)):
            target = Path(folder, name).resolve()
            if name in leave_out or name.startswith("."):
                continue
            if target in entered:
                again.append(Path(folder, name))
                continue
            entered.add(target)
            kept.append(name)
        folders[:] = kept
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    broken = sorted(file for file in files if file.is_symlink() and not file.exists())
    check_pointers(broken)
    for what, left in (("link to a folder that is read already", again), ("broken link", broken)):
        if left:
            not_read[named(what, left, root)] = len(left)
    # Sorted by path parts: the order of the file system differs between machines.
    return iter(
        sorted(
            (file for file in files if file.is_file()),
            key=lambda file: file.relative_to(root).parts,
        )
    )

"""Sources: finds the files of a source, which may be this Python's standard library, a file, a
folder, a dataset that `datasets` saved, or one of the hub."""

import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from longctx.arguments import a_path, checked, flag, kind, or_none, whole
from longctx.data.records.corpus import STANDARD_LIBRARY, Corpus
from longctx.data.records.once import check_pointers, check_tables, finished, named, once, told
from longctx.data.records.readers import MEGATRON, READERS, CorpusError, HubDataset, ending_of
from longctx.data.records.splits import TEXT_ENDINGS, chosen_split, files_of_split, splits_of
from longctx.remote import RemotePath, any_name, any_path

_NOT_STANDARD = {"site-packages", "dist-packages", "__pycache__"}
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]*[\w-]")
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

    Args:
        source: `python-stdlib`, a file, a folder, or OWNER/NAME of the hub.
        text_column: Column or key of the text; None: the keys of each record determine its format.
        split: Split to read, where files or a dataset have several; None: train.
        as_text: Whether every file is read as one text.
        subset: Subset of a data set on the hub.
        revision: Revision of a data set on the hub.
        max_documents: Reading stops after this number of documents, and a data set of the hub is
            streamed; None: read all.
        max_bytes: Likewise, after the document with which there are so many bytes.
        document_separator: What separates documents in files that are one text each.

    Raises CorpusError if `source` does not exist or cannot be a source, or has no such split.
    """
    source = any_name(source)
    if not source:
        raise CorpusError(
            f"source is '': give `{STANDARD_LIBRARY}`, a file, a folder (. is this one), a saved "
            "dataset, or OWNER/NAME"
        )
    if source != STANDARD_LIBRARY:
        _check_there(any_path(source))
    if source != STANDARD_LIBRARY and _HUB_NAME.fullmatch(source) and not Path(source).exists():
        if as_text:
            raise CorpusError(
                f"source {source!r} is no file or folder to read as text: omit --as-text, or "
                "correct it"
            )
        hub = HubDataset.look_up(source, subset, split=split or "train", revision=revision)
        corpus = Corpus(source, "hub", root=Path(), files=(), text_column=text_column, hub=hub)
    elif subset is not None or revision is not None:
        raise CorpusError(f"{source!r} is no OWNER/NAME of the hub: omit --subset and --revision")
    else:
        corpus = _Local(source, text_column, split=split, as_text=as_text).corpus()
    return replace(
        corpus, max_documents=max_documents, max_bytes=max_bytes, separator=document_separator
    )


@dataclass(frozen=True)
class _Local:
    """A source on this machine, and how `open_corpus` was asked to read it."""

    source: str
    text_column: str | None
    split: str | None
    as_text: bool

    def corpus(self) -> Corpus:
        if self.source == STANDARD_LIBRARY:
            return self._standard_library()
        path = any_path(self.source)
        if self.split is not None and (self.as_text or not path.is_dir()):
            raise CorpusError(
                f"split {self.split!r} cannot be chosen: {self.source!r} is one file, or is read "
                "as text; omit --split"
            )
        if path.is_file():
            return self._file(path)
        if not path.is_dir():
            raise CorpusError(
                f"source {self.source!r} does not exist: give `{STANDARD_LIBRARY}`, a file, a "
                "folder, a saved dataset, or OWNER/NAME"
            )
        return self._folder(path)

    def _standard_library(self) -> Corpus:
        root = Path(sysconfig.get_path("stdlib"))
        files = _walk(root, Counter(), leave_out=frozenset(_NOT_STANDARD))
        modules = tuple(file for file in files if file.suffix == ".py")
        if not modules:
            raise CorpusError(
                f"the source of Python's standard library is not in {root}: give another --source"
            )
        return Corpus(
            self.source,
            STANDARD_LIBRARY,
            root=root,
            files=modules,
            text_column=self.text_column,
        )

    def _file(self, path: Path) -> Corpus:
        ending = ending_of(path)
        is_read = ending in READERS or path.suffix.lower() in TEXT_ENDINGS
        if not (self.as_text or is_read):
            raise CorpusError(
                f"{path} is read neither as records ({', '.join(READERS)}) nor as text (such as "
                ".txt, .md, .py) by its ending: rename it (only records may be compressed, as .gz "
                "or .zst), or give --as-text to read it as one text"
            )
        files = [path]
        if ending in MEGATRON and not self.as_text:
            files = [path.with_suffix(other) for other in MEGATRON]
        there = tuple(file for file in files if file.exists())
        check_pointers(there)
        return Corpus(
            self.source,
            "files",
            root=path.parent,
            files=there,
            text_column=self.text_column,
            as_text=self.as_text,
        )

    def _folder(self, path: Path) -> Corpus:
        not_read = Counter[str]()
        root = self._folder_of_split(path, not_read)
        files = finished(list(_walk(root, not_read)), root, not_read)
        if _is_saved_dataset(root, files):
            if isinstance(root, RemotePath):
                raise CorpusError(
                    f"{root} is a dataset that `datasets` saved, which is read from folders of "
                    "this machine only: copy it there, or give Parquet files"
                )
            return self._saved_dataset(root, files, not_read=not_read)
        self._refuse_saved_datasets(files)
        check_pointers(file for file in files if file.suffix.lower() == ".dvc")
        if not self.as_text:
            files = files_of_split(
                self.source, root, files=files, split=self.split, not_read=not_read
            )
        self._refuse_no_files(files, not_read)
        check_pointers(files)
        files = once(files, root, not_read, as_text=self.as_text)
        return Corpus(
            self.source,
            "files",
            root=root,
            files=tuple(files),
            text_column=self.text_column,
            not_read=not_read,
            as_text=self.as_text,
            noted={} if self.as_text else told(files, root),
        )

    def _folder_of_split(self, path: Path, not_read: Counter[str]) -> Path:
        """Returns the folder to read: of one split, where `datasets` saved several in `path`."""
        listed = path / "dataset_dict.json"
        if not listed.exists():
            return path
        splits = splits_of(listed)
        chosen = chosen_split(self.source, self.split, splits)
        for split in splits:
            if split != chosen:
                not_read[f"split {split}"] += 1
        return path / chosen

    def _saved_dataset(self, root: Path, files: list[Path], *, not_read: Counter[str]) -> Corpus:
        if self.split is not None and root == Path(self.source):
            raise CorpusError(
                f"split {self.split!r} cannot be chosen: {self.source!r} is one saved dataset; "
                "omit --split"
            )
        check_pointers(files)
        return Corpus(
            self.source,
            "dataset",
            root=root,
            files=tuple(files),
            text_column=self.text_column,
            not_read=not_read,
        )

    def _refuse_saved_datasets(self, files: list[Path]) -> None:
        folders = sorted(
            str(file.parent)
            for file in files
            if file.name == "state.json" and file.with_name("dataset_info.json") in files
        )
        if folders:
            raise CorpusError(
                f"source {self.source!r} is a folder of saved datasets: give one of them, "
                f"{' or '.join(folders)}"
            )

    def _refuse_no_files(self, files: list[Path], not_read: Counter[str]) -> None:
        if files:
            return
        others = "".join(f"; {count:,} × {reason}" for reason, count in sorted(not_read.items()))
        raise CorpusError(
            f"source {self.source!r} is a folder without files to read{others}: put text, "
            f"{', '.join(READERS)} files there, or give --as-text to read every file as one text"
        )


def _check_there(path: Path) -> None:
    """Raises CorpusError for a source that only a pointer stands for, or a link."""
    pointers = [path]
    if path.name:  # . and / have none
        pointers.append(path.with_name(f"{path.name}.dvc"))
    check_pointers(pointers)
    if path.is_symlink() and not path.exists():
        raise CorpusError(
            f"source {path} is a link to {path.readlink()}, which does not exist: correct the "
            "link, or the source"
        )


def _is_saved_dataset(root: Path, files: list[Path]) -> bool:
    """Returns whether `datasets` saved one dataset in `root`."""
    names = {file.name for file in files if file.parent == root}
    return {"dataset_info.json", "state.json"} <= names


def _unreadable(error: OSError) -> None:
    """Raises CorpusError for a folder that cannot be listed."""
    raise CorpusError(
        f"folder {error.filename} cannot be read: {error.strerror}: change its permissions, or "
        "remove it"
    ) from error


def _walk(
    root: Path, not_read: Counter[str], leave_out: frozenset[str] = frozenset()
) -> Iterator[Path]:
    """Yields the files under `root`, sorted by relative name, without hidden ones and the folders
    named in `leave_out`.

    Links to folders are followed, each folder once, but not where folders are left out. Broken
    links are counted in `not_read`.
    """
    if isinstance(root, RemotePath):
        yield from _listed(root)
        return
    files: list[Path] = []
    again: list[Path] = []
    entered = {root.resolve()}
    for folder, folders, names in os.walk(root, onerror=_unreadable, followlinks=not leave_out):
        kept = []
        check_tables(Path(folder), folders, names)
        for name in sorted(folders, key=lambda name: (Path(folder, name).is_symlink(), name)):
            path = Path(folder, name)
            target = path.resolve()
            if name in leave_out or name.startswith("."):
                continue
            if target in entered:
                again.append(path)
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
    there = [file for file in files if file.is_file()]
    # By path parts: the order of the file system differs between machines.
    yield from sorted(there, key=lambda file: file.relative_to(root).parts)


def _listed(root: RemotePath) -> list[Path]:
    """Returns the objects below a folder in object storage, as `_walk` does."""
    files: list[Path] = []
    for file in root.files():
        inner = file.relative_to(root)
        for folder in inner.parents:
            check_tables(root / folder.parent, [folder.name], [])
        check_tables(file.parent, [], [file.name])
        if not any(part.startswith(".") for part in inner.parts):
            files.append(file)
    return sorted(files, key=lambda file: file.relative_to(root).parts)

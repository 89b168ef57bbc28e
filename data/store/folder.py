"""The folder of a store: what is there already, and the folder beside it in which a store is built,
all or nothing."""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from longctx.data.store.index import HASHES, INDEX
from longctx.data.store.manifest import (
    MANIFEST,
    TOKENIZER,
    TOKENIZER_FILES,
    Manifest,
    StoreError,
    files_of_store,
    is_store,
)
from longctx.data.store.shares import FinishedSlice, try_lock
from longctx.data.store.writer import finished_parts
from longctx.errors import UserError
from longctx.own_files import MOVE_AWAY, others, replace

REQUEST = "request"
JOIN_LOCK = "join.lock"
"""Lock of the share that puts the store in place."""
LAYOUT = 8  # version of the files in an unfinished store; other versions cannot be resumed
NOTES = (
    *(REQUEST, "journal*.jsonl", "slice-*", f"{TOKENIZER}.lock", JOIN_LOCK),
    f"data-*{HASHES}",
)
"""Files for resuming and for sharing the work, removed from a finished store."""
WAIT_S = 30.0
"""Seconds in which another share is ready to begin."""
NAMES = (
    TOKENIZER,
    "data-*.arrow",
    "dataset_info.json",
    "state.json",
    *INDEX,
    f"{TOKENIZER_FILES}/*",
    *NOTES,
)
"""Names of the files of a store, besides its manifest, while it is made."""


def is_note(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in NOTES)


def present(out: Path, matches: Callable[[Manifest], bool], overwrite: bool) -> Manifest | None:
    """Returns the manifest at `out` if it matches what is asked for; None if a store may be made
    there; else raises StoreError."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not is_store(out):
        raise StoreError(
            f"{out} exists and is not a store, so it is not replaced: choose another --out, or "
            "remove it yourself"
        )
    try:
        manifest = Manifest.load(out)
    except StoreError:
        if not overwrite:
            raise
        _check_names(out)
        return None
    if matches(manifest):
        return manifest
    if overwrite:
        _check_names(out)
        return None
    raise StoreError(
        f"{out} holds a store of another source or other settings ({manifest.source}, "
        f"{manifest.documents:,} documents, vocabulary of {manifest.vocab_size:,}): choose "
        "another --out, or replace it with --overwrite"
    )


@contextmanager
def partial_folder(out: Path, request: str) -> Iterator[Path]:
    """Yields OUT.partial, locked against other processes, with the files of an interrupted
    preparation of the same request."""
    with _opened(out) as (folder, descriptor):
        if not _locked(folder, descriptor, fcntl.LOCK_EX):
            raise StoreError(f"another process is preparing {out}: wait until it has finished")
        _tidy(folder, request)
        try:
            yield folder
        except UserError:  # the input must change, so nothing here can be reused
            shutil.rmtree(folder)
            raise


@contextmanager
def shared_folder(out: Path, request: str) -> Iterator[Path]:
    """Yields OUT.partial as `partial_folder` does, locked against processes that are no shares of
    the same store.

    The first share removes what an interrupted preparation of another request has left.
    """
    with _opened(out) as (folder, descriptor):
        if _locked(folder, descriptor, fcntl.LOCK_EX):
            _tidy(folder, request)
        began = time.monotonic()
        while not _locked(folder, descriptor, fcntl.LOCK_SH):
            if time.monotonic() - began > WAIT_S:
                raise StoreError(
                    f"another process is preparing {out}, and not as a share: wait until it has "
                    "finished"
                )
            time.sleep(0.1)
        note = folder / REQUEST
        if not note.is_file() or note.read_text("utf-8") != _noted(request):
            raise StoreError(
                f"{folder} is of another source or other settings than this share's: give every "
                "share the same options, and the same files with their times of change (rsync -a)"
            )
        yield folder


@contextmanager
def _opened(out: Path) -> Iterator[tuple[Path, int]]:
    """Yields OUT.partial and a descriptor of it, by which it can be locked."""
    folder = Path(f"{out.resolve()}.partial")
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield folder, descriptor
    finally:
        os.close(descriptor)


def _locked(folder: Path, descriptor: int, kind: int) -> bool:
    """Returns whether the folder is locked now, and was not just renamed by its owner."""
    if not try_lock(descriptor, kind):
        return False
    return folder.is_dir() and os.path.samestat(os.fstat(descriptor), folder.stat())


def _noted(request: str) -> str:
    return f"{request} {LAYOUT}"


def _tidy(folder: Path, request: str) -> None:
    """Removes unfinished files, and all files of an interrupted preparation of another request."""
    note = folder / REQUEST
    request = _noted(request)
    files = list(folder.iterdir())
    if files and not note.is_file():
        raise StoreError(
            f"{folder} was not made by `longctx prepare`, but the store must be built there: move "
            "it, or choose another --out"
        )
    kept: set[str] = set()
    if files and note.read_text("utf-8") == request:
        kept = {REQUEST, TOKENIZER, *_finished(folder)}
    for file in files:
        if file.is_dir():
            shutil.rmtree(file)
        elif file.name not in kept and file != note:
            file.unlink()
    note.write_text(request, "utf-8")  # written last, so that kept files always match it


def _finished(folder: Path) -> set[str]:
    """Returns the names of finished parts, of the journals that list them, and of the notes of
    slices whose parts are all undamaged."""
    kept = set()
    for journal in folder.glob("journal*.jsonl"):
        kept.add(journal.name)
        kept.update(part.file for part in finished_parts(folder, journal.name))
    for note in folder.glob("slice-*.json"):
        try:
            parts = FinishedSlice.load(note).parts
        except (ValueError, TypeError, KeyError):
            continue
        if all(part.file in kept for part in parts):
            kept.add(note.name)
    return kept


def put_in_place(folder: Path, out: Path) -> list[str]:
    """Puts a finished store in its place. Returns the names of what lies there, is not of a store,
    and stays."""
    own = files_of_store(out) if is_store(out) else []
    return replace(out.resolve(), made=folder, own=own)


def _check_names(out: Path) -> None:
    """Raises StoreError if a file that the manifest of a store does not list has a name that only
    files of stores have."""
    foreign = others(out, own=files_of_store(out))
    for name in foreign:
        if any(fnmatch(name, pattern) for pattern in NAMES):
            raise StoreError(
                f"{out / name} is not listed in {MANIFEST}, and is not replaced: {MOVE_AWAY}"
            )

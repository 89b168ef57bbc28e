"""The folder of a store: what is there already, and the folder beside it in which a store is built,
all or nothing."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from longctx.data.store.manifest import (
    MANIFEST,
    TOKENIZER,
    TOKENIZER_FILES,
    Manifest,
    StoreError,
    files_of_store,
    is_store,
)
from longctx.data.store.writer import JOURNAL, finished_parts
from longctx.errors import UserError
from longctx.own_files import MOVE_AWAY, others, replace

REQUEST = "request"
LAYOUT = 6  # version of the files in an unfinished store; other versions cannot be resumed
NOTES = (REQUEST, JOURNAL)  # files for resuming, removed from a finished store
NAMES = (
    TOKENIZER,
    "data-*.arrow",
    "dataset_info.json",
    "state.json",
    f"{TOKENIZER_FILES}/*",
    *NOTES,
)
"""Names of the files of a store, besides its manifest, while it is made."""


def present(out: Path, request: str, overwrite: bool) -> Manifest | None:
    """Returns the manifest at `out` if it matches the request; None if a store may be made there;
    else raises StoreError."""
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
    if manifest.request == request:
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
    folder = Path(f"{out.resolve()}.partial")
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            # Released by the system when this process ends, however it ends.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Not just renamed by its owner.
            locked = folder.is_dir() and os.path.samestat(os.fstat(lock), folder.stat())
        except BlockingIOError:
            locked = False
        if not locked:
            raise StoreError(f"another process is preparing {out}: wait until it has finished")
        _tidy(folder, request)
        try:
            yield folder
        except UserError:  # the input must change, so nothing here can be reused
            shutil.rmtree(folder)
            raise
    finally:
        os.close(lock)


def _tidy(folder: Path, request: str) -> None:
    """Removes unfinished files, and all files of an interrupted preparation of another request."""
    note = folder / REQUEST
    request = f"{request} {LAYOUT}"
    files = list(folder.iterdir())
    if files and not note.is_file():
        raise StoreError(
            f"{folder} was not made by `longctx prepare`, but the store must be built there: move "
            "it, or choose another --out"
        )
    kept: set[str] = set()
    if files and note.read_text("utf-8") == request:
        kept = {REQUEST, TOKENIZER, JOURNAL, *(part.file for part in finished_parts(folder))}
    for file in files:
        if file.is_dir():
            shutil.rmtree(file)
        elif file.name not in kept and file != note:
            file.unlink()
    note.write_text(request, "utf-8")  # written last, so that kept files always match it


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

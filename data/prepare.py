"""Prepare: corpus → tokenizer → store, all or nothing.

The store is built in `OUT.partial` and renamed to OUT when its last byte is written, so an interrupted preparation leaves
nothing that looks like a store. It is cheap to resume: a trained tokenizer and every finished part (32 Mi tokens, listed in
`journal.jsonl`) are kept, and a second call with the same request reads past the documents of those parts instead of
tokenising them again. A request is the content of the source and all settings; if OUT already answers it, nothing is done.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from longctx.data.corpus import STANDARD_LIBRARY, Corpus, CorpusError, Skipped
from longctx.data.store import TOKENIZER, VERSION, Manifest, StoreError, is_store
from longctx.data.tokenizer import ANOTHER_TOKENIZER, Tokenizer, TokenizerError
from longctx.data.writer import (
    JOURNAL,
    PART_TOKENS,
    Part,
    Progress,
    finished_parts,
    write_dataset_files,
    write_parts,
)
from longctx.errors import UserError

TRAINING_BYTES = 64 << 20  # a larger source is sampled to train the tokenizer
REQUEST = "request"
NOTES = (REQUEST, JOURNAL)  # what a preparation notes down for the one that may have to go on with it
SKIPPED_NAMES = 10  # how many names of skipped files a manifest keeps


@dataclass(frozen=True)
class Prepared:
    """The manifest of the store at the wanted place, and whether this call made it (False: it was there already)."""

    manifest: Manifest
    made: bool


def prepare(
    corpus: Corpus,
    out: Path,
    *,
    tokenizer: str = "bpe",
    vocab_size: int = 4096,
    end_of_document: str | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    progress: Progress = lambda stage, share: None,
    part_tokens: int = PART_TOKENS,
) -> Prepared:
    """Makes the store of `corpus` at `out`.

    Args:
        tokenizer: `bpe` (trained on the corpus), `bytes`, or the path of a tokenizer.json.
        vocab_size: most tokens of a trained tokenizer.
        end_of_document: the token of a given tokenizer.json that ends a document; None looks for a well-known one.
        workers: threads that tokenise; None: one per core.
        overwrite: replace a store at `out` that answers another request. Anything that is not a store is never replaced.

    Raises:
        CorpusError, TokenizerError: the source or the tokenizer is at fault, or the two do not fit: more than half of the
            characters that are not white space would be lost. If fewer are lost, the manifest says how many.
        StoreError: something else stands at `out`, or another process is preparing it.
    """
    if corpus.kind != STANDARD_LIBRARY and Path(corpus.source).is_dir() and out.resolve().is_relative_to(corpus.root.resolve()):
        raise StoreError(f"out {out} lies inside the source {corpus.root}, which would then read itself: put it elsewhere")
    given: Tokenizer | None = None  # None: to be trained
    if tokenizer == "bytes":
        given = Tokenizer.bytes()
    elif tokenizer != "bpe":
        given = Tokenizer.load(Path(tokenizer), end_of_document)
    progress("reading the source", 0)
    source = corpus.fingerprint()
    choice = ["bpe", vocab_size] if given is None else [given.fingerprint, given.end_of_document]
    request = _digest({"version": VERSION, "source": source, "tokenizer": choice})
    progress("reading the source", 1)
    if (present := _present(out, request, overwrite)) is not None:
        return Prepared(present, made=False)
    with _partial_folder(out, request) as folder:
        used = _tokenizer(folder, corpus, given, vocab_size, progress)
        skipped = Skipped()
        parts = write_parts(folder, corpus, used, skipped, workers=workers, part_tokens=part_tokens, progress=progress)
        if not parts:
            raise CorpusError(
                f"source {corpus.source!r} has no document with text: {skipped.empty} are empty, "
                f"{len(skipped.not_text)} files are not UTF-8 text ({', '.join(skipped.not_text[:3]) or 'none'})"
            )
        content = {"source": source, "tokenizer": used.fingerprint, "end_of_document": used.end_of_document}
        fingerprint = _digest({"version": VERSION, **content})
        write_dataset_files(folder, used, parts, fingerprint)
        manifest = _manifest(folder, corpus, used, parts, skipped, request=request, fingerprint=fingerprint)
        if 2 * manifest.lost_characters > manifest.characters:
            raise TokenizerError(f"{manifest.loss}; more than half of the text must be left: {ANOTHER_TOKENIZER}")
        manifest.save(folder)
        _put_in_place(folder, out)
        for name in NOTES:
            (out / name).unlink()
    return Prepared(manifest, made=True)


def _manifest(
    folder: Path,
    corpus: Corpus,
    tokenizer: Tokenizer,
    parts: Sequence[Part],
    skipped: Skipped,
    *,
    request: str,
    fingerprint: str,
) -> Manifest:
    longest = max(parts, key=lambda part: part.longest_length)
    lossiest = max(parts, key=lambda part: part.lossiest_characters)
    return Manifest(
        request=request,
        fingerprint=fingerprint,
        source=corpus.source,
        documents=sum(part.documents for part in parts),
        tokens=sum(part.tokens for part in parts),
        trained_tokens=sum(part.trained_tokens for part in parts),
        longest_name=longest.longest_name,
        longest_length=longest.longest_length,
        empty_documents=skipped.empty,
        skipped_files=len(skipped.not_text),
        skipped_names=tuple(skipped.not_text[:SKIPPED_NAMES]),
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        end_of_document_token=tokenizer.end_of_document_token,
        files={file.name: file.stat().st_size for file in sorted(folder.iterdir()) if file.name not in NOTES},
        characters=sum(part.characters for part in parts),
        lost_characters=sum(part.lost_characters for part in parts),
        lossy_documents=sum(part.lossy_documents for part in parts),
        lossiest_name=lossiest.lossiest_name,
        lossiest_characters=lossiest.lossiest_characters,
    )


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# --- what stands at `out`, and the folder beside it in which the store is built


def _present(out: Path, request: str, overwrite: bool) -> Manifest | None:
    """The manifest at `out` if it answers the request; None if a store may be made there. Raises StoreError otherwise."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not is_store(out):
        raise StoreError(f"{out} exists and is not a store, so it is not replaced: choose another --out, or remove it yourself")
    try:
        manifest = Manifest.load(out)
    except StoreError:
        if overwrite:
            return None
        raise
    if manifest.request == request:
        return manifest
    if overwrite:
        return None
    raise StoreError(
        f"{out} holds a store of another source or other settings ({manifest.source}, {manifest.documents:,} documents, "
        f"vocabulary of {manifest.vocab_size:,}): choose another --out, or replace it with --overwrite"
    )


@contextmanager
def _partial_folder(out: Path, request: str) -> Iterator[Path]:
    """OUT.partial, locked against other processes, with what an interrupted preparation of the same request left there."""
    folder = Path(f"{out.resolve()}.partial")
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released by the system when this process ends, however it ends
            locked = folder.is_dir() and os.path.samestat(os.fstat(lock), folder.stat())  # not just renamed by its owner
        except BlockingIOError:
            locked = False
        if not locked:
            raise StoreError(f"another process is preparing {out}: wait until it has finished")
        _tidy(folder, request)
        try:
            yield folder
        except UserError:  # the input has to change, so nothing of this will be of use
            shutil.rmtree(folder)
            raise
    finally:
        os.close(lock)


def _tidy(folder: Path, request: str) -> None:
    """Removes all that an interrupted preparation of another request left, or did not finish."""
    note = folder / REQUEST
    found = list(folder.iterdir())
    if found and not note.is_file():
        raise StoreError(f"{folder} was not made by `longctx prepare`, and the store is built there: move it, or change --out")
    kept: set[str] = set()
    if found and note.read_text("utf-8") == request:
        kept = {REQUEST, TOKENIZER, JOURNAL, *(part.file for part in finished_parts(folder))}
    for file in found:
        if file.name not in kept and file != note:
            file.unlink()
    note.write_text(request, "utf-8")  # last, so that what is kept always answers it


def _put_in_place(folder: Path, out: Path) -> None:
    if not out.exists() or not any(out.iterdir()):
        folder.rename(out)
        return
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f"{out.name}.old-") as old:
        out.rename(Path(old, "store"))
        folder.rename(out)


# --- tokens


def _tokenizer(folder: Path, corpus: Corpus, given: Tokenizer | None, vocab_size: int, progress: Progress) -> Tokenizer:
    """The given tokenizer, or the one that an interrupted preparation trained, or a new one; saved in `folder`."""
    file = folder / TOKENIZER
    if given is None and file.is_file():
        return Tokenizer.load(file)
    tokenizer = given or Tokenizer.train(_training_texts(corpus, progress), vocab_size)
    unfinished = folder / (TOKENIZER + ".unfinished")
    tokenizer.save(unfinished)
    unfinished.rename(file)
    return tokenizer


def _training_texts(corpus: Corpus, progress: Progress) -> Iterator[str]:
    """Every document, or of a large source every n-th."""
    every = max(1, -(-corpus.bytes // TRAINING_BYTES))
    read = 0.0
    for document in islice(corpus.documents(), 0, None, every):
        progress("training the tokenizer", min(1.0, read / corpus.bytes))
        yield from document.texts
        read += document.source_bytes * every
    progress("training the tokenizer", 1)

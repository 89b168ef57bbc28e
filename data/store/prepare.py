"""Prepare: corpus → tokenizer → store, all or nothing.

The store is built in `OUT.partial` and renamed to OUT once complete, so an interrupted preparation
leaves nothing that looks like a store. Resuming is cheap: a trained tokenizer, every finished slice
of a large source and every finished part of a slice (32 Mi tokens, listed in its journal) are kept,
and a second call with the same request tokenizes none of their documents again. A request is the
content of the source and all settings; if the store at OUT already matches it, nothing is done.

Slices are made by processes of this machine, and by shares on other ones (`shares.py`).
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

from longctx import tokenizer_files
from longctx.arguments import a_path, callable_, checked, flag, kind, or_none, whole
from longctx.checksums import checksums
from longctx.data.records.chat import CHATML, TEMPLATE_FILE
from longctx.data.records.corpus import STANDARD_LIBRARY, Corpus, SourceCounts
from longctx.data.records.formats import TOKEN_IDS, WITHOUT_TEMPLATE
from longctx.data.records.pretrained import Pretrained
from longctx.data.records.readers import CorpusError
from longctx.data.records.slices import joined_digests
from longctx.data.records.sources import open_corpus
from longctx.data.records.tokenizer import ANOTHER_TOKENIZER, Tokenizer, TokenizerError
from longctx.data.store.folder import (
    JOIN_LOCK,
    is_note,
    partial_folder,
    present,
    put_in_place,
    shared_folder,
)
from longctx.data.store.index import write_index
from longctx.data.store.manifest import (
    TOKENIZER,
    TOKENIZER_FILES,
    Counts,
    Manifest,
    StoreError,
    is_store,
)
from longctx.data.store.mapped import MappedFile
from longctx.data.store.on_ray import make_on_ray
from longctx.data.store.request import StoreRequest
from longctx.data.store.shares import (
    ALL,
    FinishedSlice,
    Preparation,
    Share,
    lock,
    make_in_processes,
)
from longctx.data.store.writer import Progress, write_dataset_files
from longctx.paths import local_path

TRAINING_BYTES = 64 << 20  # a larger source is sampled to train the tokenizer
COVERED_CHARACTERS = 100_000  # characters of the source on which a given tokenizer is tried


@dataclass(frozen=True)
class Prepared:
    """Manifest of the requested store, and whether this call made it (False: it already existed).

    `stays` names what was in the folder of a replaced store, was not written by longctx, and is
    still there.
    """

    manifest: Manifest
    made: bool
    stays: tuple[str, ...] = ()


@checked(
    StoreError,
    corpus=kind("a path, a name, or a Corpus of open_corpus", Corpus, str, Path),
    out=a_path,
    workers=or_none(whole(least=1)),
    overwrite=flag,
    ray=or_none(kind("the address of a Ray cluster, or auto", str)),
    progress=callable_,
)
def prepare(
    corpus: Corpus | str | Path,
    out: Path | str,
    *,
    workers: int | None = None,
    overwrite: bool = False,
    ray: str | None = None,
    progress: Progress = lambda stage, share: None,
    **choices: Any,
) -> Prepared:
    """Makes the store of `corpus` at `out`.

    Args:
        corpus: a file of text or records, a folder of them, a dataset saved by `datasets`,
            OWNER/NAME of the hub, or `python-stdlib`; or an open Corpus, which may also name the
            column of the text and the split, and have limits.
        out: folder of the store.
        workers: number of tokenizer threads, those of all processes; None: one per core.
        overwrite: replace a store at `out` that matches another request, but only the files that
            its manifest lists: all others stay. Anything that is not a store is never replaced.
        ray: address of a Ray cluster that makes the store, or auto; its machines see source and
            `out` under the same names, and each slice has `workers` threads (None: 1).
        progress: called with the current stage and its finished share (0 … 1).
        choices: tokenizer, chat template and others: the attributes of `StoreRequest`.

    Raises:
        CorpusError, TokenizerError: the source or the tokenizer cannot be used, or more than half
            of the tokens are unknown ones. If fewer are, the manifest counts them.
        ChatError: the template refuses a conversation, or a conversation has no token to train on.
        StoreError: `out` must not be replaced, or another process is preparing it.
    """
    out = local_path(out)
    request = _request(corpus, out, choices)

    def matches(manifest: Manifest) -> bool:
        progress("reading the source", 0)
        digest = request.digest(request.corpus.fingerprint())
        progress("reading the source", 1)
        return manifest.request == digest

    if (manifest := present(out, matches, overwrite)) is not None:
        return Prepared(manifest, made=False)
    with partial_folder(out, _identity(request)) as folder:
        _tokenizer(folder, request, progress)
        work = Preparation(folder, request, request.corpus.slices)
        if ray is None:
            make_in_processes(work, ALL, workers=workers, progress=progress)
        else:
            make_on_ray(work, ray, workers=workers, progress=progress)
        finished = work.finished()
        assert finished is not None  # all are made here
        return _joined(work, out, finished)


@checked(
    StoreError,
    corpus=kind("a path, a name, or a Corpus of open_corpus", Corpus, str, Path),
    out=a_path,
    share=kind("a Share, such as Share.parse('3/64')", Share),
    workers=or_none(whole(least=1)),
    overwrite=flag,
    progress=callable_,
)
def prepare_share(
    corpus: Corpus | str | Path,
    out: Path | str,
    share: Share,
    *,
    workers: int | None = None,
    overwrite: bool = False,
    progress: Progress = lambda stage, share: None,
    **choices: Any,
) -> Prepared | None:
    """Makes a share of the store of `corpus` at `out`, beside other shares on any machines that see
    source and `out` under the same names. The last one to finish puts the store in place; returns
    None in the others.

    The store is the same, bit for bit, as that of `prepare`. A share also makes what others have
    not begun, or have left when they died; any share may be run again. Arguments and errors are
    those of `prepare`, and a store of the same settings at `out`, whose source has files of the
    same names and sizes, is taken as it is.
    """
    out = local_path(out)
    request = _request(corpus, out, choices)

    def matches(manifest: Manifest) -> bool:
        return manifest.listing == _listing(request)

    if (manifest := present(out, matches, overwrite)) is not None:
        return Prepared(manifest, made=False)
    with shared_folder(out, _identity(request)) as folder:
        if is_store(out) and (manifest := present(out, matches, overwrite)) is not None:
            # Others have put the store in place meanwhile; more than one may be late.
            shutil.rmtree(folder, ignore_errors=True)
            return Prepared(manifest, made=False)
        with lock(folder / f"{TOKENIZER}.lock", wait=True) as is_held:
            if not is_held:  # others are putting the store in place
                return None
            _tokenizer(folder, request, progress)
        work = Preparation(folder, request, request.corpus.slices)
        make_in_processes(work, share, workers=workers, progress=progress)
        with lock(folder / JOIN_LOCK) as is_held:
            finished = work.finished() if is_held else None
            if finished is None:
                return None
            return _joined(work, out, finished)


def _request(corpus: Corpus | str | Path, out: Path, choices: Mapping[str, Any]) -> StoreRequest:
    """Returns what is asked for. Raises StoreError for an unknown choice, and for a store inside
    its source."""
    corpus = corpus if isinstance(corpus, Corpus) else open_corpus(str(corpus))
    if (
        corpus.kind != STANDARD_LIBRARY
        and Path(corpus.source).is_dir()
        and out.resolve().is_relative_to(corpus.root.resolve())
    ):
        raise StoreError(
            f"out {out} is inside the source {corpus.root}, so the source would contain it: choose "
            "another --out"
        )
    known = [each.name for each in fields(StoreRequest) if each.name != "source"]
    if unknown := sorted(choices.keys() - set(known)):
        raise StoreError(f"prepare has no argument {unknown[0]}: it takes {', '.join(known)}")
    return StoreRequest(corpus, **choices)


def _identity(request: StoreRequest) -> str:
    """Returns what an interrupted preparation must have been of, so that this one goes on with
    it."""
    return request.digest(request.corpus.listing(with_times=True))


def _listing(request: StoreRequest) -> str:
    return request.digest(request.corpus.listing(with_times=False))


def _joined(work: Preparation, out: Path, slices: Sequence[FinishedSlice]) -> Prepared:
    """Puts the store in place whose slices are all finished."""
    folder = work.folder
    manifest = _described(work, slices)
    manifest.save(folder)
    notes = [file.name for file in folder.iterdir() if is_note(file.name)]
    stays = put_in_place(folder, out)
    for name in notes:
        (out / name).unlink()
    return Prepared(manifest, made=True, stays=tuple(stays))


def _described(work: Preparation, slices: Sequence[FinishedSlice]) -> Manifest:
    """Writes what a store has besides its parts. Returns its manifest, which is not written yet."""
    folder = work.folder
    request = work.request
    corpus = request.corpus
    tokenizer = work.tokenizer
    parts = [part for each in slices for part in each.parts]
    digests = joined_digests([each.digests for each in slices])
    read = SourceCounts(noted=corpus.noted | corpus.same_texts(digests))
    for each in slices:
        read = read.plus(each.read)
    written = sum(parts, Counts())
    _check_targets(corpus, read, written, request.max_length)
    conversations = bool(set(read.formats) - WITHOUT_TEMPLATE)
    if request.given is None and TOKEN_IDS in read.formats:
        raise unnamed(corpus)
    pretrained = request.pretrained
    if pretrained is not None:
        copy_files(folder / TOKENIZER_FILES, pretrained, request.templates)
        if request.templates is None and conversations:
            (folder / TOKENIZER_FILES / TEMPLATE_FILE).write_text(CHATML, "utf-8", newline="")
    source = corpus.fingerprint(digests)
    fingerprint = request.fingerprint(tokenizer, source)
    write_dataset_files(folder, tokenizer, parts, fingerprint)
    opened = (MappedFile(folder / part.file, part.checksums) for part in parts)
    write_index(folder, opened, written.documents)
    known = {part.file: part.checksums for part in parts}
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not is_note(path.name))
    files = {path.relative_to(folder).as_posix(): path for path in paths}
    manifest = Manifest(
        **vars(read),
        **vars(written),
        request=request.digest(source),
        listing=_listing(request),
        fingerprint=fingerprint,
        source=corpus.source,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        end_of_document_token=tokenizer.end_of_document_token,
        files={name: path.stat().st_size for name, path in files.items()},
        checksums={name: known.get(name) or checksums(path) for name, path in files.items()},
        not_read=dict(corpus.not_read),
        template=request.template_in_words(tokenizer) if conversations else "",
        train_on=request.train_on,
        max_length=request.max_length,
        special_as_text=request.special_as_text,
        limits=corpus.limits,
    )
    if 2 * manifest.unknown_tokens > manifest.tokens:
        raise TokenizerError(
            f"{manifest.loss}; more than half of the text must be kept: {ANOTHER_TOKENIZER}"
        )
    return manifest


def _tokenizer(folder: Path, request: StoreRequest, progress: Progress) -> None:
    """Saves the given tokenizer in `folder`, or a new one unless an interrupted preparation or
    another share has trained one."""
    file = folder / TOKENIZER
    if request.given is None and file.is_file():
        return
    corpus = request.corpus
    tokenizer = request.given
    if tokenizer is None:
        tokenizer = Tokenizer.train(_training_texts(corpus, progress), request.vocab_size)
    elif not tokenizer.is_bytes:
        _check_covered(tokenizer, corpus)
    unfinished = folder / (TOKENIZER + ".unfinished")
    tokenizer.save(unfinished)
    unfinished.rename(file)


def _training_texts(corpus: Corpus, progress: Progress) -> Iterator[str]:
    """Yields the texts of every document, or of every n-th document or the first ones of a large
    source."""
    # Of these, the first texts are taken: others may be far away.
    first = bool(corpus.limits or corpus.hub)
    every = 1 if first else max(1, -(-corpus.bytes // TRAINING_BYTES))
    read = characters = 0.0
    for document in islice(corpus.documents(), 0, None, every):
        progress("training the tokenizer", min(1.0, read / max(1, corpus.bytes)))
        characters += document.size
        if first and characters > TRAINING_BYTES:
            break
        if document.ids is not None:
            raise unnamed(corpus)
        yield from document.texts
        read += document.source_bytes * every
    progress("training the tokenizer", 1)


def unnamed(corpus: Corpus) -> TokenizerError:
    return TokenizerError(
        f"{corpus.source} has token ids: name the tokenizer that they are from (--tokenizer)"
    )


def copy_files(folder: Path, pretrained: Pretrained, templates: Mapping[bool, str] | None) -> None:
    """Copies the files of a pretrained model, and writes the template if it is another one."""
    tokenizer_files.copy(pretrained.files, pretrained.folder, folder)
    if templates is not None and templates != pretrained.templates:
        folder.mkdir(exist_ok=True)
        (folder / TEMPLATE_FILE).write_text(templates[False], "utf-8", newline="")


def _check_covered(tokenizer: Tokenizer, corpus: Corpus) -> None:
    """Raises TokenizerError if no token comes from more than half of the characters of the first
    texts."""
    characters = covered = 0
    for document in corpus.documents():
        if document.ids is not None or characters >= COVERED_CHARACTERS:
            break
        for text in document.texts:
            counts = tokenizer.covered(text[:COVERED_CHARACTERS])
            characters = characters + counts[0]
            covered = covered + counts[1]
    if 2 * covered < characters:
        raise TokenizerError(
            f"the tokenizer makes no token of {characters - covered:,} of the first "
            f"{characters:,} characters (white space not counted), which its normalizer or "
            f"pre-tokenizer removes; more than half of the text must be kept: {ANOTHER_TOKENIZER}"
        )


def _check_targets(
    corpus: Corpus, read: SourceCounts, written: Counts, max_length: int | None
) -> None:
    """Raises CorpusError if there is nothing to train on."""
    if corpus.separator and not any(repr(corpus.separator) in what for what in read.noted):
        what = f"the document separator {corpus.separator!r} is in no file that is one text"
        raise CorpusError(
            f"source {corpus.source!r}: {what}: correct it, or omit it (--document-separator)"
        )
    if written.dropped_documents and not written.documents:
        raise CorpusError(
            f"all {written.dropped_documents:,} conversations of {corpus.source!r} have more than "
            f"{max_length:,} tokens: raise --max-length"
        )
    if not written.documents:
        left_out = [
            f"{read.empty_documents} {'is' if read.empty_documents == 1 else 'are'} empty"
        ] * bool(read.empty_documents)
        if read.untrained_documents:
            left_out.append(f"{read.untrained_documents} switch off the loss of everything")
        if read.skipped_files:
            left_out.append(
                f"{read.skipped_files} files are not UTF-8 text "
                f"({', '.join(read.skipped_names[:3])})"
            )
        left_out += [f"{count:,} {what}" for what, count in read.noted.items()]
        left_out += [
            f"{count:,} × {reason} not read" for reason, count in sorted(corpus.not_read.items())
        ]
        why = ", ".join(left_out) or "it is empty"
        raise CorpusError(
            f"source {corpus.source!r} has no document with text: {why}; give one with content"
        )
    if not written.trained_tokens:
        raise CorpusError(
            f"source {corpus.source!r} has no targets: every document is a single token; give "
            "longer documents"
        )

"""Prepare: corpus → tokenizer → store, all or nothing.

The store is built in `OUT.partial` and renamed to OUT once complete, so an interrupted preparation leaves nothing that looks
like a store. Resuming is cheap: a trained tokenizer and every finished part (32 Mi tokens, listed in `journal.jsonl`) are kept,
and a second call with the same request skips the documents of those parts instead of tokenizing them again. A request is the
content of the source and all settings; if the store at OUT already matches it, nothing is done.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from longctx import tokenizer_files
from longctx.checksums import checksums
from longctx.data.chat import CHATML, TEMPLATE_FILE, TRAIN_ON, ChatError, ChatML
from longctx.data.checkpoint import Checkpoint
from longctx.data.corpus import STANDARD_LIBRARY, Corpus, Found, open_corpus
from longctx.data.encode import Encoder
from longctx.data.formats import PAIRS, READING
from longctx.data.manifest import TOKENIZER, TOKENIZER_FILES, VERSION, Manifest, StoreError, is_store
from longctx.data.markup import Markup
from longctx.data.readers import CorpusError
from longctx.data.template import Template, marks_generation
from longctx.data.tokenizer import ANOTHER_TOKENIZER, Tokenizer, TokenizerError
from longctx.data.writer import (
    JOURNAL,
    Part,
    Progress,
    finished_parts,
    write_dataset_files,
    write_parts,
)
from longctx.errors import UserError

TRAINING_BYTES = 64 << 20  # a larger source is sampled to train the tokenizer
COVERED_CHARACTERS = 100_000  # characters of the source on which a given tokenizer is tried
REQUEST = "request"
LAYOUT = 4  # version of the files in an unfinished store; other versions cannot be resumed
NOTES = (REQUEST, JOURNAL)  # files for resuming, removed from a finished store
SKIPPED_NAMES = 10  # maximum number of names of skipped files in a manifest


@dataclass(frozen=True)
class Prepared:
    """Manifest of the requested store, and whether this call made it (False: it already existed)."""

    manifest: Manifest
    made: bool


def prepare(
    corpus: Corpus | str | Path,
    out: Path | str,
    *,
    tokenizer: str = "bpe",
    vocab_size: int = 4096,
    end_of_document: str | None = None,
    chat_template: str = "auto",
    template_variables: Mapping[str, Any] | None = None,
    train_on: str = "assistant",
    max_length: int | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    progress: Progress = lambda stage, share: None,
) -> Prepared:
    """Makes the store of `corpus` at `out`.

    Args:
        corpus: a file of text or records, a folder of them, a dataset saved by `datasets`, or `python-stdlib`; or an open
            Corpus, which may also name the column of the text and the split.
        out: folder of the store.
        tokenizer: `bpe` (trained on the corpus), `bytes`, the path of a tokenizer.json, or a checkpoint's folder or name on the
            hub.
        vocab_size: maximum vocabulary size of a trained tokenizer.
        end_of_document: token that ends a document; None: the checkpoint's, or a well-known one of a given tokenizer.json.
        chat_template: `auto` (the checkpoint's, or ChatML if it has none), `chatml`, or the path of a Jinja template.
        template_variables: JSON values of variables of the chat template, such as {"enable_thinking": False}. They become
            defaults in the template of the store, and thus of exports.
        train_on: parts of conversations to train on: the turns of the `assistant`, the `last` of them, or `all` tokens.
        max_length: maximum tokens of a conversation; longer ones are dropped and counted; None: no limit. Texts are always
            kept: training splits them.
        workers: number of tokenizer threads; None: one per core.
        overwrite: replace a store at `out` that matches another request. Anything that is not a store is never replaced.
        progress: called with the current stage and its finished share (0 … 1).

    Raises:
        CorpusError, TokenizerError: the source or the tokenizer cannot be used, or the tokenizer would lose more than half of
            the characters that are not white space. If it loses fewer, the manifest counts them.
        ChatError: the template refuses a conversation, or a conversation has no token to train on.
        StoreError: `out` must not be replaced, or another process is preparing it.
    """
    corpus, out = corpus if isinstance(corpus, Corpus) else open_corpus(str(corpus)), Path(out)
    if corpus.kind != STANDARD_LIBRARY and Path(corpus.source).is_dir() and out.resolve().is_relative_to(corpus.root.resolve()):
        raise StoreError(f"out {out} is inside the source {corpus.root}, so the source would contain it: choose another --out")
    if train_on not in TRAIN_ON:
        raise ChatError(f"train_on is {train_on!r}: it must be one of {', '.join(TRAIN_ON)}")
    if max_length is not None and max_length < 2:
        raise ChatError(f"max_length is {max_length}: it must be at least 2, as the first token is never a target")
    given, checkpoint = _given_tokenizer(tokenizer, end_of_document)
    templates = _with_variables(_templates(checkpoint, chat_template), template_variables or {})
    progress("reading the source", 0)
    source = corpus.fingerprint()
    choice = ["bpe", vocab_size] if given is None else [given.fingerprint, given.end_of_document]
    # Defaults of newer settings are left out, so that stores made before these settings existed still match.
    settings: dict[str, Any] = {"train_on": train_on} if train_on != "assistant" else {}
    if max_length is not None:
        settings["max_length"] = max_length
    if checkpoint is not None:
        settings["begin"] = checkpoint.begin.tolist()
        files = [(checkpoint.folder / file).read_bytes() for file in checkpoint.files]
        settings["files"] = [hashlib.sha256(file).hexdigest() for file in files]
    if checkpoint is not None and templates is not None:
        settings["template"] = [[key, text] for key, text in templates.items()], dict(checkpoint.variables), checkpoint.ends
    markup = template = None
    if checkpoint is not None and templates is not None:
        markup = Markup(checkpoint.tokenizer.text, checkpoint.tokenizer.dtype)
        template = Template(templates, checkpoint.variables, markup, checkpoint.ends, train_on)
    late_end = template.ends_no_turn if template is not None else given is None or ChatML(given).ends_as_text
    ends = {"end": True} if late_end and train_on != "all" else {}  # earlier versions trained no end of such conversations
    request = {"version": VERSION, "source": source, "tokenizer": choice, **settings}
    requests = {False: _digest(request), True: _digest({**request, **ends})}
    progress("reading the source", 1)
    if (present := _present(out, requests, corpus, overwrite)) is not None:
        return Prepared(present, made=False)
    with _partial_folder(out, requests[True]) as folder:
        used = _tokenizer(folder, corpus, given, vocab_size, progress)
        if given is not None and not used.is_bytes:
            _check_covered(used, corpus)
        if checkpoint is not None:
            _copy_files(folder / TOKENIZER_FILES, checkpoint, templates)
        begin = np.zeros(0, used.dtype) if checkpoint is None else checkpoint.begin
        encoder = Encoder(
            used, begin, markup=markup, template=template, train_on=train_on, max_length=max_length, workers=workers
        )
        found = Found()
        parts = write_parts(folder, corpus, encoder, found, progress=progress)
        _check_targets(corpus, found, parts, max_length)
        conversations = bool(set(found.formats) - {"text"})
        if checkpoint is not None and templates is None and conversations:
            (folder / TOKENIZER_FILES / TEMPLATE_FILE).write_text(CHATML, "utf-8", newline="")
        content = {"source": source, "tokenizer": used.fingerprint, "end_of_document": used.end_of_document, **settings}
        if PAIRS in found.formats:  # earlier versions may have read other documents from these records
            content["pairs"] = True
        if conversations:
            content |= ends
        if found.read_anew:
            content["reading"] = READING
        fingerprint = _digest({"version": VERSION, **content})
        write_dataset_files(folder, used, parts, fingerprint)
        manifest = _manifest(
            folder,
            corpus,
            used,
            parts,
            found,
            request=requests[conversations],
            fingerprint=fingerprint,
            template=_in_words(tokenizer, chat_template, templates, train_on, used) if conversations else "",
            train_on=train_on,
            max_length=max_length,
        )
        if 2 * manifest.lost_characters > manifest.characters:
            raise TokenizerError(f"{manifest.loss}; more than half of the text must be kept: {ANOTHER_TOKENIZER}")
        manifest.save(folder)
        _put_in_place(folder, out)
        for name in NOTES:
            (out / name).unlink()
    return Prepared(manifest, made=True)


def _check_covered(tokenizer: Tokenizer, corpus: Corpus) -> None:
    """Raises TokenizerError if no token comes from more than half of the characters of the first texts."""
    characters = covered = 0
    for text in chain.from_iterable(document.texts for document in corpus.documents()):
        counts = tokenizer.covered(text[:COVERED_CHARACTERS])
        characters, covered = characters + counts[0], covered + counts[1]
        if characters >= COVERED_CHARACTERS:
            break
    if 2 * covered < characters:
        raise TokenizerError(
            f"the tokenizer makes no token of {characters - covered:,} of the first {characters:,} characters (white space not "
            f"counted), which its normalizer or pre-tokenizer removes; more than half of the text must be kept: "
            f"{ANOTHER_TOKENIZER}"
        )


def _check_targets(corpus: Corpus, found: Found, parts: Sequence[Part], max_length: int | None) -> None:
    """Raises CorpusError if there is nothing to train on."""
    dropped = sum(part.dropped_documents for part in parts)
    if not parts:
        left_out = [f"{found.empty} {'is' if found.empty == 1 else 'are'} empty"] * bool(found.empty)
        if found.untrained:
            left_out.append(f"{found.untrained} switch off the loss of every turn")
        if found.useless_pairs:
            left_out.append(f"{found.useless_pairs} pairs have equal or empty completions")
        if found.not_text:
            left_out.append(f"{len(found.not_text)} files are not UTF-8 text ({', '.join(found.not_text[:3])})")
        left_out += [f"{count:,} × {reason} not read" for reason, count in sorted(corpus.not_read.items())]
        why = ", ".join(left_out) or "it is empty"
        raise CorpusError(f"source {corpus.source!r} has no document with text: {why}; give one with text or conversations")
    if dropped and not any(part.documents for part in parts):
        raise CorpusError(
            f"all {dropped:,} conversations of {corpus.source!r} have more than {max_length:,} tokens: raise --max-length"
        )
    if not any(part.trained_tokens for part in parts):
        raise CorpusError(f"source {corpus.source!r} has no targets: every document is a single token; give longer documents")


def _manifest(
    folder: Path,
    corpus: Corpus,
    tokenizer: Tokenizer,
    parts: Sequence[Part],
    found: Found,
    **settings: Any,
) -> Manifest:
    longest = max(parts, key=lambda part: part.longest_length)
    lossiest = max(parts, key=lambda part: part.lossiest_characters)
    files = {
        file.relative_to(folder).as_posix(): file
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name not in NOTES
    }
    written = {part.file: part.checksums for part in parts}
    return Manifest(
        **settings,
        source=corpus.source,
        documents=sum(part.documents for part in parts),
        tokens=sum(part.tokens for part in parts),
        trained_tokens=sum(part.trained_tokens for part in parts),
        longest_name=longest.longest_name,
        longest_length=longest.longest_length,
        empty_documents=found.empty,
        not_read=dict(corpus.not_read),
        skipped_files=len(found.not_text),
        skipped_names=tuple(found.not_text[:SKIPPED_NAMES]),
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        end_of_document_token=tokenizer.end_of_document_token,
        files={name: file.stat().st_size for name, file in files.items()},
        checksums={name: written.get(name) or checksums(file) for name, file in files.items()},
        characters=sum(part.characters for part in parts),
        lost_characters=sum(part.lost_characters for part in parts),
        lossy_documents=sum(part.lossy_documents for part in parts),
        lossiest_name=lossiest.lossiest_name,
        lossiest_characters=lossiest.lossiest_characters,
        formats=found.formats,
        pairs=PAIRS in found.formats,
        useless_pairs=found.useless_pairs,
        untrained_documents=found.untrained,
        unused=found.unused,
        left_out=dict(sum((Counter(part.left_out) for part in parts), Counter())),
        reading=READING,
        dropped_documents=sum(part.dropped_documents for part in parts),
        spelled_documents=sum(part.spelled_documents for part in parts),
        spelled_name=next((part.spelled_name for part in parts if part.spelled_name), ""),
        straddling_tokens=sum(part.straddling_tokens for part in parts),
        lightest=min(part.lightest for part in parts),
        heaviest=max(part.heaviest for part in parts),
    )


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# --- the store at `out`, and the folder beside it in which it is built


def _present(out: Path, requests: Mapping[bool, str], corpus: Corpus, overwrite: bool) -> Manifest | None:
    """Returns the manifest at `out` if it matches the request; None if a store may be made there; else raises StoreError.

    `requests` are that of stores without (False) and with conversations (True).
    """
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
    matches = manifest.request == requests[manifest.conversations]
    if matches and (manifest.reading == READING or not _read_anew(corpus, manifest)):
        return manifest
    if overwrite or matches:  # made by an earlier version, which read these records differently
        return None
    raise StoreError(
        f"{out} holds a store of another source, other settings or an earlier version ({manifest.source}, "
        f"{manifest.documents:,} documents, vocabulary of {manifest.vocab_size:,}): choose another --out, or replace it with "
        "--overwrite"
    )


def _read_anew(corpus: Corpus, manifest: Manifest) -> bool:
    """Returns whether the version that made a store may have read the records differently."""
    found = Found()
    return manifest.conversations and (any(found.read_anew for _ in corpus.documents(found)) or found.read_anew)


@contextmanager
def _partial_folder(out: Path, request: str) -> Iterator[Path]:
    """Yields OUT.partial, locked against other processes, with the files of an interrupted preparation of the same request."""
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
        except UserError:  # the input must change, so nothing here can be reused
            shutil.rmtree(folder)
            raise
    finally:
        os.close(lock)


def _tidy(folder: Path, request: str) -> None:
    """Removes unfinished files, and all files of an interrupted preparation of another request."""
    note = folder / REQUEST
    request = f"{request} {LAYOUT}"
    found = list(folder.iterdir())
    if found and not note.is_file():
        raise StoreError(
            f"{folder} was not made by `longctx prepare`, but the store must be built there: move it, or choose another --out"
        )
    kept: set[str] = set()
    if found and note.read_text("utf-8") == request:
        kept = {REQUEST, TOKENIZER, JOURNAL, *(part.file for part in finished_parts(folder))}
    for file in found:
        if file.is_dir():
            shutil.rmtree(file)
        elif file.name not in kept and file != note:
            file.unlink()
    note.write_text(request, "utf-8")  # written last, so that kept files always match it


def _put_in_place(folder: Path, out: Path) -> None:
    if not out.exists() or not any(out.iterdir()):
        folder.rename(out)
        return
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f"{out.name}.old-") as old:
        out.rename(Path(old, "store"))
        folder.rename(out)


# --- tokens


def _given_tokenizer(tokenizer: str, end_of_document: str | None) -> tuple[Tokenizer | None, Checkpoint | None]:
    """Returns the tokenizer (None: it must be trained) and its checkpoint, if it comes from one."""
    if tokenizer == "bpe":
        return None, None
    if tokenizer == "bytes":
        return Tokenizer.bytes(), None
    if tokenizer.endswith(".json") or Path(tokenizer).is_file():
        return Tokenizer.load(Path(tokenizer), end_of_document), None
    checkpoint = Checkpoint.load(tokenizer, end_of_document)
    return checkpoint.tokenizer, checkpoint


def _templates(checkpoint: Checkpoint | None, chat_template: str) -> Mapping[bool, str] | None:
    """Returns the Jinja templates without (False) and with tools (True); None: ChatML."""
    if chat_template == "chatml" or (chat_template == "auto" and checkpoint is None):
        return None
    if checkpoint is None:
        raise TokenizerError(
            f"--chat-template {chat_template} needs the special tokens of a checkpoint: give its folder as --tokenizer"
        )
    if chat_template == "auto":
        return checkpoint.templates
    try:
        text = Path(chat_template).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(
            f"chat template {chat_template!r} cannot be read: {error}; give auto, chatml, or the path of a Jinja template"
        ) from error
    return {False: text, True: text}


def _with_variables(templates: Mapping[bool, str] | None, variables: Mapping[str, Any]) -> Mapping[bool, str] | None:
    """Returns the templates with default values of variables, set in their first lines."""
    if not variables:
        return templates
    if not isinstance(variables, Mapping) or not all(map(str.isidentifier, variables)):
        raise TokenizerError("--template-variables must be a JSON object of variables: '{\"enable_thinking\": false}'")
    if templates is None or templates[False] != templates[True]:
        raise TokenizerError("--template-variables needs one chat template, for all conversations: give --chat-template FILE")
    first = "".join(f"{{%- set {name} = {name} if {name} is defined else {value!r} %}}\n" for name, value in variables.items())
    return {tools: first + text for tools, text in templates.items()}


def _in_words(tokenizer: str, chat_template: str, templates: Mapping[bool, str] | None, train_on: str, used: Tokenizer) -> str:
    """Describes the chat template, and how the tokens to train on were found."""
    if templates is None:
        why = "" if chat_template == "chatml" else ", as the tokenizer has no chat template"
        differs = "" if ChatML(used).matches_rendering else "; transformers encodes its markers differently with this tokenizer"
        return f"ChatML{why}{differs}"
    name = f"from {tokenizer}" if chat_template == "auto" else chat_template
    if train_on == "all":
        return name
    marked = all(map(marks_generation, templates.values()))
    return f"{name}; turns to train on are found by {'its generation marks' if marked else 'rendering with and without them'}"


def _copy_files(folder: Path, checkpoint: Checkpoint, templates: Mapping[bool, str] | None) -> None:
    """Copies the checkpoint's files, and writes the template if it is not the checkpoint's."""
    tokenizer_files.copy(checkpoint.files, checkpoint.folder, folder)
    if templates is not None and templates != checkpoint.templates:
        folder.mkdir(exist_ok=True)
        (folder / TEMPLATE_FILE).write_text(templates[False], "utf-8", newline="")


def _tokenizer(folder: Path, corpus: Corpus, given: Tokenizer | None, vocab_size: int, progress: Progress) -> Tokenizer:
    """Returns the given tokenizer, one trained by an interrupted preparation, or a new one; saved in `folder`."""
    file = folder / TOKENIZER
    if given is None and file.is_file():
        return Tokenizer.load(file)
    tokenizer = given or Tokenizer.train(_training_texts(corpus, progress), vocab_size)
    unfinished = folder / (TOKENIZER + ".unfinished")
    tokenizer.save(unfinished)
    unfinished.rename(file)
    return tokenizer


def _training_texts(corpus: Corpus, progress: Progress) -> Iterator[str]:
    """Yields the texts of every document, or of every n-th document of a large source."""
    every = max(1, -(-corpus.bytes // TRAINING_BYTES))
    read = 0.0
    for document in islice(corpus.documents(), 0, None, every):
        progress("training the tokenizer", min(1.0, read / corpus.bytes))
        yield from document.texts
        read += document.source_bytes * every
    progress("training the tokenizer", 1)

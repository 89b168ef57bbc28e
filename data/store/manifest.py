"""Manifest: the description of a store, with sizes and checksums of its files, in `manifest.json`."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from longctx.checksums import damage, inside, persistent, sealed, unsealed
from longctx.data.records.formats import WITHOUT_TEMPLATE
from longctx.errors import UserError, shell

FORMAT = "longctx-store"
VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
ARROW = ".arrow"
TOKENIZER_FILES = "tokenizer"
"""Folder of the checkpoint's tokenizer files."""


class StoreError(UserError):
    """A folder that is not a store, or a store that is damaged, of another version, or must not be replaced."""


def how_to_prepare(folder: Path, more: str = "") -> str:
    """Returns the command that makes a store; `more` options follow. Without --source it would be of Python's own library."""
    source = "" if folder.name == "python-stdlib" else " --source YOUR_DATA --tokenizer CHECKPOINT"
    return f"`longctx prepare{source} --out {shell(folder)}{more}`"


@dataclass(frozen=True)
class Manifest:
    """Description of a store. It is written last, so a store without a manifest was never finished.

    Attributes:
        request: SHA-256 of the source's content and of all settings; the same request need not be prepared again.
        fingerprint: SHA-256 of source, tokenizer and end of document. A run resumes only on a store with the same one.
        documents, tokens, trained_tokens: totals; `trained_tokens` are targets.
        longest_name, longest_length: name of the longest document, and number of its tokens.
        empty_documents: number of documents left out because they have no text.
        not_read: number of other files of the source, by the reason why they were not read.
        skipped_files: number of files left out because they are not UTF-8 text; `skipped_names` are the first of them.
        tokenizer_fingerprint, vocab_size, end_of_document_token: properties of the tokenizer.
        unknown_tokens: number of tokens for text that the tokenizer lacks, in `unknown_documents` documents; `unknown_name` is
            the first of them.
        files: bytes of every other file of the store.
        formats: number of documents of each format, including documents dropped later.
        template: description of the chat template, and how tokens to train on were found; empty without conversations.
        max_length: maximum tokens of a conversation; None: no limit. `dropped_documents` conversations were longer, and
            `truncated_documents` lost their first or last tokens.
        special_as_text: whether special tokens in texts are characters. If not, `spelled_documents` documents contain
            `spelled_tokens` of them; `spelled_name` is the first of these.
        noted: number of other things that a reader should know, by what they are, such as text files that are split.
        straddling_tokens: number of target tokens that also contain text that is not trained on.
        empty_thoughts: number of turns that the chat template begins with an empty thought, which is not trained on.
        lightest, heaviest: smallest and largest weight of a document.
        weighted_documents: number of documents with weights of tokens.
        untrained_documents: number of documents left out because they switch off the loss of everything.
        unused: number of records with each key that is not used.
        left_out: number of conversations of which the chat template does not show a part, by part.
        limits: maximum number of documents and of bytes, where reading stopped.
    """

    request: str
    fingerprint: str
    source: str
    documents: int
    tokens: int
    trained_tokens: int
    longest_name: str
    longest_length: int
    empty_documents: int
    skipped_files: int
    skipped_names: tuple[str, ...]
    tokenizer_fingerprint: str
    vocab_size: int
    end_of_document_token: str
    files: dict[str, int]
    checksums: dict[str, str]
    not_read: dict[str, int] = field(default_factory=dict)
    format: str = FORMAT
    version: int = VERSION
    unknown_tokens: int = 0
    unknown_documents: int = 0
    unknown_name: str = ""
    formats: dict[str, int] = field(default_factory=dict)
    template: str = ""
    train_on: str = "assistant"
    max_length: int | None = None
    dropped_documents: int = 0
    truncated_documents: int = 0
    special_as_text: bool = True  # of texts in stores that do not say
    spelled_tokens: int = 0
    spelled_documents: int = 0
    spelled_name: str = ""
    noted: dict[str, int] = field(default_factory=dict)
    straddling_tokens: int = 0
    empty_thoughts: int = 0
    lightest: float = 1.0
    heaviest: float = 1.0
    weighted_documents: int = 0
    untrained_documents: int = 0
    unused: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)

    @property
    def conversations(self) -> bool:
        return bool(set(self.formats) - WITHOUT_TEMPLATE)

    @property
    def loss(self) -> str:
        """Sentence on text that the tokenizer lacks; empty if it lacks none."""
        if not self.unknown_tokens:
            return ""
        return (
            f"{self.unknown_tokens:,} of {self.tokens:,} tokens are unknown ones, for text that the tokenizer lacks, in "
            f"{self.unknown_documents:,} of {self.documents:,} documents; the first is {self.unknown_name}"
        )

    def save(self, folder: Path) -> None:
        (folder / MANIFEST).write_text(json.dumps(sealed(asdict(self)), indent=2) + "\n", "utf-8")

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        """Reads a folder's manifest and checks that every file exists with its full size. Raises StoreError."""
        path = folder / MANIFEST
        if not folder.is_dir():
            raise StoreError(f"there is no store at {folder}: make one with {how_to_prepare(folder)}")
        if not path.is_file():
            raise StoreError(
                f"{folder} is not a store: it has no {MANIFEST}; give the folder of a store, or make one elsewhere"
            )
        try:
            content: dict[str, Any] = json.loads(persistent(lambda: path.read_text("utf-8")))
            kind, version = content["format"], content["version"]
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"{path} is not the manifest of a store, or is damaged: {error}; give the folder of a store"
            ) from error
        if kind != FORMAT or version != VERSION:
            raise StoreError(
                f"{path} is of format {kind} {version}, but this longctx reads {FORMAT} {VERSION}: "
                f"prepare it again with {how_to_prepare(folder, ' --overwrite')}"
            )
        again = f"prepare it again with {how_to_prepare(folder, ' --overwrite')}"
        try:
            manifest = cls(**unsealed(content))
            if manifest.checksums.keys() != manifest.files.keys():
                raise ValueError("some of its checksums are missing")
            files = {name: (inside(folder, name), int(size)) for name, size in manifest.files.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise StoreError(f"{path} is damaged: {error}; {again}") from error
        for name, (file, size) in files.items():
            actual = file.stat().st_size if file.is_file() else None
            if actual != size:
                raise StoreError(
                    f"store {folder} is damaged: {name} {'is missing' if actual is None else f'has {actual:,} bytes'}, "
                    f"but should have {size:,} bytes; {again}"
                )
        return manifest

    def damage(self, folder: Path, name: str) -> str:
        """Reads a file of the store. Returns what is wrong with it; empty if nothing is."""
        return damage(folder / name, self.checksums[name])


def is_store(folder: Path) -> bool:
    """Returns whether a folder claims to be a store, of any version, damaged or not."""
    try:
        content = json.loads((folder / MANIFEST).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT

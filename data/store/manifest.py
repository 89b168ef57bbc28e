"""Manifest: the description of a store, with sizes and checksums of its files, in
`manifest.json`."""

import json
import math
import os
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from longctx.checksums import check_files, persistent, plain_files, sealed, unsealed
from longctx.data.records.corpus import SourceCounts
from longctx.data.records.formats import WITHOUT_TEMPLATE
from longctx.errors import UserError, shell
from longctx.pointers import MOST_BYTES, complaint
from longctx.remote import RemotePath

FORMAT = "longctx-store"
VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
ARROW = ".arrow"
TOKEN_FILES = (".bin", ".ds")
"""Endings of parts that Megatron and datatrove wrote, which are read in place."""
TOKEN_TYPES = {2: "<u2", 4: "<i4"}
"""Types of the tokens in them, by their bytes."""
PARTS = (ARROW, *TOKEN_FILES)
TOKENIZER_FILES = "tokenizer"
"""Folder of the checkpoint's tokenizer files."""


class StoreError(UserError):
    """A folder that is not a store, or a store that is damaged, of another version, or must not be
    replaced."""


def how_to_prepare(folder: Path, more: str = "") -> str:
    """Returns the command that makes a store; `more` options follow. Without --source it would be
    of Python's own library."""
    source = "" if folder.name == "python-stdlib" else " --source YOUR_DATA --tokenizer CHECKPOINT"
    return f"`longctx prepare{source} --out {shell(folder)}{more}`"


def damaged(folder: Path, problem: object) -> StoreError:
    """Returns the error of a store with a problem."""
    return StoreError(
        f"store {folder} is damaged: {problem}; prepare it again with "
        f"{how_to_prepare(folder, ' --overwrite')}"
    )


@dataclass(kw_only=True)
class Counts:
    """What the documents of a store, or of a part of it, add up to.

    Attributes:
        documents, tokens, trained_tokens: totals; `trained_tokens` are targets.
        longest_name, longest_length: name of the longest document, and number of its tokens.
        unknown_tokens: number of tokens for text that the tokenizer lacks, in `unknown_documents`
            documents; `unknown_name` is the first of them.
        dropped_documents, truncated_documents: number of conversations that are too long, and are
            left out or cut.
        spelled_tokens: number of special tokens in the texts of `spelled_documents` documents;
            `spelled_name` is the first.
        straddling_tokens: number of target tokens that also contain text that is not trained on.
        empty_thoughts: number of turns that the chat template begins with an empty thought, which
            is not trained on.
        lightest, heaviest: smallest and largest weight of a document.
        weighted_documents: number of documents with weights of tokens.
        left_out: number of conversations of which the chat template does not show a part, by part.
    """

    documents: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    longest_name: str = ""
    longest_length: int = 0
    unknown_tokens: int = 0
    unknown_documents: int = 0
    unknown_name: str = ""
    dropped_documents: int = 0
    truncated_documents: int = 0
    spelled_tokens: int = 0
    spelled_documents: int = 0
    spelled_name: str = ""
    straddling_tokens: int = 0
    empty_thoughts: int = 0
    lightest: float = math.inf
    heaviest: float = 0.0
    weighted_documents: int = 0
    left_out: dict[str, int] = field(default_factory=dict)

    def __add__(self, later: "Counts") -> "Counts":
        longest = max(self, later, key=lambda counts: counts.longest_length)
        not_summed: dict[str, Any] = {
            "longest_name": longest.longest_name,
            "longest_length": longest.longest_length,
            "unknown_name": self.unknown_name or later.unknown_name,
            "spelled_name": self.spelled_name or later.spelled_name,
            "lightest": min(self.lightest, later.lightest),
            "heaviest": max(self.heaviest, later.heaviest),
            "left_out": dict(Counter(self.left_out) + Counter(later.left_out)),
        }
        names = {each.name for each in fields(Counts)} - not_summed.keys()
        return Counts(
            **not_summed, **{name: getattr(self, name) + getattr(later, name) for name in names}
        )


@dataclass(kw_only=True)
class Manifest(SourceCounts, Counts):
    """Description of a store. It is written last, so a store without a manifest was never finished.

    Attributes:
        request: SHA-256 of the source's content and of all settings; the same request need not be
            prepared again.
        listing: SHA-256 of the names and sizes of the source's files and of all settings, by which
            shares know a store.
        fingerprint: SHA-256 of source, tokenizer and end of document. A run resumes only on a store
            with the same one.
        tokenizer_fingerprint, vocab_size, end_of_document_token: properties of the tokenizer.
        files: bytes of every other file of the store.
        not_read: number of other files of the source, by the reason why they were not read.
        template: description of the chat template, and how tokens to train on were found; empty
            without conversations.
        max_length: maximum tokens of a conversation; None: no limit.
        special_as_text: whether special tokens in texts are characters.
        limits: maximum number of documents and of bytes, where reading stopped.
    """

    request: str
    fingerprint: str
    source: str
    tokenizer_fingerprint: str
    vocab_size: int
    end_of_document_token: str
    files: dict[str, int]
    checksums: dict[str, str]
    not_read: dict[str, int] = field(default_factory=dict)
    format: str = FORMAT
    version: int = VERSION
    template: str = ""
    train_on: str = "assistant"
    max_length: int | None = None
    special_as_text: bool = True  # of texts in stores that do not say
    lightest: float = 1.0
    heaviest: float = 1.0
    limits: dict[str, int] = field(default_factory=dict)
    listing: str = ""

    @property
    def conversations(self) -> bool:
        """Whether some documents are conversations."""
        return bool(set(self.formats) - WITHOUT_TEMPLATE)

    @property
    def checksums_of_parts(self) -> dict[str, str]:
        """Checksums of the parts, by name."""
        return {name: sums for name, sums in self.checksums.items() if name.endswith(PARTS)}

    @property
    def loss(self) -> str:
        """Sentence on text that the tokenizer lacks; empty if it lacks none."""
        if not self.unknown_tokens:
            return ""
        return (
            f"{self.unknown_tokens:,} of {self.tokens:,} tokens are unknown ones, for text that "
            f"the tokenizer lacks, in {self.unknown_documents:,} of {self.documents:,} documents; "
            f"the first is {self.unknown_name}"
        )

    def save(self, folder: Path) -> None:
        (folder / MANIFEST).write_text(json.dumps(sealed(asdict(self)), indent=2) + "\n", "utf-8")

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        """Reads a folder's manifest and checks that every file exists with its full size. Raises
        StoreError."""
        path = folder / MANIFEST
        if not folder.is_dir():
            raise StoreError(
                f"there is no store at {folder}: make one with {how_to_prepare(folder)}"
            )
        plain: dict[str, int] = {}
        if not isinstance(folder, RemotePath):  # where version control keeps no pointers
            plain = plain_files(folder)
            large = {name for name, size in plain.items() if size > MOST_BYTES}
            small = sorted(set(os.listdir(folder)) - large)
            if said := complaint(folder / name for name in small):
                raise StoreError(f"store {folder}: {said}")
        if not path.is_file():
            raise StoreError(
                f"{folder} is not a store: it has no {MANIFEST}; give the folder of a store, or "
                "make one elsewhere"
            )
        try:
            content: dict[str, Any] = json.loads(persistent(lambda: path.read_text("utf-8")))
            kind = content["format"]
            version = content["version"]
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"{path} is not the manifest of a store, or is damaged: {error}; give the folder "
                "of a store"
            ) from error
        if kind != FORMAT or version != VERSION:
            raise StoreError(
                f"{path} is of format {kind} {version}, but this longctx reads {FORMAT} {VERSION}: "
                f"prepare it again with {how_to_prepare(folder, ' --overwrite')}"
            )
        try:
            manifest = cls(**unsealed(content))
            check_files(folder, manifest.files, manifest.checksums, plain=plain)
        except (ValueError, TypeError, AttributeError) as error:
            raise damaged(folder, f"{MANIFEST}: {error}") from error
        return manifest


def is_store(folder: Path) -> bool:
    """Returns whether a folder claims to be a store, of any version, damaged or not."""
    try:
        content = json.loads((folder / MANIFEST).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT


def files_of_store(folder: Path) -> list[str]:
    """Returns the names of the files that a store lists, of any version, damaged or not, and of its
    manifest; but not of those that other programs wrote."""
    files = json.loads((folder / MANIFEST).read_text("utf-8")).get("files")
    if isinstance(files, dict):
        return [MANIFEST, *(name for name in files if not name.endswith(TOKEN_FILES))]
    return [MANIFEST]

"""Store: tokenized documents on disk, opened as memory maps and read by spans.

A store is a folder with `manifest.json`, `tokenizer.json` and Arrow stream files with one row per document:

    name            string
    tokens          list<uint16 or int32>; ends with the end-of-document token, or as the checkpoint's chat template ends
    length          int64, number of tokens
    trained_tokens  int64, number of targets: labels of the whole document other than -100
    trained         list<bool>, which tokens may be targets; null means all (every document but conversations)
    weight          float64, weight of each of its targets in the loss; stores of older versions lack it, which means 1

The files of a checkpoint's tokenizer, including its chat template, are in `tokenizer/`, for exports. `state.json` and
`dataset_info.json` make the folder also a dataset of the `datasets` library (`load_from_disk`). Reading needs neither
`datasets` nor torch, so that planning from a store's lengths starts quickly. `longctx.data.prepare` writes stores.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow

from longctx.data import IGNORED_LABEL
from longctx.data.tokenizer import Tokenizer, TokenizerError, fingerprint
from longctx.errors import UserError

FORMAT = "longctx-store"
VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = "tokenizer"
"""Folder of the checkpoint's tokenizer files."""

Int64Array = npt.NDArray[np.int64]


class StoreError(UserError):
    """A folder that is not a store, or a store that is damaged, of another version, or must not be replaced."""


@dataclass(frozen=True)
class Manifest:
    """Description of a store. It is written last, so a store without a manifest was never finished.

    Attributes:
        request: SHA-256 of the source's content and of all settings; the same request need not be prepared again.
        fingerprint: SHA-256 of source, tokenizer and end of document. A run resumes only on a store with the same one.
        source: source of the text, as given.
        documents, tokens, trained_tokens: totals; `trained_tokens` are targets.
        longest_name, longest_length: name of the longest document, and number of its tokens.
        empty_documents: number of documents left out because they have no text.
        skipped_files: number of files left out because they are not UTF-8 text; `skipped_names` are the first of them.
        tokenizer_fingerprint, vocab_size, end_of_document_token: properties of the tokenizer.
        characters: number of characters that are not white space; 0 if the tokenizer cannot lose any.
        lost_characters: number of these that no token represents, in `lossy_documents` documents.
        lossiest_name, lossiest_characters: document that lost most characters, and number of these.
        files: bytes of every other file of the store.
        formats: number of documents of each format, including documents dropped later.
        template: description of the chat template, and how tokens to train on were found; empty without conversations.
        train_on: parts of conversations that are trained on.
        max_length: maximum tokens of a conversation; None: no limit. `dropped_documents` conversations were longer.
        spelled_documents: number of conversations whose texts contain special tokens, encoded as such; `spelled_name` is the
            first of them.
        straddling_tokens: number of target tokens that also contain text that is not trained on.
        lightest, heaviest: smallest and largest weight of a document.
        pairs: whether documents 2k and 2k + 1 are the chosen and the rejected completion of one prompt, for every k.
        useless_pairs: number of pairs left out because the completions are equal, or one is empty.
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
    format: str = FORMAT
    version: int = VERSION
    characters: int = 0
    lost_characters: int = 0
    lossy_documents: int = 0
    lossiest_name: str = ""
    lossiest_characters: int = 0
    formats: dict[str, int] = field(default_factory=dict)
    template: str = ""
    train_on: str = "assistant"
    max_length: int | None = None
    dropped_documents: int = 0
    spelled_documents: int = 0
    spelled_name: str = ""
    straddling_tokens: int = 0
    lightest: float = 1.0
    heaviest: float = 1.0
    pairs: bool = False
    useless_pairs: int = 0

    @property
    def conversations(self) -> bool:
        """Whether the store has conversations; stores of older versions show this only by tokens that are not targets."""
        known = bool(set(self.formats) - {"text"})
        return known or (not self.formats and self.trained_tokens != self.tokens - self.documents)

    @property
    def loss(self) -> str:
        """Sentence on the characters that the tokenizer lost; empty if it lost none."""
        if not self.lost_characters:
            return ""
        return (
            f"the tokenizer lacks {self.lost_characters:,} of {self.characters:,} characters of the text "
            f"({self.lost_characters / self.characters:.2%}, white space not counted), in {self.lossy_documents:,} of "
            f"{self.documents:,} documents, most in {self.lossiest_name} ({self.lossiest_characters:,}): they are dropped, or "
            "replaced by an unknown token"
        )

    def save(self, folder: Path) -> None:
        (folder / MANIFEST).write_text(json.dumps(asdict(self), indent=2) + "\n", "utf-8")

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        """Reads a folder's manifest and checks that every file exists with its full size. Raises StoreError."""
        path = folder / MANIFEST
        if not folder.is_dir():
            raise StoreError(f"there is no store at {folder}: make one with `longctx prepare --out {folder}`")
        if not path.is_file():
            raise StoreError(
                f"{folder} is not a store: it has no {MANIFEST}; make one elsewhere with `longctx prepare --out FOLDER`"
            )
        try:
            content: dict[str, Any] = json.loads(path.read_text("utf-8"))
            kind, version = content["format"], content["version"]
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"{path} is not the manifest of a store, or is damaged: {error}; give the folder of a store"
            ) from error
        if (kind, version) != (FORMAT, VERSION):
            raise StoreError(
                f"{folder} has format {kind} {version}, but this longctx reads {FORMAT} {VERSION}: "
                f"prepare it again with `longctx prepare --out {folder} --overwrite`"
            )
        try:
            manifest = cls(**content)
        except TypeError as error:
            raise StoreError(
                f"{path} is damaged: {error}; prepare it again with `longctx prepare --out {folder} --overwrite`"
            ) from error
        for name, size in manifest.files.items():
            file = folder / name
            found = file.stat().st_size if file.is_file() else None
            if found != size:
                raise StoreError(
                    f"store {folder} is damaged: {name} {'is missing' if found is None else f'has {found:,} bytes'}, "
                    f"but should have {size:,} bytes; prepare it again with `longctx prepare --out {folder} --overwrite`"
                )
        return manifest


def is_store(folder: Path) -> bool:
    """Returns whether a folder claims to be a store, of any version, damaged or not."""
    try:
        content = json.loads((folder / MANIFEST).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT


def store_schema(tokenizer: Tokenizer) -> Any:
    """Returns the Arrow schema of a store's files."""
    columns = {
        "name": pyarrow.string(),
        "tokens": pyarrow.list_(pyarrow.from_numpy_dtype(tokenizer.dtype)),
        "length": pyarrow.int64(),
        "trained_tokens": pyarrow.int64(),
        "trained": pyarrow.list_(pyarrow.bool_()),
        "weight": pyarrow.float64(),
    }
    return pyarrow.schema(columns.items())


@dataclass(frozen=True, slots=True)
class _Batch:
    """One Arrow record batch: document i has tokens[starts[i]:starts[i+1]], and `trained` likewise (empty: all)."""

    tokens: npt.NDArray[np.integer[Any]]
    starts: npt.NDArray[np.int32]
    trained: Any  # pyarrow.BooleanArray: one bit per token
    trained_starts: npt.NDArray[np.int32]


@dataclass(frozen=True)
class Source:
    """One of several stores that are read as one.

    Attributes:
        path, fingerprint: path and fingerprint of the store.
        documents: indices of its documents among those of all stores.
        amount, unit: amount to take from the store: a `weight` (share of the tokens, relative to the other weights), or a
            number of `epochs` (in the time in which the other stores pass theirs).
    """

    path: Path
    fingerprint: str
    documents: range
    amount: float = 1.0
    unit: str = "weight"


class Store:
    """Documents of a store, or of several, numbered from 0. Use `Store.open`, and `Store.join` for several.

    Attributes:
        path, manifest: path and manifest of the store, or of the first of several.
        sources: the stores that this one consists of; a single store has itself.
        lengths: tokens per document, including the end-of-document token, int64 `[documents]`.
        trained_tokens: targets per document, int64 `[documents]`.
        weights: weight of each target of a document in the loss, float64 `[documents]`; 1 by default.
        tokenizer: tokenizer that made the tokens.
        fingerprint: hash of the content; stores with equal fingerprints have equal tokens.
    """

    def __init__(
        self, path: Path, manifest: Manifest, tokenizer: Tokenizer, table: Any, sources: Sequence[Source] = ()
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.tokenizer = tokenizer
        self.sources = tuple(sources) or (Source(path, manifest.fingerprint, range(table.num_rows)),)
        prints = [source.fingerprint for source in self.sources]
        self.fingerprint = prints[0] if len(prints) == 1 else hashlib.sha256("".join(prints).encode()).hexdigest()
        self._table = table
        self.lengths: Int64Array = table.column("length").to_numpy()
        self.trained_tokens: Int64Array = table.column("trained_tokens").to_numpy()
        weights = table.column("weight")
        all_one = all((part.to_numpy() == 1).all() for part in weights.chunks)  # then a single number suffices
        self.weights: npt.NDArray[np.float64] = np.broadcast_to(1.0, len(weights)) if all_one else weights.to_numpy()
        self._names = table.column("name")
        self._batches = [_batch(batch) for batch in table.to_batches()]
        self._first_document = np.cumsum([0] + [len(batch.starts) - 1 for batch in self._batches])

    @classmethod
    def open(cls, path: Path | str, *, tokenizer: Path | None = None) -> "Store":
        """Maps a store into memory. Raises StoreError naming what is wrong with it, and the way out.

        `tokenizer` is the tokenizer.json that the store must have been made with; None: any.
        """
        path = Path(path)
        manifest = Manifest.load(path)
        try:
            used = Tokenizer.load(path / TOKENIZER, manifest.end_of_document_token)
            parts = sorted(name for name in manifest.files if name.endswith(".arrow"))
            maps = [pyarrow.memory_map(str(path / name)) for name in parts]
            table = pyarrow.concat_tables([pyarrow.ipc.open_stream(part).read_all() for part in maps])
        except (pyarrow.ArrowException, TokenizerError) as error:
            raise StoreError(
                f"store {path} is damaged: {error}; prepare it again with `longctx prepare --out {path} --overwrite`"
            ) from error
        if used.fingerprint != manifest.tokenizer_fingerprint or table.num_rows != manifest.documents:
            raise StoreError(f"store {path} has files of another store: prepare it again with `longctx prepare --overwrite`")
        if "weight" not in table.column_names:  # in stores of older versions
            table = table.append_column("weight", pyarrow.array(np.ones(table.num_rows)))
        if tokenizer is not None and _fingerprint_of(tokenizer) != used.fingerprint:
            raise StoreError(
                f"store {path} was made with another tokenizer than {tokenizer}: prepare it again with that one "
                f"(`longctx prepare --tokenizer {tokenizer}`), or remove data.tokenizer to use the store's tokenizer"
            )
        return cls(path, manifest, used, table)

    @classmethod
    def join(cls, stores: Sequence["Store"], amounts: Sequence[float], unit: str = "weight") -> "Store":
        """Joins several stores into one, one after the other, with the `amounts` to take of each, in `unit` (see `Source`).

        Raises StoreError if they were made with different tokenizers, if two have the same documents, or if one has pairs.
        """
        first, *others = stores
        for store in filter(lambda store: store.pairs, stores):
            raise StoreError(f"store {store.path} has preference pairs, which cannot be mixed: give it alone, as data.store")
        for store, other in itertools.combinations(stores, 2):
            if store.fingerprint == other.fingerprint:
                raise StoreError(f"stores {store.path} and {other.path} have the same documents: give only one of them")
        for store in others:
            if store.tokenizer.fingerprint != first.tokenizer.fingerprint:
                raise StoreError(
                    f"store {store.path} was made with another tokenizer than store {first.path}: prepare both with the same "
                    f"tokenizer (`longctx prepare --tokenizer {first.path / TOKENIZER}`)"
                )
        ends = itertools.accumulate(map(len, stores))
        sources = [
            Source(store.path, store.fingerprint, range(end - len(store), end), amount, unit)
            for store, amount, end in zip(stores, amounts, ends, strict=True)
        ]
        table = pyarrow.concat_tables([store._table for store in stores])
        return cls(first.path, first.manifest, first.tokenizer, table, sources)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def pairs(self) -> bool:
        """Whether documents 2k and 2k + 1 are a pair: the chosen and the rejected completion of a prompt."""
        return self.manifest.pairs

    @property
    def said(self) -> str:
        """Path of the store, or of all stores, for messages."""
        return ", ".join(str(source.path) for source in self.sources)

    @property
    def names(self) -> Iterator[str]:
        """Names of all documents, in order."""
        for part in self._names.chunks:
            yield from part.to_pylist()

    def tokens_by_source(self, documents: Sequence[int], tokens: Sequence[int]) -> dict[str, int]:
        """Returns the sum of `tokens`, given per entry of `documents`, by the path of their store; {} for a single store."""
        if len(self.sources) == 1:
            return {}
        found = dict.fromkeys((str(source.path) for source in self.sources), 0)
        firsts = [source.documents.start for source in self.sources]
        for place, count in zip(np.searchsorted(firsts, documents, side="right") - 1, tokens, strict=True):
            found[str(self.sources[place].path)] += count
        return found

    def name(self, document: int) -> str:
        return str(self._names[document].as_py())

    def read(self, document: int, start: int, stop: int, *, end: int | None = None) -> tuple[Int64Array, Int64Array]:
        """Reads tokens and labels, both int64 `[stop - start]`, of positions start … stop - 1 of a document.

        The label of position i is token i + 1 if that token may be a target and i + 1 < `end` (default: the document's
        length), else -100. Only this span and one more token are read from disk.
        """
        end = int(self.lengths[document]) if end is None else end
        if not 0 <= start <= stop <= end <= self.lengths[document]:
            raise IndexError(f"document {document} has {self.lengths[document]} tokens: no span {start}:{stop} before {end}")
        after = min(stop + 1, end)  # one more token, for the last label
        batch, row = self._locate(document)
        first = int(batch.starts[row])
        tokens = batch.tokens[first + start : first + after].astype(np.int64)
        labels = np.full(stop - start, IGNORED_LABEL, np.int64)
        if after > start + 1:
            targets = self._trained(batch, row, start + 1, after)
            labels[: after - start - 1] = np.where(targets, tokens[1:], IGNORED_LABEL)
        return tokens[: stop - start], labels

    def tokens(self, document: int, start: int, stop: int) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        """Reads tokens, int64 `[stop - start]`, of a span of a document, and which of them may be targets."""
        if not 0 <= start <= stop <= self.lengths[document]:
            raise IndexError(f"document {document} has {self.lengths[document]} tokens: no span {start}:{stop}")
        batch, row = self._locate(document)
        first = int(batch.starts[row])
        return batch.tokens[first + start : first + stop].astype(np.int64), self._trained(batch, row, start, stop)

    def target_tokens(self, document: int, start: int, stop: int) -> int:
        """Returns the number of targets of the span start … stop - 1 as a separate document, whose first token is no target."""
        if stop - start == self.lengths[document]:
            return int(self.trained_tokens[document])
        batch, row = self._locate(document)
        return int(self._trained(batch, row, start + 1, stop).sum()) if stop > start + 1 else 0

    def _locate(self, document: int) -> tuple[_Batch, int]:
        index = int(np.searchsorted(self._first_document, document, side="right")) - 1
        return self._batches[index], document - int(self._first_document[index])

    def _trained(self, batch: _Batch, row: int, start: int, stop: int) -> npt.NDArray[np.bool_]:
        first = int(batch.trained_starts[row])
        if first == batch.trained_starts[row + 1]:
            return np.ones(stop - start, np.bool_)
        mask: npt.NDArray[np.bool_] = batch.trained.slice(first + start, stop - start).to_numpy(zero_copy_only=False)
        return mask


def _batch(batch: Any) -> _Batch:
    tokens, trained = batch.column("tokens"), batch.column("trained")
    return _Batch(tokens.values.to_numpy(), tokens.offsets.to_numpy(), trained.values, trained.offsets.to_numpy())


def _fingerprint_of(tokenizer: Path) -> str:
    try:
        return fingerprint(tokenizer.read_text("utf-8"))
    except UnicodeDecodeError as error:
        raise TokenizerError(
            f"{tokenizer} is not a tokenizer.json: {error}; give the tokenizer.json that the store was made with"
        ) from error

"""Store: tokenized documents on disk, opened as memory maps and read by spans.

A store is a folder with `manifest.json`, `tokenizer.json` and Arrow stream files with one row per
document:

    name            string
    tokens          list<uint16 or int32>; ends with the end-of-document token, or as the
                    checkpoint's chat template ends
    length          int64, number of tokens
    trained_tokens  int64, number of targets: labels of the whole document other than -100
    trained         list<bool>, which tokens may be targets; null means all (every document but
                    conversations)
    weight          float64, weight of each of its targets in the loss
    token_weights   list<float32>, further factor of each target in the loss; null means 1; only
                    files that need it have it

The files of a checkpoint's tokenizer, including its chat template, are in `tokenizer/`, for
exports. `state.json` and `dataset_info.json` make the folder also a dataset of the `datasets`
library (`load_from_disk`). Reading needs neither `datasets` nor torch, so that planning from a
store's lengths starts quickly. `longctx.data.store.prepare` writes stores.

The manifest has checksums of itself and of every file. Small files are verified when a store is
opened, large ones part by part when a document there is first read. What is known of all documents
is in an index (`index.py`). A store in object storage is read through a cache (`cache.py`).
"""

import bisect
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.compute

from longctx.checksums import damage
from longctx.data import IGNORED_LABEL
from longctx.data.records.tokenizer import Tokenizer
from longctx.data.store.cache import Cache, CachedParts
from longctx.data.store.documents import Documents, Parts
from longctx.data.store.held_out import HeldOut, halves
from longctx.data.store.index import BLOCK, INDEX, LENGTHS, Index, write_index
from longctx.data.store.manifest import PARTS, TOKENIZER, Manifest, StoreError, damaged
from longctx.data.store.mapped import SMALL, LocalParts, MappedFile
from longctx.errors import UserError, shell
from longctx.remote import RemotePath, any_path

Int64Array = npt.NDArray[np.int64]


def store_schema(tokenizer: Tokenizer, weighted: bool = False) -> Any:
    """Returns the Arrow schema of a store's files, with weights of tokens if `weighted`."""
    columns = {
        "name": pyarrow.string(),
        "tokens": pyarrow.list_(pyarrow.from_numpy_dtype(tokenizer.dtype)),
        "length": pyarrow.int64(),
        "trained_tokens": pyarrow.int64(),
        "trained": pyarrow.list_(pyarrow.bool_()),
        "weight": pyarrow.float64(),
    }
    if weighted:
        columns["token_weights"] = pyarrow.list_(pyarrow.float32())
    return pyarrow.schema(columns.items())


@dataclass(frozen=True)
class Source:
    """One of several stores that are read as one.

    Attributes:
        documents: indices of its documents, counted over all stores.
        amount, unit: amount to take from the store: a `weight` (share of the tokens, relative to
            the other weights), or a number of `epochs` (in the time in which the other stores pass
            theirs).
    """

    path: Path
    fingerprint: str
    documents: range
    amount: float = 1.0
    unit: str = "weight"


class Store:
    """Documents of a store, or of several, numbered from 0. Use `Store.open`, and `Store.join` for
    several.

    Attributes:
        sources: the stores that this one consists of; a single store has itself.
        tokens_in_all, longest: tokens of all documents, and those of the longest one.
        weighted: whether a document has weights of tokens.
        fingerprint: hash of the content; stores with equal fingerprints have equal tokens.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        tokenizer: Tokenizer,
        documents: Sequence[Documents],
        sources: Sequence[Source] = (),
        *,
        tokens_in_all: int,
        longest: int,
        weighted: bool,
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.tokenizer = tokenizer
        self.sources = tuple(sources) or (
            Source(path, manifest.fingerprint, range(len(documents[0]))),
        )
        prints = [source.fingerprint for source in self.sources]
        if len(prints) == 1:
            self.fingerprint = prints[0]
        else:
            self.fingerprint = hashlib.sha256("".join(prints).encode()).hexdigest()
        self._documents = documents
        self._firsts = [source.documents.start for source in self.sources]
        self.tokens_in_all = tokens_in_all
        self.longest = longest
        self.weighted = weighted

    @cached_property
    def lengths(self) -> Int64Array:
        """Tokens per document, including the end-of-document token, int64 `[documents]`; 8 bytes a
        document once they are asked for."""
        return np.concatenate([each.index.lengths_of(slice(None)) for each in self._documents])

    @cached_property
    def trained_tokens(self) -> Int64Array:
        """Targets per document, int64 `[documents]`; 8 bytes a document once they are asked for."""
        return np.concatenate([each.index.targets_of(slice(None)) for each in self._documents])

    @cached_property
    def weights(self) -> npt.NDArray[np.float64]:
        """Weight of each target of a document in the loss, float64 `[documents]`; 1 by default; 8
        bytes a document once they are asked for."""
        return np.concatenate([each.index.weights_of(slice(None)) for each in self._documents])

    @classmethod
    def open(cls, path: Path | str, *, cache: Cache | None = None) -> "Store":
        """Opens a store, of which nothing is read yet but its index; one in object storage is read
        through a cache (None: the default one). Raises StoreError naming what is wrong with it, and
        the way out."""
        path = any_path(path)
        manifest = Manifest.load(path)
        try:
            for name in manifest.files:
                is_whole = not name.endswith((*PARTS, *INDEX))
                if is_whole and (problem := damage(path / name, manifest.checksums[name])):
                    raise ValueError(problem)
            used = Tokenizer.load(path / TOKENIZER, manifest.end_of_document_token)
            if used.fingerprint != manifest.tokenizer_fingerprint:
                raise _of_another_store(path)
            if isinstance(path, RemotePath):
                index, parts = _remote(path, manifest, cache or Cache())
            else:
                index, parts = _local(path, manifest)
        except (pyarrow.ArrowException, ValueError, OSError) as error:
            if isinstance(error, UserError):
                raise
            raise damaged(path, error) from error
        if len(index.lengths) != manifest.documents:
            raise _of_another_store(path)
        schemas = store_schema(used), store_schema(used, weighted=True)
        documents = Documents(index, parts, schemas)
        return cls(
            path,
            manifest,
            used,
            [documents],
            tokens_in_all=manifest.tokens,
            longest=manifest.longest_length or int(index.lengths.max(initial=0)),
            weighted=manifest.weighted_documents > 0,
        )

    @classmethod
    def join(
        cls, stores: Sequence["Store"], amounts: Sequence[float], unit: str = "weight"
    ) -> "Store":
        """Joins several stores into one, one after the other, with the `amounts` to take of each,
        in `unit` (see `Source`).

        Raises StoreError if they were made with different tokenizers, or if two have the same
        documents.
        """
        first, *others = stores
        for store, other in itertools.combinations(stores, 2):
            if store.fingerprint == other.fingerprint:
                raise StoreError(
                    f"stores {store.path} and {other.path} have the same documents: give only one "
                    "of them"
                )
        for store in others:
            if store.tokenizer.fingerprint != first.tokenizer.fingerprint:
                raise StoreError(
                    f"store {store.path} was made with another tokenizer than store {first.path}: "
                    "prepare both with the same tokenizer (`longctx prepare --tokenizer "
                    f"{shell(first.path / TOKENIZER)}`)"
                )
        ends = itertools.accumulate(map(len, stores))
        sources = [
            Source(
                store.path,
                store.fingerprint,
                documents=range(end - len(store), end),
                amount=amount,
                unit=unit,
            )
            for store, amount, end in zip(stores, amounts, ends, strict=True)
        ]
        documents = [each for store in stores for each in store._documents]
        return cls(
            first.path,
            first.manifest,
            first.tokenizer,
            documents=documents,
            sources=sources,
            tokens_in_all=sum(store.tokens_in_all for store in stores),
            longest=max(store.longest for store in stores),
            weighted=any(store.weighted for store in stores),
        )

    def __len__(self) -> int:
        return self.sources[-1].documents.stop

    def size(self, source: int) -> int:
        """Returns the number of documents of a store of `sources`."""
        return len(self.sources[source].documents)

    def first(self, source: int) -> int:
        """Returns the number of the first document of a store of `sources`."""
        return self.sources[source].documents.start

    def columns(self, source: int, which: Any) -> tuple[Int64Array, Int64Array]:
        """Returns lengths and targets of documents of a store of `sources`, where they are numbered
        from 0, of a slice of them or of an array of their numbers."""
        index = self._documents[source].index
        return index.lengths_of(which), index.targets_of(which)

    def groups(self, source: int) -> npt.NDArray[Any] | None:
        """Returns what is known of groups of documents of a store of `sources`, GROUPS `[groups]`;
        None of an earlier one."""
        return self._documents[source].index.groups

    def held_out(self, source: int, share: float) -> HeldOut:
        """Returns which documents of a store of `sources` are held out for evaluation. Raises
        StoreError for an earlier store in object storage, all of which would be fetched."""
        documents = self._documents[source]
        path = self.sources[source].path
        if documents.index.name_hashes is None and isinstance(path, RemotePath):
            raise StoreError(
                f"store {path} was prepared before documents could be held out in object storage: "
                "prepare it again, set eval.store and data.held_out 0, or copy it to a folder of "
                "this machine"
            )
        return HeldOut(documents.name_hashes, documents.name, share)

    def length(self, document: int) -> int:
        """Returns the tokens of a document."""
        index, number = self._known(document)
        return int(index.lengths[number])

    def longer_than(self, tokens: int) -> int:
        """Returns the number of documents with more tokens."""
        count = 0
        for source in range(len(self.sources)):
            for start in range(0, self.size(source), BLOCK):
                lengths, _ = self.columns(source, slice(start, start + BLOCK))
                count += int((lengths > tokens).sum())
        return count

    def weight(self, document: int) -> float:
        """Returns the weight of each target of a document in the loss."""
        index, number = self._known(document)
        return float(index.weights_of(np.array([number]))[0])

    def _known(self, document: int) -> tuple[Index, int]:
        """Returns the index of the store that a document is in, and its number there."""
        source = self._source(document)
        return self._documents[source].index, document - self._firsts[source]

    @property
    def description(self) -> str:
        return ", ".join(str(source.path) for source in self.sources)

    @property
    def names(self) -> Iterator[str]:
        """Names of all documents; reads all of them."""
        for documents in self._documents:
            for batch in documents.batches():
                yield from batch.column("name").to_pylist()

    @property
    def largest_token(self) -> int:
        """Largest token id of all documents; reads all of them."""
        return max(
            pyarrow.compute.max(batch.column("tokens").values).as_py() or 0
            for documents in self._documents
            for batch in documents.batches()
        )

    def tokens_by_source(self, documents: Sequence[int], tokens: Sequence[int]) -> dict[str, int]:
        """Returns the sum of `tokens`, given per entry of `documents`, by the path of their store;
        {} for a single store."""
        if len(self.sources) == 1:
            return {}
        by_path = dict.fromkeys((str(source.path) for source in self.sources), 0)
        for place, count in zip(map(self._source, documents), tokens, strict=True):
            by_path[str(self.sources[place].path)] += count
        return by_path

    def _source(self, document: int) -> int:
        """Returns the number of the store that a document is in."""
        return bisect.bisect_right(self._firsts, document) - 1

    def fetch(self, documents: Iterable[int]) -> None:
        """Fetches documents that will be read, several at a time, where a store is far away."""
        by_source: dict[int, list[int]] = {}
        for document in documents:
            source = self._source(document)
            by_source.setdefault(source, []).append(document - self._firsts[source])
        for source, its in by_source.items():
            try:
                self._documents[source].fetch(its)
            except ValueError as error:
                raise self._damaged(self._firsts[source], error) from error

    def name(self, document: int) -> str:
        batch, row = self._row(document)
        return str(batch.column("name")[row].as_py())

    def read(
        self, document: int, start: int, stop: int, *, end: int | None = None
    ) -> tuple[Int64Array, Int64Array]:
        """Reads tokens and labels, both int64 `[stop - start]`, of positions start … stop - 1 of a
        document.

        The label of position i is token i + 1 if that token may be a target and i + 1 < `end`
        (default: the document's length), else -100. Only this span and one more token are read from
        disk.
        """
        length = self.length(document)
        end = length if end is None else end
        if not 0 <= start <= stop <= end <= length:
            raise IndexError(
                f"document {document} has {length} tokens: no span {start}:{stop} before {end}"
            )
        after = min(stop + 1, end)  # one more token, for the last label
        tokens, trained = self._read(document, start, after)
        labels = np.full(stop - start, IGNORED_LABEL, np.int64)
        labels[: max(0, after - start - 1)] = np.where(trained[1:], tokens[1:], IGNORED_LABEL)
        return tokens[: stop - start], labels

    def tokens(
        self, document: int, start: int, stop: int
    ) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        """Reads tokens, int64 `[stop - start]`, of a span of a document, and which of them may be
        targets."""
        length = self.length(document)
        if not 0 <= start <= stop <= length:
            raise IndexError(f"document {document} has {length} tokens: no span {start}:{stop}")
        return self._read(document, start, stop)

    def token_weights(self, document: int, start: int, stop: int) -> npt.NDArray[np.float32] | None:
        """Reads weights of the targets start … stop - 1 of a document, float32 `[stop - start]`;
        None: 1 for all of it.

        Tokens that are no targets have 0. They multiply the weight of the document.
        """
        if not self.weighted:
            return None
        weights: npt.NDArray[np.float32] | None
        weights = self._values(document, "token_weights", start, stop)
        return weights

    def target_tokens(self, document: int, start: int, stop: int) -> int:
        """Returns the number of targets of the span start … stop - 1 as a separate document, whose
        first token is no target."""
        index, number = self._known(document)
        if stop - start == index.lengths[number]:
            if index.trained_tokens is None:
                return stop - start - 1
            return int(index.trained_tokens[number])
        if stop > start + 1:
            return int(self._trained(document, start + 1, stop).sum())
        return 0

    def has_targets(
        self, documents: Int64Array, starts: Int64Array, stops: Int64Array
    ) -> npt.NDArray[np.bool_]:
        """Returns which of these spans have a target as separate documents; reads them."""
        spans = zip(documents.tolist(), starts.tolist(), stops.tolist(), strict=True)
        counts = [self.target_tokens(*span) for span in spans]
        return np.array(counts) > 0

    def _read(
        self, document: int, start: int, stop: int
    ) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        """Returns tokens of a document and which may be targets. Raises StoreError if they are
        damaged."""
        tokens = self._values(document, "tokens", start, stop).astype(np.int64)
        size = self.tokenizer.vocab_size
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < size):
            at = int(np.flatnonzero((tokens < 0) | (tokens >= size))[0])
            where = (
                f"document {self.name(document)} has token {tokens[at]} at position {start + at}"
            )
            raise damaged(self._path(document), f"{where}, but its tokenizer has {size:,} tokens")
        return tokens, self._trained(document, start, stop)

    def _trained(self, document: int, start: int, stop: int) -> npt.NDArray[np.bool_]:
        mask: npt.NDArray[np.bool_] | None = self._values(document, "trained", start, stop)
        if mask is None:
            return np.ones(stop - start, np.bool_)
        return mask

    def _values(self, document: int, column: str, start: int, stop: int) -> Any:
        """Returns a span of a document's list in a column; None: it has none. Raises StoreError if
        it is damaged."""
        batch, row = self._row(document)
        if column not in batch.schema.names:
            return None
        values = batch.column(column)[row].values
        if values is None:
            return None
        return values[start:stop].to_numpy(zero_copy_only=False)

    def _row(self, document: int) -> tuple[Any, int]:
        """Returns the record batch of a document, and its row there. Raises StoreError if it is
        damaged."""
        source = self._source(document)
        try:
            return self._documents[source].row(document - self._firsts[source])
        except ValueError as error:
            raise self._damaged(document, error) from error

    def _damaged(self, document: int, error: ValueError) -> UserError:
        """Returns the error of a document that cannot be read; one that says the way out stays."""
        if isinstance(error, UserError):
            return error
        return damaged(self._path(document), error)

    def _path(self, document: int) -> Path:
        return self.sources[self._source(document)].path


def _of_another_store(path: Path) -> StoreError:
    return StoreError(
        f"store {path} has files of another store: prepare it again with `longctx prepare "
        "--overwrite`"
    )


def _local(path: Path, manifest: Manifest) -> tuple[Index, Parts]:
    """Returns index and parts of a store in a folder of this machine. Raises ValueError if they are
    damaged, as far as a glance tells."""
    checksums = manifest.checksums_of_parts
    parts = LocalParts(path, checksums)
    if LENGTHS not in manifest.files:  # made before there were indices
        opened = (MappedFile(path / name, checksums[name]) for name in parts.names)
        with TemporaryDirectory() as folder:
            write_index(Path(folder), opened, manifest.documents)
            made = {file.name: file for file in Path(folder).iterdir()}
            index = Index.load(made)  # which stays mapped
    else:
        if sum(manifest.files[name] for name in parts.names) <= SMALL and parts.damage():
            raise ValueError(parts.damage())
        files = {name: path / name for name in INDEX if name in manifest.files}
        for name, file in files.items():
            if manifest.files[name] <= SMALL and damage(file, manifest.checksums[name]):
                raise ValueError(damage(file, manifest.checksums[name]))
        index = Index.load(files)
    if len(index.lengths) <= SMALL:
        _check_totals(index, manifest, parts)
    return index, parts


def _check_totals(index: Index, manifest: Manifest, parts: LocalParts) -> None:
    """Raises ValueError if the documents do not add up to what the manifest says."""
    tokens = int(index.lengths.sum(dtype=np.int64))
    targets = tokens - len(index.lengths)
    if index.trained_tokens is not None:
        targets = int(index.trained_tokens.sum(dtype=np.int64))
    totals = {"length": (tokens, manifest.tokens)}
    totals["trained_tokens"] = (targets, manifest.trained_tokens)
    for column, (actual, total) in totals.items():
        if actual != total:
            raise ValueError(parts.damage() or f"{column} adds up to {actual:,}, not {total:,}")


def _remote(path: RemotePath, manifest: Manifest, cache: Cache) -> tuple[Index, Parts]:
    """Returns index and parts of a store in object storage. Raises StoreError if it has no
    index."""
    if LENGTHS not in manifest.files:
        raise StoreError(
            f"store {path} was prepared before stores could be read in object storage: prepare it "
            "again, or copy it to a folder of this machine"
        )
    cache.make()
    files = {}
    for name in INDEX:
        if name in manifest.files:
            checksums = manifest.checksums[name]
            files[name] = cache.file(path / name, manifest.files[name], checksums=checksums)
    parts = CachedParts(path, manifest.files, checksums=manifest.checksums_of_parts, cache=cache)
    return Index.load(files), parts


class Lengths(Store):
    """Documents of these lengths for planning steps; every token is trained, and none can be read.

    Attributes as of `Store`; `description` is of the lengths, and the tokenizer has a size only.
    """

    def __init__(self, lengths: Sequence[int], description: str, vocab_size: int) -> None:
        self.lengths = np.array(lengths, dtype=np.int64)
        self.trained_tokens = np.maximum(self.lengths - 1, 0)
        self.tokens_in_all = int(self.lengths.sum())
        self.longest = int(self.lengths.max(initial=0))
        self.path = Path(description)
        self.sources = (Source(self.path, "", range(len(self.lengths))),)
        self.tokenizer = cast(Tokenizer, SimpleNamespace(vocab_size=vocab_size))
        self.weighted = False
        self._firsts = [0]

    def columns(self, source: int, which: Any) -> tuple[Int64Array, Int64Array]:
        return self.lengths[which], self.trained_tokens[which]

    def groups(self, source: int) -> None:
        return None

    def held_out(self, source: int, share: float) -> HeldOut:
        return HeldOut(halves(self.names), self.name, share)

    @property
    def names(self) -> Iterator[str]:
        yield from map(self.name, range(len(self)))

    def name(self, document: int) -> str:
        return f"document {document + 1}"

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
opened, large ones part by part when a document there is first read.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.compute

from longctx.checksums import damage
from longctx.data import IGNORED_LABEL
from longctx.data.records.tokenizer import Tokenizer
from longctx.data.store.manifest import ARROW, TOKENIZER, Manifest, StoreError, damaged
from longctx.data.store.mapped import Batch, MappedFile
from longctx.errors import shell
from longctx.paths import local_path

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
        lengths: tokens per document, including the end-of-document token, int64 `[documents]`.
        trained_tokens: targets per document, int64 `[documents]`.
        weights: weight of each target of a document in the loss, float64 `[documents]`; 1 by
            default.
        weighted: whether a document has weights of tokens.
        fingerprint: hash of the content; stores with equal fingerprints have equal tokens.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        tokenizer: Tokenizer,
        table: Any,
        batches: Sequence[Batch],
        sources: Sequence[Source] = (),
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.tokenizer = tokenizer
        self.sources = tuple(sources) or (
            Source(path, manifest.fingerprint, range(table.num_rows)),
        )
        prints = [source.fingerprint for source in self.sources]
        if len(prints) == 1:
            self.fingerprint = prints[0]
        else:
            self.fingerprint = hashlib.sha256("".join(prints).encode()).hexdigest()
        self._table = table
        self.weighted = "token_weights" in table.column_names
        self.lengths: Int64Array = table.column("length").to_numpy()
        self.trained_tokens: Int64Array = table.column("trained_tokens").to_numpy()
        weights = table.column("weight")
        # Then a single number suffices.
        all_one = all((part.to_numpy() == 1).all() for part in weights.chunks)
        self.weights: npt.NDArray[np.float64] = (
            np.broadcast_to(1.0, len(weights)) if all_one else weights.to_numpy()
        )
        self._names = table.column("name")
        self._batches = batches
        self._first_document = np.cumsum([0] + [batch.rows.num_rows for batch in self._batches])

    @classmethod
    def open(cls, path: Path | str) -> "Store":
        """Maps a store into memory. Raises StoreError naming what is wrong with it, and the way
        out."""
        path = local_path(path)
        manifest = Manifest.load(path)
        try:
            for name in manifest.files:
                if not name.endswith(ARROW) and (
                    problem := damage(path / name, manifest.checksums[name])
                ):
                    raise ValueError(problem)
            used = Tokenizer.load(path / TOKENIZER, manifest.end_of_document_token)
            parts = sorted(name for name in manifest.files if name.endswith(ARROW))
            files = [MappedFile(path / name, manifest.checksums[name]) for name in parts]
            table = pyarrow.concat_tables([file.table for file in files], promote_options="default")
        except (pyarrow.ArrowException, ValueError) as error:
            raise damaged(path, error) from error
        if (
            used.fingerprint != manifest.tokenizer_fingerprint
            or table.num_rows != manifest.documents
        ):
            raise StoreError(
                f"store {path} has files of another store: prepare it again with `longctx prepare "
                "--overwrite`"
            )
        for column, total in (
            ("length", manifest.tokens),
            ("trained_tokens", manifest.trained_tokens),
        ):
            if (
                actual := sum(int(part.to_numpy().sum()) for part in table.column(column).chunks)
            ) != total:
                found = filter(None, (file.damage() for file in files))
                raise damaged(path, next(found, f"{column} adds up to {actual:,}, not {total:,}"))
        return cls(
            path,
            manifest,
            tokenizer=used,
            table=table,
            batches=[batch for file in files for batch in file.batches],
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
        table = pyarrow.concat_tables([store._table for store in stores], promote_options="default")
        batches = [batch for store in stores for batch in store._batches]
        return cls(
            first.path,
            first.manifest,
            tokenizer=first.tokenizer,
            table=table,
            batches=batches,
            sources=sources,
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def partly_trained(self) -> npt.NDArray[np.bool_]:
        """Documents of which some tokens have no loss, as of conversations, bool `[documents]`."""
        partly: npt.NDArray[np.bool_] = self.trained_tokens < self.lengths - 1
        return partly

    @property
    def description(self) -> str:
        return ", ".join(str(source.path) for source in self.sources)

    @property
    def names(self) -> Iterator[str]:
        for part in self._names.chunks:
            yield from part.to_pylist()

    @property
    def largest_token(self) -> int:
        """Largest token id of all documents; reads all of them."""
        return max(
            pyarrow.compute.max(batch.rows.column("tokens").values).as_py() or 0
            for batch in self._batches
        )

    def tokens_by_source(self, documents: Sequence[int], tokens: Sequence[int]) -> dict[str, int]:
        """Returns the sum of `tokens`, given per entry of `documents`, by the path of their store;
        {} for a single store."""
        if len(self.sources) == 1:
            return {}
        by_path = dict.fromkeys((str(source.path) for source in self.sources), 0)
        firsts = [source.documents.start for source in self.sources]
        for place, count in zip(
            np.searchsorted(firsts, documents, side="right") - 1, tokens, strict=True
        ):
            by_path[str(self.sources[place].path)] += count
        return by_path

    def name(self, document: int) -> str:
        return str(self._names[document].as_py())

    def read(
        self, document: int, start: int, stop: int, *, end: int | None = None
    ) -> tuple[Int64Array, Int64Array]:
        """Reads tokens and labels, both int64 `[stop - start]`, of positions start … stop - 1 of a
        document.

        The label of position i is token i + 1 if that token may be a target and i + 1 < `end`
        (default: the document's length), else -100. Only this span and one more token are read from
        disk.
        """
        end = int(self.lengths[document]) if end is None else end
        if not 0 <= start <= stop <= end <= self.lengths[document]:
            raise IndexError(
                f"document {document} has {self.lengths[document]} tokens: no span {start}:{stop} "
                f"before {end}"
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
        if not 0 <= start <= stop <= self.lengths[document]:
            raise IndexError(
                f"document {document} has {self.lengths[document]} tokens: no span {start}:{stop}"
            )
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
        if stop - start == self.lengths[document]:
            return int(self.trained_tokens[document])
        if stop > start + 1:
            return int(self._trained(document, start + 1, stop).sum())
        return 0

    def has_targets(
        self, documents: Int64Array, starts: Int64Array, stops: Int64Array
    ) -> npt.NDArray[np.bool_]:
        """Returns which of these spans have a target as separate documents; reads those that are
        parts of conversations."""
        has_target: npt.NDArray[np.bool_] = stops - starts > 1
        whole = stops - starts == self.lengths[documents]
        has_target[whole] = self.trained_tokens[documents[whole]] > 0
        for place in np.flatnonzero(
            has_target & ~whole & (self.trained_tokens < self.lengths - 1)[documents]
        ):
            has_target[place] = (
                self.target_tokens(int(documents[place]), int(starts[place]), int(stops[place])) > 0
            )
        return has_target

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
        index = int(np.searchsorted(self._first_document, document, side="right")) - 1
        batch = self._batches[index]
        if problem := batch.file.damage(batch.begin, batch.end):
            raise damaged(self._path(document), problem)
        if column not in batch.rows.schema.names:
            return None
        values = batch.rows.column(column)[document - int(self._first_document[index])].values
        if values is None:
            return None
        return values[start:stop].to_numpy(zero_copy_only=False)

    def _path(self, document: int) -> Path:
        return next(source.path for source in self.sources if document in source.documents)


class Lengths(Store):
    """Documents of these lengths for planning steps; every token is trained, and none can be read.

    Attributes as of `Store`; `description` is of the lengths, and the tokenizer has a size only.
    """

    def __init__(self, lengths: Sequence[int], description: str, vocab_size: int) -> None:
        self.lengths = np.array(lengths, dtype=np.int64)
        self.trained_tokens = np.maximum(self.lengths - 1, 0)
        self.path = Path(description)
        self.sources = (Source(self.path, "", range(len(self.lengths))),)
        self.tokenizer = cast(Tokenizer, SimpleNamespace(vocab_size=vocab_size))
        self.weighted = False

    @property
    def names(self) -> Iterator[str]:
        yield from map(self.name, range(len(self)))

    def name(self, document: int) -> str:
        return f"document {document + 1}"

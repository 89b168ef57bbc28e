"""Writer: tokenizes documents batch by batch and streams them into Arrow files, the parts of a
store.

Finished parts are listed in `journal.jsonl`, so that an interrupted preparation continues after
them.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from longctx.checksums import SummedFile, damage, sealed, unsealed
from longctx.data.records.corpus import Corpus, SourceCounts
from longctx.data.records.formats import Document
from longctx.data.records.slices import Slice
from longctx.data.records.tokenizer import Tokenizer, TokenWeights
from longctx.data.store.encode import EncodedDocument, Encoder
from longctx.data.store.held_out import halves
from longctx.data.store.index import HASHES
from longctx.data.store.manifest import Counts
from longctx.data.store.store import store_schema

PART_TOKENS = 1 << 25  # minimum tokens per Arrow file, the unit of resuming
BATCH_CHARACTERS = 4 << 20
BATCH_DOCUMENTS = 1024  # text to tokenize at once, by all threads
JOURNAL = "journal.jsonl"
"""Journal of the parts of the only slice."""

Progress = Callable[[str, float], None]
"""Called with the name of the current stage and its finished share (0 … 1)."""


Row = EncodedDocument | None
"""A document of the store; None: it is dropped."""


@dataclass(kw_only=True)
class Part(Counts):
    """An Arrow file, as the journal lists it once finished; `weighted`: whether it has the column
    `token_weights`."""

    file: str
    source_bytes: float
    weighted: bool
    checksums: str


@dataclass(frozen=True)
class SliceFiles:
    """Names of the files of slice `number` of a source with `count` slices: its parts sort behind
    those of the slices before it."""

    number: int
    count: int

    @property
    def _mark(self) -> str:
        return "" if self.count == 1 else f"-{self.number:05d}"

    @property
    def journal(self) -> str:
        return f"journal{self._mark}.jsonl"

    @property
    def note(self) -> str:
        """Says that the slice is finished."""
        return f"slice-{self.number:05d}.json"

    @property
    def lock(self) -> str:
        return f"slice-{self.number:05d}.lock"

    def part(self, number: int) -> str:
        return f"data{self._mark}-{number:05d}.arrow"

    def is_part(self, name: str) -> bool:
        return name.startswith(f"data{self._mark}-") and name.endswith(".arrow")


def write_parts(
    folder: Path,
    corpus: Corpus,
    encoder: Encoder,
    counts: SourceCounts,
    *,
    slice_: Slice,
    files: SliceFiles,
    progress: Progress,
) -> list[Part]:
    """Writes the Arrow files of a slice that are still missing. Returns all its parts."""
    parts = finished_parts(folder, files.journal)
    documents = islice(
        corpus.documents_of(slice_, counts),
        sum(part.documents + part.dropped_documents for part in parts),
        None,
    )
    read = sum(part.source_bytes for part in parts)
    in_all = max(1, slice_.bytes)
    writer: _PartWriter | None = None
    with (folder / files.journal).open("a", encoding="utf-8") as journal:

        def finish(writer: _PartWriter) -> None:
            parts.append(writer.finish())
            journal.write(json.dumps(sealed(asdict(parts[-1]))) + "\n")
            journal.flush()

        for batch, rows in _encoded(_batches(documents), encoder):
            weighted = any(row is not None and _has_weights(row.trained) for row in rows)
            if writer is not None and weighted > writer.weighted:
                finish(writer)
                writer = None
            writer = writer or _PartWriter(
                folder / files.part(len(parts)), encoder.tokenizer, weighted
            )
            writer.write(batch, rows)
            read += sum(document.source_bytes for document in batch)
            progress("tokenizing", min(1.0, read / in_all))
            if writer.counts.tokens >= PART_TOKENS:
                finish(writer)
                writer = None
        if writer is not None:
            finish(writer)
    progress("tokenizing", 1)
    return parts


def finished_parts(folder: Path, journal: str = JOURNAL) -> list[Part]:
    """Returns the parts that a journal lists, up to the first incomplete or damaged line or
    file."""
    file = folder / journal
    parts: list[Part] = []
    for line in file.read_bytes().splitlines() if file.is_file() else []:
        try:
            content = unsealed(json.loads(line))
        except ValueError:
            break
        if damage(folder / content["file"], content["checksums"]):
            break
        parts.append(Part(**content))
    return parts


def _encoded(
    batches: Iterator[list[Document]], encoder: Encoder
) -> Iterator[tuple[list[Document], list[Row]]]:
    """Yields batches with the results of `Encoder.encode`; the next batch is read and rendered
    while one is tokenized."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        ahead: tuple[list[Document], Future[list[Row]]] | None = None
        for batch in batches:
            submitted = batch, thread.submit(encoder.encode, batch, encoder.render(batch))
            if ahead is not None:
                yield ahead[0], ahead[1].result()
            ahead = submitted
        if ahead is not None:
            yield ahead[0], ahead[1].result()


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Yields batches of documents to tokenize at once."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += document.size
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch = []
            characters = 0
    if batch:
        yield batch


class _PartWriter:
    """Writes one Arrow stream file, one record batch at a time."""

    def __init__(self, file: Path, tokenizer: Tokenizer, weighted: bool) -> None:
        self._file = file
        self._unknown = tokenizer.unknown
        self.weighted = weighted
        self._schema = store_schema(tokenizer, weighted)
        self._sink = SummedFile(file)
        self._stream = pyarrow.ipc.new_stream(self._sink, self._schema)
        self._source_bytes = 0.0
        self._hashes = [halves(())]
        self.counts = Counts()

    def write(self, documents: Sequence[Document], given: Sequence[Row]) -> None:
        """Appends the rows of `documents`."""
        rows = [row for row in given if row is not None]
        self._source_bytes += sum(document.source_bytes for document in documents)
        self.counts += Counts(dropped_documents=len(given) - len(rows))
        if not rows:
            return
        self._hashes.append(halves(row.document.name for row in rows))
        masks = [row.trained for row in rows]
        targets = [
            len(row.tokens) - 1 if row.trained is None else int(np.count_nonzero(row.trained[1:]))
            for row in rows
        ]
        columns = {
            "name": [row.document.name for row in rows],
            "tokens": [row.tokens for row in rows],
            "length": [len(row.tokens) for row in rows],
            "trained_tokens": targets,
            "trained": [None if mask is None else mask != 0 for mask in masks],
            "weight": [row.document.weight for row in rows],
            # Only if it is in the schema.
            "token_weights": [mask if _has_weights(mask) else None for mask in masks],
        }
        self._stream.write_batch(pyarrow.RecordBatch.from_pydict(columns, schema=self._schema))
        self.counts += self._counted(rows, sum(targets))

    def _counted(self, rows: Sequence[EncodedDocument], targets: int) -> Counts:
        longest = max(rows, key=lambda row: len(row.tokens))
        unknown = [
            0 if self._unknown is None else int((row.tokens == self._unknown).sum()) for row in rows
        ]
        weights = [row.document.weight for row in rows]
        return Counts(
            documents=len(rows),
            tokens=sum(len(row.tokens) for row in rows),
            trained_tokens=targets,
            longest_name=longest.document.name,
            longest_length=len(longest.tokens),
            unknown_tokens=sum(unknown),
            unknown_documents=sum(map(bool, unknown)),
            unknown_name=next(
                (row.document.name for row, count in zip(rows, unknown, strict=True) if count), ""
            ),
            truncated_documents=sum(row.truncated for row in rows),
            spelled_tokens=sum(row.spelled for row in rows),
            spelled_documents=sum(row.spelled > 0 for row in rows),
            spelled_name=next((row.document.name for row in rows if row.spelled), ""),
            straddling_tokens=sum(row.straddling for row in rows),
            empty_thoughts=sum(row.thoughts for row in rows),
            lightest=min(weights),
            heaviest=max(weights),
            weighted_documents=sum(_has_weights(row.trained) for row in rows),
            left_out=dict(Counter(name for row in rows for name in row.left_out)),
        )

    def finish(self) -> Part:
        np.save(self._file.with_suffix(HASHES), np.concatenate(self._hashes))
        self._stream.close()
        self._sink.close()
        return Part(
            file=self._file.name,
            source_bytes=self._source_bytes,
            weighted=self.weighted,
            checksums=self._sink.checksums,
            **vars(self.counts),
        )


def _has_weights(trained: TokenWeights | None) -> bool:
    return trained is not None and trained.dtype == np.float32


def write_dataset_files(
    folder: Path, tokenizer: Tokenizer, parts: Sequence[Part], fingerprint: str
) -> None:
    """Writes the files that `datasets.load_from_disk` needs besides the Arrow files."""
    import datasets  # imported here: it takes a second, and only preparing needs it

    schema = store_schema(tokenizer, any(part.weighted for part in parts))
    features = datasets.Features.from_arrow_schema(schema)
    datasets.DatasetInfo(features=features).write_to_directory(str(folder))
    state: dict[str, Any] = {
        "_data_files": [{"filename": part.file} for part in parts],
        "_fingerprint": fingerprint[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(state, indent=2), "utf-8")

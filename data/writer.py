"""Writing a store's files: documents are tokenised batch by batch and streamed into Arrow files, the parts of a store.

A finished part is listed in `journal.jsonl`, so that an interrupted preparation goes on behind it. All texts of a batch go
to the tokenizer in one call, which spreads them over its threads.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow

from longctx.data.chat import Template
from longctx.data.corpus import Corpus, Document, Skipped
from longctx.data.store import store_schema
from longctx.data.tokenizer import TokenArray, Tokenizer

PART_TOKENS = 1 << 25  # tokens of an Arrow file, the unit of resuming
BATCH_CHARACTERS, BATCH_DOCUMENTS = 4 << 20, 1024  # text that is tokenised at once, by all threads
JOURNAL = "journal.jsonl"

Progress = Callable[[str, float], None]
"""Called with what is being done, and the share of it that is done (0 … 1)."""


class Row(NamedTuple):
    """Tokens of a document, which of them may be targets (None: all), and the counts of `Encoded` over its texts."""

    tokens: TokenArray
    trained: npt.NDArray[np.bool_] | None
    characters: int
    lost: int


@dataclass
class Part:
    """An Arrow file, as the journal lists it once it is finished. Names are those of `Manifest`."""

    file: str
    bytes: int = 0
    source_bytes: float = 0.0
    documents: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    longest_name: str = ""
    longest_length: int = 0
    characters: int = 0  # from here on older journals lack them
    lost_characters: int = 0
    lossy_documents: int = 0
    lossiest_name: str = ""
    lossiest_characters: int = 0


def write_parts(
    folder: Path,
    corpus: Corpus,
    tokenizer: Tokenizer,
    skipped: Skipped,
    *,
    workers: int | None,
    part_tokens: int,
    progress: Progress,
) -> list[Part]:
    """Writes the Arrow files that are still missing. Returns all of them."""
    parts = finished_parts(folder)
    documents = islice(corpus.documents(skipped), sum(part.documents for part in parts), None)
    encode = partial(_encode, tokenizer=tokenizer, template=Template(tokenizer), workers=workers)
    read = sum(part.source_bytes for part in parts)
    writer: _PartWriter | None = None
    with (folder / JOURNAL).open("a", encoding="utf-8") as journal:

        def finish(writer: _PartWriter) -> None:
            parts.append(writer.finish())
            journal.write(json.dumps(asdict(parts[-1])) + "\n")
            journal.flush()

        for batch in _batches(documents):
            writer = writer or _PartWriter(folder / f"data-{len(parts):05d}.arrow", tokenizer)
            writer.write(batch, encode(batch))
            read += sum(document.source_bytes for document in batch)
            progress("tokenising", min(1.0, read / max(1, corpus.bytes)))
            if writer.part.tokens >= part_tokens:
                finish(writer)
                writer = None
        if writer is not None:
            finish(writer)
    progress("tokenising", 1)
    return parts


def finished_parts(folder: Path) -> list[Part]:
    """What the journal lists, up to the first line or file that is not complete."""
    file = folder / JOURNAL
    parts: list[Part] = []
    for line in file.read_text("utf-8").splitlines(keepends=True) if file.is_file() else []:
        if not line.endswith("\n"):
            break
        part = Part(**json.loads(line))
        if not (folder / part.file).is_file() or (folder / part.file).stat().st_size != part.bytes:
            break
        parts.append(part)
    return parts


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += sum(map(len, document.texts))
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class _PartWriter:
    """One Arrow stream file, a record batch at a time."""

    def __init__(self, file: Path, tokenizer: Tokenizer) -> None:
        self._file = file
        self._schema = store_schema(tokenizer)
        self._sink = pyarrow.OSFile(str(file), "wb")
        self._stream = pyarrow.ipc.new_stream(self._sink, self._schema)
        self.part = Part(file.name)

    def write(self, documents: Sequence[Document], rows: Sequence[Row]) -> None:
        lengths = np.array([len(row.tokens) for row in rows], np.int64)
        masks = [row.trained for row in rows]
        targets = np.array(
            [n - 1 if mask is None else mask[1:].sum() for n, mask in zip(lengths, masks, strict=True)], np.int64
        )
        columns = [
            pyarrow.array([document.name for document in documents]),
            pyarrow.ListArray.from_arrays(_offsets(lengths), np.concatenate([row.tokens for row in rows])),
            pyarrow.array(lengths),
            pyarrow.array(targets),
            pyarrow.ListArray.from_arrays(
                _offsets([0 if mask is None else len(mask) for mask in masks]),
                np.concatenate([mask for mask in masks if mask is not None] or [np.zeros(0, np.bool_)]),
                mask=pyarrow.array([mask is None for mask in masks]),
            ),
        ]
        self._stream.write_batch(pyarrow.record_batch(columns, schema=self._schema))
        part = self.part
        part.documents += len(documents)
        part.tokens += int(lengths.sum())
        part.trained_tokens += int(targets.sum())
        part.source_bytes += sum(document.source_bytes for document in documents)
        if (longest := int(lengths.max())) > part.longest_length:
            part.longest_length, part.longest_name = longest, documents[int(lengths.argmax())].name
        lost = np.array([row.lost for row in rows], np.int64)
        part.characters += sum(row.characters for row in rows)
        part.lost_characters += int(lost.sum())
        part.lossy_documents += int((lost > 0).sum())
        if (most := int(lost.max())) > part.lossiest_characters:
            part.lossiest_characters, part.lossiest_name = most, documents[int(lost.argmax())].name

    def finish(self) -> Part:
        self._stream.close()
        self._sink.close()
        self.part.bytes = self._file.stat().st_size
        return self.part


def _encode(documents: Sequence[Document], tokenizer: Tokenizer, template: Template, workers: int | None) -> list[Row]:
    """Tokens of each document, its end included. All texts go to the tokenizer in one call."""
    encoded = iter(tokenizer.encode_batch([text for document in documents for text in document.texts], workers=workers))
    end = np.array([tokenizer.end_of_document], tokenizer.dtype)
    rows: list[Row] = []
    for document in documents:
        texts = list(islice(encoded, len(document.texts)))
        counts = sum(text.characters for text in texts), sum(text.lost for text in texts)
        if document.text is not None:
            rows.append(Row(np.concatenate([texts[0].tokens, end]), None, *counts))
        else:
            tokens, mask = template.join(document.messages, [text.tokens for text in texts])
            rows.append(Row(np.concatenate([tokens, end]), np.append(mask, False), *counts))
    return rows


def _offsets(lengths: npt.ArrayLike) -> npt.NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def write_dataset_files(folder: Path, tokenizer: Tokenizer, parts: Sequence[Part], fingerprint: str) -> None:
    """What `datasets.load_from_disk` needs beside the Arrow files."""
    import datasets  # here, because it takes a second and only preparing needs it

    features = datasets.Features.from_arrow_schema(store_schema(tokenizer))
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

"""Records of an encoder-decoder in the batches of a trainer: a source, which its encoder reads, and
a target.

A collator pads both. What `attention_mask` leaves out of a source is removed. The padding of a
target looks like masked labels, so the collator is watched: the labels of its examples tell which
columns are of the target.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from longctx.data import IGNORED_LABEL
from longctx.hf.exactness import replaced
from longctx.planning.layout import Span
from longctx.trainers.documents import (
    Document,
    Ids,
    array_of,
    check_shapes,
    host_field,
    refuse_lost_fields,
    spans_of_mask,
)
from longctx.trainers.refusals import TrainerError

TARGETS = "spans_of_targets"
"""Field of a batch with the first column of every row's target, and the one after it."""
SOURCE_FIELDS = ("input_ids", "attention_mask")
TARGET_FIELDS = ("labels", "decoder_input_ids", "decoder_attention_mask", TARGETS)


class WatchingTargets:
    """Wraps a data collator: the batch tells which columns of `labels` hold the labels of its
    examples, unless the collator makes others."""

    def __init__(self, collate: Callable[[Sequence[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, examples: Sequence[Any]) -> Any:
        own = [_labels_of(example) for example in examples]  # a collator may remove them
        batch = self.collate(examples)
        labels = batch.get("labels")
        if labels is None or len(labels) != len(own) or any(label is None for label in own):
            return batch
        spans = []
        for row, example_labels in zip(labels, own, strict=True):
            spans.append(_columns(row, torch.as_tensor(example_labels)))
        if None not in spans:
            batch[TARGETS] = torch.tensor(spans)
        return batch


def _labels_of(example: Any) -> Any:
    return example.get("labels") if isinstance(example, Mapping) else None


def _columns(row: torch.Tensor, labels: torch.Tensor) -> Span | None:
    """Returns the columns of a padded row that are these labels; None if it is not padded on one
    side."""
    for start, stop in ((0, len(labels)), (len(row) - len(labels), len(row))):
        padding = torch.cat([row[:start], row[stop:]])
        if torch.equal(row[start:stop], labels) and bool((padding == IGNORED_LABEL).all()):
            return start, stop
    return None


def rows_of_pairs(batch: Mapping[str, Any], hf: Any, training: bool = True) -> list[list[Document]]:
    """Returns the record of every row that a batch was collated from; none of a row whose target is
    empty.

    `hf` is the encoder-decoder of transformers, which makes what its decoder reads from labels.
    Labels that are masked at the end of a target are left out, as nothing depends on them. Raises
    TrainerError for what would be lost.
    """
    refuse_lost_fields(batch, (*SOURCE_FIELDS, *TARGET_FIELDS, "num_items_in_batch"))
    has_targets = batch.get("labels") is not None or batch.get("decoder_input_ids") is not None
    if batch.get("input_ids") is None or not has_targets:
        raise TrainerError(
            "the data collator returns no input_ids, or no labels: return both for every record"
        )
    check_shapes(batch, SOURCE_FIELDS)
    tensors = TARGET_FIELDS[:-1]  # the last one has spans
    check_shapes(batch, [name for name in tensors if batch.get(name) is not None])
    ids = batch["input_ids"].cpu()
    given: Any = host_field(batch.get("decoder_input_ids"))
    labels = host_field(batch.get("labels"))
    if labels is None:
        labels = torch.full_like(given, IGNORED_LABEL)
    if given is not None and torch.equal(given, _decoder_input(hf, labels)):
        given = None  # it is made again, without the labels that are left out
    sources = _sources(batch, ids, hf)
    targets = _targets(batch, labels)
    config = hf.get_decoder().config
    # T5Gemma's decoder hides padding if it is given no mask, but not where it fills a cache, as in
    # evaluations.
    hides = batch.get("decoder_attention_mask") is None and (training or not config.use_cache)
    rows: list[list[Document]] = [[] for _ in ids]
    for row, (source_span, (start, stop)) in enumerate(zip(sources, targets, strict=True)):
        if start == stop:
            continue
        source = array_of(ids[row, slice(*source_span)])
        if not len(source):
            raise TrainerError(
                f"row {row} of a batch has no token of a source: give every record one or more"
            )
        target = slice(start, _end_of_labels(labels[row], start, stop))
        row_labels = labels[row, target]
        if given is None:
            tokens = array_of(_decoder_input(hf, row_labels[None])[0])
        else:
            tokens = array_of(given[row, target])
        document = Document(
            tokens,
            array_of(row_labels),
            source=source,
            hidden=_hidden(row, tokens, config) if hides else (),
            column=start,
        )
        rows[row].append(document)
    return rows


def _decoder_input(hf: Any, labels: torch.Tensor) -> torch.Tensor:
    """Returns what the decoder reads for labels [rows, tokens]."""
    read: torch.Tensor = hf.prepare_decoder_input_ids_from_labels(labels=labels)
    return read


def _end_of_labels(labels: torch.Tensor, start: int, stop: int) -> int:
    """Returns the column after the last label of a target that is not masked; `stop` if all are."""
    wanted = np.flatnonzero(labels[start:stop] != IGNORED_LABEL)
    return start + int(wanted[-1]) + 1 if len(wanted) else stop


def columns_of(rows: Sequence[Sequence[Document]], like: torch.Tensor) -> torch.Tensor:
    """Returns a mask of the columns that the targets of a batch are in, of the shape of its
    labels."""
    kept = torch.zeros_like(like)
    for row, documents in enumerate(rows):
        for document in documents:
            end = document.column + len(document.tokens)
            kept[row, document.column : end] = 1
    return kept


def _sources(batch: Mapping[str, Any], ids: torch.Tensor, hf: Any) -> list[Span]:
    """Returns the columns of every row's source. Raises TrainerError for padding without a mask."""
    if batch.get("attention_mask") is not None:
        return spans_of_mask("attention_mask", batch["attention_mask"])
    if bool((ids == hf.get_encoder().config.pad_token_id).any()):
        raise TrainerError(
            "sources have padding, but the data collator returns no attention_mask: return it"
        )
    return [(0, ids.shape[1])] * len(ids)


def _targets(batch: Mapping[str, Any], labels: torch.Tensor) -> list[Span]:
    """Returns the columns of every row's target."""
    if batch.get("decoder_attention_mask") is not None:
        return spans_of_mask("decoder_attention_mask", batch["decoder_attention_mask"])
    if batch.get(TARGETS) is None:
        return [(0, labels.shape[1])] * len(labels)
    return [(start, stop) for start, stop in batch[TARGETS].tolist()]


def _hidden(row: int, tokens: Ids, config: Any) -> tuple[Span, ...]:
    """Returns the runs of padding in what a decoder reads. Raises TrainerError if a token would see
    nothing else."""
    padding = np.concatenate([[0], tokens == config.pad_token_id, [0]])
    edges = np.flatnonzero(np.diff(padding)).tolist()
    runs = tuple(zip(edges[::2], edges[1::2], strict=True))
    slides = "sliding_attention" in (config.layer_types or ())
    window = config.sliding_window if slides else None
    if any(start == 0 or (window and stop - start >= window) for start, stop in runs):
        raise TrainerError(
            f"the decoder reads only padding in a window of row {row}, which it hides from "
            "attention: return decoder_attention_mask with 1 for the tokens of targets"
        )
    return runs


def sharded_with_head(hf: Any) -> AbstractContextManager[None]:
    """Makes accelerate shard the decoder's embedding and the head, which may be tied, together.

    It takes `get_input_embeddings`, which is the encoder's, for what may be tied to the head, and
    FSDP2 then fails.
    """
    return replaced(hf, "get_input_embeddings", hf.get_decoder().get_input_embeddings)

"""Records of an encoder-decoder in the batches of a trainer: a source, which its encoder reads, and
a target.

A collator pads both. What `attention_mask` leaves out of a source is removed. The padding of a
target looks like masked labels, so the collator is watched: the labels of its examples tell which
columns are of the target.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
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
    refuse_lost_fields,
    spans_of_mask,
)
from longctx.trainers.refusals import TrainerError

TARGETS = "spans_of_targets"
"""Field of a batch with the first column of every row's target, and the one after it."""
TARGET_FIELDS = ("labels", "decoder_input_ids", "decoder_attention_mask", TARGETS)


class WatchingTargets:
    """Wraps a data collator: the batch tells which columns of `labels` are those of its examples,
    if they come from these."""

    def __init__(self, collate: Callable[[Sequence[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, examples: Sequence[Any]) -> Any:
        # A collator may remove them.
        own = [
            example.get("labels") if isinstance(example, Mapping) else None for example in examples
        ]
        batch = self.collate(examples)
        labels = batch.get("labels")
        if labels is not None and len(labels) == len(own) and all(each is not None for each in own):
            spans = [
                _columns(row, torch.as_tensor(each)) for row, each in zip(labels, own, strict=True)
            ]
            if None not in spans:
                batch[TARGETS] = torch.tensor(spans)
        return batch


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
    refuse_lost_fields(batch, ("input_ids", "attention_mask", "num_items_in_batch", *TARGET_FIELDS))
    if batch.get("input_ids") is None or (
        batch.get("labels") is None and batch.get("decoder_input_ids") is None
    ):
        raise TrainerError(
            "the data collator returns no input_ids, or no labels: return both for every record"
        )
    check_shapes(batch, ["input_ids", "attention_mask"])
    check_shapes(batch, [name for name in TARGET_FIELDS[:3] if batch.get(name) is not None])
    fields = (batch.get(name) for name in ("input_ids", "labels", "decoder_input_ids"))
    moved: list[Any] = [None if field is None else field.cpu() for field in fields]
    ids, labels, read = moved
    labels = torch.full_like(read, IGNORED_LABEL) if labels is None else labels
    given = read is not None and not torch.equal(
        read, hf.prepare_decoder_input_ids_from_labels(labels=labels)
    )
    sources, targets, config = (
        _sources(batch, ids, hf),
        _targets(batch, labels),
        hf.get_decoder().config,
    )
    # T5Gemma's decoder hides padding if it is given no mask, but not where it fills a cache, as in
    # evaluations.
    hides = batch.get("decoder_attention_mask") is None and (training or not config.use_cache)
    rows: list[list[Document]] = [[] for _ in ids]
    for row, ((first, last), (start, stop)) in enumerate(zip(sources, targets, strict=True)):
        if start == stop:
            continue
        if first == last:
            raise TrainerError(
                f"row {row} of a batch has no token of a source: give every record one or more"
            )
        if len(wanted := np.flatnonzero(labels[row, start:stop] != IGNORED_LABEL)):
            stop = start + int(wanted[-1]) + 1
        expected = labels[row, start:stop]
        tokens = (
            read[row, start:stop]
            if given
            else hf.prepare_decoder_input_ids_from_labels(labels=expected[None])[0]
        )
        hidden = _hidden(row, array_of(tokens), config) if hides else ()
        source = array_of(ids[row, first:last])
        rows[row] = [
            Document(
                array_of(tokens), array_of(expected), source=source, hidden=hidden, column=start
            )
        ]
    return rows


def columns_of(rows: Sequence[Sequence[Document]], like: torch.Tensor) -> torch.Tensor:
    """Returns a mask of the columns that the targets of a batch are in, of the shape of its
    labels."""
    kept = torch.zeros_like(like)
    for row, documents in enumerate(rows):
        for document in documents:
            kept[row, document.column : document.column + len(document.tokens)] = 1
    return kept


def _sources(batch: Mapping[str, Any], ids: torch.Tensor, hf: Any) -> list[Span]:
    if batch.get("attention_mask") is not None:
        return spans_of_mask("attention_mask", batch["attention_mask"])
    if bool((ids == hf.get_encoder().config.pad_token_id).any()):
        raise TrainerError(
            "sources have padding, but the data collator returns no attention_mask: return it"
        )
    return [(0, ids.shape[1])] * len(ids)


def _targets(batch: Mapping[str, Any], labels: torch.Tensor) -> list[Span]:
    if batch.get("decoder_attention_mask") is not None:
        return spans_of_mask("decoder_attention_mask", batch["decoder_attention_mask"])
    return (
        [(0, labels.shape[1])] * len(labels)
        if batch.get(TARGETS) is None
        else batch[TARGETS].tolist()
    )


def _hidden(row: int, tokens: Ids, config: Any) -> tuple[Span, ...]:
    """Returns the runs of padding in what a decoder reads."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], tokens == config.pad_token_id, [0]])))
    runs = tuple((int(start), int(stop)) for start, stop in list(pairwise(edges))[::2])
    window = config.sliding_window if "sliding_attention" in (config.layer_types or ()) else None
    if any(start == 0 or (window and stop - start >= window) for start, stop in runs):
        raise TrainerError(
            f"the decoder reads only padding in a window of row {row}, which it hides from "
            "attention: return "
            "decoder_attention_mask with 1 for the tokens of targets"
        )
    return runs


def sharded_with_head(hf: Any) -> AbstractContextManager[None]:
    """Makes accelerate shard the decoder's embedding and the head, which may be tied, together.

    It takes `get_input_embeddings`, which is the encoder's, for what may be tied to the head, and
    FSDP2 then fails.
    """
    return replaced(hf, "get_input_embeddings", hf.get_decoder().get_input_embeddings)

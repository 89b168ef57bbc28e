"""Turns collated batches into documents: unpads rows and splits packed ones."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from longctx.data import IGNORED_LABEL
from longctx.hf.vision import VISION_FAMILIES
from longctx.planning.layout import Span
from longctx.planning.tree import Tree
from longctx.trainers.exchange import DocumentInfo
from longctx.trainers.images import DocumentImages
from longctx.trainers.packed_masks import FOUR_AXES, check_numbers, numbers_documents
from longctx.trainers.refusals import TrainerError

Ids = npt.NDArray[np.integer[Any]]
TOKEN_FIELDS = ("input_ids", "labels")
SEGMENTS = "token_type_ids"
DOCUMENTS_IN_ROWS = "documents_in_rows"
"""Field of a batch with the number of documents of every example that was joined to others."""
PACKING_FIELDS = (
    DOCUMENTS_IN_ROWS,
    "attention_mask",
    "position_ids",
    "seq_idx",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "num_items_in_batch",
)


@dataclass(frozen=True)
class Document:
    """One sequence, a tree of several, or a record of a source and a target.

    With a source, `tokens` are the decoder's input.

    Attributes:
        tokens: token ids [tokens].
        labels: what each token predicts [tokens]: the next token, of an encoder its own, or -100.
        tree: the branches, if sequences with a common prefix were merged.
        images: images and videos among the tokens.
        source: token ids that the encoder reads [source tokens].
        hidden: spans of the target that attention skips.
        column: column of the batch in which the target begins.
    """

    tokens: Ids
    labels: Ids
    tree: Tree | None = None
    images: DocumentImages | None = None
    source: Ids | None = None
    hidden: tuple[Span, ...] = ()
    column: int = 0

    @property
    def targets(self) -> int:
        """Number of tokens that have a label."""
        return int((self.labels != IGNORED_LABEL).sum())

    @property
    def tokens_read(self) -> int:
        """Number of its tokens in a batch, or of those of its source."""
        if self.source is None:
            return len(self.tokens)
        return len(self.source)

    def info(self, rank: int, index: int) -> DocumentInfo:
        """Returns what other ranks know of this document, the one with this index on its rank.

        Raises TrainerError for images of several kinds.
        """
        source = 0 if self.source is None else len(self.source)
        info = DocumentInfo(
            rank=rank,
            drawn_index=index,
            length=source + len(self.tokens),
            targets=self.targets,
            tree=self.tree,
            source=source,
            hidden=self.hidden,
        )
        if self.images is None:
            return info
        return info._replace(places=self.images.places, pixels=self.images.kind)


def cut_rows(
    batch: Mapping[str, Any],
    *,
    more_fields: Sequence[str] = (),
    labels_in_place: bool = False,
) -> list[list[Document]]:
    """Returns the documents of every row of a batch.

    A batch has a row of tokens for each example, padded by `attention_mask`, or one for all, as
    TRL's `padding_free` makes it. Rows are cut into documents where `position_ids` are 0, at which
    the mask may number them, too.

    Args:
        batch: what a data collator returns, by the name of the field.
        more_fields: names of fields that the caller reads.
        labels_in_place: a token's label stands in its own place, not in that of the next token.

    Raises TrainerError for a batch without labels, with fields that would be lost, with holes in
    its mask, or with positions other than 0, 1, 2, .. in a document.
    """
    refuse_lost_fields(batch, (*TOKEN_FIELDS, *PACKING_FIELDS, *more_fields))
    missing = [name for name in TOKEN_FIELDS if batch.get(name) is None]
    if missing:
        raise TrainerError(
            f"the data collator returns no {' and no '.join(missing)}: return both for every "
            "document"
        )
    read = (*TOKEN_FIELDS, "attention_mask", "position_ids")
    on_host = {name: host_field(batch.get(name)) for name in read}
    numbers = None
    if on_host["position_ids"] is not None and numbers_documents(on_host["attention_mask"]):
        numbers = on_host["attention_mask"]
        on_host["attention_mask"] = (numbers != 0).long()
    check_shapes(on_host, read)
    mask = on_host["attention_mask"]
    positions = on_host["position_ids"]
    if positions is None:
        _refuse_packing_without_positions(batch)
        if mask is not None:
            spans_of_mask("attention_mask", mask)
    ids = np.asarray(on_host["input_ids"], np.int32)
    labels = np.asarray(on_host["labels"], np.int32)
    rows = []
    for row in range(len(ids)):
        kept = np.ones(len(ids[row]), bool) if mask is None else array_of(mask[row]).astype(bool)
        cuts: list[int] = []
        if positions is not None:
            positions_of_row = array_of(positions.expand(len(ids), -1)[row])
            cuts = _cuts(row, positions_of_row[kept])
        if numbers is not None:
            check_numbers(row, array_of(numbers[row])[kept], cuts)
        rows.append(_documents(ids[row][kept], labels[row][kept], cuts, labels_in_place))
    return rows


def _documents(
    tokens: Ids, labels: Ids, cuts: Sequence[int], labels_in_place: bool
) -> list[Document]:
    """Returns the documents of a row without padding, which begin at 0 and at the `cuts`."""
    documents = []
    parts = zip(np.split(tokens, cuts), np.split(labels, cuts), strict=True)
    for document_tokens, document_labels in parts:
        if not len(document_tokens):
            continue
        if not labels_in_place:
            document_labels = np.append(document_labels[1:], IGNORED_LABEL)
        documents.append(Document(document_tokens, document_labels))
    return documents


def _refuse_packing_without_positions(batch: Mapping[str, Any]) -> None:
    for name in ("cu_seq_lens_q", "seq_idx"):
        if batch.get(name) is not None:
            raise TrainerError(
                f"the data collator returns {name}, but no position_ids, by which rows are cut: "
                "return these"
            )


def refuse_segments(batch: Mapping[str, Any]) -> None:
    """Raises TrainerError for tokens of a second segment, as encoders know them."""
    segments = batch.get(SEGMENTS)
    if segments is not None and bool(segments.any()):
        raise TrainerError(
            "token_type_ids are not all 0, but documents have one segment: leave them out, or set "
            "them to 0"
        )


def rows_of_examples(
    rows: Sequence[list[Document]], counts: torch.Tensor | None
) -> list[list[Document]]:
    """Returns the documents of every example of a batch.

    `counts` are numbers of documents [examples], if a collator has joined examples to fewer `rows`;
    None: every row is an example. Raises TrainerError if rows have other documents.
    """
    if counts is None:
        return list(rows)
    documents = list(itertools.chain.from_iterable(rows))
    expected = int(counts.sum())
    if len(documents) != expected:
        raise TrainerError(
            f"the data collator joins examples of {expected} documents to {len(rows)} rows, in "
            f"which position_ids show {len(documents)}: begin each document at position 0, and "
            "give none without a token"
        )
    remaining = iter(documents)
    return [list(itertools.islice(remaining, count)) for count in counts.tolist()]


def check_shapes(batch: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raises TrainerError unless fields of a batch, the first of which it has, are tensors of whole
    numbers [rows, tokens].

    Masks are 0 and 1, and positions may be those of one row for all.
    """
    first = batch[names[0]]
    for name in names:
        field = batch.get(name)
        if field is None:
            continue
        if not isinstance(field, torch.Tensor):
            raise TrainerError(
                f"{name} is a {type(field).__name__}: return a tensor of [rows, tokens]"
            )
        if name == "attention_mask" and field.dim() == 4:
            raise TrainerError(FOUR_AXES)
        if field.dim() != 2:
            raise TrainerError(f"{name} has {field.dim()} axes: return one of [rows, tokens]")
        if field.shape != first.shape and not (
            name == "position_ids" and field.shape == (1, first.shape[1])
        ):
            raise TrainerError(
                f"{name} has the shape {list(field.shape)}, but {names[0]} {list(first.shape)}: "
                "return the same"
            )
        if name.endswith("mask"):
            others = field[(field != 0) & (field != 1)].unique().tolist()
            if others:
                raise TrainerError(
                    f"{name} has {others[0]:g}, but must be 1 for tokens and 0 for padding: packed "
                    "rows are cut by position_ids"
                )
        elif field.is_floating_point() or field.dtype == torch.bool:
            raise TrainerError(
                f"{name} is of {str(field.dtype).removeprefix('torch.')}: return whole numbers"
            )


def _cuts(row: int, positions: Ids) -> list[int]:
    """Returns where documents after the first one begin. Raises TrainerError for positions that do
    not count 0, 1, 2, .."""
    steps = np.diff(positions, prepend=-1)
    wrong = np.flatnonzero((positions != 0) & (steps != 1))
    if len(wrong):
        at = int(wrong[0])
        raise TrainerError(
            f"position_ids of row {row} have {positions[at]} "
            f"{f'after {positions[at - 1]}' if at else 'first'}, but documents count 0, 1, 2, ..: "
            "leave position_ids out, or begin each document at 0 and skip and repeat no position"
        )
    return [int(start) for start in np.flatnonzero(positions == 0)[1:]]


def spans_of_mask(name: str, mask: torch.Tensor) -> list[Span]:
    """Returns the columns of every row that a mask keeps. Raises TrainerError if there are others
    between them."""
    spans = []
    for row, kept in enumerate(array_of(mask)):
        at = np.flatnonzero(kept)
        spans.append((int(at[0]), int(at[-1]) + 1) if len(at) else (0, 0))
        if len(at) != spans[-1][1] - spans[-1][0]:
            raise TrainerError(
                f"{name} leaves out tokens between others in row {row}: only padding can be removed"
            )
    return spans


def labels_beside_padding(batch: Mapping[str, Any]) -> int:
    """Returns how many labels of a causal model's batch stand on padding, or follow it. Documents
    do not have them."""
    mask = batch.get("attention_mask")
    labels = batch.get("labels")
    if mask is None or labels is None:
        return 0
    has_label = labels[:, 1:] != IGNORED_LABEL
    is_next_token = mask[:, 1:].bool() & mask[:, :-1].bool()
    return int((has_label & ~is_next_token).sum())


def refuse_lost_fields(batch: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises TrainerError if a batch has fields that are not `known`."""
    lost = sorted(name for name, value in batch.items() if value is not None and name not in known)
    if lost:
        raise TrainerError(
            f"the data collator returns {', '.join(lost)}, which splitting documents would lose: "
            f"return only {', '.join(TOKEN_FIELDS)}, attention_mask and position_ids, "
            "decoder_input_ids and decoder_attention_mask only for encoder-decoders, and images "
            f"only for {', '.join(VISION_FAMILIES)}, of which those of Qwen also take videos"
        )


class CountingRows:
    """Wraps a data collator: if it joins its examples to fewer rows, the batch tells how many
    documents each example has."""

    def __init__(self, collate: Callable[[Sequence[Any]], dict[str, Any]]) -> None:
        self.collate = collate

    def __call__(self, examples: Sequence[Any]) -> dict[str, Any]:
        batch = self.collate(examples)
        if not isinstance(batch, Mapping):
            raise TrainerError(
                f"the data collator returns a {type(batch).__name__}: return a dict of tensors "
                "[rows, tokens]"
            )
        if "input_ids" in batch and len(batch["input_ids"]) < len(examples):
            batch[DOCUMENTS_IN_ROWS] = torch.tensor(list(map(_documents_in, examples)))
        return batch


def _documents_in(example: Any) -> int:
    """Returns how many documents an example has: a row that TRL has packed has several, and so has
    a list of examples."""
    if isinstance(example, Mapping):
        return len(example.get("seq_lengths", [0]))
    if isinstance(example, list | tuple) and all(isinstance(part, Mapping) for part in example):
        return len(example)
    return 1


def host_field(field: Any) -> Any:
    """Returns a field of a batch, copied to the host if it is a tensor: checks that read a GPU
    would wait for it each."""
    return field.cpu() if isinstance(field, torch.Tensor) else field


def array_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Returns a tensor's values as an array in host memory."""
    array: npt.NDArray[Any] = tensor.cpu().numpy()
    return array

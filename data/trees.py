"""Merging: sequences with common prefixes become trees, whose shared tokens are read and computed
once.

    merged = merge_prefixes(sequences, labels, most_tokens=ranks * tokens_per_rank)
    plan = make_plan(merged.lengths, trees=merged.trees, ranks=ranks, ..)
    micro_batches, targets = pack_merged(plan, rank, merged)

Rows are shared while tokens and what they predict are equal. So every row has one label, and where
completions differ, the last token of their prompt is a row of each, whose loss would be lost
otherwise. The loss of a row counts for all its sequences.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from longctx.arguments import checked, kind, only, or_none, real, sequence_of, token_ids, whole
from longctx.data import IGNORED_LABEL
from longctx.data.packing import (
    RULES,
    Ids,
    MicroBatch,
    PackingError,
    Tokens,
    pack_documents,
    with_weights,
)
from longctx.planning.plan import Plan
from longctx.planning.tree import ROOT, Tree, is_too_large


@dataclass(frozen=True)
class Merged:
    """Documents of a step that sequences were merged to, some of them trees; arrays are int64
    [tokens] if not said otherwise.

    Attributes:
        tokens: token ids of every document.
        labels: what every row predicts, already shifted.
        weights: number of sequences that have each row, or the sum of their weights; float64.
        trees: shapes of those documents that are trees; the others are sequences as they were.
        rows: document of every sequence, and the rows there of its tokens, in order.
    """

    tokens: tuple[Ids, ...]
    labels: tuple[Ids, ...]
    weights: tuple[npt.NDArray[np.float64], ...]
    trees: dict[int, Tree]
    rows: tuple[tuple[int, Ids], ...]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document after merging."""
        return list(map(len, self.tokens))

    @property
    def target_weight(self) -> float:
        """Sum of the weights of all rows with a label: without weights of sequences, the number of
        their targets."""
        return float(
            sum(
                w[label != IGNORED_LABEL].sum()
                for label, w in zip(self.labels, self.weights, strict=True)
            )
        )

    def amounts_of(self, targets: Sequence[float]) -> Sequence[float]:
        """Returns what each sequence counts in the divisor of the loss, if it has so many
        targets."""
        return targets

    def micro_batches(self, plan: Plan, rank: int, pad_to_multiple_of: int) -> list[MicroBatch]:
        """Returns a rank's share of every micro-batch of a step, without weights of sequences."""
        packed, _ = pack_documents(
            plan,
            rank,
            self.tokens,
            self.labels,
            pad_to_multiple_of=pad_to_multiple_of,
            shift=False,
        )
        return packed


@checked(
    PackingError,
    most_tokens=or_none(whole(least=1)),
    tokens_per_rank=or_none(whole(least=1)),
    least_shared=whole(least=1),
    weights=or_none(sequence_of("weights", real(least=0))),
)
def merge_prefixes(
    sequences: Sequence[Tokens],
    labels: Sequence[Tokens] | None = None,
    *,
    most_tokens: int | None = None,
    tokens_per_rank: int | None = None,
    least_shared: int = 1,
    weights: Sequence[float] | None = None,
) -> Merged:
    """Merges sequences that begin alike.

    Args:
        sequences: token ids `[tokens]` of each, at least one.
        labels: as long as the sequences and NOT shifted, -100 where a token is not a target; None:
            the sequences.
        most_tokens: maximum number of tokens of a tree, such as those that all ranks hold in a
            micro-batch. Sequences that would be more become several trees. None: any number.
        tokens_per_rank: tokens that a rank holds in a micro-batch, beyond which trees are only as
            large as is worth it, see `is_too_large`. None: as large as they may be.
        least_shared: number of first rows that sequences must share to be merged. Each tree is in
            one micro-batch, so plans with fewer, larger documents have less freedom.
        weights: weight of each sequence in the loss; None: 1 for all.

    Raises PackingError for sequences, labels and weights that do not match.
    """
    keys = _keys(sequences, labels)
    of_sequences = np.ones(len(keys)) if weights is None else np.asarray(weights, np.float64)
    if of_sequences.shape != (len(keys),):
        raise PackingError(
            f"there are {len(keys)} sequences, but weights of shape {list(of_sequences.shape)}: "
            "give one for each"
        )
    paths: list[list[Ids]] = [[] for _ in keys]
    of_sequence = [0] * len(keys)
    documents = []
    of_rows = []
    trees = {}
    for document, part in enumerate(
        _parts(keys, most_tokens, tokens_per_rank, max(1, least_shared))
    ):
        nodes = list(_nodes(part, keys))
        tree = Tree(
            tuple(node.stop - node.start for node in nodes), tuple(node.parent for node in nodes)
        )
        if len(nodes) > 1:
            trees[document] = tree
        documents.append(
            np.concatenate([keys[node.sequences[0]][node.start : node.stop] for node in nodes])
        )
        of_rows.append(
            np.repeat([of_sequences[node.sequences].sum() for node in nodes], tree.lengths)
        )
        for node, place in zip(nodes, tree.nodes, strict=True):
            for sequence in node.sequences:
                of_sequence[sequence] = document
                paths[sequence].append(np.arange(place.start, place.stop))
    tokens, shifted = (
        tuple(np.ascontiguousarray(each[:, column]) for each in documents) for column in (0, 1)
    )
    rows = zip(of_sequence, map(np.concatenate, paths), strict=True)
    return Merged(tokens, shifted, weights=tuple(of_rows), trees=trees, rows=tuple(rows))


@checked(
    PackingError,
    **only("plan", "rank", "pad_to_multiple_of", of=RULES),
    merged=kind("what merge_prefixes returns", Merged),
)
def pack_merged(
    plan: Plan, rank: int, merged: Merged, *, pad_to_multiple_of: int = 1
) -> tuple[list[MicroBatch], float]:
    """Returns a rank's share of every micro-batch of a step, and the sum of the weights of all
    targets of the step.

    The loss is the sum of weight · -log p over all rows, divided by that sum: what it is without
    merging. Arguments otherwise as in `pack_documents`; `plan` is made from `merged.lengths` and
    `merged.trees`.
    """
    packed = Merged.micro_batches(merged, plan, rank, pad_to_multiple_of)
    weighed = [
        with_weights(batch, lambda document, *span: merged.weights[document][slice(*span)])
        for batch in packed
    ]
    return weighed, merged.target_weight


def _keys(sequences: Sequence[Tokens], labels: Sequence[Tokens] | None) -> list[Ids]:
    """Returns token and shifted label of every row of each sequence, [tokens, 2]."""
    tokens = token_ids("sequences", sequences, PackingError)
    if labels is None:
        targets = tokens
    else:
        targets = token_ids("labels", labels, PackingError, ignored=IGNORED_LABEL)
    if len(targets) != len(tokens):
        raise PackingError(
            f"there are {len(tokens)} sequences, but {len(targets)} labels: give one of each"
        )
    for number, (ids, label) in enumerate(zip(tokens, targets, strict=True)):
        if ids.ndim != 1 or not len(ids) or label.shape != ids.shape:
            raise PackingError(
                f"sequence {number} has tokens of shape {list(ids.shape)} and labels of "
                f"{list(label.shape)}: give one axis of at least one token, and as many labels"
            )
    return [
        np.stack([ids, np.append(label[1:], IGNORED_LABEL)], axis=1)
        for ids, label in zip(tokens, targets, strict=True)
    ]


def _parts(
    keys: Sequence[Ids], most_tokens: int | None, tokens_per_rank: int | None, least_shared: int
) -> list[list[tuple[int, int]]]:
    """Returns the sequences of each tree, as many as it may have; trees in the order of their first
    sequences.

    Sequences that begin alike are neighbours, each with the number of first rows that it shares
    with the one before.
    """
    parts: list[list[tuple[int, int]]] = []
    size = 0
    total = 0
    before = -1
    for number in sorted(range(len(keys)), key=lambda number: keys[number].tobytes()):
        key = keys[number]
        shared = _shared(keys[before], key) if parts else 0
        size = size + len(key) - shared
        total = total + len(key)
        before = number
        if shared < least_shared or is_too_large(
            size,
            total,
            sequences=len(parts[-1]) + 1,
            most_tokens=most_tokens,
            tokens_per_rank=tokens_per_rank,
        ):
            size = len(key)
            total = len(key)
            shared = 0
            parts.append([])
        parts[-1].append((number, shared))
    return sorted(parts, key=min)


def _shared(a: Ids, b: Ids) -> int:
    """Returns the number of first rows that are equal."""
    count = min(len(a), len(b))
    differ = np.flatnonzero((a[:count] != b[:count]).any(axis=1))
    if len(differ):
        return int(differ[0])
    return count


class _Node(NamedTuple):
    """Rows [start, stop) that some sequences share, below the rows of the parent."""

    parent: int
    sequences: list[int]
    start: int
    stop: int


def _nodes(part: list[tuple[int, int]], keys: Sequence[Ids]) -> Iterator[_Node]:
    """Yields the nodes of a tree in depth-first order, the children of each by number of rows.

    With the shortest first, ranks have more even work than in any other order.
    """
    sequences, shared = map(list, zip(*part, strict=True))
    lengths = [len(keys[sequence]) for sequence in sequences]
    upto = np.cumsum(
        [0, *(length - common for length, common in zip(lengths, shared, strict=True))]
    ).tolist()
    todo = [(ROOT, 0, len(sequences), 0)]
    number = 0
    while todo:
        parent, first, end, start = todo.pop()
        stop = min([lengths[first], *shared[first + 1 : end]])
        yield _Node(parent, sequences[first:end], start, stop)
        cuts = [first, *(i for i in range(first + 1, end) if shared[i] == stop), end]
        below = [(a, b) for a, b in pairwise(cuts) if lengths[a] > stop]
        below.sort(key=lambda ends: upto[ends[1]] - upto[ends[0]] + shared[ends[0]], reverse=True)
        todo += [(number, a, b, stop) for a, b in below]
        number += 1

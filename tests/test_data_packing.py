"""Packing of documents in memory: the same buffers as from a store, labels shifted before the cut, wrong documents refused."""

from pathlib import Path

import numpy as np
import pytest
import torch

from longctx.data import IGNORED_LABEL
from longctx.data.packing import PackingError, pack, pack_documents
from longctx.data.sampler import Piece
from tests.data_cases import byte_store, random_plan

LENGTHS = [37, 3, 150, 8, 2, 64]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("multiple", [1, 16])
def test_documents_in_memory_give_the_buffers_of_a_store(tmp_path: Path, seed: int, multiple: int) -> None:
    store = byte_store(tmp_path, LENGTHS)
    documents = [store.read(document, 0, length)[0] for document, length in enumerate(LENGTHS)]
    pieces = [Piece(document, 0, length) for document, length in enumerate(LENGTHS)]
    plan = random_plan(LENGTHS, 3, seed)
    for rank in range(3):
        packed, targets = pack_documents(plan, rank, documents, pad_to_multiple_of=multiple)
        assert targets == store.trained_tokens.sum() == sum(LENGTHS) - len(LENGTHS)
        assert len(packed) == len(plan.micro_batches)
        for index, mine in enumerate(packed):
            stored = pack(store, pieces, plan.layout(index, rank), pad_to_multiple_of=multiple)
            assert mine.index == index and mine.layout == stored.layout
            for name in ("tokens", "labels", "positions"):
                assert torch.equal(getattr(mine, name), getattr(stored, name)), name


def test_labels_of_a_document_are_shifted_and_masked() -> None:
    """For every cut, each target is the label of the token before it, exactly once over all ranks."""
    documents = [list(range(1000 * i, 1000 * i + length)) for i, length in enumerate(LENGTHS)]
    labels = [torch.tensor([IGNORED_LABEL if token % 3 else token for token in document]) for document in documents]
    plan = random_plan(LENGTHS, 3, seed=4)
    pairs, targets = [], 0
    for rank in range(3):
        packed, targets = pack_documents(plan, rank, documents, labels)
        for batch in packed:
            valid = batch.labels != IGNORED_LABEL
            pairs += zip(batch.tokens[valid].tolist(), batch.labels[valid].tolist(), strict=True)
    expected = [(token - 1, token) for document in documents for token in document[1:] if token % 3 == 0]
    assert sorted(pairs) == expected
    assert targets == len(expected)


@pytest.mark.parametrize(
    ("documents", "labels", "message"),
    [
        ([[1, 2]], None, r"there are 1 documents, but the plan has 2"),
        ([[1, 2], [3]], None, r"documents\[1\] has shape \[1\], but the plan's document 1 has 3 tokens"),
        ([[1, 2], [[3, 4, 5]]], None, r"documents\[1\] has shape \[1, 3\]"),
        ([[1, 2], [3, 4, 5]], [[1, 2], np.zeros(4)], r"labels\[1\] has shape \[4\]"),
    ],
)
def test_documents_of_another_plan_are_refused(documents: list, labels: list | None, message: str) -> None:
    with pytest.raises(PackingError, match=message):
        pack_documents(random_plan([2, 3], 1, seed=0), 0, documents, labels)

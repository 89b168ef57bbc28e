"""Noise of block diffusion: what is masked, what it weighs, and that it does not depend on the
split."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.data.diffusion import Noise, Noised, noise_documents, noise_pieces
from longctx.data.loader import Loader
from longctx.data.packing import PackingError, StepBatch
from longctx.data.pieces import Piece
from longctx.data.store.store import Store
from longctx.data.trees import pack_merged
from longctx.planning.planners.planner import make_plan
from tests.data_cases import PROFILE, byte_store
from tests.diffusion_cases import MASK, noisy_copy
from tests.marks import examples

TEXT = np.arange(60) % MASK


def noised(noise: Noise, tokens: Any = TEXT, key: tuple[int, ...] = (3,)) -> Any:
    return noise.document(tokens, trained=tokens >= 0, key=key)


@settings(max_examples=examples(60), deadline=None)
@given(
    length=st.integers(1, 90),
    block=st.integers(1, 40),
    largest=st.integers(0, 50),
    seed=st.integers(0, 9),
    next_token=st.sampled_from([0.0, 0.25]),
    per_document=st.booleans(),
    prompt=st.integers(0, 90),
)
def test_trees_are_those_of_the_noise(
    length: int,
    block: int,
    largest: int,
    seed: int,
    next_token: float,
    per_document: bool,
    prompt: int,
) -> None:
    """Every path is the document up to a block, whose labels are where it is masked; a clean block
    is there only if it is seen or has a loss."""
    noise = Noise(
        MASK,
        block=block,
        largest_block=largest,
        seed=seed,
        next_token=next_token,
        per_document=per_document,
    )
    text = np.arange(length) % MASK
    trained = np.arange(length) >= prompt
    document = noise.document(text, trained=trained, key=(seed, 1))
    targets = int(trained[1:].sum())
    assert document.amount == (min(1, targets) if per_document else targets)
    share = max(1, targets) if per_document else 1
    tree = document.tree
    sizes = set()
    for number, node in enumerate(tree.nodes[1:], 1):
        rows = slice(node.start, node.stop)
        tokens, labels = document.tokens[rows], document.labels[rows]
        expected = text[slice(*node.positions)]
        is_last = node.positions[1] == length
        if not is_last:
            sizes.add(len(tokens))
        masked = tokens != expected
        if not masked.any():
            assert tree.both_ways[number] == (not next_token)
            following = np.append(text[1:], -100)[slice(*node.positions)]
            is_target = np.append(trained[1:], False)[slice(*node.positions)]
            wanted = (
                np.where(is_target, following, -100) if next_token else np.full_like(labels, -100)
            )
            assert labels.tolist() == wanted.tolist()
            assert tree.weights[number] == next_token / share
            assert next_token or node.stop < node.end or len(tree.nodes) == 2
            continue
        assert tree.both_ways[number] and node.stop == node.end
        assert (tokens[masked] == MASK).all()
        assert labels.tolist() == np.where(masked, expected, -100).tolist()
        assert not masked[~trained[slice(*node.positions)]].any()
        assert node.positions[0] > 0 or not masked[0]
        assert noise.least <= 1 / (tree.weights[number] * share) <= 1
    assert len(sizes) <= 1
    for size in sizes:
        assert block <= size <= max(block, largest)


def test_noise_depends_on_seed_document_and_block_alone() -> None:
    noise = Noise(MASK, block=8)
    clean = torch.from_numpy(TEXT)
    first, _, level = noisy_copy(noised(noise), clean)
    longer = noisy_copy(noised(noise, np.arange(90) % MASK), torch.arange(90) % MASK)
    assert torch.equal(longer.tokens[:56], first[:56])  # whole blocks
    assert len(set(level.tolist())) > 3
    others = [noised(noise, key=(4,)), noised(Noise(MASK, block=8, seed=1))]
    for other in others:
        assert not torch.equal(noisy_copy(other, clean).tokens, first)


def test_the_expected_weight_of_a_token_is_one() -> None:
    """So the sum of the loss over the targets is the bound of the paper."""
    total = 0.0
    for key in range(2000):
        document = noised(Noise(MASK, block=5, least=0.05), key=(key,))
        total += float(document.tree.row_weights()[document.labels >= 0].sum())
    assert total / 2000 / 59 == pytest.approx(1, abs=0.01)


def test_a_document_without_noise_is_one_block() -> None:
    document = Noise(MASK, block=4).document(TEXT, trained=TEXT < 0, key=(0,))
    assert document.tree.lengths == (0, 4) and document.amount == 0
    assert (document.labels == -100).all()


def first_step(store: Store, ranks: int, noise: Noise) -> list[StepBatch]:
    """Returns the shares of all ranks."""

    def planner(lengths: Any, **trees: Any) -> Any:
        return make_plan(lengths, ranks=ranks, tokens_per_rank=900, profile=PROFILE, **trees)

    def merging(store: Store, pieces: Sequence[Piece]) -> Noised:
        return noise_pieces(store, pieces, noise)

    shares = []
    for rank in range(ranks):
        with Loader(
            store,
            rank=rank,
            ranks=ranks,
            planner=planner,
            merging=merging,
            global_tokens=700,
            seed=0,
            max_length=410,
        ) as loader:
            shares.append(next(loader))
    return shares


NOISE = Noise(MASK, block=16)


def test_a_step_has_the_same_noise_on_any_ranks(tmp_path: Path) -> None:
    """And other noise in the next epoch."""
    store = byte_store(tmp_path, (200, 70, 410, 130, 90))
    weights = []
    for ranks in (1, 3):
        found = [0.0]
        for batch in first_step(store, ranks, NOISE):
            assert batch.target_weight == batch.target_tokens == batch.tokens - batch.sequences
            for micro_batch in batch.micro_batches:
                assert micro_batch.weights is not None
                found += micro_batch.weights[micro_batch.labels >= 0].tolist()
        assert min(found[1:]) >= 1
        weights.append(sorted(found))
    assert weights[0] == weights[1]
    (alike,) = first_step(store, 1, replace(NOISE, per_document=True))
    assert alike.target_weight == alike.sequences
    pieces = [Piece(2, 0, 410, epoch) for epoch in (0, 1)]
    one, other = noise_pieces(store, pieces, NOISE).labels
    assert not np.array_equal(one, other)


def test_refusals() -> None:
    with pytest.raises(PackingError, match=r"levels of noise are 0\.5 to 0\.2"):
        Noise(MASK, least=0.5, most=0.2)
    with pytest.raises(PackingError, match="block is 0: must be a whole number"):
        Noise(MASK, block=0)
    with pytest.raises(PackingError, match="there are 2 documents, 2 labels and 1 keys"):
        noise_documents([[1], [2]], noise=Noise(MASK), keys=[(0,)])
    with pytest.raises(PackingError, match="give one axis of at least one token"):
        noise_documents([[]], noise=Noise(MASK))


def test_weights_are_packed_with_their_rows() -> None:
    noised_step = noise_documents([TEXT, TEXT[:7]], noise=Noise(MASK, block=8, per_document=True))
    plan = make_plan(
        noised_step.lengths,
        ranks=2,
        tokens_per_rank=200,
        profile=PROFILE,
        trees=noised_step.trees,
        mode="static",
        degree=2,
    )
    total = 0.0
    for rank in range(2):
        packed, divisor = pack_merged(plan, rank, noised_step)
        assert divisor == 2
        total += sum(float(batch.weights[batch.labels >= 0].sum()) for batch in packed)
    expected = sum(
        weights[labels >= 0].sum()
        for weights, labels in zip(noised_step.weights, noised_step.labels, strict=True)
    )
    assert total == pytest.approx(expected, rel=1e-6)

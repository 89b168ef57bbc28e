"""Masks of encoders: a pure function of seed, epoch, document and position, whatever the plan, with the shares of BERT."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longctx.data import IGNORED_LABEL
from longctx.data.loader import Loader, read_step
from longctx.data.masking import Masking, MaskingError
from longctx.data.packing import StepBatch
from longctx.data.sampler import Piece
from longctx.data.store import Store
from longctx.data.tokenizer import Tokenizer, TokenizerError
from longctx.planning.planners.planner import make_plan
from tests.data_cases import PROFILE, byte_store, random_plan

LENGTHS = (150, 2, 37, 3, 90, 64)
MASK = 300
ORDINARY = np.arange(256)


def masking(seed: int = 7, share: float = 0.3) -> Masking:
    return Masking(seed, share, MASK, ORDINARY)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return byte_store(tmp_path_factory.mktemp("masking"), LENGTHS, conversations=1)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(0, 10**12), st.integers(0, 3), st.integers(0, 10**9))
def test_parts_of_a_document_have_the_masks_of_the_whole(spans: list[int], start: int, epoch: int, document: int) -> None:
    tokens = np.arange(sum(spans)) % 256
    whole = masking().mask(tokens, epoch=epoch, document=document, start=start)
    parts, first = [], 0
    for length in spans:
        part = tokens[first : first + length]
        parts.append(masking().mask(part, epoch=epoch, document=document, start=start + first))
        first += length
    for one, others in zip(whole, zip(*parts, strict=True), strict=True):
        assert one.tolist() == np.concatenate(others).tolist()


def test_shares_are_those_asked_for() -> None:
    """Over 200,000 tokens: to 4 standard deviations, and every random token about as often as any other."""
    tokens = np.zeros(200_000, np.int64)
    replaced, labels = Masking(3, 0.3, MASK, ORDINARY, random=0.2, kept=0.15).mask(tokens, epoch=1, document=5)
    masked = labels != IGNORED_LABEL
    assert masked.mean() == pytest.approx(0.3, abs=4 * (0.3 * 0.7 / len(tokens)) ** 0.5)
    assert (labels[masked] == 0).all() and (replaced[~masked] == 0).all()
    count = masked.sum()
    for share, those in ((0.65, replaced == MASK), (0.2 * 255 / 256, (replaced != MASK) & (replaced != 0))):
        assert those[masked].mean() == pytest.approx(share, abs=4 * (share * (1 - share) / count) ** 0.5)
    drawn = np.bincount(replaced[masked & (replaced != MASK)], minlength=256)[1:]
    assert drawn.min() > 0 and drawn.max() < 2 * drawn.mean()


def test_masks_differ_by_seed_epoch_document_and_position() -> None:
    tokens = np.arange(256)
    labels = {
        tuple(masking(seed).mask(tokens, epoch=epoch, document=document, start=start)[1].tolist())
        for seed in (0, 1)
        for epoch in (0, 1)
        for document in (0, 1)
        for start in (0, 1, 4)
    }
    assert len(labels) == 24


def test_the_draws_stay_the_same() -> None:
    """A run must resume with the same masks under any version of NumPy, and of this code."""
    tokens, labels = masking().mask(np.arange(20), epoch=2, document=9, start=5)
    assert tokens.tolist() == [0, 194, 2, 3, 300, 300, 300, 7, 8, 9, 300, *range(11, 20)]
    assert np.flatnonzero(labels != IGNORED_LABEL).tolist() == [1, 4, 5, 6, 10, 15]


def test_only_ordinary_tokens_that_may_be_targets_are_masked() -> None:
    tokens = np.array([MASK, 256, 10_000, 5, 6])
    trained = np.array([True, True, True, True, False])
    replaced, labels = masking(share=1.0).mask(tokens, epoch=0, document=0, trained=trained)
    assert labels.tolist() == [IGNORED_LABEL] * 3 + [5, IGNORED_LABEL]
    assert replaced[[0, 1, 2, 4]].tolist() == tokens[[0, 1, 2, 4]].tolist()
    everything = Masking(0, 1.0, 7, np.array([5, 7, 9]), random=1.0, kept=0.0)
    drawn = everything.mask(np.full(1000, 5), epoch=0, document=0)[0]
    assert set(drawn.tolist()) == {5, 9}, "the mask token is not ordinary, even if it is listed"
    assert len(masking().mask(np.zeros(0, np.int64), epoch=0, document=0)[0]) == 0


@pytest.mark.parametrize("settings", [{"share": 0.0}, {"share": 1.5}, {"random": 0.6, "kept": 0.5}, {"kept": -0.1}])
def test_wrong_settings_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(MaskingError, match=r"must be (above|0 or more)"):
        Masking(**{"seed": 0, "share": 0.3, "mask_token": MASK, "ordinary": ORDINARY, **settings})
    with pytest.raises(MaskingError, match="ordinary is empty"):
        Masking(0, 0.3, 7, np.array([7]))


def rows_of(batches: list[StepBatch]) -> dict[tuple[int, int], tuple[int, int]]:
    """Returns token and label by store document and position in the piece."""
    found = {}
    for batch in batches:
        for micro_batch in batch.micro_batches:
            for shard in micro_batch.layout.shards:
                rows = slice(shard.offset, shard.offset + shard.tokens)
                columns = (micro_batch.positions, micro_batch.tokens, micro_batch.labels)
                for position, token, label in zip(*(column[rows].tolist() for column in columns), strict=True):
                    found[shard.document, position] = token, label
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_neither_plan_nor_ranks_change_what_is_masked(store: Store, ranks: int) -> None:
    """Also the second half of a document as a piece of its own, and tokens of conversations that are no targets."""
    pieces = [Piece(document, 0, int(length), epoch=1) for document, length in enumerate(store.lengths)]
    pieces.append(Piece(0, 75, 150, epoch=1))
    plan = random_plan([piece.length for piece in pieces], ranks, seed=ranks)
    batches = [read_step(store, pieces, plan, rank, masking=masking()) for rank in range(ranks)]
    found = rows_of(batches)
    assert len(found) == sum(piece.length for piece in pieces)
    for number, piece in enumerate(pieces):
        tokens, trained = store.tokens(piece.document, piece.start, piece.stop)
        ours = [found[number, position] for position in range(piece.length)]
        replaced, labels = masking().mask(tokens, epoch=1, document=piece.document, start=piece.start, trained=trained)
        assert ours == list(zip(replaced.tolist(), labels.tolist(), strict=True))
    assert [found[len(pieces) - 1, position] for position in range(75)] == [found[0, 75 + position] for position in range(75)]
    targets = sum(label != IGNORED_LABEL for _, label in found.values())
    assert {batch.target_tokens for batch in batches} == {targets} and targets > 50
    conversation = len(LENGTHS)
    trained = store.tokens(conversation, 0, int(store.lengths[conversation]))[1]
    assert not trained.all() and trained.any()
    assert all(trained[position] for (number, position), (_, label) in found.items() if number == conversation and label >= 0)


def loader(store: Store, **settings: object) -> Loader:
    cut = {"max_length": 100, "long_documents": "split"}
    given = {"rank": 0, "ranks": 1, "global_tokens": 200, "seed": 7, "masking": masking(), **cut, **settings}
    return Loader(store, planner=lambda lengths: make_plan(lengths, ranks=1, tokens_per_rank=400, profile=PROFILE), **given)


def test_every_epoch_has_other_masks_and_resumption_the_same(store: Store) -> None:
    with loader(store) as ours:
        steps = [next(ours) for _ in range(6)]
        state = ours.state_dict()
        seventh = next(ours)
    seen: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for batch in steps:
        for micro_batch in batch.micro_batches:
            original = micro_batch.labels.where(micro_batch.labels >= 0, micro_batch.tokens)
            for shard in micro_batch.layout.shards:
                rows = slice(shard.offset, shard.offset + shard.tokens)
                seen.setdefault(tuple(original[rows].tolist()), []).append(tuple(micro_batch.labels[rows].tolist()))
    several = [labels for labels in seen.values() if len(labels) > 1 and sum(label >= 0 for label in labels[0]) > 5]
    assert len(several) > 2 and all(len(set(labels)) == len(labels) for labels in several)
    with loader(store) as again:
        again.load_state_dict(state)
        (resumed,), (expected,) = next(again).micro_batches, seventh.micro_batches
    assert torch.equal(resumed.tokens, expected.tokens) and torch.equal(resumed.labels, expected.labels)


def test_special_tokens_are_known() -> None:
    plain = Tokenizer.bytes()
    assert plain.ordinary.tolist() == list(range(256))
    with pytest.raises(TokenizerError, match=r"none of \[MASK\], <mask>, <\|mask\|> is in the vocabulary: name its mask token"):
        plain.mask_token()
    with pytest.raises(TokenizerError, match="none of <hole> is"):
        plain.mask_token("<hole>")
    plain._inner.add_special_tokens(["[MASK]", "<hole>"])
    with_masks = Tokenizer(plain._inner.to_str())
    assert with_masks.mask_token() == 257 and with_masks.mask_token("<hole>") == 258
    assert with_masks.ordinary.tolist() == list(range(256))


def test_the_store_itself_is_untouched(store: Store, tmp_path: Path) -> None:
    tokens, _ = store.tokens(0, 10, 20)
    tokens[:] = 0
    assert store.tokens(0, 10, 20)[0].any()

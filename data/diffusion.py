"""Block diffusion: documents become trees of clean blocks with a noisy copy beside each, which
learns to restore the tokens that are masked in it.

    noised = noise_documents(documents, labels, noise=Noise(mask_token=5, block=32))
    plan = make_plan(noised.lengths, trees=noised.trees, ranks=ranks, ..)
    micro_batches, divisor = pack_merged(plan, rank, noised)

This is the training of BD3-LM (arXiv 2503.09573): a noisy block sees itself both ways and the clean
blocks before it. A block has one level of noise t, drawn evenly; each of its tokens is masked with
probability t, and the loss of masked tokens counts 1/t. Summed over a document and divided by its
targets, the expectation is an upper bound on the mean of -log p, whose exponential bounds the
perplexity. A block without a masked token has no noisy copy, as nothing would be learned from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from longctx.arguments import (
    LARGEST_ID,
    check_arguments,
    checked,
    flag,
    kind,
    real,
    token_ids,
    whole,
)
from longctx.data import IGNORED_LABEL
from longctx.data.packing import Ids, MicroBatch, PackingError, Tokens, with_weights
from longctx.data.trees import Merged, pack_merged
from longctx.planning.plan import Plan
from longctx.planning.tree import ROOT, BlockTree

if TYPE_CHECKING:
    from longctx.data.pieces import Piece
    from longctx.data.store.store import Store

LEAST_LEVEL = 1e-3
Key = tuple[int, ...]
"""Numbers that tell a document, and its reading, from others."""


@dataclass(frozen=True)
class NoisyTree(BlockTree):
    """A document with noisy copies of its blocks.

    Attributes:
        weights: of every node, the weight of its labels in the loss.
    """

    weights: tuple[float, ...]

    def row_weights(self) -> npt.NDArray[np.float64]:
        """Returns the weight of every row, [tokens]."""
        return np.repeat(self.weights, self.lengths)


@dataclass(frozen=True)
class NoisyDocument:
    """A document of a step; arrays are int64 [tokens].

    Attributes:
        tokens: token ids, of which masked ones are the mask token.
        labels: the token itself where it is masked, and -100 elsewhere; on clean blocks with a
            loss of the next token, this one.
        tree: the blocks.
        amount: what the document counts in the divisor of the loss.
    """

    tokens: Ids
    labels: Ids
    tree: NoisyTree
    amount: int


@dataclass(frozen=True)
class Noise:
    """How documents are noised.

    Attributes:
        mask_token: token id in place of a masked token.
        block: tokens of a block; the last one of a document may be shorter.
        largest_block: if it is larger than `block`, blocks of every document have a size between
            both, drawn evenly; 0: `block`.
        least, most: bounds of the level of noise. The bound on perplexity needs all, 0.001 to 1.
        next_token: weight of the loss of the next token on the clean blocks, which then are causal;
            with 0 they see themselves both ways.
        per_document: each document counts alike, as in LLaDA, not each token.
        seed: draws are a function of this, of the document's key and of the block.
    """

    mask_token: int
    block: int = 32
    largest_block: int = 0
    least: float = LEAST_LEVEL
    most: float = 1.0
    next_token: float = 0.0
    per_document: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        rules = {
            "mask_token": whole(least=0, most=LARGEST_ID),
            "block": whole(least=1),
            "largest_block": whole(least=0),
            "least": real(least=0),
            "most": real(least=0),
            "next_token": real(least=0),
            "per_document": flag,
            "seed": whole(least=0),
        }
        check_arguments(PackingError, rules, vars(self))
        if not 0 < self.least <= self.most <= 1:
            raise PackingError(
                f"levels of noise are {self.least} to {self.most}: they must be above 0, at most "
                "1, and ascend"
            )

    def document(self, tokens: Ids, trained: npt.NDArray[np.bool_], key: Key) -> NoisyDocument:
        """Returns a document with noise, which only `trained` tokens get, and never the first."""
        block = self._block_of(key)
        starts = range(0, len(tokens), block)
        levels = self._random(key, 1).uniform(self.least, self.most, size=len(starts))
        chances = self._random(key, 2).random(len(tokens))
        is_target = trained.copy()
        is_target[0] = False
        masked = is_target & (chances < np.repeat(levels, block)[: len(tokens)])
        noisy = np.where(masked, self.mask_token, tokens)
        hidden = np.where(masked, tokens, IGNORED_LABEL)
        following = np.full(len(tokens), IGNORED_LABEL)
        if self.next_token:
            following[:-1] = np.where(is_target, tokens, IGNORED_LABEL)[1:]
        targets = int(is_target.sum())
        share = max(1, targets) if self.per_document else 1
        last_clean = self._last_clean(masked, block)
        copies = list[_Copy]()
        above = 0  # the root, which is empty
        for number, start in enumerate(starts):
            rows = slice(start, start + block)
            parent = above
            if masked[rows].any():
                weight = 1 / (float(levels[number]) * share)
                copy = _Copy(
                    noisy[rows], hidden[rows], parent=parent, both_ways=True, weight=weight
                )
                copies.append(copy)
            if number <= last_clean:
                copy = _Copy(
                    tokens[rows],
                    following[rows],
                    parent=parent,
                    both_ways=not self.next_token,
                    weight=self.next_token / share,
                )
                copies.append(copy)
                above = len(copies)
        return _joined(copies, amount=min(1, targets) if self.per_document else targets)

    def _block_of(self, key: Key) -> int:
        """Returns the tokens of the blocks of a document."""
        if self.largest_block <= self.block:
            return self.block
        return int(self._random(key, 0).integers(self.block, self.largest_block + 1))

    def _last_clean(self, masked: npt.NDArray[np.bool_], block: int) -> int:
        """Returns the last block whose clean copy has a loss, or is seen; a document has one."""
        if self.next_token:
            return len(masked) // block
        last = np.flatnonzero(masked)
        if not len(last):
            return 0
        return int(last[-1]) // block - 1

    def _random(self, key: Key, what: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, what, *key])


class _Copy(NamedTuple):
    """A clean or a noisy block: tokens and labels, and what its node is."""

    tokens: Ids
    labels: Ids
    parent: int
    both_ways: bool
    weight: float


def _joined(copies: Sequence[_Copy], amount: int) -> NoisyDocument:
    """Returns the document of these blocks, in depth-first order."""
    tree = NoisyTree(
        lengths=(0, *(len(copy.tokens) for copy in copies)),
        parents=(ROOT, *(copy.parent for copy in copies)),
        both_ways=(False, *(copy.both_ways for copy in copies)),
        weights=(0.0, *(copy.weight for copy in copies)),
    )
    tokens = np.concatenate([copy.tokens for copy in copies]).astype(np.int64)
    labels = np.concatenate([copy.labels for copy in copies]).astype(np.int64)
    return NoisyDocument(tokens, labels, tree=tree, amount=amount)


@dataclass(frozen=True)
class Noised(Merged):
    """Documents of a step with noise, in the place of merged ones: each is a tree, and weights are
    those of `NoisyTree`.

    Attributes:
        amounts: what each counts in the divisor of the loss.
    """

    amounts: tuple[int, ...]

    @classmethod
    def of(cls, documents: Sequence[NoisyDocument]) -> "Noised":
        return cls(
            tokens=tuple(document.tokens for document in documents),
            labels=tuple(document.labels for document in documents),
            weights=tuple(document.tree.row_weights() for document in documents),
            trees={number: document.tree for number, document in enumerate(documents)},
            rows=tuple(
                (number, np.arange(len(document.tokens)))
                for number, document in enumerate(documents)
            ),
            amounts=tuple(document.amount for document in documents),
        )

    @property
    def target_weight(self) -> float:
        """Divisor of the loss."""
        return float(sum(self.amounts))

    def amounts_of(self, targets: Sequence[float]) -> Sequence[float]:
        return self.amounts

    def micro_batches(self, plan: Plan, rank: int, pad_to_multiple_of: int) -> list[MicroBatch]:
        return pack_merged(plan, rank, self, pad_to_multiple_of=pad_to_multiple_of)[0]


@checked(PackingError, noise=kind("a Noise of longctx.data.diffusion", Noise))
def noise_documents(
    documents: Sequence[Tokens],
    labels: Sequence[Tokens] | None = None,
    *,
    noise: Noise,
    keys: Sequence[Key] | None = None,
) -> Noised:
    """Makes trees of clean and noisy blocks.

    Args:
        documents: token ids `[tokens]` of each, at least one.
        labels: as long as the documents and NOT shifted, -100 where a token is never masked and has
            no loss, as in prompts; None: the documents.
        noise: how they are noised.
        keys: numbers ≥ 0 that tell each document, and the epoch, from others, for the same noise
            under any split; None: their numbers here.

    Raises PackingError for documents, labels and keys that do not match.
    """
    tokens = token_ids("documents", documents, PackingError)
    targets = tokens
    if labels is not None:
        targets = token_ids("labels", labels, PackingError, ignored=IGNORED_LABEL)
    told = [(number,) for number in range(len(tokens))] if keys is None else keys
    if not len(tokens) == len(targets) == len(told):
        raise PackingError(
            f"there are {len(tokens)} documents, {len(targets)} labels and {len(told)} keys: give "
            "one of each"
        )
    noisy = []
    for number, (ids, label, key) in enumerate(zip(tokens, targets, told, strict=True)):
        if ids.ndim != 1 or not len(ids) or label.shape != ids.shape:
            raise PackingError(
                f"document {number} has tokens of shape {list(ids.shape)} and labels of "
                f"{list(label.shape)}: give one axis of at least one token, and as many labels"
            )
        noisy.append(noise.document(ids, trained=label != IGNORED_LABEL, key=key))
    return Noised.of(noisy)


def noise_pieces(store: "Store", pieces: "Sequence[Piece]", noise: Noise) -> Noised:
    """Returns the documents of a step with noise, which differs in every epoch. Reads all pieces.
    For a `Loader`'s `merging`."""
    assert not store.weighted, "tokens of noisy blocks have weights of their own"
    noisy = []
    for piece in pieces:
        tokens, trained = store.tokens(piece.document, piece.start, piece.stop)
        key = (piece.document, piece.start, piece.epoch)
        noisy.append(noise.document(tokens.astype(np.int64), trained=trained, key=key))
    return Noised.of(noisy)


def weighted_by_trees(batch: MicroBatch) -> MicroBatch:
    """Returns a micro-batch with the weights of its rows that its trees say."""
    weights = {}
    for shard in batch.layout.shards:
        assert isinstance(shard.tree, NoisyTree)
        weights[shard.document] = shard.tree.row_weights()
    return with_weights(batch, lambda document, *span: weights[document][slice(*span)])

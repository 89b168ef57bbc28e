"""Block diffusion in `transformers.Trainer`: a data collator that asks for it, and documents with
noise.

    collator = BlockDiffusionCollator(collate, Noise(mask_token=5, block=32))
    trainer = Trainer(model, args, data_collator=collator, train_dataset=..)
    dynamic_context_parallel(trainer)

Batches stay as they are until they are documents, so that noise depends on a document and the epoch
alone, and not on ranks and batches.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from longctx.data import IGNORED_LABEL
from longctx.data.diffusion import LEAST_LEVEL, Noise
from longctx.trainers.documents import Document
from longctx.trainers.refusals import TrainerError


class BlockDiffusionCollator:
    """A data collator for block diffusion.

    Args:
        collate: the collator of batches of causal models, with labels that are not shifted.
        noise: how documents are noised; evaluations have all levels of noise, so that their loss is
            a bound.
    """

    def __init__(self, collate: Callable[[Sequence[Any]], Any], noise: Noise) -> None:
        self.collate = collate
        self.noise = noise

    def __call__(self, examples: Sequence[Any]) -> Any:
        raise TrainerError(
            "the data collator asks for block diffusion, which the trainer itself does not know: "
            "call dynamic_context_parallel(trainer) first"
        )


@dataclass(frozen=True)
class NoisyDocument(Document):
    """A document with noise.

    Attributes:
        amount: what it counts in the divisor of the loss.
        text_tokens: number of its tokens without noisy copies.
    """

    amount: int = 0
    text_tokens: int = 0

    @property
    def targets(self) -> int:
        return self.amount

    @property
    def tokens_read(self) -> int:
        return self.text_tokens


def with_noise(document: Document, noise: Noise, epoch: int) -> NoisyDocument:
    """Returns a document, whose labels are in place, with the noise of an epoch."""
    read = np.stack([document.tokens, document.labels]).astype(np.int32)
    digest = hashlib.blake2b(read.tobytes(), digest_size=8).digest()
    key = (int.from_bytes(digest), epoch)
    made = noise.document(
        document.tokens.astype(np.int64), trained=document.labels != IGNORED_LABEL, key=key
    )
    return NoisyDocument(
        made.tokens,
        made.labels,
        tree=made.tree,
        amount=made.amount,
        text_tokens=len(document.tokens),
    )


def for_evaluation(noise: Noise) -> Noise:
    """Returns the noise whose loss is a bound on the mean of -log p."""
    return replace(noise, least=LEAST_LEVEL, most=1.0, next_token=0.0, per_document=False)

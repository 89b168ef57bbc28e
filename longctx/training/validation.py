"""Validation: the loss of documents that are not trained on, by the same plans, attention and head as training.

A pass goes once through all documents, in the order of the store. It draws no random number, and the loader of the run knows
nothing of it, so that training goes on bit by bit as without it.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from longctx.config import Config
from longctx.data.loader import Planner, read_step
from longctx.data.packing import StepBatch
from longctx.data.sampler import Piece, Sampler, held_out
from longctx.data.store import Store
from longctx.errors import UserError
from longctx.model.protocol import Projection
from longctx.parallel.mesh import Mesh
from longctx.training.loss import log_probabilities
from longctx.training.objective import StepWeights
from longctx.training.setup import padding


class Score(Protocol):
    """A number for every label [tokens] from hidden states [tokens, hidden] and the output weight; 0 where there is none."""

    def __call__(
        self, hidden: torch.Tensor, weight: Projection, labels: torch.Tensor, *, softcap: float = 0.0
    ) -> torch.Tensor: ...


Look = Callable[[StepBatch, Score], list[torch.Tensor]]
"""`Trainer.look`."""


@dataclass(frozen=True)
class Validation:
    """What goes into the metrics of a step; see `StepMetrics`."""

    validation_loss: float
    validation_tokens: int
    validation_s: float
    validation_accuracy: float | None = None


@dataclass(frozen=True)
class Documents:
    """Some documents of a store, cut where they are too long as in training, to be gone through once.

    Attributes:
        pieces: in the order of the store.
        step_tokens: so many tokens, at least, are planned together.
        pad_to_multiple_of: as `Loader` has it.
        long: how many documents are longer than the `max_length` tokens of a piece, and are split or dropped.
    """

    store: Store
    pieces: tuple[Piece, ...]
    step_tokens: int
    pad_to_multiple_of: int
    max_length: int
    long: int

    @classmethod
    def choose(
        cls, config: Config, store: Store, max_length: int, first: int | None = None, held_out_share: float | None = None
    ) -> "Documents":
        """The `first` documents of a store (None: all); with `held_out_share` of those that a run with this share sets apart.

        Raises UserError if there are none, or if some are too long and `data.long_documents` is error.
        """
        chosen = np.ones(len(store), np.bool_) if held_out_share is None else held_out(store.names, held_out_share)
        if not chosen.any():
            raise UserError(
                f"data.held_out {held_out_share} sets none of the {len(store):,} documents of {store.said} apart: raise it"
            )
        if first is not None:
            chosen &= np.cumsum(chosen) <= first + (store.pairs and first % 2)
        long_documents = config.data.long_documents
        sampler = Sampler(
            store.lengths,
            global_tokens=1,
            seed=0,
            max_length=max_length,
            long_documents=long_documents,
            name=store.name,
            left_out=~chosen,
            pairs=store.pairs,
        )
        tokens, multiple = config.batch.global_tokens, padding(config)
        return cls(store, sampler.in_order(), tokens, multiple, max_length, sampler.long)

    def steps(self, planner: Planner, mesh: Mesh) -> Iterator[StepBatch]:
        """This rank's share of all pieces, one plan after the other. All ranks call it."""
        for step, pieces in enumerate(in_steps(self.pieces, self.step_tokens, 1 + self.store.pairs), start=1):
            plan = planner([piece.length for piece in pieces])
            mesh.agree(plan.hash, f"plan {step} of the evaluation")
            yield read_step(self.store, pieces, plan, mesh.rank, step, self.pad_to_multiple_of)


def in_steps(pieces: Iterable[Piece], tokens: int, multiple: int = 1) -> Iterator[list[Piece]]:
    """All pieces in order, as many together as hold at least so many tokens, and a multiple of so many pieces."""
    waiting: list[Piece] = []
    held = 0
    for piece in pieces:
        waiting.append(piece)
        held += piece.length
        if held >= tokens and len(waiting) % multiple == 0:
            yield waiting
            waiting, held = [], 0
    if waiting:
        yield waiting


def documents_apart(config: Config, training: Store, max_length: int) -> Documents:
    """What a run is validated on: the documents of eval.store, else those of its own store that it is not trained on.

    Raises UserError if there are none, or if they were made with another tokenizer.
    """
    if config.eval.store is None:
        return Documents.choose(config, training, max_length, config.eval.documents, config.data.held_out)
    store = Store.open(config.eval.store)
    if store.tokenizer.fingerprint != training.tokenizer.fingerprint:
        raise UserError(
            f"eval.store {config.eval.store} was made with another tokenizer than {config.data.said}: prepare it "
            f"with that one (`longctx prepare --tokenizer {training.path}/tokenizer.json`)"
        )
    return Documents.choose(config, store, max_length, config.eval.documents)


def mean_loss(documents: Documents, look: Look, planner: Planner, mesh: Mesh) -> Validation:
    """The mean over all targets of all ranks, the same on each of them."""
    began = time.perf_counter()
    total, targets = 0.0, 0
    for batch in documents.steps(planner, mesh):
        values = look(batch, log_probabilities)
        total -= sum(float(one.double().sum()) for one in values) if mesh.counts else 0.0
        targets += batch.target_tokens
    loss = float(mesh.gather([total]).sum()) / max(1, targets)
    return Validation(loss, targets, time.perf_counter() - began)


def mean_preference(
    documents: Documents, weigh: Callable[[StepBatch], StepWeights], planner: Planner, mesh: Mesh
) -> Validation:
    """The mean of a preference loss over all pairs, the same on every rank; `weigh` makes loss and accuracy of some of them."""
    began = time.perf_counter()
    pairs = loss = accuracy = 0.0
    targets = 0
    for batch in documents.steps(planner, mesh):
        found = weigh(batch)
        assert found.loss is not None
        pairs += found.divisor
        loss += found.divisor * found.loss
        accuracy += found.divisor * found.reported["reward_accuracy"]
        targets += batch.target_tokens
    return Validation(loss / pairs, targets, time.perf_counter() - began, accuracy / pairs)

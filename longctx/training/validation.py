"""Validation: the loss of documents that are not trained on, with the same planner, attention and
head as training.

A pass covers all documents once, in the order of the store. It draws no random numbers and does not
touch the loader of the run, so that training continues bit by bit as without it.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from longctx.config import Config
from longctx.data.loader import Merging, Planner, plan_step, read_step
from longctx.data.packing import StepBatch
from longctx.data.pieces import LeftOut, Piece, Pieces, SamplerError, first_documents
from longctx.data.store.store import Store
from longctx.errors import UserError, shell
from longctx.parallel.mesh import Mesh
from longctx.training.data import RunData, validation_noise
from longctx.training.objectives.objective import token_mean
from longctx.training.runner import ModelRunner


@dataclass(frozen=True)
class Documents:
    """Documents of a store for one pass in order, split or dropped if too long, as in training.

    Attributes:
        pieces: documents or parts of documents, in the order of the store.
        step_tokens: minimum number of tokens that are planned together.
        max_length: maximum tokens of a piece.
        long: number of documents longer than `max_length`, which are split or dropped.
        merging: what gives documents noise; None: they stay as they are.
    """

    store: Store
    pieces: tuple[Piece, ...]
    step_tokens: int
    pad_to_multiple_of: int
    max_length: int
    long: int
    merging: Merging | None

    @classmethod
    def choose(
        cls,
        config: Config,
        store: Store,
        max_length: int,
        first: int | None = None,
        held_out_share: float | None = None,
    ) -> "Documents":
        """Chooses the `first` documents of a store (None: all); with `held_out_share` only held-out
        documents.

        Raises UserError if there are none, or if some are too long and `data.long_documents` is
        error.
        """
        pieces: list[Piece] = []
        left = len(store) if first is None else first
        long = 0
        some_are_held = held_out_share is None
        for source in range(len(store.sources)):
            left_out: LeftOut | None = None
            if held_out_share is not None:
                left_out = store.held_out(source, held_out_share).others
            chosen, stop = first_documents(left, store.size(source), left_out)
            if not chosen:
                continue
            some_are_held = True
            left -= chosen
            found = Pieces(
                store,
                max_length=max_length,
                long_documents=config.data.long_documents,
                source=source,
                left_out=left_out,
                stop=stop,
            )
            long += found.tally.long
            pieces += found.in_order()
        if not some_are_held:
            raise UserError(
                f"data.held_out is {held_out_share}, which holds out no document of "
                f"{store.description} ({len(store):,}): raise it"
            )
        if not pieces:
            raise SamplerError(
                f"none of the documents of {store.description} has a token to train on, or fits: "
                "give a store with other documents, or raise data.max_length"
            )
        tokens = config.batch.global_tokens
        multiple = config.padding
        return cls(
            store,
            tuple(pieces),
            step_tokens=tokens,
            pad_to_multiple_of=multiple,
            max_length=max_length,
            long=long,
            merging=validation_noise(config, store),
        )

    @property
    def targets(self) -> list[int]:
        """Number of targets of every piece."""
        counts = []
        for piece in self.pieces:
            count = self.store.target_tokens(piece.document, piece.start, piece.stop)
            counts.append(count)
        return counts

    def steps(self, planner: Planner, mesh: Mesh) -> Iterator[StepBatch]:
        """Yields this rank's share of all pieces, step by step. Collective."""
        for step, pieces in enumerate(in_steps(self.pieces, self.step_tokens), start=1):
            plan, merged = plan_step(self.store, pieces, planner, self.merging)
            mesh.agree(plan.hash, f"plan {step} of the evaluation")
            yield read_step(
                self.store,
                pieces,
                plan=plan,
                rank=mesh.rank,
                step=step,
                pad_to_multiple_of=self.pad_to_multiple_of,
                merged=merged,
            )


def in_steps(pieces: Iterable[Piece], tokens: int) -> Iterator[list[Piece]]:
    """Yields all pieces in order, in groups of at least `tokens` tokens."""
    waiting: list[Piece] = []
    held = 0
    for piece in pieces:
        waiting.append(piece)
        held += piece.length
        if held >= tokens:
            yield waiting
            waiting = []
            held = 0
    if waiting:
        yield waiting


def validation_documents(config: Config, data: RunData, max_length: int) -> Documents:
    """Returns the validation documents of a run: all of eval.store, otherwise the held-out
    documents of its own store.

    Raises UserError if there are none, or if they were made with another tokenizer.
    """
    training = data.store
    store = data.validation
    if store is None:
        return Documents.choose(
            config,
            training,
            max_length=max_length,
            first=config.eval.documents,
            held_out_share=config.data.held_out,
        )
    if store.tokenizer.fingerprint != training.tokenizer.fingerprint:
        raise UserError(
            f"eval.store {config.eval.store} was made with another tokenizer than "
            f"{config.data.description}: prepare it with the same tokenizer (`longctx prepare "
            f"--tokenizer {shell(training.path / 'tokenizer.json')}`)"
        )
    return Documents.choose(config, store, max_length, config.eval.documents)


@dataclass(frozen=True)
class Validator:
    documents: Documents
    runner: ModelRunner
    planner: Planner

    def validate(self) -> dict[str, Any]:
        """Returns numbers of `StepMetrics`, with the mean loss over all targets, the same on each
        rank. Collective."""
        began = time.perf_counter()
        mesh = self.runner.mesh
        total = 0.0
        divisor = 0.0
        targets = 0
        for batch in self.documents.steps(self.planner, mesh):
            values = self.runner.log_probabilities(batch)
            weights = token_mean(batch)
            for number, value in enumerate(values if mesh.counts else ()):
                of_tokens = None if weights.tokens is None else weights.tokens[number]
                total -= float(
                    (
                        value.double()
                        if of_tokens is None
                        else value.double() * of_tokens.to(value.device)
                    ).sum()
                )
            targets += batch.target_tokens
            divisor += batch.target_weight
        loss = float(mesh.gather([total]).sum()) / (divisor or 1.0)
        self.runner.after_scoring()
        return {
            "validation_loss": loss,
            "validation_tokens": targets,
            "validation_s": time.perf_counter() - began,
        }

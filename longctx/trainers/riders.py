"""Riders: what goes along with the micro-batches of a step, such as the random numbers of dropout,
and changes nothing in how they are planned."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from longctx.data.packing import MicroBatch


class Rider:
    """Something that a model needs for each micro-batch beside its arguments; by default nothing.

    Attributes:
        rows: what `begin` has found about the rows of the micro-batch that runs.
        needs_every_document: whether documents without a label are planned, too.
    """

    rows: Any = None
    needs_every_document = False

    def used_by(self, model: Any) -> AbstractContextManager[Any]:
        """Replaces methods of a model, which then takes what it needs from this rider."""
        return nullcontext()

    def begin(self, batch: MicroBatch, call: int) -> None:
        """Gets ready for a micro-batch, in a call of the model with this number in its step."""

    def during_step(
        self, batches: Sequence[MicroBatch], tokens: int, run: Callable[[MicroBatch], None]
    ) -> AbstractContextManager[Any]:
        """Goes around the micro-batches of a step.

        Args:
            batches: this rank's micro-batches.
            tokens: tokens of the step, over all ranks.
            run: computes the outputs of a micro-batch, without a loss. Collective.
        """
        return nullcontext()

    def during_loss(self) -> AbstractContextManager[Any]:
        """Goes around the computation of a loss whose other outputs nobody reads."""
        return nullcontext()


class Carrier(Rider):
    """A rider with whole numbers of every token, which travel with tokens of planned calls."""

    def begin_with(self, carried: torch.Tensor | None) -> None:
        """Gets ready for a micro-batch with these numbers [tokens, numbers]; None: without."""


@contextmanager
def all_during_step(
    riders: Sequence[Rider],
    batches: Sequence[MicroBatch],
    *,
    tokens: int,
    run: Callable[[MicroBatch], None],
) -> Iterator[None]:
    """Enters `during_step` of all riders."""
    with ExitStack() as entered:
        for rider in riders:
            entered.enter_context(rider.during_step(batches, tokens, run))
        yield


@contextmanager
def all_during_loss(riders: Sequence[Rider]) -> Iterator[None]:
    """Enters `during_loss` of all riders."""
    with ExitStack() as entered:
        for rider in riders:
            entered.enter_context(rider.during_loss())
        yield


def begun_again(riders: Sequence[Rider]) -> Callable[[], None]:
    """Returns a function that makes riders as ready as now: layers may be recomputed in backward,
    after other calls of the model."""
    rows_now = [rider.rows for rider in riders]

    def begin_again() -> None:
        for rider, rows in zip(riders, rows_now, strict=True):
            rider.rows = rows

    return begin_again

"""Calls of a model that are planned, for losses that need whole rows.

The rows of all ranks are exchanged like documents of a step, every rank runs its micro-batches, and
sends the values to the ranks whose rows they are of. Each rank computes its own loss from them, and
DDP or FSDP averages the gradients, as before. Without images, rows with a common prefix are merged
to a tree and computed once.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from longctx.data.packing import MicroBatch
from longctx.data.trees import merge_prefixes
from longctx.trainers.agreement import attempted
from longctx.trainers.documents import Document
from longctx.trainers.refusals import TrainerError
from longctx.trainers.riders import begun_again
from longctx.trainers.step import StepExchange

MIN_SHARED_TOKENS = 16
"""First tokens that rows must share to be merged: plans with fewer, larger documents have less
freedom."""
Compute = Callable[[MicroBatch, int], torch.Tensor]
"""Returns values [tokens, ..] of a micro-batch, given the number of the call."""


@dataclass
class PlannedCall:
    """Plans the calls of a model.

    Attributes:
        exchange: what plans and exchanges rows.
        merged: gets the share of a batch's tokens that merging leaves; None: rows stay apart.
        calls: numbers of the calls.
    """

    exchange: StepExchange
    merged: Callable[[float], None] | None = None
    calls: Iterator[int] = field(default_factory=itertools.count)

    def values_of(
        self, read: Callable[[], list[Document]], mask: torch.Tensor, compute: Compute
    ) -> torch.Tensor:
        """Returns values of the tokens of this rank's rows, [*mask.shape, ..]; 0 where `mask` is.
        Collective.

        Args:
            read: returns the rows' documents; what it raises on one rank ends all.
            mask: 1 for tokens, 0 for padding [rows, tokens].
            compute: returns values of a micro-batch.
        """
        (documents, places), failed = attempted(lambda: self._merged(read()), ([], None))
        kept = mask.cpu()  # before the model runs: the host waits for no more than the batch
        # Every row: a rank whose rows have no target takes part in the backward of the others.
        step = self.exchange.plan_and_exchange([documents], every=True, failed=failed)
        if step.exchange is None:
            raise TrainerError("no row of any rank has a token: leave such batches out")
        # One graph is there at a time: backward begins with the last, which is kept as it is, and
        # of all before, only inputs are kept.
        kept_graph = len(step.micro_batches) - 1
        run = functools.partial(self._run, compute, next(self.calls))
        values = []
        for number, batch in enumerate(step.micro_batches):
            if number < kept_graph and torch.is_grad_enabled():
                values.append(checkpoint(run, batch, use_reentrant=False))
            else:
                values.append(run(batch))
        return self.exchange.rows_of_batch(step, values, mask=kept, rows=places)

    def _run(self, compute: Compute, call: int, batch: MicroBatch) -> torch.Tensor:
        riders = self.exchange.riders
        values = compute(batch, call)
        if riders and values.requires_grad:
            begin_again = begun_again(riders)

            def before_backward(_: Any) -> None:
                begin_again()

            values.register_hook(before_backward)
        return values

    def _merged(self, rows: list[Document]) -> tuple[list[Document], torch.Tensor | None]:
        """Returns the documents of a batch, and the places there of its tokens; None if each row is
        a document."""
        if self.merged is None or any(row.images is not None for row in rows):
            return rows, None
        tokens_per_rank = self.exchange.planning.tokens_per_rank
        together = merge_prefixes(
            [row.tokens for row in rows],
            [np.roll(row.labels, 1) for row in rows],  # not shifted; the last one is -100
            most_tokens=self.exchange.ranks * tokens_per_rank,
            tokens_per_rank=tokens_per_rank,
            least_shared=MIN_SHARED_TOKENS,
        )
        self.merged(sum(together.lengths) / sum(len(row.tokens) for row in rows))
        documents = []
        parts = zip(together.tokens, together.labels, strict=True)
        for index, (tokens, labels) in enumerate(parts):
            documents.append(Document(tokens, labels, tree=together.trees.get(index)))
        first_places = np.cumsum([0, *together.lengths])
        places = []
        for document, places_there in together.rows:
            places.append(first_places[document] + places_there)
        return documents, torch.from_numpy(np.concatenate(places))

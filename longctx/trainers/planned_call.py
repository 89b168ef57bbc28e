"""Calls of a model that are planned, for losses that need whole rows.

The rows of all ranks are exchanged like documents of a step, every rank runs its micro-batches, and
sends the values to the ranks whose rows they are of. Each rank computes its own loss from them, and
DDP or FSDP averages the gradients, as before. Without images, rows with a common prefix are merged
to a tree and computed once.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from longctx.attention.host_to_device import copy_to
from longctx.data.packing import MicroBatch
from longctx.data.trees import merge_prefixes
from longctx.planning.assignment import Assignment, tokens_on_ranks
from longctx.trainers.agreement import attempted
from longctx.trainers.documents import Document, Ids
from longctx.trainers.families import Causal
from longctx.trainers.refusals import TrainerError
from longctx.trainers.riders import Carrier, begun_again
from longctx.trainers.step import RankStep, StepExchange, placed

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
        carrier: gets the numbers that travel with tokens; None: none do.
        calls: numbers of the calls.
    """

    exchange: StepExchange
    merged: Callable[[float], None] | None = None
    carrier: Carrier | None = None
    calls: Iterator[int] = field(default_factory=itertools.count)

    def values_of(
        self,
        read: Callable[[], list[Document]],
        mask: torch.Tensor,
        compute: Compute,
        carried: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns values of the tokens of this rank's rows, [*mask.shape, ..]; 0 where `mask` is.
        Collective.

        Args:
            read: returns the rows' documents; what it raises on one rank ends all.
            mask: 1 for tokens, 0 for padding [rows, tokens].
            compute: returns values of a micro-batch.
            carried: numbers that travel with the tokens [*mask.shape, numbers]; None: none do.
        """
        kept = mask.cpu()  # before the model runs: the host waits for no more than the batch
        numbers = None
        if carried is not None:
            numbers = carried.cpu()[kept.bool()].int()
        return placed(self.values_of_tokens(read, compute, numbers), kept)

    def values_of_tokens(
        self,
        read: Callable[[], list[Document]],
        compute: Compute,
        numbers: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns values of the tokens of this rank's rows, one row after the other, [tokens, ..].
        Collective.

        Args:
            read: returns the rows' documents; what it raises on one rank ends all.
            compute: returns values of a micro-batch.
            numbers: those that travel with the tokens [tokens, numbers]; None: none do.
        """
        rows, failed = attempted(lambda: self._merged(read(), numbers), Together([]))
        # Every row: a rank whose rows have no target takes part in the backward of the others.
        step = self.exchange.plan_and_exchange([rows.documents], every=True, failed=failed)
        if step.exchange is None:
            raise TrainerError("no row of any rank has a token: leave such batches out")
        first_kept = self._first_kept(step)
        held = self._held(step, rows.carried)
        call = next(self.calls)
        values = []
        for number, batch in enumerate(step.micro_batches):
            run = functools.partial(self._run, compute, call, held[number])
            if number < first_kept and torch.is_grad_enabled():
                values.append(checkpoint(run, batch, use_reentrant=False))
            else:
                values.append(run(batch))
        own = self.exchange.to_owners(step, values)
        if rows.places is None:
            return own
        return own[copy_to(rows.places, own.device)]

    def _first_kept(self, step: RankStep) -> int:
        """Returns the first micro-batch whose graph is kept until backward, which begins with the
        last: as many as one rank holds the tokens of. Of those before, only inputs are kept.

        It is the same on all ranks, as K and V travel again where a micro-batch is computed again.
        """
        assert step.plan is not None
        count = len(step.micro_batches)
        lengths = np.array(step.plan.lengths)
        placed = Assignment.of(step.plan)
        by_rank = tokens_on_ranks(lengths, placed, (count, step.plan.ranks))
        from_last = np.cumsum(by_rank.max(1)[::-1])
        together = int((from_last <= self.exchange.planning.tokens_per_rank).sum())
        return count - max(1, together)

    def _run(
        self, compute: Compute, call: int, carried: torch.Tensor | None, batch: MicroBatch
    ) -> torch.Tensor:
        riders = self.exchange.riders
        if self.carrier is not None:
            self.carrier.begin_with(carried)
        values = compute(batch, call)
        if riders and values.requires_grad:
            begin_again = begun_again(riders)

            def before_backward(_: Any) -> None:
                begin_again()

            values.register_hook(before_backward)
        return values

    def _held(
        self, step: RankStep, carried: torch.Tensor | None
    ) -> list[torch.Tensor] | list[None]:
        """Returns the numbers of every micro-batch of this rank, given those of its own documents.
        Collective."""
        if carried is None or step.exchange is None:
            return [None] * len(step.micro_batches)
        held = step.exchange.to_holders(carried, self.exchange.ids_group)
        return list(held.split([batch.layout.tokens for batch in step.micro_batches]))

    def _merged(self, rows: list[Document], numbers: torch.Tensor | None) -> "Together":
        """Returns a batch with its common prefixes merged, if they are to be."""
        if self.merged is None or any(row.images is not None for row in rows):
            return Together(rows, carried=numbers)
        tokens_per_rank = self.exchange.planning.tokens_per_rank
        keys = KeysOfTokens([row.tokens for row in rows], numbers)
        together = merge_prefixes(
            keys.by_row,
            [np.roll(row.labels, 1) for row in rows],  # not shifted; the last one is -100
            most_tokens=self.exchange.ranks * tokens_per_rank,
            tokens_per_rank=tokens_per_rank,
            least_shared=MIN_SHARED_TOKENS,
        )
        self.merged(sum(together.lengths) / sum(len(row.tokens) for row in rows))
        documents = []
        parts = zip(together.tokens, together.labels, strict=True)
        for index, (of_document, labels) in enumerate(parts):
            tokens = keys.tokens_of(of_document)
            documents.append(Document(tokens, labels, tree=together.trees.get(index)))
        first_places = np.cumsum([0, *together.lengths])
        places = []
        for document, places_there in together.rows:
            places.append(first_places[document] + places_there)
        merged_numbers = keys.numbers_of(np.concatenate(together.tokens))
        return Together(documents, torch.from_numpy(np.concatenate(places)), merged_numbers)


def whole_rows(family: Causal, batch: Mapping[str, Any]) -> list[Document]:
    """Returns the document of every row of a batch. Raises TrainerError for rows without one."""
    rows = family.rows_of(batch)
    if any(len(row) != 1 for row in rows):
        raise TrainerError(
            "a row of the trainer's batch has no token: every row must have one sequence"
        )
    return [document for (document,) in rows]


class Together(NamedTuple):
    """A batch to be planned.

    Attributes:
        documents: its rows, or trees of them.
        places: places in the documents of the batch's tokens; None: each row is a document.
        carried: numbers of the documents' tokens [tokens, numbers]; None: none travel.
    """

    documents: list[Document]
    places: torch.Tensor | None = None
    carried: torch.Tensor | None = None


class KeysOfTokens:
    """Keys of tokens, by which rows are merged: equal where tokens and their numbers are.

    Attributes:
        by_row: keys of every row [tokens].
    """

    def __init__(self, rows: list[Ids], numbers: torch.Tensor | None) -> None:
        """`numbers` are those of all tokens, row by row; without any, keys are token ids."""
        self.by_row = rows
        self._numbers = numbers
        if numbers is None:
            return
        self._tokens = np.concatenate(rows).astype(np.int32)
        both = np.column_stack([self._tokens, numbers.numpy()])
        as_bytes = np.ascontiguousarray(both).view(np.dtype((np.void, both[0].nbytes)))
        _, self._first, keys = np.unique(as_bytes.ravel(), return_index=True, return_inverse=True)
        ends = np.cumsum([len(row) for row in rows])
        self.by_row = np.split(keys, ends[:-1])

    def tokens_of(self, keys: Ids) -> Ids:
        """Returns the token ids of keys."""
        return keys if self._numbers is None else self._tokens[self._first[keys]]

    def numbers_of(self, keys: Ids) -> torch.Tensor | None:
        """Returns the numbers of keys [keys, numbers]; None if there are none."""
        return None if self._numbers is None else self._numbers[torch.from_numpy(self._first[keys])]

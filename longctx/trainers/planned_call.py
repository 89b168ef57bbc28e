"""Calls of a model that are planned, for losses that need whole rows.

The rows of all ranks are shared like documents of a step, every rank runs its micro-batches, and
sends the values to the ranks whose rows they are of. Each rank computes its own loss from them, and
DDP or FSDP averages the gradients, as before. Rows of a rank that begin alike, such as the
completions of a prompt, become trees, which are computed once, unless some have images.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from longctx.data.packing import MicroBatch
from longctx.data.trees import merge_prefixes
from longctx.trainers.agreement import attempted
from longctx.trainers.documents import Document
from longctx.trainers.refusals import TrainerError
from longctx.trainers.step import Sharing

LEAST_SHARED = 16
"""First tokens that rows must share to be merged: plans with fewer, larger documents have less
freedom."""


@dataclass
class PlannedCall:
    """Plans the calls of a model. `merged` gets the share of a batch's tokens that merging leaves;
    None: rows stay apart."""

    sharing: Sharing
    merged: Callable[[float], None] | None = None
    calls: Iterator[int] = field(default_factory=itertools.count)

    def values_of(
        self,
        read: Callable[[], list[Document]],
        mask: torch.Tensor,
        compute: Callable[[MicroBatch, int], torch.Tensor],
    ) -> torch.Tensor:
        """Returns values of the tokens of this rank's rows, [*mask.shape, ..]; 0 where `mask` is.
        Collective.

        `read` returns the rows' documents; what it raises on one rank ends all. `compute` returns
        values [tokens, ..] of a micro-batch, given the number of the call.
        """
        (documents, places), failed = attempted(lambda: self._merged(read()), ([], None))
        kept = mask.cpu()  # before the model runs: the host waits for no more than the batch
        # Every row: a rank whose rows have no target takes part in the backward of the others.
        share = self.sharing.share([documents], every=True, failed=failed)
        if share.exchange is None:
            raise TrainerError("no row of any rank has a token: leave such batches out")
        # One graph is kept as it is; of several, each keeps only its inputs.
        recompute = len(share.micro_batches) > 1 and torch.is_grad_enabled()
        run = functools.partial(self._run, compute, next(self.calls))
        computed = [
            checkpoint(run, batch, use_reentrant=False) if recompute else run(batch)
            for batch in share.micro_batches
        ]
        return self.sharing.rows_of_batch(share, computed, kept, places)

    def _run(
        self, compute: Callable[[MicroBatch, int], torch.Tensor], call: int, batch: MicroBatch
    ) -> torch.Tensor:
        noise, values = self.sharing.noise, compute(batch, call)
        if noise is not None and values.requires_grad:  # layers may be recomputed after other calls
            values.register_hook(
                functools.partial(lambda rows, _: setattr(noise, "rows", rows), noise.rows)
            )
        return values

    def _merged(self, rows: list[Document]) -> tuple[list[Document], torch.Tensor | None]:
        """Returns the documents of a batch, and the rows there of its tokens; None if each row is a
        document."""
        if self.merged is None or any(row.images is not None for row in rows):
            return rows, None
        together = merge_prefixes(
            [row.tokens for row in rows],
            [np.roll(row.labels, 1) for row in rows],  # not shifted; the last one is -100
            most_tokens=self.sharing.ranks * self.sharing.tokens_per_rank,
            tokens_per_rank=self.sharing.tokens_per_rank,
            least_shared=LEAST_SHARED,
        )
        self.merged(sum(together.lengths) / sum(len(row.tokens) for row in rows))
        parts = enumerate(zip(together.tokens, together.labels, strict=True))
        starts = np.cumsum([0, *together.lengths])
        places = np.concatenate(
            [starts[document] + rows_there for document, rows_there in together.rows]
        )
        return [
            Document(*part, together.trees.get(number)) for number, part in parts
        ], torch.from_numpy(places)

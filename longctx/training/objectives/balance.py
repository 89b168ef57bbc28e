"""Balance of a model's experts in training: tells routers about documents, and moves their biases
after each step."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from longctx.attention.host_to_device import copy_to
from longctx.config import Config
from longctx.errors import UserError
from longctx.model.balance import RouterWatch, RowDocuments
from longctx.model.protocol import Model
from longctx.parallel.mesh import Mesh
from longctx.planning.layout import Layout
from longctx.planning.plan import Plan

STATISTICS = ("expert_layers", "expert_imbalance", "unused_experts", "document_loss", "z_loss")
"""Names of what `Balance.end_step` returns, sums over this rank's layers: their number first."""


@dataclass
class Balance:
    """Balance of the experts of this rank by its `routers`; there may be none, as on other stages
    of a pipeline, or if nothing is to be balanced.

    Attributes:
        routers: watches of the routers, one per layer.
        counts: tokens of every expert [layers, experts] in the last step, over all ranks.
    """

    routers: list[RouterWatch]
    bias_rate: float
    mesh: Mesh
    counts: torch.Tensor | None = field(default=None, init=False)

    @classmethod
    def of(cls, model: Model, config: Config, mesh: Mesh) -> "Balance":
        """Sets the factors of the losses in all routers of the model."""
        settings = config.balance
        routers = model.routers() if mesh.tokens is not None else []
        for router in routers:
            assert mesh.tokens is not None
            router.document_loss = settings.document_loss
            router.z_loss = settings.z_loss
            router.begin_sum = partial(_begin_sum, mesh.tokens)
        return cls(routers, config.bias_rate, mesh)

    def documents(self, plan: Plan, layout: Layout, tokens: int) -> RowDocuments | None:
        """Returns the documents of this rank's rows in a micro-batch of `tokens` rows, padding
        included."""
        if not self.routers:
            return None
        if plan.trees and any(router.document_loss or router.z_loss for router in self.routers):
            raise UserError(
                f"the step has {len(plan.trees)} trees, but losses of experts count every "
                "sequence: set balance.document_loss and balance.z_loss to 0, or use documents "
                "without merged prefixes"
            )
        if layout.micro_batch < len(plan.micro_batches):
            placed = plan.micro_batches[layout.micro_batch]
        else:
            placed = ()
        tensor = self.mesh.tensor.size()  # whose ranks have parts of all documents
        split = sorted(placement.document for placement in placed if placement.degree * tensor > 1)
        known = {document: place for place, document in enumerate(split)}
        for shard in layout.shards:
            known.setdefault(shard.document, len(known))
        lengths = [plan.lengths[document] for document in known]
        of_shards = [known[shard.document] for shard in layout.shards]
        rows = np.repeat(
            [*of_shards, len(known)],
            [*(shard.tokens for shard in layout.shards), tokens - layout.tokens],
        )
        share = torch.from_numpy(rows.astype(np.int64)).tensor_split(tensor)[
            self.mesh.tensor.get_local_rank()
        ]
        of_documents = torch.tensor(lengths, dtype=torch.float32)
        device = self.mesh.device
        return RowDocuments(
            copy_to(share, device), copy_to(of_documents, device), len(split), sum(plan.lengths)
        )

    @torch.no_grad()
    def _sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns counts [layers, experts] and losses [layers, 2] of the step over all ranks, and
        clears them. Collective."""
        device = self.mesh.device
        experts = self.routers[0].experts
        none = (
            torch.zeros(experts, dtype=torch.int64, device=device),
            torch.zeros(2, dtype=torch.float64, device=device),
        )
        counts = torch.stack(
            [none[0] if router.counts is None else router.counts for router in self.routers]
        )
        losses = torch.stack(
            [none[1] if router.losses is None else router.losses for router in self.routers]
        )
        for router in self.routers:
            router.clear()
        for tensor in (counts, losses):
            dist.all_reduce(tensor, group=self.mesh.tokens)
        return counts, losses

    @torch.no_grad()
    def end_step(self) -> torch.Tensor:
        """Sums the counts of the step, and returns its `STATISTICS`, summed over this rank's
        layers: float64 [5], on the device. Collective.

        The imbalance of a layer is the tokens of its busiest expert over the mean.
        """
        device = self.mesh.device
        if not self.routers:
            return torch.zeros(len(STATISTICS), dtype=torch.float64, device=device)
        self.counts, losses = self._sums()
        wide = self.counts.double()
        imbalance = wide.amax(1) / wide.mean(1).clamp(min=1)
        unused = (self.counts == 0).double().mean(1)
        layers = torch.full((), float(len(self.routers)), dtype=torch.float64, device=device)
        return torch.stack([layers, imbalance.sum(), unused.sum(), *losses.sum(0)])

    def move_biases(self, finite: torch.Tensor) -> None:
        """Moves the biases by the counts of the step that has ended: part of its update. They stay
        where they are unless `finite`, bool [] on the device."""
        if self.counts is not None:
            rate = self.bias_rate * finite
            for router, counts in zip(self.routers, self.counts, strict=True):
                router.move_bias(counts, rate)


def _begin_sum(group: dist.ProcessGroup, tensor: torch.Tensor) -> Callable[[], object]:
    work: dist.Work = dist.all_reduce(tensor, group=group, async_op=True)
    return work.wait

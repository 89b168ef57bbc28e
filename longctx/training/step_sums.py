"""Sums of a step: loss, gradient norm and balance statistics over all ranks. They stay on the
device, where they clip the gradients and may leave out the update; the host reads a copy."""

import torch

from longctx.parallel.device_to_host import Arriving
from longctx.training.objectives.balance import STATISTICS
from longctx.training.optimizer import norm_of

NAMES = ("squares", "loss", *STATISTICS)
"""What every rank has a value of: the sum of squares of its gradients, its part of the loss, and
its balance statistics."""


class StepSums:
    """Values of all ranks in a step, on the device.

    Attributes:
        of_ranks: values of `NAMES`, float64 [world size, names].
        norm: gradient norm before clipping, float64 [].
        finite: whether loss and gradient norm are, bool [].
    """

    def __init__(self, of_ranks: torch.Tensor) -> None:
        """Computes norm and `finite` from the values of all ranks: the same on each, bit by
        bit."""
        self.of_ranks = of_ranks
        loss = of_ranks[:, NAMES.index("loss")].sum()
        self.norm = norm_of(of_ranks[:, NAMES.index("squares")])
        self.finite = loss.isfinite() & self.norm.isfinite()

    def to_host(self) -> "ArrivingSums":
        """Starts a copy to the host."""
        return ArrivingSums(self)


class ArrivingSums:
    """Sums of a step on their way to the host."""

    def __init__(self, sums: StepSums) -> None:
        self._shape = sums.of_ranks.shape
        numbers = torch.cat([sums.norm.view(1), sums.of_ranks.flatten()])
        self._numbers = Arriving(numbers)

    def read(self) -> tuple[float, dict[str, torch.Tensor]]:
        """Returns the gradient norm, and values of all ranks by name, float64 [world size]. The
        host waits for them."""
        norm, of_ranks = self._numbers.read().split([1, self._shape.numel()])
        table = of_ranks.view(self._shape)
        return norm.item(), dict(zip(NAMES, table.T, strict=True))

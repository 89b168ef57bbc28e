"""Aim: how much each prediction should count in a step; here all targets alike."""

from typing import Any

from .finding import Finding
from .probe import Probe

Weights = dict[tuple[int, int], float]
"""Of predictions, by the number of a token and the id that it predicts."""


class Aim:
    """The mean of the cross-entropy of all targets. Others inherit from it.

    Attributes:
        unit: words for the weight of a right prediction.
    """

    unit = "1/N"

    def probe_of(self, probe: Probe) -> Probe:
        """Returns the probe with the documents that a step with this aim takes."""
        return probe

    def weights(self, targets: list[tuple[int, int]], tokens: Any, reference: Any) -> Weights:
        """Returns the right weights of targets of a probe's `Tokens` by a `Reference`."""
        return dict.fromkeys(targets, 1 / max(len(targets), 1))

    def rounding(self, record: Any, reference: Any) -> float:
        """Returns by how much rounding changes right weights in the dtype of a `Record`, relative
        to them."""
        return 0.0

    def faults(self, facts: Any) -> list[Finding]:
        """Returns faults that this aim alone knows, of the `Facts` of a step, in place of those of
        predictions without loss and of weights; nothing: there are none."""
        return []

    def of_given(self, facts: Any) -> list[Finding]:
        """Returns faults of what the user gave beside gradients."""
        return []

    def is_judged(self, facts: Any) -> bool:
        """Returns whether right weights are known, as other faults of a step may change them."""
        return True

    def loss(self, facts: Any) -> float:
        """Returns the loss of a right step."""
        return float(facts.reference.loss(facts.right_predictions()))

    def loss_of_step(self, facts: Any) -> float | None:
        """Returns the loss of this step, if that is known."""
        return float(facts.reference.loss(facts.fit.weights))

    def not_tested(self, facts: Any) -> dict[str, str]:
        """Returns what a fault of this aim would not have shown, with the reason."""
        return {}

"""Faults of what is logged: the loss and the gradient norm."""

from collections.abc import Iterator

from .facts import Facts
from .finding import Finding

LOGGED_LOSS = "the logged loss is wrong"
LOGGED_NORM = "the logged gradient norm is wrong"


def wrong_log(facts: Facts, loss: float | None) -> Iterator[Finding]:
    """Yields a logged loss that is neither a right step's nor this step's, `loss`, and a logged
    norm that is not that of the gradients."""
    record = facts.record
    if record.loss is not None and loss is not None:
        right = facts.aim.loss(facts)
        if not min(abs(record.loss - right), abs(record.loss - loss)) <= facts.limits.logged * abs(
            right
        ):
            yield Finding(
                LOGGED_LOSS,
                f"{record.loss:.5g} and not {right:.5g} ({record.loss / right:.4g} times)",
            )
    if record.norm is not None and not record.apart:
        norm = sum(float(value.norm()) ** 2 for value in record.gradients.values()) ** 0.5
        if not abs(record.norm - norm) <= facts.limits.logged * norm:
            words = f"{record.norm:.5g} and not {norm:.5g} ({record.norm / norm:.4g} times)"
            yield Finding(LOGGED_NORM, words)

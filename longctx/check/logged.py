"""Faults of what is logged: the loss and the gradient norm."""

from collections.abc import Iterator

from .contexts import Sequence
from .facts import Facts
from .finding import Finding
from .reference import Prediction

LOGGED_LOSS = "the logged loss is wrong"
LOGGED_NORM = "the logged gradient norm is wrong"


def wrong_log(facts: Facts, loss: float | None) -> Iterator[Finding]:
    """Yields a logged loss that is neither a right step's nor this step's, `loss`, and a logged
    norm that is not that of the gradients."""
    record = facts.record
    if record.loss is not None and loss is not None:
        right = _right_loss(facts)
        if (
            not min(abs(record.loss - right), abs(record.loss - loss))
            <= facts.limits.logged * right
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


def _right_loss(facts: Facts) -> float:
    """Returns the mean loss of the wanted predictions, documents apart."""
    return facts.reference.loss(right_weights(facts))


def right_weights(facts: Facts) -> dict[Prediction, float]:
    """Returns the weights of a right step: 1/N of each wanted prediction, documents apart."""
    right = dict[Prediction, float]()
    for document in facts.documents:
        numbers = facts.tokens.of(document)
        sequence = Sequence(tuple(numbers), tuple(range(len(numbers))))
        own = (pair for pair in facts.wanted if pair[0] in numbers)
        right |= {
            Prediction(sequence, facts.tokens.place[number], target): 1 / len(facts.wanted)
            for number, target in own
        }
    return right

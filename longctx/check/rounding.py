"""Rounding: what plain transformers leave in a coarse dtype of hidden states and gradients, as
models differ in it."""

import copy
from dataclasses import replace

from .contexts import Context
from .probe import experts_of
from .record import CheckError, Record
from .reference import Prediction, Reference
from .tolerances import FLOAT32, NAMES, Tolerances

TIMES = 2.0
"""Times what plain transformers leave that another kernel may leave."""


def widened(record: Record, reference: Reference, right: Context) -> Tolerances:
    """Returns the tolerances of a record's dtype, wider where the model rounds more: measured on
    documents apart, by transformers in this dtype."""
    if record.tolerances == FLOAT32:
        return FLOAT32
    _require_all_experts(record, reference)
    rounded = copy.deepcopy(reference.model).to(record.dtype)
    coarse = Reference(replace(record, reference=rounded))
    apart = 0.0
    weights = dict[Prediction, float]()
    for sequence in right.sequences:
        wanted = reference.states(sequence)
        found = coarse.states(sequence).double()
        relative = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
        apart = max(apart, float(relative.max()))
        for place, number in enumerate(sequence.numbers):
            after = record.tokens.next(number)
            if after is not None:
                weights[Prediction(sequence, place, record.tokens.ids[after])] = 1.0
    _, wanted_gradients, _ = reference.gradients(weights)
    _, found_gradients, _ = coarse.gradients(weights)
    parameters = {
        name: TIMES * float((found_gradients[name] - each).norm() / each.norm().clamp_min(1e-300))
        for name, each in wanted_gradients.items()
    }
    return record.tolerances._replace(
        states=max(record.tolerances.states, TIMES * apart), parameters=parameters
    )


def _require_all_experts(record: Record, reference: Reference) -> None:
    """Raises CheckError for routers that choose: where two experts are within rounding, a right
    step takes another one than the reference."""
    experts = experts_of(reference.config)
    chosen = getattr(reference.config, "num_experts_per_tok", None) or experts
    if chosen < experts:
        raise CheckError(
            f"in {NAMES[record.dtype]} routers choose other experts where two are within rounding: "
            f"let them take all (probe.model(.., num_experts_per_tok={experts})), or check in "
            "float32"
        )

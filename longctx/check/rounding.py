"""Rounding: what plain transformers leave in a coarse dtype of hidden states and gradients, as
models differ in it."""

import copy
import math
from dataclasses import replace

import torch
from torch.nn.functional import cross_entropy

from .contexts import Context, Sequence
from .errors import CheckError
from .gathered import Record
from .objectives import final_logits, objectives
from .probe import experts_of
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
    left = 0.0
    weights = dict[Prediction, float]()
    for sequence in right.sequences:
        wanted = reference.states(sequence)
        found = coarse.states(sequence).double()
        relative = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
        apart = max(apart, float(relative.max()))
        predictions = [
            Prediction(sequence, place, record.tokens.ids[after])
            for place, number in enumerate(sequence.numbers)
            if (after := record.tokens.next(number)) is not None
        ]
        if predictions:
            weights |= dict.fromkeys(predictions, 1.0)
            left = max(left, _left_of_objective(coarse, sequence, predictions))
    found_gradients = coarse.gradients(weights).of
    parameters = {
        name: TIMES * float((found_gradients[name] - each).norm() / each.norm().clamp_min(1e-300))
        for name, each in reference.gradients(weights).of.items()
    }
    return record.tolerances._replace(
        states=max(record.tolerances.states, TIMES * apart),
        objective=max(record.tolerances.objective, TIMES * left),
        parameters=parameters,
    )


def _left_of_objective(
    coarse: Reference, sequence: Sequence, predictions: list[Prediction]
) -> float:
    """Returns the most that is left of ∂loss/∂logits without cross-entropy, where slopes are
    rounded."""
    output = coarse.output_of(sequence)
    final = final_logits(output, coarse.config).double()
    places = [prediction.place for prediction in predictions]
    targets = torch.tensor([prediction.target for prediction in predictions])
    loss = cross_entropy(final[places], targets, reduction="sum")
    (slopes,) = torch.autograd.grad(loss, output)
    told = objectives(
        output.detach().double(), slopes.double(), config=coarse.config, limit=math.inf
    )
    return float(told.left.max())


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

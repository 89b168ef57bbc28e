"""Faults after the objective: gradients that do not follow from the slopes that forward left."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from .attended import gradients_without_others
from .changes import ROUNDED, change_of_gradient
from .facts import Facts
from .finding import Finding, suffixes
from .largest import largest
from .routers import loss_of_routers
from .tensors import Tensors

BACKWARD_WRONG = "the backward pass is wrong"
KEYS_WITHOUT_GRADIENT = "keys and values get no gradient from the queries of other ranks"
DECAY = "a share of the weights is added to gradients"
ROUTERS = "the loss of routers is added to that of tokens"
CHANGED = "gradients are changed after backward"


def after_backward(facts: Facts) -> Iterator[Finding]:
    """Yields that the output layer's gradient is not the one that backward gave."""
    shown = facts.fit.shown
    if shown is None or shown.after is None or shown.after <= facts.limits.after:
        return
    name = facts.reference.output
    assert name is not None  # else there is nothing to compare
    found = facts.record.gradients[name]
    rounded = [
        words
        for dtype, words in ROUNDED.items()
        if bool((found.float().to(dtype).double() == found).all())
    ]
    details = f"the output layer's differs by {shown.after:.1e} of it from what backward gave"
    if rounded:
        details += f"; it is rounded to {rounded[0]}"
    yield Finding(CHANGED, details)


def beside_tokens(facts: Facts, expected: Tensors) -> Iterator[Finding]:
    """Yields what is added to all gradients: a share of the weights, or the loss of routers."""
    lacking = {name: facts.record.gradients[name] - right for name, right in expected.items()}
    limit = facts.limits.backward
    size = _norm(expected)
    if not _norm(lacking) > limit * size:
        return
    weights = {name: weight.detach() for name, weight in facts.reference.named.items()}
    candidates = {DECAY: weights}
    routers = loss_of_routers(facts.record, facts.reference)
    if routers is not None:
        candidates[ROUTERS] = routers
    for kind, added in candidates.items():
        times = _product(lacking, added) / max(_norm(added) ** 2, 1e-300)
        left = {name: lacking[name] - times * each for name, each in added.items()}
        if _norm(left) <= limit * _norm(lacking):
            yield Finding(kind, f"{times:.3g} times")
            return


def _norm(tensors: Tensors) -> float:
    return float(_product(tensors, tensors) ** 0.5)


def _product(ones: Tensors, others: Tensors) -> float:
    return sum(float((one * others[name]).sum()) for name, one in ones.items())


def wrong_backward(facts: Facts, gradients: Tensors) -> Iterator[Finding]:
    """Yields parameters whose gradients do not follow from the weights: what is wrong in a layer
    shows in all before it."""
    if facts.reference.output is None and facts.fit.shown is None:
        # What was fitted at once leaves nothing to compare.
        fitted = facts.reference.fitted
        gradients = {name: each for name, each in gradients.items() if name not in fitted}
    if not gradients:
        return
    sizes = {name: float(value.norm()) for name, value in gradients.items()}
    least = 1e-3 * largest(sizes.values())
    layers = _layers(facts.reference.order)
    off = defaultdict[int, dict[str, str]](dict)
    for name, expected in gradients.items():
        found = facts.record.gradients[name]
        limit = facts.limits.of_parameter(name)
        if not float((found - expected).norm()) <= limit * max(sizes[name], least):
            off[layers[name]][name] = change_of_gradient(found, expected, gradients, limit=limit)
    if not off:
        return
    if _is_without_others(facts):
        yield Finding(KEYS_WITHOUT_GRADIENT)
        return
    last = max(off)
    details = suffixes(off[last])
    if 0 <= last < BEHIND:
        details += f" in layer {last}"
    details += ": " + ", ".join(sorted(set(off[last].values())))
    before = sum(map(len, off.values())) - len(off[last])
    if before:
        details += f"; {before} before it are off, too"
    yield Finding(BACKWARD_WRONG, details)


def _is_without_others(facts: Facts) -> bool:
    """Returns whether gradients are those of keys and values that get none from other ranks."""
    shown = facts.fit.shown
    if facts.record.ranks == 1:
        return False
    if shown is not None:
        slopes = shown.slopes
    elif facts.reference.output is not None:
        slopes = facts.reference.slopes_of(facts.fit.weights)
    else:
        slopes = None
    if slopes is None:
        return False
    ranks = {number: place[0] for number, place in facts.at.items()}
    try:
        expected = gradients_without_others(facts.reference, slopes, ranks)
    except (RuntimeError, ValueError, TypeError):
        return False
    return all(
        float((facts.record.gradients[name] - each).norm())
        <= facts.limits.of_parameter(name) * float(each.norm())
        for name, each in expected.items()
    )


BEHIND = 1 << 30
"""Number of a layer that parameters behind all layers count as being in."""


def _layers(names: Iterable[str]) -> dict[str, int]:
    """Returns the number of the layer of each parameter: -1 before all layers, BEHIND behind them;
    names are in the order of the model."""
    found = dict[str, int]()
    outside = -1
    for name in names:
        number = next((int(part) for part in name.split(".") if part.isdigit()), None)
        if number is not None:
            outside = BEHIND
        found[name] = outside if number is None else number
    return found

"""Faults after the objective: gradients that do not follow from the slopes that forward left."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from .backward_ways import ways
from .changes import CLEARLY, ROUNDED, change_of_gradient
from .facts import Facts
from .finding import Finding, suffixes
from .largest import largest
from .routers import loss_of_routers
from .scale import SCALE
from .tensors import Tensors
from .tolerances import FLOAT32

BACKWARD_WRONG = "the backward pass is wrong"
OF_ANOTHER_HEAD = "or another head, or another loss, sends gradients to the last hidden states"
"""Of what lies behind all layers alone it is not known who is wrong."""
DECAY = "a share of the weights is added to gradients"
ROUTERS = "the loss of routers is added to that of tokens"
BEFORE = "gradients from before the step are added"
CHANGED = "gradients are changed after backward"
CLIPPED = "gradients are clipped, or divided by their norms"
THINNED = "elements of gradients are set to 0"
SIGNS = "gradients are replaced by their signs"
ROUNDED_STATES = "backward takes rounded hidden states"
ONE_SIZE = 1e-3
"""Relative difference of sizes that are the same, and of elements that are near 0."""
MANY_VALUES = 3
"""Fewest elements of the largest size that tell a clipping."""


def after_backward(facts: Facts) -> Iterator[Finding]:
    """Yields that the output layer's gradient is not the one that backward gave."""
    shown = facts.fit.shown
    if shown is None or shown.after is None or shown.after <= facts.limits.after:
        return
    name = facts.reference.output
    assert name is not None  # else there is nothing to compare
    found = facts.record.gradients[name]
    rounded_states = _of_rounded_states(facts, found)
    if rounded_states:
        yield Finding(ROUNDED_STATES, f"those of the output layer, to {rounded_states}")
        return
    rounded = [
        words
        for dtype, words in ROUNDED.items()
        if dtype != facts.record.dtype and bool((found.float().to(dtype).double() == found).all())
    ]
    details = f"the output layer's differs by {shown.after:.1e} of it from what backward gave"
    if rounded:
        details += f"; it is rounded to {rounded[0]}"
    yield Finding(CHANGED, details)


def _of_rounded_states(facts: Facts, found: torch.Tensor) -> str:
    """Returns to which dtype hidden states are rounded whose product with ∂loss/∂logits is the
    output layer's gradient; "" if to none."""
    for dtype, words in ROUNDED.items():
        product = torch.zeros_like(found)
        for looked in facts.record.looked or ():
            product += looked.slopes.T @ looked.states.to(dtype).double()
        for factor in (1.0, 1 / facts.record.ranks):
            apart = float((found - factor * product).norm())
            if apart <= facts.limits.after * float(found.norm()):
                return words
    return ""


def beside_tokens(facts: Facts, expected: Tensors) -> Iterator[Finding]:
    """Yields what is added to all gradients: a share of the weights, the loss of routers, or what
    was there before; or how all are clipped."""
    found = facts.record.gradients
    lacking = {name: found[name] - right for name, right in expected.items()}
    limit = facts.limits.backward
    size = _norm(expected)
    if not _norm(lacking) > limit * size:
        return
    made = _made_of(facts, expected, apart=_norm(lacking))
    if made is not None:
        yield made
        return
    for kind, added in _candidates(facts, expected).items():
        sum_of = _sum_with(facts, expected, added, lacking=_norm(lacking))
        if sum_of is not None:
            yield from _added(facts, kind, sum_of)
            return


def _candidates(facts: Facts, expected: Tensors) -> dict[str, Tensors]:
    """Returns what may have been added to all gradients, by kind of fault."""
    candidates = {DECAY: {name: each.detach() for name, each in facts.reference.named.items()}}
    routers = loss_of_routers(facts.record, facts.reference)
    if routers is not None:
        candidates[ROUTERS] = routers
    before = facts.record.before
    if before:
        zeros = {name: torch.zeros_like(each) for name, each in expected.items()}
        candidates[BEFORE] = {name: before.get(name, zero) for name, zero in zeros.items()}
    return candidates


@dataclass(frozen=True)
class Sum:
    """What gradients are: the step's own ones times `share`, and what was added times `by`."""

    share: float
    by: float


def _sum_with(facts: Facts, own: Tensors, added: Tensors, *, lacking: float) -> Sum | None:
    """Returns the sum that the gradients found are, None if they are none. `lacking`: how far they
    are from the step's own."""
    found = facts.record.gradients
    limit = facts.limits.backward
    for share in (1.0, _share(found, own, added)):
        rest = {name: found[name] - share * right for name, right in own.items()}
        by = _product(rest, added) / max(_norm(added) ** 2, 1e-300)
        left = {name: rest[name] - by * each for name, each in added.items()}
        most = limit * min(_norm(rest), lacking)
        if limit != FLOAT32.backward:  # sums are rounded whole
            most = max(most, min(limit * _norm(found), CLEARLY * lacking))
        if _norm(left) <= most:
            return Sum(share, by)
    return None


def _added(facts: Facts, kind: str, sum_of: Sum) -> Iterator[Finding]:
    """Yields what is said of something added to gradients, and of the scale of the others."""
    as_it_was = kind == BEFORE and abs(sum_of.by - 1) <= facts.limits.backward
    yield Finding(kind, "" if as_it_was else f"{sum_of.by:.3g} times")
    weights = list(facts.kept.values())
    if weights and facts.even(weights):
        scale = sum_of.share * sum(weights) / len(weights)
        if not abs(scale - 1) <= facts.same:
            yield Finding(SCALE, f"× {scale:.5g}, without that")


def _share(found: Tensors, own: Tensors, added: Tensors) -> float:
    """Returns by what a step's own gradients are multiplied in the sum with something added that is
    nearest to what was found."""
    crossed = _product(own, added)
    gram = torch.tensor(
        [[_product(own, own), crossed], [crossed, _product(added, added)]], dtype=torch.float64
    )
    projected = torch.tensor([_product(found, own), _product(found, added)], dtype=torch.float64)
    share, _ = (torch.linalg.pinv(gram, hermitian=True) @ projected).tolist()
    return float(share)


def _made_of(facts: Facts, expected: Tensors, *, apart: float) -> Finding | None:
    """Returns what all gradients were made of right ones: clipped, thinned out, or signs. `apart`:
    how far they are from right ones."""
    clipped = _clipped(facts, expected, apart=apart)
    if clipped:
        return Finding(CLIPPED, clipped)
    found = facts.record.gradients
    kept = {name: each.masked_fill(found[name] == 0, 0.0) for name, each in expected.items()}
    counts = {name: int((each != 0).sum()) for name, each in kept.items()}
    of = {name: int((each != 0).sum()) for name, each in expected.items()}
    in_all = all(0 < count < of[name] for name, count in counts.items())
    if in_all and _explains(facts, kept, apart=apart):
        share = sum(counts.values()) / sum(of.values())
        return Finding(THINNED, f"{share:.0%} of all are kept")
    if all(_are_signs(found[name], each) for name, each in expected.items()):
        return Finding(SIGNS, "times a number for each parameter")
    return None


def _are_signs(found: torch.Tensor, right: torch.Tensor) -> bool:
    """Returns whether a gradient is of one size, with the signs of the right one where that is not
    near 0."""
    sizes = found.abs()[found != 0]
    if not len(sizes):
        return not right.any()
    most = float(sizes.max())
    if not most - float(sizes.min()) <= ONE_SIZE * most:
        return False
    clear = right.abs() > ONE_SIZE * right.abs().max()
    return bool((found.sign() == right.sign())[clear].all())


def _clipped(facts: Facts, expected: Tensors, *, apart: float) -> str:
    """Returns how each element, or each parameter's gradient, is limited; "" if they are not.
    `apart`: how far gradients are from what they should be."""
    found = facts.record.gradients
    most = largest(float(each.abs().max()) for each in found.values())
    at_most = sum(int((most - each.abs() <= 1e-6 * most).sum()) for each in found.values())
    if at_most >= MANY_VALUES:
        by_value = {name: each.clamp(-most, most) for name, each in expected.items()}
        if _explains(facts, by_value, apart=apart):
            return f"each element, to {most:.3g}"
    sizes = {name: float(each.norm()) for name, each in expected.items() if each.any()}
    longest = largest(float(each.norm()) for each in found.values())
    by_length = dict[str, torch.Tensor]()
    for name, each in expected.items():
        by_length[name] = each * min(1.0, longest / sizes.get(name, 1.0))
    if _explains(facts, by_length, apart=apart):
        return f"each parameter's, to a norm of {longest:.3g}"
    by_norm = {name: each * (longest / sizes.get(name, 1.0)) for name, each in expected.items()}
    if len(sizes) > 1 and _explains(facts, by_norm, apart=apart):
        return f"each parameter's is divided by its norm, which is {longest:.3g} then"
    return ""


def _explains(facts: Facts, candidate: Tensors, *, apart: float) -> bool:
    """Returns whether a candidate explains the gradients of all parameters, and is clearly nearer
    than what is right, which is so far `apart`."""
    found = facts.record.gradients
    left = _norm({name: found[name] - each for name, each in candidate.items()})
    if not left <= CLEARLY * apart:
        return False
    sizes = {name: float(each.norm()) for name, each in candidate.items()}
    least = 1e-3 * largest(sizes.values())
    return all(
        float((found[name] - each).norm())
        <= facts.limits.of_parameter(name) * max(sizes[name], least)
        for name, each in candidate.items()
    )


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
    off = defaultdict[int, list[str]](list)
    for name, expected in gradients.items():
        found = facts.record.gradients[name]
        limit = facts.limits.of_parameter(name)
        if not float((found - expected).norm()) <= limit * max(sizes[name], least):
            off[layers[name]].append(name)
    if not off:
        return
    every = [name for names in off.values() for name in names]
    right = {name: gradients[name] for name in every}
    named = _way(facts, gradients) or _lost_calls(facts, right)
    if named is not None:
        yield named
        return
    last = max(off)
    changes = defaultdict[str, list[str]](list)
    for name in off[last]:
        changes[_change(facts, name, gradients)].append(name)
    where = f" in layer {last}" if 0 <= last < BEHIND else ""
    details = ", ".join(f"{suffixes(names)}{where}: {change}" for change, names in changes.items())
    before = sum(map(len, off.values())) - len(off[last])
    if before:
        details += f"; {before} before it are off, too"
    if last == BEHIND:
        details += f"; {OF_ANOTHER_HEAD}"
    yield Finding(BACKWARD_WRONG, details)


def _change(facts: Facts, name: str, gradients: Tensors) -> str:
    """Returns in words how a parameter's gradient came from the right one."""
    found = facts.record.gradients[name]
    limit = facts.limits.of_parameter(name)
    words = change_of_gradient(found, gradients[name], gradients, limit=limit)
    embeddings = facts.reference.model.get_input_embeddings().weight
    if facts.reference.named[name] is not embeddings or facts.record.ranks == 1:
        return words
    tokens = facts.tokens
    off = (found - gradients[name]).norm(dim=1) > limit * gradients[name].norm(dim=1)
    ids = [row for row in off.nonzero()[:, 0].tolist() if row in tokens.number]
    ranks = {facts.rank(tokens.number[row]) for row in ids}
    if len(ranks) == 1 and "rows" in words:
        words += f", ids of rank {min(ranks)} alone"
    return words


def _way(facts: Facts, right: Tensors) -> Finding | None:
    """Returns what was computed otherwise in backward, if that explains all gradients."""
    shown = facts.fit.shown
    slopes = shown.slopes if shown is not None else facts.reference.slopes_of(facts.fit.weights)
    if slopes is None:
        return None
    ranks = {number: place[0] for number, place in facts.at.items()}
    several = ranks if facts.record.ranks > 1 else None
    found = facts.record.gradients
    apart = _norm({name: found[name] - each for name, each in right.items()})
    for way in ways(facts.reference, several):
        try:
            expected = way.gradients(slopes)
        except (RuntimeError, ValueError, TypeError):
            continue
        if _explains(facts, expected, apart=apart):
            return Finding(way.kind, way.details)
    return None


def _lost_calls(facts: Facts, right: Tensors) -> Finding | None:
    """Returns that parameters, of which `right` has what they should have, lack the gradients of a
    micro-batch, or of a rank."""
    shown = facts.fit.shown
    if shown is None or len(shown.of_calls) < 2 or _are_multiples(facts, right):
        return None
    by_call = {
        call: facts.reference.gradients_of(slopes).of for call, slopes in shown.of_calls.items()
    }
    groups = {
        "micro-batch": {call: call[1] for call in by_call},
        "rank": {call: call[0] for call in by_call},
    }
    for word, group_of in groups.items():
        numbers = sorted(set(group_of.values()))
        if len(numbers) < 2:
            continue
        for number in numbers:
            kept = [by_call[call] for call, group in group_of.items() if group != number]
            if _is_sum(facts, kept, right):
                where = _up_to(facts, right)
                details = f"{suffixes(right)}{where}: without that of {word} {number}"
                return Finding(BACKWARD_WRONG, details)
    return None


def _up_to(facts: Facts, names: Iterable[str]) -> str:
    """Returns in words up to which layer parameters are; "" of those outside all layers."""
    layers = _layers(facts.reference.order)
    last = max(layers[name] for name in names)
    if 0 <= last < BEHIND:
        return f", up to layer {last}"
    return ""


def _are_multiples(facts: Facts, right: Tensors) -> bool:
    """Returns whether gradients are multiples of the right ones, which says more: where ranks have
    the same tokens, the gradient without that of one is a share of all."""
    for name, wanted in right.items():
        found = facts.record.gradients[name]
        size = float(wanted.square().sum())
        ratio = float((found * wanted).sum()) / max(size, 1e-300)
        limit = facts.limits.of_parameter(name) * size**0.5
        if not float((found - ratio * wanted).norm()) <= limit:
            return False
    return True


def _is_sum(facts: Facts, kept: list[Tensors], right: Tensors) -> bool:
    """Returns whether parameters have the sum of these gradients, clearly rather than the right
    ones."""
    for name, wanted in right.items():
        found = facts.record.gradients[name]
        expected = torch.stack([each[name] for each in kept]).sum(0)
        apart = float((found - expected).norm())
        limit = facts.limits.of_parameter(name) * float(expected.norm())
        if not apart <= min(limit, CLEARLY * float((found - wanted).norm())):
            return False
    return True


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

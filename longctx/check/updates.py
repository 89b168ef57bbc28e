"""Verdicts on the update of an optimizer: what it got, which settings it had, and whether the new
weights are those that follow, computed in float64."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from math import isclose
from typing import Any

import torch

from .clipping import KINDS as OF_CLIPPING
from .clipping import Clipped, is_same
from .finding import Finding, suffixes
from .gathered import Record
from .largest import largest
from .tensors import Tensors
from .watched import Update

STEPS = "the optimizer makes several steps"
TWICE = "parameters are in an optimizer more than once"
NOT_UPDATED = "trained parameters are not updated"
APART_AFTER = "ranks end the step with different weights"
RATE = "the learning rate is another one"
DECAY_OTHER = "the weight decay is another one"
DECAY_MIXED = "parameters of one kind decay, and others do not"
VANISHED = "updates vanish as weights are rounded"
SOME_VANISHED = "updates of some parameters vanish as weights are rounded"
CHOICES = {SOME_VANISHED: "whose weights have no copy in float32"}
"""Kinds that are no faults, with whose choice they are."""
UPDATED_OTHERWISE = "new weights are not those of the optimizer"
KINDS = (
    STEPS,
    TWICE,
    NOT_UPDATED,
    APART_AFTER,
    RATE,
    DECAY_OTHER,
    DECAY_MIXED,
    VANISHED,
    SOME_VANISHED,
    UPDATED_OTHERWISE,
    *OF_CLIPPING,
)
UPDATE = "the update of weights"
"""What may be not tested, beside clipping."""

ADAM = ("torch.optim.adam.Adam", "torch.optim.adamw.AdamW")
SGD = "torch.optim.sgd.SGD"
CLEARLY = 1e-3
"""Largest relative difference of an update from one that explains it."""
ROUNDINGS = 16
"""How often the numbers of an update may be rounded."""


def judge(record: Record) -> tuple[list[Finding], dict[str, str]]:
    """Returns the faults of the updates in a step, and what of them was not tested, with the
    reason. `record` has one update at least."""
    held = Counter[str]()
    for update, *_ in record.updates:
        for group in update.groups:
            held.update(group.names)
    found = list[Finding]()
    untested = dict[str, str]()
    several = [name for name, count in held.items() if count > 1]
    if several:
        found.append(Finding(TWICE, f"{len(several)} of them: {suffixes(several)}"))
    for everyones in record.updates:
        judged = _Judged(record, everyones, held=held)
        found += [finding for finding in judged.findings() if finding not in found]
        untested |= judged.not_tested
    return found, untested


class _Judged:
    """One optimizer's update on all ranks.

    Attributes:
        not_tested: what was not, with the reason, of what `findings` came to.
    """

    def __init__(self, record: Record, everyones: list[Update], *, held: Counter[str]) -> None:
        """`held`: how often each parameter is in a group of an optimizer."""
        self.not_tested = dict[str, str]()
        self._record = record
        self._everyones = everyones
        self._update = everyones[0]
        self._held = held
        self._before = Tensors()
        for name, weight in record.reference.named_parameters():
            if weight.requires_grad and name in self._update.weights:
                self._before[name] = weight.detach()
        self._settings = dict[str, dict[str, Any]]()
        """Of the trained parameters in the groups."""
        for group in self._update.groups:
            for name in group.names:
                if name in self._before:
                    self._settings[name] = group.settings

    def findings(self) -> list[Finding]:
        """Returns the faults, the most telling first."""
        steps = max(each.steps for each in self._everyones)
        if steps > 1:
            return [Finding(STEPS, f"{steps}, {self._of_second_step()}")]
        clipped = Clipped(self._record, self._everyones)
        found = [*self._rates(), *self._decays(), *clipped.findings(), *self._apart()]
        self.not_tested |= clipped.not_tested
        if not any(_rate(group.settings) for group in self._update.groups):
            self.not_tested[UPDATE] = "the learning rate of this step is 0"
            return found
        not_updated = list(self._not_updated())
        return found + not_updated + list(self._weights())

    def _of_second_step(self) -> str:
        first = self._update.gradients
        second = self._update.again
        if first.keys() == second.keys():
            same = all(torch.equal(value, second[name]) for name, value in first.items())
        else:
            same = False
        return "the second with the gradients of the first" if same else "with other gradients"

    def _apart(self) -> Iterator[Finding]:
        """Yields that ranks have different weights now."""
        names = list[str]()
        most = 0.0
        for name, before in self._before.items():
            own = self._update.weights[name].double()
            others = [each.weights[name].double() for each in self._everyones[1:]]
            if any(not torch.equal(other, own) for other in others):
                names.append(name)
                made = (own - before).norm().clamp_min(1e-300)
                most = largest([most, *(float((other - own).norm() / made) for other in others)])
        if names:
            which = f"{len(names)} of {len(self._before)} parameters"
            share = f"by up to {most:.2g} of their update"
            yield Finding(APART_AFTER, f"{which}, {share}: {suffixes(names)}")

    def _rates(self) -> Iterator[Finding]:
        asked = self._update.asked.lr
        if asked is None:
            return
        rates = list[float]()
        for group in self._update.groups:
            # A schedule keeps there what it begins with.
            rates.append(float(group.settings.get("initial_lr", _rate(group.settings))))
        if not any(isclose(rate, asked, rel_tol=1e-6) for rate in rates):
            shown = ", ".join(f"{rate:.4g}" for rate in dict.fromkeys(rates))
            times = f" ({rates[0] / asked:.4g} times)" if asked and len(set(rates)) == 1 else ""
            yield Finding(RATE, f"{shown} and not {asked:.4g}{times}")

    def _decays(self) -> Iterator[Finding]:
        decays = dict[str, float]()
        for name, settings in self._settings.items():
            decays[name] = float(settings.get("weight_decay", 0.0))
        if not decays:
            return
        asked = self._update.asked.weight_decay
        values = set(decays.values())
        if asked is not None and not any(isclose(value, asked) for value in values):
            shown = ", ".join(f"{value:.4g}" for value in sorted(values))
            yield Finding(DECAY_OTHER, f"{shown} and not {asked:.4g}")
        mixed = dict[str, str]()
        for kind, names in self._kinds_of_parameters(decays).items():
            decaying = [name for name in names if decays[name]]
            if decaying and len(decaying) < len(names):
                mixed.setdefault(", ".join(sorted(decaying)), f"{len(decaying)} of {kind}")
        if mixed:
            yield Finding(DECAY_MIXED, ", ".join(mixed.values()))

    def _kinds_of_parameters(self, names: dict[str, float]) -> dict[str, list[str]]:
        """Returns parameters by kind, in words: norms, biases, and those of one name in several
        layers."""
        found = defaultdict[str, list[str]](list)
        for name in names:
            if name.endswith("bias"):
                found["biases"].append(name)
            elif "norm" in name:
                found["norms"].append(name)
            plain = suffixes([name])
            found[plain].append(name)
        return {f"{len(several)} {kind}": several for kind, several in found.items()}

    def _not_updated(self) -> Iterator[Finding]:
        """Yields which parameters keep their weights though they have a gradient, and why."""
        reasons = defaultdict[str, list[str]](list)
        strangers = sum(group.strangers for group in self._update.groups)
        for name, before in self._before.items():
            has_gradient = name in self._record.gradients and self._record.gradients[name].any()
            moved = not torch.equal(self._update.weights[name].double(), before)
            if not self._held[name] and moved and strangers:
                self.not_tested[UPDATE] = "the optimizer holds other tensors than the model"
            if moved or not has_gradient:
                continue
            if not self._held[name]:
                reasons["in no group of the optimizer"].append(name)
            elif name not in self._settings:
                continue  # another optimizer's
            elif not _rate(self._settings[name]):
                reasons["with a learning rate of 0"].append(name)
            elif name not in self._update.gradients:
                reasons["without a gradient when the optimizer stepped"].append(name)
        for reason, names in reasons.items():
            details = f"{len(names)} of {len(self._before)}, {reason}: {suffixes(names)}"
            if strangers and reason.startswith("in no group"):
                details += f"; {strangers} tensors of the optimizer are none of the model's"
            yield Finding(NOT_UPDATED, details)

    def _weights(self) -> Iterator[Finding]:
        """Yields how new weights are not those that follow from what the optimizer got."""
        update = self._update
        if update.optimizer not in (*ADAM, SGD):
            self.not_tested[UPDATE] = f"by {update.optimizer}, none of torch's AdamW, Adam, SGD"
            return
        if not update.is_first:
            self.not_tested[UPDATE] = "the optimizer had made steps before"
            return
        changes = dict[str, int]()
        vanished = dict[str, int]()
        otherwise = dict[str, str]()
        for name in self._settings:
            if self._held[name] > 1:
                continue
            before = self._before[name]
            made = update.weights[name].double() - before
            expected, error = self._expected(name)
            epsilon = torch.finfo(update.weights[name].dtype).eps
            limit = epsilon * (2 * before.abs() + ROUNDINGS * error)
            is_small = (expected != 0) & (expected.abs() <= epsilon * before.abs())
            changes[name] = int((expected != 0).sum())
            vanished[name] = int((is_small & (made == 0)).sum())
            if not bool(((made - expected).abs() <= limit).all()):
                otherwise[name] = _change(made, expected, before)
        yield from self._vanished(changes, vanished)
        if otherwise:
            words = ", ".join(sorted(set(otherwise.values())))
            details = f"{len(otherwise)} of {len(self._settings)} parameters: "
            yield Finding(UPDATED_OTHERWISE, f"{details}{suffixes(otherwise)}: {words}")

    def _expected(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the update of a parameter that should have been made, and by what its rounding is
        to be measured."""
        before = self._before[name]
        gradient = self._update.gradients.get(name)
        if gradient is None:
            none = torch.zeros_like(before)
            return none, none
        rule = _by_sgd if self._update.optimizer == SGD else _by_adam
        return rule(before, gradient.double().cpu(), self._settings[name])

    def _vanished(self, changes: dict[str, int], vanished: dict[str, int]) -> Iterator[Finding]:
        """Yields which parameters keep most of their numbers, as updates are too small for their
        dtype. `changes`, `vanished`: how many numbers of each should change, and do not for that
        reason."""
        names = [name for name, count in vanished.items() if 2 * count > changes[name]]
        if not names:
            return
        still = sum(vanished[name] for name in names)
        of_them = sum(changes[name] for name in names)
        dtype = str(self._update.weights[names[0]].dtype).removeprefix("torch.")
        details = f"{still} of {of_them} numbers keep their value in {dtype}: {suffixes(names)}"
        if 2 * sum(vanished.values()) > sum(changes.values()):
            yield Finding(VANISHED, details)
        else:
            yield Finding(SOME_VANISHED, details)


def _rate(settings: dict[str, Any]) -> float:
    """Returns the learning rate of a group; 1 where the optimizer has none."""
    rate = settings.get("lr")
    return 1.0 if rate is None else float(rate)


def _by_adam(
    before: torch.Tensor, gradient: torch.Tensor, settings: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the update that the first step of Adam makes, and by what its rounding is to be
    measured."""
    decay = settings["weight_decay"]
    rate = settings["lr"]
    slope = -gradient if settings["maximize"] else gradient
    decoupled = settings.get("decoupled_weight_decay", False)
    sizes = slope.abs()
    if not decoupled:
        slope = slope + decay * before
        sizes = sizes + decay * before.abs()
    divisor = slope.abs() + settings["eps"]
    made = -rate * slope / divisor
    error = rate * sizes / divisor
    if decoupled:
        made = made - rate * decay * before
        error = error + rate * decay * before.abs()
    return made, error


def _by_sgd(
    before: torch.Tensor, gradient: torch.Tensor, settings: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the update that the first step of SGD makes, and by what its rounding is to be
    measured."""
    decay = settings["weight_decay"]
    rate = settings["lr"]
    slope = -gradient if settings["maximize"] else gradient
    sizes = slope.abs() + decay * before.abs()
    slope = slope + decay * before
    if settings["nesterov"]:
        rate = rate * (1 + settings["momentum"])
    return -rate * slope, rate * sizes


def _change(made: torch.Tensor, expected: torch.Tensor, before: torch.Tensor) -> str:
    """Returns how an update came from the one that was expected."""
    if not bool(made.isfinite().all()):
        return "not finite"
    if not bool(made.any()):
        return "as they were"
    if not bool(expected.any()):
        return "changed without a gradient"
    times = float((made * expected).sum() / expected.square().sum())
    if is_same(made, times * expected, limit=CLEARLY):
        return f"the update is made {times:.4g} times"
    lacking = made - expected
    share = float((lacking * before).sum() / before.square().sum().clamp_min(1e-300))
    if is_same(lacking, share * before, limit=CLEARLY):
        return f"{share:.2g} times the weights are added, as by another weight decay"
    return "another update"

"""What an optimizer got in a step, and what it made of the weights, on one rank."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .errors import CheckError
from .looked import plain_name
from .tensors import Tensors, gradients_of, whole


class Asked(NamedTuple):
    """Settings that a user means; None: any."""

    lr: float | None
    weight_decay: float | None
    max_norm: float | None


class Group(NamedTuple):
    """A group of an optimizer.

    Attributes:
        settings: as the group has them.
        names: of the model's parameters in it, as often as they are in it.
        strangers: how many tensors of it are no parameters of the model.
    """

    settings: dict[str, Any]
    names: list[str]
    strangers: int


@dataclass
class Update:
    """What one optimizer did in a step.

    Attributes:
        optimizer: its class, with the module; "" before its first step.
        asked: what the user says of its settings.
        groups: as they were at its first step.
        gradients: that it got at its first step, by name of parameter.
        again: the same at its second step; empty without one.
        weights: of all trained parameters after its last step.
        steps: how many it made.
        is_first: whether it kept nothing of steps before.
    """

    asked: Asked
    optimizer: str = ""
    groups: list[Group] = field(default_factory=list)
    gradients: Tensors = field(default_factory=dict)
    again: Tensors = field(default_factory=dict)
    weights: Tensors = field(default_factory=dict)
    steps: int = 0
    is_first: bool = True


class Watch:
    """Hooks on an optimizer that fill an `update`. Its steps are collective if parameters are
    sharded (DTensor)."""

    def __init__(self, optimizer: Any, model: Any, asked: Asked) -> None:
        """Raises CheckError for what has no hooks before and after a step."""
        if not is_watchable(optimizer):
            raise CheckError(
                f"{type(optimizer).__name__} is no torch.optim.Optimizer: its steps cannot be "
                "watched"
            )
        self.update = Update(asked)
        self._model = model
        plain = _unwrapped(optimizer)
        self._hooks = [
            plain.register_step_pre_hook(self._before),
            plain.register_step_post_hook(self._after),
        ]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, optimizer: Any, given: Any, named: Any) -> None:
        update = self.update
        update.steps += 1
        if update.steps == 1:
            kind = type(optimizer)
            update.optimizer = f"{kind.__module__}.{kind.__qualname__}"
            update.groups = _groups(optimizer, self._model)
            update.gradients = gradients_of(self._model)
            update.is_first = not any(optimizer.state.values())
        elif update.steps == 2:
            update.again = gradients_of(self._model)

    def _after(self, optimizer: Any, given: Any, named: Any) -> None:
        for name, weight in self._model.named_parameters():
            if weight.requires_grad:
                plain = plain_name(name)
                self.update.weights[plain] = whole(weight).cpu()


def is_watchable(optimizer: Any) -> bool:
    """Returns whether an optimizer has hooks before and after a step."""
    return isinstance(_unwrapped(optimizer), torch.optim.Optimizer)


def _unwrapped(optimizer: Any) -> Any:
    """Returns an optimizer without what accelerate wraps around it."""
    return getattr(optimizer, "optimizer", optimizer)


def _groups(optimizer: torch.optim.Optimizer, model: Any) -> list[Group]:
    """Returns the groups of an optimizer, by names of the model's parameters."""
    names = {id(weight): plain_name(name) for name, weight in model.named_parameters()}
    found = list[Group]()
    for group in optimizer.param_groups:
        settings = dict[str, Any]()
        for name, value in group.items():
            if name in ("params", "param_names"):
                continue
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = float(value)
            settings[name] = value
        ours = [names[id(weight)] for weight in group["params"] if id(weight) in names]
        strangers = len(group["params"]) - len(ours)
        found.append(Group(settings, ours, strangers))
    return found

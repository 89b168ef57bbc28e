"""What the output layer got and returned in a step, and what backward brought it: hidden state,
target and weight of every token without inference.

The product of ∂loss/∂logits and the hidden states is the gradient that backward gives the output
layer: what the optimizer would get beside it is what came after. A loss that is fused with the
output layer shows none of that.
"""

import re
from collections.abc import Callable
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .objectives import objectives

Parts = dict[str, list[torch.Tensor]]
"""Inputs and outputs of the parts of layers by words for them, in the order in which they ran, one
of each call [.., width]."""
PART = re.compile(r"^\D*\.\d+(\.\w+)?$")
"""Names of parts: in a list of layers, a layer or one of its own modules."""
INPUT = "input of "
OUTPUT = "output of "
"""Words before the name of a part."""


@dataclass
class Output:
    """One call of the output layer.

    Attributes:
        states: what it got [.., H].
        logits: what it returned [.., V].
        slopes: ∂loss/∂logits [.., V]; None before backward.
    """

    states: torch.Tensor
    logits: torch.Tensor
    slopes: torch.Tensor | None = None

    def add(self, slopes: torch.Tensor) -> None:
        """Takes what a backward brought."""
        slopes = slopes.detach().clone()
        self.slopes = slopes if self.slopes is None else self.slopes + slopes


def keep_parts(model: Any, kept: Parts) -> list[RemovableHandle]:
    """Has the outputs of embeddings and of all parts of layers kept, and the inputs of layers,
    where gradients are wanted."""

    def keep(words: str, value: Any) -> None:
        if isinstance(value, tuple):
            value = value[0]
        if torch.is_grad_enabled() and type(value) is torch.Tensor:
            kept.setdefault(words, []).append(value.detach().clone())

    def keeper_of_output(words: str) -> Callable[..., None]:
        return lambda module, inputs, output: keep(words, output)

    def keeper_of_input(words: str) -> Callable[..., None]:
        def before(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            keep(words, inputs[0] if inputs else named.get("hidden_states"))

        return before

    embeddings = model.get_input_embeddings()
    hooks = []
    for name, module in model.named_modules():
        plain = plain_name(name)
        if module is embeddings or PART.search(plain):
            hooks.append(module.register_forward_hook(keeper_of_output(f"{OUTPUT}{plain}")))
        if plain[-1:].isdigit() and PART.search(plain):
            hook = keeper_of_input(f"{INPUT}{plain}")
            hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    return hooks


def plain_name(name: str) -> str:
    """Returns the name of a parameter without what wrappers add."""
    for added in ("module.", "_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module."):
        name = name.replace(added, "") if added != "module." else name.removeprefix(added)
    return name


def of_tokens(parts: Parts, tokens: int) -> dict[str, torch.Tensor]:
    """Returns the outputs of parts that have one row for each token [tokens, width], in float32; of
    each two alike, as checkpointing runs parts again, the first."""
    found = {}
    for name, kept in parts.items():
        again = sum(output.shape[:-1].numel() for output in kept) == 2 * tokens
        outputs = kept[::2] if again else kept
        if outputs and sum(output.shape[:-1].numel() for output in outputs) == tokens:
            found[name] = torch.cat([output.flatten(0, -2) for output in outputs]).float().cpu()
    return found


class Looked(NamedTuple):
    """What a rank's calls of the output layer show, token by token in their order.

    Attributes:
        states: what it got [tokens, H].
        targets: the id with a loss, or another one where a token has no weight.
        weights: of its cross-entropy.
        left: what is left of ∂loss/∂logits without it, relative to all of it.
        chances: how likely the model has the targets.
        beside: what some tokens' objectives are instead, in words.
        slopes: ∂loss/∂logits [tokens, V].
        parts: outputs of the parts of layers [tokens, width].
    """

    states: torch.Tensor
    targets: list[int]
    weights: list[float]
    left: list[float]
    chances: list[float]
    beside: list[str]
    slopes: torch.Tensor
    parts: dict[str, torch.Tensor]


def look(
    given: Listed[Output],
    parts: Parts,
    *,
    calls: Listed[torch.Size],
    config: Any,
    limit: float,
) -> Looked | None:
    """Returns what outputs show; None where they are not those of all tokens in order, or tensors
    are not plain or not finite. `limit`: most that may be left of ∂loss/∂logits without
    cross-entropy; `calls`: shapes of ids of the model's calls."""
    tokens = sum(call.numel() for call in calls)
    outputs = _in_order([*given], calls)
    if not outputs or any(not _is_plain(output) for output in outputs):
        return None
    states = torch.cat([output.states.flatten(0, -2) for output in outputs]).double().cpu()
    logits = torch.cat([output.logits.flatten(0, -2) for output in outputs]).double().cpu()
    slopes = torch.cat([_slopes_of(output).flatten(0, -2) for output in outputs]).double().cpu()
    finite = all(bool(each.isfinite().all()) for each in (states, logits, slopes))
    if len(states) != tokens or not finite:
        return None
    told = objectives(logits, slopes, config=config, limit=limit)
    return Looked(
        states,
        told.targets.tolist(),
        weights=told.weights.tolist(),
        left=told.left.tolist(),
        chances=told.chances.tolist(),
        beside=told.beside,
        slopes=slopes,
        parts=of_tokens(parts, tokens),
    )


def _in_order(outputs: list[Output], calls: Listed[torch.Size]) -> list[Output]:
    """Returns outputs one for each call, where a call of several rows [rows, tokens] ran the output
    layer on some columns after others; without those that checkpointing ran again."""
    tokens = sum(call.numel() for call in calls)
    if sum(output.states.shape[:-1].numel() for output in outputs) == 2 * tokens:
        outputs = [output for output in outputs if output.slopes is not None]
    found = list[Output]()
    left = list(outputs)
    for call in calls:
        own = list[Output]()
        while left and sum(each.states.shape[:-1].numel() for each in own) < call.numel():
            own.append(left.pop(0))
        in_columns = len(own) > 1 and len(call) == 2 and call[0] > 1
        if in_columns and all(each.states.shape[:-2] == call[:1] for each in own):
            own = [_beside(own)]
        found += own
    return found + left


def _beside(outputs: list[Output]) -> Output:
    """Returns outputs of columns [rows, tokens, ..] as one."""
    return Output(
        torch.cat([output.states for output in outputs], 1),
        torch.cat([output.logits for output in outputs], 1),
        torch.cat([_slopes_of(output) for output in outputs], 1),
    )


def _is_plain(output: Output) -> bool:
    """Returns whether states and logits are whole tensors of as many tokens."""
    both = (output.states, output.logits)
    return all(type(tensor) is torch.Tensor for tensor in both) and (
        output.states.shape[:-1] == output.logits.shape[:-1]
    )


def _slopes_of(output: Output) -> torch.Tensor:
    if output.slopes is None:
        return torch.zeros_like(output.logits)
    return output.slopes

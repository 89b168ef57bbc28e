"""Ways of backward: what loops computed otherwise after a right forward, done to the reference, to
see which one explains the gradients of all parameters."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from .attended import gradients_of_first_heads, gradients_without_others
from .contexts import Sequence
from .reference import Reference
from .tensors import Tensors

KEYS_WITHOUT_GRADIENT = "keys and values get no gradient from the queries of other ranks"
FIRST_HEADS = "keys and values get the gradient of the first head of their group alone"
ROOT = "norms send back a gradient as if their root were a constant"
ADAPTERS_BACK = "adapters send no gradient back to what they get"
TIED = "a tied weight lacks a share of its gradient"
TIED_TWICE = "a share of a tied weight's gradient counts twice"
KINDS = (KEYS_WITHOUT_GRADIENT, FIRST_HEADS, ROOT, ADAPTERS_BACK, TIED, TIED_TWICE)

Slopes = Mapping[Sequence, torch.Tensor]
"""∂loss/∂ of what the output layer returned, for the tokens of each sequence [tokens, V]."""


class Way(NamedTuple):
    """A kind of fault, what it is in words, and the gradients that it gives for slopes."""

    kind: str
    details: str
    gradients: Callable[[Slopes], Tensors]


def ways(reference: Reference, ranks: Mapping[int, int] | None) -> Iterator[Way]:
    """Yields what may have been computed in backward; `ranks`: of each token, by its number, None
    on one process."""
    if ranks is not None:
        without_others = partial(gradients_without_others, reference, ranks=ranks)
        yield Way(KEYS_WITHOUT_GRADIENT, "", without_others)
    yield Way(FIRST_HEADS, "", partial(gradients_of_first_heads, reference))
    yield Way(ROOT, "", partial(_with, _constant_roots, reference))
    yield Way(ADAPTERS_BACK, "", partial(_with, _adapters_cut, reference))
    embeddings = reference.model.get_input_embeddings()
    is_tied = embeddings.weight is reference.head.weight
    if is_tied and embeddings.weight.requires_grad:
        yield Way(TIED, "that of the embedding", partial(_with, _embedding_cut, reference))
        yield Way(TIED, "that of the output layer", partial(_with_output_layer, reference, -1))
        yield Way(TIED_TWICE, "that of the output layer", partial(_with_output_layer, reference, 1))


def _with(change: Callable[[Reference], Any], reference: Reference, slopes: Slopes) -> Tensors:
    """Returns the gradients of a reference that computes otherwise meanwhile."""
    with change(reference):
        return reference.gradients_of(slopes).of


@contextmanager
def _constant_roots(reference: Reference) -> Iterator[None]:
    """Has RMS norms take their root for a constant in backward."""
    changed = list[tuple[Any, Any]]()
    for module in reference.model.modules():
        if "rmsnorm" in type(module).__name__.lower():
            changed.append((module, module.forward))
            module.forward = partial(_by_constant_root, module.forward)
    try:
        yield
    finally:
        for module, forward in changed:
            module.forward = forward


def _by_constant_root(norm: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor) -> Any:
    """Returns what a norm returns, whose gradient is as if it only multiplied."""
    of_weight = norm(hidden.detach())
    factors = (of_weight / hidden).detach().nan_to_num()
    of_input = hidden * factors
    return of_weight + of_input - of_input.detach()


@contextmanager
def _adapters_cut(reference: Reference) -> Iterator[None]:
    with _hooks() as hooks:
        for module in reference.model.modules():
            for down in getattr(module, "lora_A", {}).values():
                hooks.append(down.register_forward_pre_hook(_detached_inputs))
        yield


@contextmanager
def _embedding_cut(reference: Reference) -> Iterator[None]:
    embeddings = reference.model.get_input_embeddings()
    with _hooks() as hooks:
        hooks.append(embeddings.register_forward_hook(_detached_output))
        yield


@contextmanager
def _hooks() -> Iterator[list[Any]]:
    """Removes hooks at the end."""
    found = list[Any]()
    with ExitStack() as stack:
        stack.callback(lambda: [hook.remove() for hook in found])
        yield found


def _detached_inputs(_: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(each.detach() for each in inputs)


def _detached_output(_: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output.detach()


def _with_output_layer(reference: Reference, times: int, slopes: Slopes) -> Tensors:
    """Returns gradients with the output layer's share of a tied weight added so many times."""
    found = dict(reference.gradients_of(slopes).of)
    weight = reference.head.weight
    name = next(name for name, each in reference.named.items() if each is weight)
    for sequence, each in slopes.items():
        found[name] = found[name] + times * each.T @ reference.states(sequence)
    return found

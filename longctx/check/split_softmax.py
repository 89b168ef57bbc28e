"""The gradient of cross-entropy by logits where ranks have shares of the vocabulary: right, and
what loops computed otherwise."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

Errors = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Returns ∂loss/∂logits [tokens, V], of probabilities [tokens, V] and targets [tokens]."""


class Otherwise(NamedTuple):
    """Another gradient by logits, in words."""

    words: str
    errors: Errors


def right_errors(likely: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns what cross-entropy sends back."""
    errors = likely.clone()
    errors[range(len(targets)), targets] -= 1
    return errors


def other_errors(ranks: int) -> Iterator[Otherwise]:
    """Yields what loops send back that share the vocabulary among so many ranks."""
    words = f"the softmax counts {1 / ranks:.3g} times in the gradient of logits"
    yield Otherwise(f"{words}, as if each rank had a share of them", partial(_counted, ranks))
    words = "a target brings a gradient to the logits of its own rank's share of ids alone"
    yield Otherwise(words, partial(_of_owners, ranks))


def _counted(ranks: int, likely: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return right_errors(likely, targets) - (1 - 1 / ranks) * likely


def _of_owners(ranks: int, likely: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    share = -(-likely.shape[1] // ranks)
    owner = targets // share
    is_own = torch.arange(likely.shape[1]) // share == owner[:, None]
    return right_errors(likely, targets) * is_own

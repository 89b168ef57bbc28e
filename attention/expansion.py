"""Expansion: models with latent attention keep less of a token than its keys and values, and
compute both from it.

Ring attention then sends what they keep. Received rows are expanded where they are attended, call
by call, and again in backward, where autograd differentiates the expansion: the gradients of rows
return to their owners, and gradients of its weights are summed in float32 on the rank that expanded
them. A rank's own rows are expanded once, by the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Expansion(Protocol):
    """Computes K and V of each token from the two tensors that a model keeps of it. `handle`: see
    `operator.register`."""

    handle: int

    def expand(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Returns k and v [tokens, kv_heads, head_dim], each row from one row of both [tokens, ..],
        and of nothing random."""
        ...

    def weights(self) -> list[Tensor]:
        """Returns the parameters that `expand` uses and that need gradients, always in the same
        order."""
        ...


class Compressed(NamedTuple):
    """What ring attention sends in place of K and V: `first` and `second` [tokens, ..], and what
    computes K and V from them.

    `autocast`: whether the model runs under autocast, to the dtype of both.
    """

    first: Tensor
    second: Tensor
    expansion: Expansion
    autocast: bool = False


class Expanding:
    """The expansion of one pass on one rank; sums the gradients of its weights."""

    def __init__(self, expansion: Expansion, autocast: bool) -> None:
        self.expansion = expansion
        self.autocast = autocast
        self.sums: list[Tensor] = []

    def keys(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of received rows."""
        if not self.autocast:
            return self.expansion.expand(first, second)
        with torch.autocast(first.device.type, first.dtype, cache_enabled=False):
            return self.expansion.expand(first, second)

    @contextmanager
    def differentiable(self) -> Iterator[None]:
        """Records what is computed for autograd, which custom operators leave out."""
        included = torch._C._dispatch_tls_local_include_set()
        excluded = torch._C._dispatch_tls_local_exclude_set()
        excluded = excluded.remove(torch._C.DispatchKey.AutogradFunctionality)
        with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
            yield

    def gradients(
        self,
        rows: tuple[Tensor, Tensor],
        keys: tuple[Tensor, Tensor],
        dk: Tensor,
        dv: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Returns the gradients of both tensors `rows`, of which `keys` were computed, and adds the
        weights' gradients to their sums."""
        weights = self.expansion.weights()
        with self.differentiable():
            gradients = torch.autograd.grad(
                keys, [*rows, *weights], [dk, dv], materialize_grads=True
            )
        for total, gradient in zip(self.sums_for(weights), gradients[2:], strict=True):
            total += gradient
        return gradients[0], gradients[1]

    def sums_for(self, weights: list[Tensor]) -> list[Tensor]:
        """Returns the sums of the gradients of the weights, in float32 or wider."""
        if not self.sums:
            self.sums = [
                torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
                for weight in weights
            ]
        return self.sums

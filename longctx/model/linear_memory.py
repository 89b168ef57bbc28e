"""Memory of linear attention layers, by running them on the meta device: nothing is computed, all tensors are counted."""

import sys
import weakref
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longctx.attention.linear.huggingface import ARGUMENT, LayerRecurrence, replace_functions
from longctx.attention.linear.recurrence import Recurrence
from longctx.planning.layout import Layout, Placement

TOKENS = 1024
"""One document of 16 chunks."""
_MEASURED: dict[tuple[Any, ...], tuple[int, int]] = {}


class Live(TorchDispatchMode):
    """Counts the bytes of live tensors that operators return inside it, and their peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self.size = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        out = function(*arguments, **(named or {}))
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage not in self.seen:
                self.seen.add(storage)
                self.size += storage.nbytes()
                self.peak = max(self.peak, self.size)
                weakref.finalize(storage, self._free, storage.nbytes())
        return out

    def _free(self, size: int) -> None:
        self.size -= size


class _Forward(nn.Module):
    """Calls a layer without its hooks."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, recurrence: LayerRecurrence) -> Any:
        return self.layer.forward(x, **{ARGUMENT: recurrence})


def linear_memory(layer: nn.Module, kind: type, hidden_size: int) -> tuple[int, int]:
    """Returns the bytes per token that a layer keeps for backward, and those that its backward needs beside them, at most.

    `kind` is its class before sharding. Does not change the layer, wherever it is.
    """
    key = kind, hidden_size, *((x.shape, x.dtype, x.requires_grad) for x in layer.parameters())
    if key not in _MEASURED:
        _MEASURED[key] = _run(layer, kind, hidden_size)
    return _MEASURED[key]


def _run(layer: nn.Module, kind: type, hidden_size: int) -> tuple[int, int]:
    replace_functions(sys.modules[kind.__module__])
    wrapped = _Forward(layer)
    everything = [*wrapped.named_parameters(), *wrapped.named_buffers()]
    weights = {name: torch.empty_like(x, device="meta", requires_grad=x.requires_grad) for name, x in everything}
    dtype = next(x.dtype for x in weights.values() if x.is_floating_point())
    x = torch.empty(1, TOKENS, hidden_size, dtype=dtype, device="meta", requires_grad=True)
    layout = Layout.of([Placement(0, 0, 1)], [TOKENS], 0, 0)
    with Live() as live:
        out = functional_call(wrapped, weights, (x, LayerRecurrence(Recurrence(layout), None)))
        kept, live.peak = live.size, live.size
        torch.autograd.grad(out, x, torch.empty_like(out))
    return kept // TOKENS, (live.peak - kept) // TOKENS

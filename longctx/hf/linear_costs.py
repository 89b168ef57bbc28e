"""Costs of linear attention layers, by running them on the meta device: tensors and products are
counted, not computed."""

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from longctx.attention.linear.recurrence import Recurrence
from longctx.hf.linear import ARGUMENT, LayerRecurrence, replace_functions
from longctx.hf.live import Live
from longctx.planning.cost.spec import PassFlops
from longctx.planning.layout import Layout, Placement

TOKENS = 16384
"""Of a document on each of its ranks: 16 lanes of 16 chunks, as the scan of long documents takes
more."""


class Where(NamedTuple):
    """A document on some ranks, seen from one of them."""

    placement: Placement
    rank: int


WHOLE = Where(Placement(0, 0, 1), rank=0)
"""A document on one rank."""
SPLIT = Where(Placement(0, 0, 4), rank=1)
"""A document on four ranks, of which the second holds two segments in its middle."""


class LinearCosts(NamedTuple):
    """What a layer keeps and computes per token.

    Attributes:
        kept, working: bytes kept for backward, and those that its backward needs beside them, at
            most.
        scan, split: as `flops` and `split_flops` of `Scan`.
    """

    kept: int
    working: int
    scan: PassFlops
    split: PassFlops


_MEASURED: dict[tuple[Any, ...], LinearCosts] = {}


class _Forward(nn.Module):
    """Calls a layer without its hooks."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, recurrence: LayerRecurrence) -> Any:
        return self.layer.forward(x, **{ARGUMENT: recurrence})


class _Silent:
    """An exchange without messages: what it receives is not computed either."""

    def __init__(self, *_: Any) -> None:
        self.incoming: Any = None

    def start(self, _outgoing: Any, incoming: torch.Tensor, _rows: Any) -> "_Silent":
        self.incoming = incoming
        return self

    def wait(self) -> Any:
        return self.incoming


def linear_costs(layer: nn.Module, kind: type, hidden_size: int) -> LinearCosts:
    """Returns the costs of a layer. `kind` is its class before sharding. Does not change the layer,
    wherever it is."""
    weights = [(weight.shape, weight.dtype, weight.requires_grad) for weight in layer.parameters()]
    sizes = {
        name: value for name, value in vars(layer).items() if isinstance(value, int | float | str)
    }
    own = {name: value for name, value in sizes.items() if name not in ("layer_idx", "training")}
    key = (kind, hidden_size, *weights, *sorted(own.items()))
    if key not in _MEASURED:
        replace_functions(sys.modules[kind.__module__])
        kept, working = _memory(layer, hidden_size)
        whole, split = (_scan_flops(layer, hidden_size, where) for where in (WHOLE, SPLIT))
        more = PassFlops(split.forward - whole.forward, split.backward - whole.backward)
        _MEASURED[key] = LinearCosts(kept, working, whole, more)
    return _MEASURED[key]


def _memory(layer: nn.Module, hidden_size: int) -> tuple[int, int]:
    run, x, weights = _prepared(layer, hidden_size, WHOLE)
    live = Live()
    for weight in weights:
        live.add(weight)
    beside = live.now
    with live:
        out = run()
        kept = live.now - beside
        live.peak = live.now
        torch.autograd.grad(out, x, torch.empty_like(out))
    return kept // TOKENS, (live.peak - beside - kept) // TOKENS


def _scan_flops(layer: nn.Module, hidden_size: int, where: Where) -> PassFlops:
    """Returns the operations of the scan: triangular systems, and products of batches of matrices,
    which weights are not."""
    run, x, _ = _prepared(layer, hidden_size, where)
    forward, backward = (
        FlopCounterMode(display=False, custom_mapping={_SOLVE: _solve_flops}) for _ in range(2)
    )
    with forward:
        out = run()
    with backward:
        torch.autograd.grad(out, x, torch.empty_like(out))
    return PassFlops(_counted(forward), _counted(backward))


def _counted(counter: FlopCounterMode) -> float:
    """Returns the operations of scans per token that a counter has seen."""
    counts = counter.get_flop_counts().get("Global", {})
    return sum(counts.get(operation, 0) for operation in (*_BATCHES, _SOLVE)) / TOKENS


_SOLVE = torch.ops.aten.linalg_solve_triangular
_BATCHES = (torch.ops.aten.bmm, torch.ops.aten.baddbmm)


def _solve_flops(_system: Any, right: torch.Size, *_: Any, **__: Any) -> int:
    """Returns the operations of solving a triangular system, from the shapes that torch's counter
    gives."""
    return math.prod(right) * right[-2]


def _prepared(
    layer: nn.Module, hidden_size: int, where: Where
) -> tuple[Callable[[], Any], torch.Tensor, list[torch.Tensor]]:
    """Returns a function that runs a layer's forward on the meta device, its input and weights."""
    wrapped = _Forward(layer)
    everything = [*wrapped.named_parameters(), *wrapped.named_buffers()]
    weights = {
        name: torch.empty_like(x, device="meta", requires_grad=x.requires_grad)
        for name, x in everything
    }
    dtype = next(x.dtype for x in weights.values() if x.is_floating_point())
    x = torch.empty(1, TOKENS, hidden_size, dtype=dtype, device="meta", requires_grad=True)
    length = TOKENS * where.placement.degree
    layout = Layout.of([where.placement], [length], 0, where.rank)
    silent: Any = _Silent
    recurrence: Any = Recurrence(layout, exchange=silent)

    def run() -> Any:
        return functional_call(wrapped, weights, (x, LayerRecurrence(recurrence, None)))

    return run, x, list(weights.values())

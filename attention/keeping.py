"""Keeping: saves our operators' outputs in forward and replays them when the block is recomputed,
so that neither attention nor its exchange runs twice.

Torch's own selective recomputation does so by a Python mode, which every operation of both passes
goes through. That costs the host more than the block itself, so it is left to torch.compile, where
no mode exists at run time.
"""

import functools
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch import Tensor

_now = threading.local()


@dataclass(frozen=True)
class Place:
    """Where kept tensors are between forward and backward.

    Attributes:
        put: returns what stands for a tensor.
        get: returns the tensor for what `put` returned.
    """

    put: Callable[[Tensor], Any]
    get: Callable[[Any], Tensor]


def _same(tensor: Tensor) -> Tensor:
    return tensor


ON_DEVICE = Place(put=_same, get=_same)


class _Keeping(AbstractContextManager[None]):
    """Keeps what operators return, or with `again` returns it in their place, in the same order."""

    def __init__(self, outputs: deque[Any], place: Place, *, again: bool) -> None:
        self.outputs = outputs
        self.place = place
        self.again = again

    def __enter__(self) -> None:
        self.outer = getattr(_now, "keeping", None)
        _now.keeping = self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _now.keeping = self.outer

    def run(self, compute: Callable[[], Any]) -> Any:
        """Returns the outputs of an operator, which `compute` runs if they are not kept yet."""
        if not self.again:
            out = compute()
            self.outputs.append(_each(self._kept, out))
            return out
        if not self.outputs:
            raise RuntimeError(
                "a block with recomputation `selective` was recomputed twice, but what it keeps "
                "is freed after the first time: call backward once, without retain_graph"
            )
        return _each(self.place.get, self.outputs.popleft())

    def _kept(self, tensor: Tensor) -> Any:
        """Returns what stands for the same values in another tensor, since autograd writes their
        history into those that are returned."""
        return self.place.put(tensor.detach())


def contexts(
    place: Place = ON_DEVICE,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns the contexts of a block's forward and of its recomputation, for
    `torch.utils.checkpoint.checkpoint`."""
    outputs = deque[Any]()
    return _Keeping(outputs, place, again=False), _Keeping(outputs, place, again=True)


def kept(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Lets recomputation return what forward returned, instead of running the operator again."""

    @functools.wraps(operator)
    def keeping(*arguments: Any, **named: Any) -> Any:
        now = getattr(_now, "keeping", None)
        if now is None:
            return operator(*arguments, **named)
        return now.run(functools.partial(operator, *arguments, **named))

    return keeping


def _each(function: Callable[[Any], Any], out: Any) -> Any:
    """Applies a function to an operator's output, or to each of its outputs."""
    if isinstance(out, (tuple, list)):
        return tuple(function(one) for one in out)
    return function(out)

"""Keeping: forward of a recomputed block hands the outputs of our operators to its recomputation,
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
from types import TracebackType
from typing import Any

import torch

_now = threading.local()


class _Keeping(AbstractContextManager[None]):
    """Keeps what operators return, or with `again` returns it in their place, in the same order."""

    def __init__(self, outputs: deque[Any], again: bool) -> None:
        self.outputs, self.again = outputs, again

    def __enter__(self) -> None:
        self.outer, _now.keeping = getattr(_now, "keeping", None), self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _now.keeping = self.outer

    def run(self, operator: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if not self.again:
            out = operator(*arguments)
            self.outputs.append(_detached(out))
            return out
        if not self.outputs:
            raise RuntimeError(
                "a block with recomputation `selective` was recomputed twice, but what it keeps is "
                "freed after the first time: "
                "call backward once, without retain_graph"
            )
        return self.outputs.popleft()


def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns the contexts of a block's forward and of its recomputation, for
    `torch.utils.checkpoint.checkpoint`."""
    outputs = deque[Any]()
    return _Keeping(outputs, again=False), _Keeping(outputs, again=True)


def kept(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Lets recomputation return what forward returned, instead of running the operator again."""

    @functools.wraps(operator)
    def keeping(*arguments: Any) -> Any:
        now = getattr(_now, "keeping", None)
        return operator(*arguments) if now is None else now.run(operator, arguments)

    return keeping


def _detached(out: Any) -> Any:
    """Returns the same values in other tensors, since autograd writes their history into those that
    are returned."""
    return out.detach() if isinstance(out, torch.Tensor) else tuple(each.detach() for each in out)

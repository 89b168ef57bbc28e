"""Keeping: saves outputs of our operators and of products in forward, and replays them when the
block is recomputed, so that neither attention nor its exchange runs twice.

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
from typing import Any, Literal

from torch import Tensor

_now = threading.local()

KeptProducts = Literal["none", "around attention", "all"]
"""Matrix products whose outputs are kept: those before attention and the first after it, or all."""


@dataclass(frozen=True)
class Place:
    """Where kept tensors are between forward and backward.

    Attributes:
        put: returns what stands for a tensor.
        get: returns the tensor for what `put` returned.
    """

    put: Callable[[Tensor], Any]
    get: Callable[[Any], Tensor]


class ChangedInPlace(RuntimeError):
    """A kept tensor has other values than it was kept with."""


class _OnDevice:
    """A kept tensor, and how often it was changed in place before."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = tensor._version

    def get(self) -> Tensor:
        if self.tensor._version != self.version:
            raise ChangedInPlace(
                "an output that recomputation keeps was changed in place after it was computed, so "
                "the block would be recomputed from other values: do not change it in place"
            )
        return self.tensor


ON_DEVICE = Place(put=_OnDevice, get=_OnDevice.get)


class _Keeping(AbstractContextManager[None]):
    """Keeps what operators return, or with `again` returns it in their place, in the same order."""

    def __init__(
        self, outputs: deque[Any], place: Place, products: KeptProducts, *, again: bool
    ) -> None:
        self.outputs = outputs
        self.place = place
        self.products = products
        self.again = again
        self.since_attention: int | None = None
        """Products since attention; None before it."""

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

    def run(self, compute: Callable[[], Any], *, may_repeat: bool = False) -> Any:
        """Returns the outputs of an operator, which `compute` runs if they are not kept yet, or if
        it `may_repeat` and they were changed in place. Raises ChangedInPlace."""
        if not self.again:
            with _Nothing():  # what it computes with is not computed again
                out = compute()
            self.outputs.append(_each(self._kept, out))
            return out
        if not self.outputs:
            raise RuntimeError(
                "a block that keeps outputs was recomputed twice, but what it keeps is "
                "freed after the first time: call backward once, without retain_graph"
            )
        found = self.outputs.popleft()
        try:
            return _each(self.place.get, found)
        except ChangedInPlace:
            if not may_repeat:
                raise
        with _Nothing():
            return compute()

    def keeps_product(self) -> bool:
        """Counts a product. Returns whether its output is kept."""
        if self.since_attention is not None:
            self.since_attention += 1
        if self.products == "around attention":
            return self.since_attention in (None, 1)
        return self.products == "all"

    def _kept(self, tensor: Tensor) -> Any:
        """Returns what stands for the same values in another tensor, since autograd writes their
        history into those that are returned."""
        return self.place.put(tensor.detach())


def contexts(
    place: Place = ON_DEVICE, products: KeptProducts = "none"
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns the contexts of a block's forward and of its recomputation, for
    `torch.utils.checkpoint.checkpoint`."""
    outputs = deque[Any]()
    forward = _Keeping(outputs, place, products, again=False)
    return forward, _Keeping(outputs, place, products, again=True)


def nothing() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """As `contexts`, for parts of a block that are recomputed on their own: nothing in them is
    kept."""
    return _Nothing(), _Nothing()


class _Nothing(AbstractContextManager[None]):
    def __enter__(self) -> None:
        self.outer = getattr(_now, "keeping", None)
        _now.keeping = None

    def __exit__(self, *error: object) -> None:
        _now.keeping = self.outer


def keeps_product() -> bool:
    """Returns whether the output of the next matrix product is kept; call it once for each."""
    now = getattr(_now, "keeping", None)
    return now is not None and now.keeps_product()


def run(compute: Callable[[], Tensor]) -> Tensor:
    """Returns the output of a product that is kept, which `compute` runs in forward, and again if
    it was changed in place."""
    out: Tensor = _now.keeping.run(compute, may_repeat=True)
    return out


def kept(operator: Callable[..., Any], *, is_attention: bool = False) -> Callable[..., Any]:
    """Lets recomputation return what forward returned, instead of running the operator again.
    Products are counted from attention."""

    @functools.wraps(operator)
    def keeping(*arguments: Any, **named: Any) -> Any:
        now = getattr(_now, "keeping", None)
        if now is None:
            return operator(*arguments, **named)
        out = now.run(functools.partial(operator, *arguments, **named))
        if is_attention:
            now.since_attention = 0
        return out

    return keeping


kept_attention = functools.partial(kept, is_attention=True)


def _each(function: Callable[[Any], Any], out: Any) -> Any:
    """Applies a function to an operator's output, or to each of its outputs."""
    if isinstance(out, (tuple, list)):
        return tuple(function(one) for one in out)
    return function(out)

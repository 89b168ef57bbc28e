"""Bytes of fake tensors that are alive."""

import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveFakes(TorchDispatchMode):
    """Counts the bytes of the fake tensors of a device that are alive, `now`, and their `peak`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.sizes: dict[int, int] = {}
        self.now = 0
        self.peak = 0
        self.kinds: set[tuple[str, torch.dtype]] = set()
        """Types of devices and dtypes of all fake tensors that were made."""

    def add(self, tensor: Any) -> None:
        """Counts a tensor from now on; its storage is counted once."""
        tensor = getattr(tensor, "_local_tensor", tensor)
        if not isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
            return
        self.kinds.add((tensor.device.type, tensor.dtype))
        if tensor.device.type != self.device.type:
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self.sizes:
            self.sizes[storage._cdata] = 0
            weakref.finalize(storage, self._drop, storage._cdata)
            self.resize(storage)

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Counts a storage with the size that it has now."""
        if storage._cdata in self.sizes:
            self.now += storage.nbytes() - self.sizes[storage._cdata]
            self.sizes[storage._cdata] = storage.nbytes()
            self.peak = max(self.peak, self.now)

    def _drop(self, key: int) -> None:
        self.now -= self.sizes.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            self.add(tensor)
        return out

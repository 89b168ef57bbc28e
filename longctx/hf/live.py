"""Bytes of tensors that are alive while a module runs on no values."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Live(TorchDispatchMode):
    """Counts the bytes of live tensors that operators return inside it, `now`, and their `peak`.

    A view counts as the tensor that it is of: weights are `add`ed before, so that what they take is
    known.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.sizes: dict[int, int] = {}
        self.now = 0
        self.peak = 0

    def add(self, tensor: torch.Tensor) -> None:
        """Counts a tensor from now on; its storage is counted once."""
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
            if isinstance(tensor, torch.Tensor):
                self.add(tensor)
        return out

"""Offload: the inputs of recomputed blocks lie in host memory from forward to backward.

A block that recomputes keeps its input alone, so this takes nearly all that a model without attention outputs keeps off the
device. Copies to the host run on a stream of their own, beside the computation, and to pinned memory. Copies back run on the
stream of the computation when backward asks for them, not ahead, so that it waits for each.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

Packed = tuple[torch.device, torch.Tensor, torch.cuda.Event | None]


class Offload:
    """Runs blocks so that what autograd saves of their input is a copy in host memory; `moved_bytes` counts the copies."""

    def __init__(self) -> None:
        self.moved_bytes = 0
        self.stream: torch.cuda.Stream | None = None

    def __call__(self, forward: Callable[..., torch.Tensor], x: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        """`forward(x, *others, **named)`, where `forward` saves `x` for its backward."""
        storage = x.untyped_storage().data_ptr()

        def pack(tensor: torch.Tensor) -> torch.Tensor | Packed:
            same = tensor.numel() > 0 and tensor.untyped_storage().data_ptr() == storage
            return self._to_host(tensor) if same else tensor

        with saved_tensors_hooks(pack, _from_host):
            return forward(x, *others, **named)

    def _to_host(self, tensor: torch.Tensor) -> Packed:
        self.moved_bytes += tensor.numel() * tensor.element_size()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        if not tensor.is_cuda:
            host.copy_(tensor)
            return tensor.device, host, None
        if self.stream is None:
            self.stream = torch.cuda.Stream(tensor.device)
        self.stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self.stream):
            host.copy_(tensor, non_blocking=True)
            tensor.record_stream(self.stream)  # its memory is not given to others before the copy is done
            return tensor.device, host, self.stream.record_event()


def _from_host(packed: torch.Tensor | Packed) -> torch.Tensor:
    """Copies back on the current stream: nothing is fetched before it is needed."""
    if isinstance(packed, torch.Tensor):
        return packed
    device, host, copied = packed
    if copied is not None:
        torch.cuda.current_stream(device).wait_event(copied)
    return host.to(device, non_blocking=True)

"""Offload: keeps the inputs of recomputed blocks in host memory between forward and backward.

Besides its attention output in mode selective, a recomputed block keeps only its input, so little else stays on the device.
Copies to pinned host memory run on a separate stream, in parallel with the computation. Copies back run on the compute stream
when backward needs them, not in advance, so that backward waits for each.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from longctx.attention.host_to_device import copy_to

Packed = tuple[torch.device, torch.Tensor, torch.cuda.Event | None]


class Offload:
    """Runs blocks so that autograd saves their input as a copy in host memory; `moved_bytes` is the number of bytes copied."""

    def __init__(self) -> None:
        self.moved_bytes = 0
        self.stream: torch.cuda.Stream | None = None

    def __call__(self, forward: Callable[..., torch.Tensor], x: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        """Returns `forward(x, *others, **named)`, where `forward` saves `x` for its backward."""
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
            tensor.record_stream(self.stream)  # keeps its memory from being reused before the copy is done
            return tensor.device, host, self.stream.record_event()


def _from_host(packed: torch.Tensor | Packed) -> torch.Tensor:
    """Copies a tensor back, on the current stream, once the copy to the host is done."""
    if isinstance(packed, torch.Tensor):
        return packed
    device, host, copied = packed
    if copied is not None:
        torch.cuda.current_stream(device).wait_event(copied)
    return copy_to(host, device)

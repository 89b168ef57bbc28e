"""Offload: keeps the inputs of recomputed blocks in host memory between forward and backward.

Besides its attention output in mode selective, a recomputed block keeps only its input, so little
else stays on the device. Copies to pinned host memory and back run on a separate stream, in
parallel with the computation: an input comes back while backward is in the block after.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks


@dataclass(eq=False)
class Kept:
    """A tensor of a GPU in host memory. `before` refers to the one that was kept before, which
    backward needs next."""

    device: torch.device
    host: torch.Tensor
    stream: torch.cuda.Stream
    before: Callable[[], "Kept | None"]
    back: tuple[torch.Tensor, torch.cuda.Event] | None = None
    used: bool = False

    def start(self) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Begins the copy back, if it has not begun, after the copy to the host, which used the
        same stream.

        Its memory is that of the current stream, which may still read what was there before.
        """
        if self.back is None:
            tensor = torch.empty_like(self.host, device=self.device)
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.stream):
                self.back = tensor.copy_(self.host, non_blocking=True), self.stream.record_event()
        return self.back

    def take(self) -> torch.Tensor:
        """Returns the tensor on the device, and begins the copy of the one before."""
        tensor, copied = self.start()
        before = self.before()
        if before is not None and not before.used:
            before.start()
        torch.cuda.current_stream(self.device).wait_event(copied)
        self.back = None
        self.used = True
        return tensor


class Offload:
    """Runs blocks so that autograd saves their input as a copy in host memory; `moved_bytes` is the
    number of bytes copied."""

    def __init__(self) -> None:
        self.moved_bytes = 0
        self.stream: torch.cuda.Stream | None = None
        self._last: Callable[[], Kept | None] = lambda: None

    def __call__(
        self, forward: Callable[..., torch.Tensor], x: torch.Tensor, *others: Any, **named: Any
    ) -> torch.Tensor:
        """Returns `forward(x, *others, **named)`, where `forward` saves `x` for its backward."""
        storage = x.untyped_storage().data_ptr()

        def pack(tensor: torch.Tensor) -> torch.Tensor | Kept:
            same = tensor.numel() > 0 and tensor.untyped_storage().data_ptr() == storage
            if same:
                return self._to_host(tensor)
            return tensor

        with saved_tensors_hooks(pack, _from_host):
            return forward(x, *others, **named)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor | Kept:
        self.moved_bytes += tensor.numel() * tensor.element_size()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        if not _has_stream(tensor):
            return host.copy_(tensor)
        if self.stream is None:
            self.stream = torch.cuda.Stream(tensor.device)
        self.stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self.stream):
            host.copy_(tensor, non_blocking=True)
            # Keeps its memory from being reused before the copy is done.
            tensor.record_stream(self.stream)
        kept = Kept(tensor.device, host, self.stream, self._last)
        self._last = weakref.ref(kept)  # autograd alone keeps host memory
        return kept


def _has_stream(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def _from_host(kept: torch.Tensor | Kept) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return kept
    return kept.take()

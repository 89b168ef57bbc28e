"""Offload: keeps what recomputed blocks keep in host memory between forward and backward.

A recomputed block keeps its input, and in mode selective the output and the log-sum-exp of its
attention. Copies to pinned host memory and back run on a separate stream, in parallel with the
computation: the tensors of a block come back while backward is in the block after.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks


@dataclass(eq=False)
class KeptBlock:
    """Tensors of one block in host memory. `before` refers to those of the block before, which
    backward needs next; autograd alone keeps the tensors."""

    before: "Callable[[], KeptBlock | None]"
    tensors: "list[weakref.ref[Kept]]" = field(default_factory=list)

    def start(self) -> None:
        """Begins the copies back of the tensors that were not used yet."""
        for reference in self.tensors:
            kept = reference()
            if kept is not None and not kept.used:
                kept.start()


@dataclass(eq=False)
class Kept:
    """A tensor of a GPU in host memory, of a block."""

    device: torch.device
    host: torch.Tensor
    stream: torch.cuda.Stream
    block: KeptBlock
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
        """Returns the tensor on the device, and begins the copies of its block and of the block
        before."""
        tensor, copied = self.start()
        self.block.start()
        before = self.block.before()
        if before is not None:
            before.start()
        torch.cuda.current_stream(self.device).wait_event(copied)
        self.back = None
        self.used = True
        return tensor


class Offload:
    """Runs blocks so that they keep tensors as copies in host memory: their input, and if `outputs`
    is set, what selective recomputation keeps of each token.

    `moved_bytes` is the number of bytes copied.
    """

    def __init__(self) -> None:
        self.outputs = False
        self.moved_bytes = 0
        self.stream: torch.cuda.Stream | None = None
        self._block = KeptBlock(lambda: None)
        self._tokens = 0

    def __call__(
        self, forward: Callable[..., torch.Tensor], x: torch.Tensor, *others: Any, **named: Any
    ) -> torch.Tensor:
        """Returns `forward(x, *others, **named)`, where `forward` saves `x` for its backward."""
        self._block = KeptBlock(weakref.ref(self._block))
        self._tokens = x.shape[-2]
        storage = _storage(x)
        given = {_storage(other) for other in (*others, *named.values())}

        def pack(tensor: torch.Tensor) -> torch.Tensor | Kept:
            place = _storage(tensor)
            if tensor.numel() > 0 and place == storage:
                return self._to_host(tensor)
            if place in given or isinstance(tensor, torch.nn.Parameter):
                return tensor
            return self.keep(tensor)

        with saved_tensors_hooks(pack, from_host):
            return forward(x, *others, **named)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor | Kept:
        """Returns a tensor that the running block keeps in host memory, if it is [tokens, ..];
        else the tensor."""
        of_tokens = tensor.dim() > 1 and len(tensor) == self._tokens
        if self.outputs and of_tokens and tensor.numel() > 0:
            return self._to_host(tensor)
        return tensor

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor | Kept:
        self.moved_bytes += tensor.numel() * tensor.element_size()
        host = _pinned_like(tensor)
        if not _has_stream(tensor):
            return host.copy_(tensor)
        if self.stream is None:
            self.stream = torch.cuda.Stream(tensor.device)
        self.stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self.stream):
            host.copy_(tensor, non_blocking=True)
            # Keeps its memory from being reused before the copy is done.
            tensor.record_stream(self.stream)
        kept = Kept(tensor.device, host, self.stream, self._block)
        self._block.tensors.append(weakref.ref(kept))
        return kept


def _storage(value: Any) -> int | None:
    """Returns a number of a tensor's memory, also of a fake one; None for another value."""
    if not isinstance(value, torch.Tensor):
        return None
    number: int = value.untyped_storage()._cdata
    return number


def _pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _has_stream(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def from_host(kept: torch.Tensor | Kept) -> torch.Tensor:
    """Returns a kept tensor on its device."""
    if isinstance(kept, torch.Tensor):
        return kept
    return kept.take()

"""Copies of a device's numbers to the host, which waits for them when it reads them, not before."""

import torch


class Arriving:
    """A tensor on its way to the host, behind the work that the device has been given so far."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Starts the copy; on a GPU into pinned memory, as other copies would make the host
        wait."""
        self._copy = tensor
        self._arrived: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> torch.Tensor:
        """Returns the tensor on the CPU. The host waits for it, but not for later work."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy.cpu()

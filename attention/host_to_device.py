"""Non-blocking copies to a device."""

import torch


def copy_to(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Returns the tensor on `device`. Pinned memory keeps the host from waiting for earlier work on
    a GPU."""
    if torch.device(device).type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)

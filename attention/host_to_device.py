"""Copies to a device that nothing waits for."""

import torch


def copy_to(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The tensor on `device`. To a GPU by way of pinned memory, or the host would wait until all earlier work there is done."""
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)

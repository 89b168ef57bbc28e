"""Torch's grouped matrix product, by which mixtures multiply rows by the matrix of their expert:
where it is wrong."""

from functools import cache

import torch


@cache
def leaves_gradients() -> bool:
    """Returns whether torch's grouped product leaves gradients of matrices without rows as it found
    them in memory.

    So it does on Blackwell (pytorch issue 172439, seen on a B200 and open for torch 2.13).
    """
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 10

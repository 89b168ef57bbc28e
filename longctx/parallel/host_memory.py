"""What the C library does with host memory that is freed.

glibc keeps freed blocks of up to 32 MiB to hand them out again, and cannot reuse an aligned one for another of the same size: a
process that reads a model block by block would come to hold most of it.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
LARGE = 1 << 20


@contextmanager
def returned_when_freed() -> Iterator[None]:
    """While it lasts, memory from a mebibyte on goes back to the system as soon as it is freed; without glibc nothing changes.

    Afterwards blocks of up to 32 MiB are kept again, as glibc does by itself after a while.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_MMAP_THRESHOLD, LARGE)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, 32 << 20)
        mallopt(_TRIM_THRESHOLD, 64 << 20)

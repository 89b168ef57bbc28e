"""Free host memory, and how the C library returns what is freed to the system.

glibc keeps freed blocks of up to 32 MiB for reuse, but cannot reuse an aligned block for another of
the same size: a process that reads a model block by block would end up with most of the model in
memory.
"""

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3  # mallopt(3)
LARGE = 1 << 20


@contextmanager
def returned_when_freed() -> Iterator[None]:
    """Within the context, returns blocks of 1 MiB or more to the system as soon as they are freed;
    no effect without glibc.

    Afterwards blocks of up to 32 MiB are kept again, the value that glibc itself reaches over time.
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


def pinned_bytes(sizes: Iterable[int], *, rounded: bool) -> int:
    """Returns the host memory that pinned buffers of these sizes in bytes take; `rounded`: each has
    a power of two."""
    return sum(1 << (size - 1).bit_length() if rounded and size else size for size in sizes)


def free_bytes() -> int | None:
    """Returns the memory of this machine that programs can still use; None if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    free = [line for line in lines if line.startswith("MemAvailable:")]
    if free:
        return int(free[0].split()[1]) * 1024
    return None

"""Segments: the interface between layout and kernels. A segment is a range of queries, a range of
keys and a band."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Segment(NamedTuple):
    """Queries [q_start, q_stop) against keys [k_start, k_stop).

    Key j is visible to query i iff lo ≤ (j - k_start) - (i - q_start) ≤ hi; None means no limit on
    that side.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    lo: int | None = None
    hi: int | None = None

    @property
    def queries(self) -> slice:
        return slice(self.q_start, self.q_stop)

    @property
    def keys(self) -> slice:
        return slice(self.k_start, self.k_stop)

    @property
    def dense(self) -> bool:
        return self.lo is None and self.hi is None

    @property
    def causal(self) -> bool:
        """Whether the segment is plain causal with equal numbers of queries and keys, where both
        alignments agree.

        A single query with a single key is both causal and dense.
        """
        queries = self.q_stop - self.q_start
        if self.lo is not None or queries != self.k_stop - self.k_start:
            return False
        return self.hi == 0 or (self.hi is None and queries == 1)

    @property
    def empty(self) -> bool:
        return self.q_start >= self.q_stop or self.k_start >= self.k_stop

    @property
    def _band(self) -> tuple[int | None, int | None]:
        """Limits in absolute positions: lo ≤ key - query ≤ hi."""
        shift = self.k_start - self.q_start
        lo = None if self.lo is None else self.lo + shift
        hi = None if self.hi is None else self.hi + shift
        return lo, hi

    def seen(self, queries: tuple[int, int], keys: tuple[int, int]) -> tuple[int, int]:
        """Returns the half-open range of `keys` that some of `queries` see; it is empty if its stop
        is not above its start."""
        q_start, q_stop = max(self.q_start, queries[0]), min(self.q_stop, queries[1])
        k_start, k_stop = max(self.k_start, keys[0]), min(self.k_stop, keys[1])
        if q_start >= q_stop:
            return k_start, k_start
        lo, hi = self._band
        if lo is not None:
            k_start = max(k_start, q_start + lo)
        if hi is not None:
            k_stop = min(k_stop, q_stop + hi)
        return k_start, k_stop

    def cut(self, queries: tuple[int, int], keys: tuple[int, int]) -> "Segment":
        """Returns the part within half-open ranges of queries and keys.

        Drops queries that see no key, keys that no query sees, and limits of the band that hide
        nothing.
        """
        q_start, q_stop = max(self.q_start, queries[0]), min(self.q_stop, queries[1])
        k_start, k_stop = self.seen(queries, keys)
        lo, hi = self._band
        if hi is not None:
            q_start = max(q_start, k_start - hi)
        if lo is not None:
            q_stop = min(q_stop, k_stop - lo)
        shift = k_start - q_start
        if lo is not None:
            lo = lo - shift if k_start - (q_stop - 1) < lo else None
        if hi is not None:
            hi = hi - shift if k_stop - 1 - q_start > hi else None
        return Segment(q_start, q_stop, k_start, k_stop, lo, hi)


Segments = Sequence[Segment]


def visible(segment: Segment, device: torch.device) -> Tensor:
    """Returns a boolean tensor [queries, keys]: the keys of the segment that each query sees."""
    queries = torch.arange(segment.q_stop - segment.q_start, device=device).unsqueeze(1)
    keys = torch.arange(segment.k_stop - segment.k_start, device=device).unsqueeze(0)
    mask = torch.ones(queries.shape[0], keys.shape[1], dtype=torch.bool, device=device)
    if segment.lo is not None:
        mask &= keys - queries >= segment.lo
    if segment.hi is not None:
        mask &= keys - queries <= segment.hi
    return mask

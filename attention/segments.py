"""Segments: the one language between layout and kernels. A segment lets a run of queries see a run of keys inside a band."""

from collections.abc import Sequence
from typing import NamedTuple


class Segment(NamedTuple):
    """Queries [q_start, q_stop) against keys [k_start, k_stop).

    Key j is visible to query i iff lo ≤ (j - k_start) - (i - q_start) ≤ hi, where None stands for no limit on that side.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    lo: int | None = None
    hi: int | None = None

    @property
    def dense(self) -> bool:
        return self.lo is None and self.hi is None

    @property
    def causal(self) -> bool:
        """Plain causal over equal numbers of queries and keys: bottom-right and top-left alignment are then the same."""
        return self.lo is None and self.hi == 0 and self.q_stop - self.q_start == self.k_stop - self.k_start


Segments = Sequence[Segment]


def packed_causal(lengths: Sequence[int]) -> list[Segment]:
    """One causal segment a document, for documents that lie one after the other in one buffer."""
    segments, start = [], 0
    for length in lengths:
        segments.append(Segment(start, start + length, start, start + length, hi=0))
        start += length
    return [s for s in segments if s.q_stop > s.q_start]

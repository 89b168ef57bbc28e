"""Segments: the one language between layout and kernels. A segment lets a run of queries see a run of keys inside a band."""

from collections.abc import Sequence
from typing import NamedTuple

import torch


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

    def part(self, start: int, stop: int) -> "Segment":
        """The same band for the queries [start, stop) alone, with no more keys than these see."""
        shift = start - self.q_start
        first = self.k_start if self.lo is None else max(self.k_start, self.k_start + self.lo + shift)
        last = self.k_stop if self.hi is None else min(self.k_stop, self.k_start + self.hi + stop - self.q_start)
        move = shift - (first - self.k_start)
        return Segment(
            start,
            stop,
            first,
            max(first, last),
            None if self.lo is None else self.lo + move,
            None if self.hi is None else self.hi + move,
        )


Segments = Sequence[Segment]


def visible(segment: Segment, device: torch.device) -> torch.Tensor:
    """Boolean [queries, keys]: which keys of the segment each of its queries sees."""
    queries = torch.arange(segment.q_stop - segment.q_start, device=device).unsqueeze(1)
    keys = torch.arange(segment.k_stop - segment.k_start, device=device).unsqueeze(0)
    mask = torch.ones(queries.shape[0], keys.shape[1], dtype=torch.bool, device=device)
    if segment.lo is not None:
        mask &= keys - queries >= segment.lo
    if segment.hi is not None:
        mask &= keys - queries <= segment.hi
    return mask


def packed_causal(lengths: Sequence[int]) -> list[Segment]:
    """One causal segment a document, for documents that lie one after the other in one buffer."""
    segments, start = [], 0
    for length in lengths:
        segments.append(Segment(start, start + length, start, start + length, hi=0))
        start += length
    return [s for s in segments if s.q_stop > s.q_start]

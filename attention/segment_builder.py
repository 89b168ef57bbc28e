"""Segment builder: turns the visibility of available keys to a rank's queries into few segments and
few kernel calls.

Areas of a mask are cut to runs of queries and keys (tokens with consecutive positions), and the
parts are joined where kernels can compute them as one. A causal mask needs one call for local keys,
as [head; tail] against [head; tail] is plain causal, and at most two per round: both chunks against
earlier keys, and tails against the keys between head and tail.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longctx.attention.host_to_device import copy_to
from longctx.attention.segments import Segment


class SpanRows(NamedTuple):
    """Positions [start, stop) of a document and the buffer rows that hold them, in order."""

    start: int
    stop: int
    rows: tuple[range, ...]

    def part(self, start: int, stop: int) -> tuple[range, ...]:
        """Returns the rows of positions [start, stop)."""
        parts = []
        position = self.start
        for rows in self.rows:
            part = rows[max(0, start - position) : max(0, stop - position)]
            if part:
                parts.append(part)
            position += len(rows)
        return tuple(parts)


@dataclass(frozen=True)
class RowSet:
    """Rows of a buffer, in order: a range, which is read and written in place, or any rows, which
    are copied."""

    index: slice | Tensor
    count: int

    @classmethod
    def of(cls, ranges: Sequence[range], device: torch.device | str) -> "RowSet":
        """Returns the rows of all ranges; index tensors are on `device`."""
        ranges = [rows for rows in ranges if rows]
        count = sum(map(len, ranges))
        if all(before.stop == after.start for before, after in pairwise(ranges)):
            start = ranges[0].start if ranges else 0
            return cls(slice(start, start + count), count)
        return cls(row_index(ranges, device), count)

    def __len__(self) -> int:
        return self.count

    def read(self, buffer: Tensor) -> Tensor:
        """Returns these rows of `buffer`, as a view if they are a range."""
        if isinstance(self.index, slice):
            return buffer[self.index]
        return buffer.index_select(0, self.index)

    def write(self, buffer: Tensor, values: Tensor) -> None:
        """Replaces these rows of `buffer`."""
        buffer[self.index] = values

    def add(self, buffer: Tensor, values: Tensor) -> None:
        """Adds to these rows of `buffer`, which all differ."""
        if isinstance(self.index, slice):
            buffer[self.index].add_(values)
        else:
            buffer.index_add_(0, self.index, values)


@dataclass(frozen=True)
class Call:
    """One kernel call.

    Attributes:
        rows: buffer rows of its keys, in order; None: the buffer itself.
        segments: its segments.
        again: whether some of these rows were keys of an earlier call on the same buffer.
    """

    rows: RowSet | None
    segments: tuple[Segment, ...]
    again: bool = False


Visibility = tuple[Sequence[SpanRows], Sequence[SpanRows], Sequence[Segment]]
"""Queries, keys and the mask's areas of one document."""


def local_calls(documents: Iterable[list["BandPart"]]) -> tuple[Call, ...]:
    """Builds calls that use keys in place, from the parts of every document."""
    made = []
    for parts in _calls(documents):
        segments = tuple(part.segment(part.keys[0].start) for part in parts)
        made.append(Call(None, segments))
    return tuple(made)


def local_parts(
    queries: Sequence[SpanRows], keys: Sequence[SpanRows], areas: Sequence[Segment]
) -> list["BandPart"]:
    """Returns the parts of keys in place; every run of keys must be one range of rows."""
    return _parts(queries, keys, areas, _follows)


def whole_parts(areas: Sequence[Segment], offset: int) -> list["BandPart"]:
    """Returns the parts of keys in place of a document whose tokens are all on this rank, from row
    `offset` on."""
    if len(areas) == 1:
        area = areas[0]
        queries = range(offset + area.q_start, offset + area.q_stop)
        keys = range(offset + area.k_start, offset + area.k_stop)
        return [BandPart(queries, (keys,), area.lo, area.hi)]
    stop = max((max(area.q_stop, area.k_stop) for area in areas), default=0)
    everything = [SpanRows(0, stop, (range(offset, offset + stop),))]
    return local_parts(everything, everything, areas)


def gathered_calls(documents: Iterable[Visibility], device: torch.device | str) -> tuple[Call, ...]:
    """Builds calls on keys that are selected from a buffer first; index tensors are on `device`."""
    documents = [(queries, _neighbours_joined(keys), areas) for queries, keys, areas in documents]
    buffer = max(
        (rows.stop for _, keys, _ in documents for run in keys for rows in run.rows), default=0
    )
    met = torch.zeros(buffer, dtype=torch.bool)
    made: list[Call] = []
    parts_of = (_parts(queries, keys, areas, operator.add) for queries, keys, areas in documents)
    for parts in _calls(parts_of):
        rows = [keys for part in parts for keys in part.keys]
        starts = accumulate((part.key_count for part in parts), initial=0)
        segments = tuple(map(BandPart.segment, parts, starts))
        index = row_index(rows, "cpu")
        made.append(Call(RowSet.of(rows, device), segments, again=bool(met[index].any())))
        met[index] = True
    return tuple(made)


def row_index(ranges: Sequence[range], device: torch.device | str) -> Tensor:
    """Returns the rows of all ranges as one int64 tensor on `device`."""
    ends = np.array([(rows.start, rows.stop) for rows in ranges], dtype=np.int64)
    starts, stops = ends.reshape(-1, 2).T
    counts = stops - starts
    index = np.arange(counts.sum()) + np.repeat(starts - np.cumsum(counts) + counts, counts)
    return copy_to(torch.from_numpy(index), device)


class BandPart(NamedTuple):
    """A segment before its keys are gathered: rows of queries, rows of keys, and the band between
    them."""

    queries: range
    keys: tuple[range, ...]
    lo: int | None
    hi: int | None

    @property
    def dense(self) -> bool:
        return self.lo is None and self.hi is None

    @property
    def key_count(self) -> int:
        return sum(map(len, self.keys))

    def segment(self, k_start: int) -> Segment:
        q_start, q_stop = self.queries.start, self.queries.stop
        return Segment(q_start, q_stop, k_start, k_start + self.key_count, self.lo, self.hi)

    def conflicts(self, other: "BandPart") -> bool:
        """Returns whether both parts share a query or a key, which one call does not allow."""
        return _overlap(self.queries, other.queries) or any(
            _overlap(a, b) for a in self.keys for b in other.keys
        )


def _overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


def _calls(documents: Iterable[list[BandPart]]) -> list[list[BandPart]]:
    """Puts every part into the first call without a conflict; documents share neither queries nor
    keys."""
    calls: list[list[BandPart]] = []
    for parts in documents:
        taken = [parts] if len(parts) == 1 else _without_conflicts(parts)
        while len(calls) < len(taken):
            calls.append([])
        for call, more in zip(calls, taken, strict=False):
            call += more
    return calls


def _without_conflicts(parts: list[BandPart]) -> list[list[BandPart]]:
    """Puts every part of a document into the first call without a conflict."""
    calls: list[list[BandPart]] = []
    for part in parts:
        for call in calls:
            if not any(part.conflicts(other) for other in call):
                call.append(part)
                break
        else:
            calls.append([part])
    return calls


def _neighbours_joined(runs: Sequence[SpanRows]) -> list[SpanRows]:
    """Joins runs that are adjacent in the document."""
    joined: list[SpanRows] = []
    for run in sorted(runs):
        if joined and joined[-1].stop == run.start:
            joined[-1] = SpanRows(joined[-1].start, run.stop, joined[-1].rows + run.rows)
        else:
            joined.append(run)
    return joined


def _parts(
    queries: Sequence[SpanRows], keys: Sequence[SpanRows], areas: Sequence[Segment], after: "Chain"
) -> list[BandPart]:
    """Returns the visible parts of keys for queries, joined where possible; `after` chains ranges
    of keys if possible."""
    parts = []
    for run in keys:
        seen = []
        for query in queries:
            for area in areas:
                cut = area.cut((query.start, query.stop), (run.start, run.stop))
                if cut.empty:
                    continue
                (rows,) = query.part(cut.q_start, cut.q_stop)
                # A single token is both dense and causal; as causal, it can join the next part of a
                # diagonal.
                first = cut.causal and cut.q_start == cut.k_start and area.hi is not None
                hi = 0 if first else cut.hi
                seen.append(BandPart(rows, run.part(cut.k_start, cut.k_stop), cut.lo, hi))
        parts += _joined(seen, _side_by_side)
    parts = _joined(parts, lambda a, b: _stacked(a, b, after))
    return _joined(parts, _staircase)


Chain = Callable[[tuple[range, ...], tuple[range, ...]], tuple[range, ...] | None]


def _follows(a: tuple[range, ...], b: tuple[range, ...]) -> tuple[range, ...] | None:
    """Chains ranges that are adjacent."""
    return (range(a[0].start, b[-1].stop),) if a[-1].stop == b[0].start else None


def _joined(
    parts: list[BandPart], join: Callable[[BandPart, BandPart], BandPart | None]
) -> list[BandPart]:
    """Joins every part with the first earlier part that `join` accepts."""
    kept: list[BandPart] = []
    for part in parts:
        for i, other in enumerate(kept):
            whole = join(other, part)
            if whole is not None:
                kept[i] = whole
                break
        else:
            kept.append(part)
    return kept


def _side_by_side(a: BandPart, b: BandPart) -> BandPart | None:
    """Joins adjacent queries that see the same keys without a band."""
    if a.dense and b.dense and a.keys == b.keys and a.queries.stop == b.queries.start:
        return BandPart(range(a.queries.start, b.queries.stop), a.keys, None, None)
    return None


def _stacked(a: BandPart, b: BandPart, after: Chain) -> BandPart | None:
    """Joins parts of the same queries if one is dense; its keys come first and shift the band of
    the other part."""
    if b.dense and not a.dense:
        a, b = b, a
    if not a.dense or b.lo is not None or a.queries != b.queries:
        return None
    keys = after(a.keys, b.keys)
    if keys is None:
        return None
    hi = None if b.hi is None else b.hi + a.key_count
    return BandPart(a.queries, keys, None, hi)


def _staircase(a: BandPart, b: BandPart) -> BandPart | None:
    """Joins adjacent queries whose keys start alike and are bounded by one diagonal: [head; tail]
    of a causal mask."""
    if a.lo is not None or b.lo is not None or a.queries.stop != b.queries.start:
        return None
    if a.hi is None or b.hi != a.hi + len(a.queries):
        return None
    start_alike = b.keys[: len(a.keys)] == a.keys or (
        len(a.keys) == len(b.keys) == 1 and a.keys[0].start == b.keys[0].start
    )
    if start_alike and b.hi <= a.key_count <= b.key_count:
        return BandPart(range(a.queries.start, b.queries.stop), b.keys, None, a.hi)
    return None

"""Segment builder: turns the visibility of available keys to a rank's queries into few segments and
few kernel calls.

Areas of a mask are cut to runs of queries and keys (tokens with consecutive positions), and the
parts are joined where kernels can compute them as one. A causal mask needs one call for local keys,
as [head; tail] against [head; tail] is plain causal, and at most two per round: both chunks against
earlier keys, and tails against the keys between head and tail. Where many areas have the same
queries, their keys are gathered for one call.
"""

import operator
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
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

    def to(self, device: torch.device) -> "RowSet":
        """Returns the same rows with index tensors on `device`."""
        if isinstance(self.index, slice):
            return self
        return RowSet(copy_to(self.index, device), self.count)

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

    @property
    def in_place(self) -> bool:
        return self.rows is None

    def to(self, device: torch.device) -> "Call":
        """Returns the same call with index tensors on `device`."""
        if self.rows is None:
            return self
        return replace(self, rows=self.rows.to(device))


Visibility = tuple[Sequence[SpanRows], Sequence[SpanRows], Sequence[Segment]]
"""Queries, keys and the mask's areas of one document."""


def local_calls(documents: Iterable[list["BandPart"]]) -> tuple[Call, ...]:
    """Builds calls on this rank's own keys from the parts of every document: first those that use
    keys in place, then those that select them."""
    in_place = list[list[BandPart]]()
    gathered = list[list[BandPart]]()
    for parts in documents:
        own = list[BandPart]()
        chosen = list[BandPart]()
        for part in parts:
            if len(part.keys) == 1:
                own.append(part)
            else:
                chosen.append(part)
        in_place.append(own)
        gathered.append(chosen)
    made = []
    for parts in _calls(in_place):
        segments = tuple(part.segment(part.keys[0].start) for part in parts)
        made.append(Call(None, segments))
    for parts in _calls(gathered):
        rows, segments = _selected(parts)
        made.append(Call(RowSet.of(rows, "cpu"), segments))
    return tuple(made)


def local_parts(
    queries: Sequence[SpanRows], keys: Sequence[SpanRows], areas: Sequence[Segment]
) -> list["BandPart"]:
    """Returns the parts of keys in place; every run of keys must be one range of rows."""
    return _parts(queries, keys, areas, _follows)


def gathering_parts(
    queries: Sequence[SpanRows], keys: Sequence[SpanRows], areas: Sequence[Segment]
) -> list["BandPart"]:
    """Returns the same, but all keys that the same queries see are one part.

    Parts of most queries come first: those of as many then fill a call.
    """
    parts = _parts(queries, keys, areas, _follows_or_beside, gathers=True)
    return sorted(parts, key=lambda part: len(part.queries), reverse=True)


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


def gathered_calls(documents: Iterable[Visibility]) -> tuple[Call, ...]:
    """Builds calls on keys that are selected from a buffer first."""
    documents = [(queries, _neighbours_joined(keys), areas) for queries, keys, areas in documents]
    buffer = max(
        (rows.stop for _, keys, _ in documents for run in keys for rows in run.rows), default=0
    )
    met = torch.zeros(buffer, dtype=torch.bool)
    made: list[Call] = []
    parts_of = (_parts(queries, keys, areas, operator.add) for queries, keys, areas in documents)
    for parts in _calls(parts_of):
        rows, segments = _selected(parts)
        index = row_index(rows, "cpu")
        made.append(Call(RowSet.of(rows, "cpu"), segments, again=bool(met[index].any())))
        met[index] = True
    return tuple(made)


def _selected(parts: Sequence["BandPart"]) -> tuple[list[range], tuple[Segment, ...]]:
    """Returns the rows of all keys of a call, and its segments on these."""
    rows = [keys for part in parts for keys in part.keys]
    starts = accumulate((part.key_count for part in parts), initial=0)
    return rows, tuple(map(BandPart.segment, parts, starts))


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


class _Taken:
    """The parts of one call of a document, and their disjoint rows of queries and of keys."""

    def __init__(self) -> None:
        self.parts = list[BandPart]()
        self.queries = _Ranges()
        self.keys = _Ranges()

    def conflicts(self, part: BandPart) -> bool:
        """Returns whether a part shares a query or a key, which one call does not allow."""
        if self.queries.overlap(part.queries):
            return True
        return any(map(self.keys.overlap, part.keys))

    def add(self, part: BandPart) -> None:
        self.parts.append(part)
        self.queries.add(part.queries)
        for rows in part.keys:
            self.keys.add(rows)


class _Ranges:
    """Disjoint ranges of rows, by their ascending ends.

    Of ranges that do not overlap, the one that begins later also ends later.
    """

    def __init__(self) -> None:
        self.starts = list[int]()
        self.stops = list[int]()

    def overlap(self, rows: range) -> bool:
        after = bisect_right(self.stops, rows.start)
        if after == len(self.starts):
            return False
        return self.starts[after] < rows.stop

    def add(self, rows: range) -> None:
        insort(self.starts, rows.start)
        insort(self.stops, rows.stop)


def _without_conflicts(parts: list[BandPart]) -> list[list[BandPart]]:
    """Puts every part of a document into the first call without a conflict."""
    calls: list[_Taken] = []
    for part in parts:
        for call in calls:
            if not call.conflicts(part):
                break
        else:
            call = _Taken()
            calls.append(call)
        call.add(part)
    return [call.parts for call in calls]


def _neighbours_joined(runs: Sequence[SpanRows]) -> list[SpanRows]:
    """Joins runs that are adjacent in the document."""
    joined: list[SpanRows] = []
    for run in sorted(runs):
        if joined and joined[-1].stop == run.start:
            joined[-1] = SpanRows(joined[-1].start, run.stop, joined[-1].rows + run.rows)
        else:
            joined.append(run)
    return joined


class _AreasOverKeys:
    """The areas of a mask, found by the keys that they have.

    A mask may have many areas, and runs of keys that other ranks sent are about as many:
    each should not be compared with all.

    Attributes:
        order: numbers of the areas by the start of their keys.
        starts: these starts, ascending.
        furthest: the furthest stop of an area's keys up to this one, ascending.
    """

    def __init__(self, areas: Sequence[Segment]) -> None:
        self.areas = areas
        self.order = sorted(range(len(areas)), key=lambda number: areas[number].k_start)
        self.starts = [areas[number].k_start for number in self.order]
        stops = (areas[number].k_stop for number in self.order)
        self.furthest = list(accumulate(stops, max))

    def of(self, start: int, stop: int) -> list[Segment]:
        """Returns areas with keys in [start, stop), and maybe others, in their order."""
        first = bisect_right(self.furthest, start)
        last = bisect_left(self.starts, stop)
        numbers = sorted(self.order[first:last])
        return [self.areas[number] for number in numbers]


def _parts(
    queries: Sequence[SpanRows],
    keys: Sequence[SpanRows],
    areas: Sequence[Segment],
    after: "Chain",
    *,
    gathers: bool = False,
) -> list[BandPart]:
    """Returns the visible parts of keys for queries, joined where possible; `after` chains ranges
    of keys if possible. With `gathers`, keys of the same queries are joined first."""
    parts = []
    over = _AreasOverKeys(areas)
    stacked = partial(_stacked, after=after)
    for run in keys:
        seen = []
        areas_of_run = over.of(run.start, run.stop)
        for query in queries:
            for area in areas_of_run:
                cut = area.cut((query.start, query.stop), (run.start, run.stop))
                if cut.empty:
                    continue
                (rows,) = query.part(cut.q_start, cut.q_stop)
                # A single token is both dense and causal; as causal, it can join the next part of a
                # diagonal.
                first = cut.causal and cut.q_start == cut.k_start and area.hi is not None
                hi = 0 if first else cut.hi
                seen.append(BandPart(rows, run.part(cut.k_start, cut.k_stop), cut.lo, hi))
        if gathers:
            seen = _joined(seen, stacked, joins_at=_same_queries)
        parts += _joined(seen, _side_by_side, joins_at=_same_keys_after)
    parts = _joined(parts, stacked, joins_at=_same_queries)
    return _joined(parts, _staircase, joins_at=_queries_after)


Chain = Callable[[tuple[range, ...], tuple[range, ...]], tuple[range, ...] | None]


def _follows(a: tuple[range, ...], b: tuple[range, ...]) -> tuple[range, ...] | None:
    """Chains ranges that are adjacent."""
    return (range(a[0].start, b[-1].stop),) if a[-1].stop == b[0].start else None


Place = tuple[Hashable, Hashable]
"""Where an earlier part is found by one that it may join, and where the latter looks for it."""


def _same_queries(part: BandPart) -> Place:
    """Parts of the same queries may join."""
    return part.queries, part.queries


def _queries_after(part: BandPart) -> Place:
    """A part may join one whose queries end where its own begin."""
    return part.queries.stop, part.queries.start


def _same_keys_after(part: BandPart) -> Place:
    """A part may join one of the same keys, whose queries end where its own begin."""
    stop = part.queries.stop
    start = part.queries.start
    return (part.keys, stop), (part.keys, start)


def _follows_or_beside(a: tuple[range, ...], b: tuple[range, ...]) -> tuple[range, ...]:
    """Chains any ranges, and those that are adjacent to one.

    In a comb of block diffusion, noisy blocks lie between the clean ones, which are gathered.
    """
    if a[-1].stop == b[0].start:
        between = range(a[-1].start, b[0].stop)
        return *a[:-1], between, *b[1:]
    return a + b


def _joined(
    parts: list[BandPart],
    join: Callable[[BandPart, BandPart], BandPart | None],
    joins_at: Callable[[BandPart], Place],
) -> list[BandPart]:
    """Joins every part with the first earlier part that `join` accepts, of those at its place.

    Args:
        parts: what to join, in this order.
        join: returns a part in place of two, or None.
        joins_at: says where to look, so that not all parts are compared with all.
    """
    kept: list[BandPart] = []
    at = defaultdict[Hashable, list[int]](list)
    for part in parts:
        its_place, looks_at = joins_at(part)
        for number in at[looks_at]:
            whole = join(kept[number], part)
            if whole is not None:
                at[looks_at].remove(number)
                kept[number] = whole
                insort(at[joins_at(whole)[0]], number)
                break
        else:
            at[its_place].append(len(kept))
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

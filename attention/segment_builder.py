"""Parts: which queries of a rank see which keys at hand, as the fewest segments in the fewest kernel calls.

Runs of queries and keys (tokens with neighbouring positions) are cut out of the areas of a mask; what comes out is joined where
kernels can take it as one. So a causal mask needs one call for local keys, whose [head; tail] against [head; tail] is plainly
causal again, and at most two for a stage: both chunks against the keys before them, tails against those between.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from longctx.attention.host_to_device import copy_to
from longctx.attention.segments import Segment


class Run(NamedTuple):
    """Tokens [start, stop) of a document, by position, and the rows of a buffer that hold them, in that order."""

    start: int
    stop: int
    rows: tuple[range, ...]

    def part(self, start: int, stop: int) -> tuple[range, ...]:
        """The rows of the positions [start, stop)."""
        parts, position = [], self.start
        for rows in self.rows:
            part = rows[max(0, start - position) : max(0, stop - position)]
            parts += [part] if part else []
            position += len(rows)
        return tuple(parts)


@dataclass(frozen=True)
class Call:
    """One kernel call: its segments, and which rows of a buffer its keys are, one after the other; None: the buffer itself.

    `again`: some of these rows were keys of an earlier call on the same buffer.
    """

    rows: torch.Tensor | None
    segments: tuple[Segment, ...]
    again: bool = False


Document = tuple[Sequence[Run], Sequence[Run], Sequence[Segment]]
"""Queries, keys and the mask's areas of one document."""


def local_calls(documents: Iterable[Document]) -> tuple[Call, ...]:
    """Calls on keys that are taken where they lie; every run of keys must be one range of rows."""
    calls = _calls(_parts(*document, _follows) for document in documents)
    return tuple(Call(None, tuple(part.segment(part.keys[0].start) for part in parts)) for parts in calls)


def gathered_calls(documents: Iterable[Document], device: torch.device | str) -> tuple[Call, ...]:
    """Calls on keys that are picked out of a buffer first; the index tensors live on `device`."""
    documents = [(queries, _neighbours_joined(keys), areas) for queries, keys, areas in documents]
    buffer = max((rows.stop for _, keys, _ in documents for run in keys for rows in run.rows), default=0)
    met = torch.zeros(buffer, dtype=torch.bool)
    made: list[Call] = []
    for parts in _calls(_parts(*document, operator.add) for document in documents):
        rows = [keys for part in parts for keys in part.keys]
        starts = accumulate((part.key_count for part in parts), initial=0)
        segments = tuple(part.segment(start) for part, start in zip(parts, starts, strict=False))
        index = row_index(rows, "cpu")
        made.append(Call(copy_to(index, device), segments, again=bool(met[index].any())))
        met[index] = True
    return tuple(made)


def row_index(ranges: Sequence[range], device: torch.device | str) -> torch.Tensor:
    """The rows of all ranges as one int64 tensor."""
    if not ranges:
        return torch.empty(0, dtype=torch.int64, device=device)
    return copy_to(torch.cat([torch.arange(rows.start, rows.stop) for rows in ranges]), device)


@dataclass(frozen=True)
class _Part:
    """A segment whose keys are yet to be put in a row: rows of queries, rows of keys, and the band between them."""

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
        return Segment(self.queries.start, self.queries.stop, k_start, k_start + self.key_count, self.lo, self.hi)

    def conflicts(self, other: "_Part") -> bool:
        """Whether they share a query or a key, so that one call cannot hold both."""
        return _overlap(self.queries, other.queries) or any(_overlap(a, b) for a in self.keys for b in other.keys)


def _overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


def _calls(documents: Iterable[list[_Part]]) -> list[list[_Part]]:
    """Every part in the first call where it is in nobody's way; documents share neither queries nor keys."""
    calls: list[list[_Part]] = []
    for parts in documents:
        taken: list[list[_Part]] = []
        for part in parts:
            free = (call for call in taken if not any(part.conflicts(other) for other in call))
            call = next(free, None)
            if call is None:
                taken.append([part])
            else:
                call.append(part)
        calls += ([] for _ in range(len(taken) - len(calls)))
        for call, more in zip(calls, taken, strict=False):
            call += more
    return calls


def _neighbours_joined(runs: Sequence[Run]) -> list[Run]:
    """Runs that are neighbours in the document become one."""
    joined: list[Run] = []
    for run in sorted(runs):
        if joined and joined[-1].stop == run.start:
            joined[-1] = Run(joined[-1].start, run.stop, joined[-1].rows + run.rows)
        else:
            joined.append(run)
    return joined


def _parts(queries: Sequence[Run], keys: Sequence[Run], areas: Sequence[Segment], after: "Chain") -> list[_Part]:
    """What these queries see of these keys, joined where it can be; `after` chains ranges of keys if that is possible."""
    parts = []
    for run in keys:
        seen = []
        for query in queries:
            for area in areas:
                cut = area.cut((query.start, query.stop), (run.start, run.stop))
                if not cut.empty:
                    (rows,) = query.part(cut.q_start, cut.q_stop)
                    # One token of itself: all is visible, but as the first of a diagonal it joins the next one.
                    first = cut.causal and cut.q_start == cut.k_start and area.hi is not None
                    seen.append(_Part(rows, run.part(cut.k_start, cut.k_stop), cut.lo, 0 if first else cut.hi))
        parts += _joined(seen, _side_by_side)
    parts = _joined(parts, lambda a, b: _stacked(a, b, after))
    return _joined(parts, _staircase)


Chain = Callable[[tuple[range, ...], tuple[range, ...]], tuple[range, ...] | None]


def _follows(a: tuple[range, ...], b: tuple[range, ...]) -> tuple[range, ...] | None:
    """Chains ranges that lie one after the other."""
    return (range(a[0].start, b[-1].stop),) if a[-1].stop == b[0].start else None


def _joined(parts: list[_Part], join: Callable[[_Part, _Part], _Part | None]) -> list[_Part]:
    """Joins every part with the first one before it that it fits."""
    kept: list[_Part] = []
    for part in parts:
        for i, other in enumerate(kept):
            whole = join(other, part)
            if whole is not None:
                kept[i] = whole
                break
        else:
            kept.append(part)
    return kept


def _side_by_side(a: _Part, b: _Part) -> _Part | None:
    """Neighbouring queries that all see the same keys."""
    if a.dense and b.dense and a.keys == b.keys and a.queries.stop == b.queries.start:
        return _Part(range(a.queries.start, b.queries.stop), a.keys, None, None)
    return None


def _stacked(a: _Part, b: _Part, after: Chain) -> _Part | None:
    """The same queries, which see all keys of one part; these come first, and the other one's band moves up by them."""
    if b.dense and not a.dense:
        a, b = b, a
    if not a.dense or b.lo is not None or a.queries != b.queries:
        return None
    keys = after(a.keys, b.keys)
    return None if keys is None else _Part(a.queries, keys, None, None if b.hi is None else b.hi + a.key_count)


def _staircase(a: _Part, b: _Part) -> _Part | None:
    """Queries that see the first of their neighbours' keys, under one diagonal: [head; tail] of a causal mask."""
    if a.hi is None or b.hi is None or a.lo is not None or b.lo is not None or a.queries.stop != b.queries.start:
        return None
    first_keys = b.keys[: len(a.keys)] == a.keys or (len(a.keys) == len(b.keys) == 1 and a.keys[0].start == b.keys[0].start)
    if first_keys and b.hi == a.hi + len(a.queries) and a.hi + len(a.queries) <= a.key_count <= b.key_count:
        return _Part(range(a.queries.start, b.queries.stop), b.keys, None, a.hi)
    return None

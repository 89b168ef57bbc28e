"""Schedule: the kernel calls and messages of one rank in one micro-batch, a pure function of its layout and number of stages.

Ring index r of a document needs the head chunks of lower ring indices (for all its queries) and head and tail chunks of higher
ones (for the queries of its tail); nothing else is sent. A stage covers a range of ring distances, so one stage gathers
everything at once and degree-1 stages are the classic ring. Both ends of a message derive its content from the same cut
points, in the same order of documents, so no metadata travels.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch

from longctx.attention.segments import Segment
from longctx.planning.layout import Layout, Shard, head_span, tail_span


@dataclass(frozen=True)
class Call:
    """One kernel call on received keys: `rows` picks its keys out of the rows that the stage received."""

    rows: torch.Tensor
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class Stage:
    """Messages and kernel calls of one exchange stage; peers ascend.

    sends: (peer, rows of the local buffer); receives: (peer, number of rows), laid one after the other.
    lower: whole [head; tail] against head chunks of lower ring indices. upper: tails against all chunks of higher ones.
    """

    sends: tuple[tuple[int, torch.Tensor], ...]
    receives: tuple[tuple[int, int], ...]
    lower: Call
    upper: Call

    @property
    def received_rows(self) -> int:
        return sum(rows for _, rows in self.receives)


@dataclass(frozen=True)
class Schedule:
    """All that a rank does in one micro-batch: `local` causal segments, then the stages."""

    layout: Layout
    local: tuple[Segment, ...]
    stages: tuple[Stage, ...]

    @classmethod
    def build(cls, layout: Layout, stages: int | None = None, device: torch.device | str = "cpu") -> "Schedule":
        """Derives the schedule from a layout; `stages` None takes the plan's. Index tensors live on `device`."""
        wanted = layout.stages if stages is None else stages
        if wanted < 1:
            raise ValueError(f"stages is {wanted}: an exchange has at least one stage; 1 gathers everything at once")
        widest = max((shard.degree for shard in layout.shards), default=1)
        local = tuple(Segment(s.offset, s.offset + s.tokens, s.offset, s.offset + s.tokens, hi=0) for s in layout.shards)
        count = min(wanted, widest - 1)
        return cls(layout, local, tuple(_stage(layout, stage, wanted, device) for stage in range(count)))


def stage_of(distance: int, degree: int, stages: int) -> int:
    """The stage in which chunks travel `distance` ring indices, 1 ≤ distance < degree; distances are spread evenly."""
    return (distance - 1) * min(stages, degree - 1) // (degree - 1)


@dataclass(frozen=True, slots=True)
class _Piece:
    """What this rank gives to, or gets from, ring index `other` of one document: the first rows of a [head; tail]."""

    shard: Shard
    other: int
    rows: int

    @property
    def peer(self) -> int:
        return self.shard.rank_of(self.other)


def rows_needed(shard: Shard, source: int, target: int) -> int:
    """How many rows of ring index `source` the queries of ring index `target` need.

    They are the first rows of the source's [head; tail]: its head if it is lower, all of it if it is higher. A target
    without the queries that would read them needs none.
    """
    source_head, source_tail = _sizes(shard, source)
    target_head, target_tail = _sizes(shard, target)
    if source < target:
        return source_head if target_head + target_tail else 0
    return source_head + source_tail if target_tail else 0


def _sizes(shard: Shard, ring_index: int) -> tuple[int, int]:
    head, tail = head_span(shard.length, shard.degree, ring_index), tail_span(shard.length, shard.degree, ring_index)
    return head[1] - head[0], tail[1] - tail[0]


def _pieces(layout: Layout, stage: int, stages: int, *, incoming: bool) -> Iterator[_Piece]:
    """The non-empty pieces that this rank receives (or sends) in a stage, in ascending order of documents."""
    for shard in layout.shards:
        mine = shard.ring_index
        for other in range(shard.degree):
            source, target = (other, mine) if incoming else (mine, other)
            distance = (target - source) % shard.degree
            if distance and stage_of(distance, shard.degree, stages) == stage:
                rows = rows_needed(shard, source, target)
                if rows:
                    yield _Piece(shard, other, rows)


def _stage(layout: Layout, stage: int, stages: int, device: torch.device | str) -> Stage:
    sends: dict[int, list[range]] = defaultdict(list)
    for piece in _pieces(layout, stage, stages, incoming=False):
        sends[piece.peer].append(range(piece.shard.offset, piece.shard.offset + piece.rows))

    received: dict[int, list[_Piece]] = defaultdict(list)
    for piece in _pieces(layout, stage, stages, incoming=True):
        received[piece.peer].append(piece)
    ordered = [piece for _, pieces in sorted(received.items()) for piece in pieces]
    offsets = accumulate((piece.rows for piece in ordered), initial=0)
    lower: dict[Shard, list[range]] = defaultdict(list)
    upper: dict[Shard, list[range]] = defaultdict(list)
    for piece, offset in zip(ordered, offsets, strict=False):
        side = lower if piece.other < piece.shard.ring_index else upper
        side[piece.shard].append(range(offset, offset + piece.rows))

    return Stage(
        sends=tuple((peer, _index(ranges, device)) for peer, ranges in sorted(sends.items())),
        receives=tuple((peer, sum(p.rows for p in pieces)) for peer, pieces in sorted(received.items())),
        lower=_call(lower, device, tail_only=False),
        upper=_call(upper, device, tail_only=True),
    )


def _call(keys_of: dict[Shard, list[range]], device: torch.device | str, *, tail_only: bool) -> Call:
    segments, rows = [], 0
    for shard, ranges in keys_of.items():
        count = sum(map(len, ranges))
        q_start = shard.offset + (shard.head_tokens if tail_only else 0)
        segments.append(Segment(q_start, shard.offset + shard.tokens, rows, rows + count))
        rows += count
    return Call(_index([keys for ranges in keys_of.values() for keys in ranges], device), tuple(segments))


def _index(ranges: list[range], device: torch.device | str) -> torch.Tensor:
    if not ranges:
        return torch.empty(0, dtype=torch.int64, device=device)
    return torch.cat([torch.arange(r.start, r.stop) for r in ranges]).to(device)

"""Schedule: the kernel calls and messages of one rank in one micro-batch, a pure function of its layout, mask and stages.

Only rows that some query of the receiver sees are sent: with a causal mask, ring index r gets the head chunks of lower ring
indices (for all its queries) and head and tail chunks of higher ones (for the queries of its tail). A stage covers a range of
ring distances, so one stage gathers everything at once and degree-1 stages are the classic ring. Both ends of a message derive
its content from the same cut points, in the same order of documents, so no metadata travels.

What a rank computes are the areas of the mask (`masks`) cut to the chunks of queries and keys at hand (`parts`).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from longctx.attention.masks import CAUSAL, Mask
from longctx.attention.parts import Call, Run, gathered_calls, local_calls, row_index
from longctx.attention.segments import Segment
from longctx.planning.layout import Layout, Shard, Span, head_span, tail_span


@dataclass(frozen=True)
class Stage:
    """Messages and kernel calls of one exchange stage; peers ascend.

    sends: (peer, rows of the local buffer); receives: (peer, number of rows), laid one after the other; the calls' rows are
    those of the received buffer.
    """

    sends: tuple[tuple[int, torch.Tensor], ...]
    receives: tuple[tuple[int, int], ...]
    calls: tuple[Call, ...]

    @property
    def received_rows(self) -> int:
        return sum(rows for _, rows in self.receives)


@dataclass(frozen=True)
class Schedule:
    """All that a rank does in one micro-batch: calls on `local` keys, then the stages."""

    layout: Layout
    local: tuple[Call, ...]
    stages: tuple[Stage, ...]

    @property
    def received_rows(self) -> int:
        return sum(stage.received_rows for stage in self.stages)

    @cached_property
    def calls(self) -> int:
        """How many kernel calls a pass makes."""
        return len(self.local) + sum(len(stage.calls) for stage in self.stages)

    @cached_property
    def bands(self) -> bool:
        """Whether kernels need to know bands, not only dense and plain causal segments."""
        calls = (*self.local, *(call for stage in self.stages for call in stage.calls))
        return any(not (segment.dense or segment.causal) for call in calls for segment in call.segments)

    @classmethod
    def build(
        cls, layout: Layout, stages: int | None = None, device: torch.device | str = "cpu", mask: Mask = CAUSAL
    ) -> "Schedule":
        """Derives the schedule from a layout; `stages` None takes the plan's. Index tensors live on `device`."""
        wanted = layout.stages if stages is None else stages
        if wanted < 1:
            raise ValueError(f"stages is {wanted}: an exchange has at least one stage; 1 gathers everything at once")
        documents = [_Document.of(shard, mask) for shard in layout.shards]
        local = local_calls((document.queries, document.queries, document.areas) for document in documents)
        count = min(wanted, max((shard.degree for shard in layout.shards), default=1) - 1)
        return cls(layout, local, tuple(_stage(documents, stage, wanted, device) for stage in range(count)))


def stage_of(distance: int, degree: int, stages: int) -> int:
    """The stage in which chunks travel `distance` ring indices, 1 ≤ distance < degree; distances are spread evenly."""
    return (distance - 1) * min(stages, degree - 1) // (degree - 1)


@dataclass(frozen=True)
class _Document:
    """What this rank has to do with one document: its shard, the mask's areas, and the shard's tokens as queries."""

    shard: Shard
    areas: list[Segment]
    queries: list[Run]

    @classmethod
    def of(cls, shard: Shard, mask: Mask) -> "_Document":
        runs = [Run(*span, (shard.rows(*span),)) for span in chunks(shard.length, shard.degree, shard.ring_index)]
        return cls(shard, mask.areas(shard.document, shard.length), runs)


def chunks(length: int, degree: int, ring_index: int) -> list[Span]:
    """The positions that a ring index holds: head and tail, one span where they are neighbours, without empty ones."""
    head, tail = head_span(length, degree, ring_index), tail_span(length, degree, ring_index)
    spans = [(head[0], tail[1])] if head[1] == tail[0] else [head, tail]
    return [span for span in spans if span[0] < span[1]]


def spans_needed(areas: Sequence[Segment], length: int, degree: int, source: int, target: int) -> list[Span]:
    """Which positions of ring index `source` the queries of ring index `target` see: disjoint spans, ascending."""
    needed: list[Span] = []
    for keys in chunks(length, degree, source):
        cuts = (area.cut(queries, keys) for queries in chunks(length, degree, target) for area in areas)
        for start, stop in sorted((cut.k_start, cut.k_stop) for cut in cuts if not cut.empty):
            if needed and start <= needed[-1][1]:
                needed[-1] = needed[-1][0], max(stop, needed[-1][1])
            else:
                needed.append((start, stop))
    return needed


def _stage(documents: Sequence[_Document], stage: int, stages: int, device: torch.device | str) -> Stage:
    sends: dict[int, list[range]] = defaultdict(list)
    receives: dict[int, list[tuple[int, Span]]] = defaultdict(list)
    for i, document in enumerate(documents):
        shard, mine = document.shard, document.shard.ring_index
        needed = partial(spans_needed, document.areas, shard.length, shard.degree)
        for other in range(shard.degree):
            if other != mine and stage_of((other - mine) % shard.degree, shard.degree, stages) == stage:
                sends[shard.rank_of(other)] += (shard.rows(*span) for span in needed(mine, other))
            if other != mine and stage_of((mine - other) % shard.degree, shard.degree, stages) == stage:
                receives[shard.rank_of(other)] += ((i, span) for span in needed(other, mine))

    keys: list[list[Run]] = [[] for _ in documents]
    row = 0
    for _, pieces in sorted(receives.items()):
        for i, (start, stop) in pieces:
            keys[i].append(Run(start, stop, (range(row, row + stop - start),)))
            row += stop - start
    return Stage(
        sends=tuple((peer, row_index(ranges, device)) for peer, ranges in sorted(sends.items()) if ranges),
        receives=tuple((peer, sum(b - a for _, (a, b) in pieces)) for peer, pieces in sorted(receives.items()) if pieces),
        calls=gathered_calls(((d.queries, runs, d.areas) for d, runs in zip(documents, keys, strict=True)), device),
    )

"""Timeline of a plan: when every rank works on which document, as plain data for the drawings.

The cost model gives the busy time of a rank in a micro-batch, not an order. The timeline puts the
widest rings first, so that the ranks of a ring work on it at the same time where possible, and
waiting for K and V last.
"""

from dataclasses import dataclass

import numpy as np

from longctx.planning.cost.model import NANOSECONDS, linear_ns
from longctx.planning.cost.rounds import plan_score
from longctx.planning.layout import shard_tokens
from longctx.planning.plan import Plan


@dataclass(frozen=True, slots=True)
class DocumentBlock:
    """One document in the timeline: rank first_rank + i works on it from start_s[i] to stop_s[i],
    in seconds of the step."""

    document: int
    degree: int
    micro_batch: int
    first_rank: int
    start_s: tuple[float, ...]
    stop_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Time in which a rank waits for an exchange of K and V that attention could not hide."""

    micro_batch: int
    rank: int
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class Timeline:
    """A step under a plan: blocks in the order in which ranks run them, waits, and (start, stop) of
    every micro-batch.

    The launch of a micro-batch precedes its start. The fixed cost of the step and the bubble of a
    pipeline follow the last micro-batch, up to the makespan.
    """

    ranks: int
    makespan_s: float
    blocks: tuple[DocumentBlock, ...]
    waits: tuple[Wait, ...]
    micro_batches: tuple[tuple[float, float], ...]


def timeline(plan: Plan) -> Timeline:
    """Returns the timeline of a plan, which ends at the makespan."""
    result = plan_score(plan)
    attention = result.attention.tolist()
    blocks = []
    waits = []
    spans = []
    now = 0
    for k, placements in enumerate(plan.micro_batches):
        now += result.launch_ns
        busy = [now] * plan.ranks
        for p in sorted(
            placements,
            key=lambda p: (-p.degree, p.first_rank, -plan.lengths[p.document], p.document),
        ):
            length = plan.lengths[p.document]
            tokens = np.array(
                [shard_tokens(length, p.degree, p.ring_index(rank)) for rank in p.ring]
            )
            start = busy[p.first_rank : p.first_rank + p.degree]
            stop = [
                a + attention[p.document] + b
                for a, b in zip(start, linear_ns(plan.profile, tokens).tolist(), strict=True)
            ]
            busy[p.first_rank : p.first_rank + p.degree] = stop
            blocks.append(
                DocumentBlock(
                    p.document,
                    p.degree,
                    micro_batch=k,
                    first_rank=p.first_rank,
                    start_s=_seconds(start),
                    stop_s=_seconds(stop),
                )
            )
        for rank, exposed in enumerate(result.exposed[k].tolist()):
            if exposed:
                waits.append(Wait(k, rank, *_seconds([busy[rank], busy[rank] + exposed])))
        spans.append((now / NANOSECONDS, (now + int(result.micro_batch_ns[k])) / NANOSECONDS))
        now += int(result.micro_batch_ns[k])
    return Timeline(
        plan.ranks,
        result.makespan_ns / NANOSECONDS,
        blocks=tuple(blocks),
        waits=tuple(waits),
        micro_batches=tuple(spans),
    )


def _seconds(values: list[int]) -> tuple[float, ...]:
    return tuple(value / NANOSECONDS for value in values)

"""Timeline: when every rank works on which document under a plan, as plain data for the drawings.

The cost model knows how long a rank is busy in a micro-batch, not in which order; here widest rings come first, so that a
ring's ranks work on it at the same time where they can, and a rank waits for K and V at the end.
"""

from dataclasses import dataclass

import numpy as np

from longctx.planning.assignment import Assignment
from longctx.planning.cost.model import NANOSECONDS, attention_ns, linear_ns, score
from longctx.planning.layout import shard_tokens
from longctx.planning.plan import Plan


@dataclass(frozen=True, slots=True)
class Block:
    """One document in the timeline: rank first_rank + i works on it from start_s[i] to stop_s[i] of the step."""

    document: int
    degree: int
    micro_batch: int
    first_rank: int
    start_s: tuple[float, ...]
    stop_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank waits for K and V that its attention could not hide."""

    micro_batch: int
    rank: int
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class Timeline:
    """A step under a plan: blocks in the order in which ranks run them, waits, and (start, stop) of every micro-batch.

    Before the start of a micro-batch lies its launch; after the last one the fixed cost of the step and the bubble of a
    pipeline, up to the makespan.
    """

    ranks: int
    makespan_s: float
    blocks: tuple[Block, ...]
    waits: tuple[Wait, ...]
    micro_batches: tuple[tuple[float, float], ...]


def timeline(plan: Plan) -> Timeline:
    """Computes the timeline of a plan; it ends at the plan's makespan."""
    lengths = np.array(plan.lengths, dtype=np.int64)
    assignment = Assignment.of(plan)
    result = score(plan.profile, lengths, assignment, plan.ranks, plan.pipeline)
    attention = attention_ns(plan.profile, lengths, assignment.degree).tolist()
    blocks, waits, spans = [], [], []
    now = 0
    for k, placements in enumerate(plan.micro_batches):
        now += result.launch_ns
        busy = [now] * plan.ranks
        for p in sorted(placements, key=lambda p: (-p.degree, p.first_rank, -plan.lengths[p.document], p.document)):
            length = plan.lengths[p.document]
            tokens = np.array([shard_tokens(length, p.degree, p.ring_index(rank)) for rank in p.ring])
            start = busy[p.first_rank : p.first_rank + p.degree]
            stop = [a + attention[p.document] + b for a, b in zip(start, linear_ns(plan.profile, tokens).tolist(), strict=True)]
            busy[p.first_rank : p.first_rank + p.degree] = stop
            blocks.append(Block(p.document, p.degree, k, p.first_rank, _seconds(start), _seconds(stop)))
        for rank, exposed in enumerate(result.exposed[k].tolist()):
            if exposed:
                waits.append(Wait(k, rank, *_seconds([busy[rank], busy[rank] + exposed])))
        spans.append((now / NANOSECONDS, (now + int(result.micro_batch_ns[k])) / NANOSECONDS))
        now += int(result.micro_batch_ns[k])
    return Timeline(plan.ranks, result.makespan_ns / NANOSECONDS, tuple(blocks), tuple(waits), tuple(spans))


def _seconds(values: list[int]) -> tuple[float, ...]:
    return tuple(value / NANOSECONDS for value in values)

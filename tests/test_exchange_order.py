"""Messages of all ranks match in order and size, and cross the network once per node; checked without sending any.

Every rank runs forward and backward alone, with an exchange that only records its messages.
"""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.attention import Schedule
from longctx.attention.exchange import Rows
from longctx.planning.layout import Placement
from tests.attention_cases import Case
from tests.test_attention import cases, masks, swapped


@dataclass
class Log:
    """Records (peer, rows) of every message that one rank posts, in order."""

    sent: list[tuple[int, int]] = field(default_factory=list)
    received: list[tuple[int, int]] = field(default_factory=list)

    def __call__(self, group: Any, where: str) -> "Log":
        return self

    def start(self, outgoing: list[tuple[int, torch.Tensor]], incoming: torch.Tensor, rows: Rows) -> "Arrived":
        self.sent += [(peer, len(tensor)) for peer, tensor in outgoing]
        self.received += rows
        assert sum(count for _, count in rows) == len(incoming)
        return Arrived(incoming.zero_())


@dataclass
class Arrived:
    incoming: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.incoming


def logs(case: Case) -> list[Log]:
    made = []
    for rank in range(case.ranks):
        log = Log()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "is_initialized", lambda: True)
            patch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
            attention = case.attention(rank, log)
        q, k, v, dout = (tensor[case.rows(rank)].requires_grad_() for tensor in case.inputs())
        attention(q, k, v).backward(dout.detach())
        made.append(log)
    return made


@given(data=st.data(), case=cases(max_ranks=9))
@settings(max_examples=60, deadline=None)
def test_messages_meet_in_order(data: st.DataObject, case: Case) -> None:
    """Each rank receives exactly the messages sent to it, in order; otherwise gloo aborts and NCCL hangs."""
    case = replace(
        case,
        mask=data.draw(masks(case.lengths)),
        keep_kv=data.draw(st.booleans()),
        ranks_per_node=data.draw(st.none() | st.integers(1, 4)),
    )
    if data.draw(st.booleans()):
        case = data.draw(swapped(case))
    sent: dict[tuple[int, int], list[int]] = defaultdict(list)
    awaited: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, log in enumerate(logs(case)):
        for peer, rows in log.sent:
            sent[rank, peer].append(rows)
        for peer, rows in log.received:
            awaited[peer, rank].append(rows)
    assert sent == awaited


@given(
    data=st.data(),
    length=st.integers(1, 200),
    degree=st.integers(2, 16),
    first=st.integers(0, 5),
    reverse=st.booleans(),
    per_node=st.integers(2, 8),
    stages=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_rows_cross_the_network_once_a_node(
    data: st.DataObject, length: int, degree: int, first: int, reverse: bool, per_node: int, stages: int
) -> None:
    """A node receives each remote key that its queries see exactly once."""
    placement = Placement(0, first, degree, reverse)
    case = Case(first + degree, (length,), (placement,), exchange_stages=stages, mask=data.draw(masks((length,))))
    rows = [case.rows(rank) for rank in range(case.ranks)]
    crossing: dict[int, int] = defaultdict(int)
    for rank in range(case.ranks):
        schedule = Schedule.build(case.layout(rank), mask=case.mask, ranks_per_node=per_node)
        for hop in (hop for stage in schedule.stages for hop in stage.hops):
            crossing[rank // per_node] += sum(count for peer, count in hop.receives if peer // per_node != rank // per_node)
    for node in range(-(-case.ranks // per_node)):
        mine = torch.zeros(length, dtype=torch.bool)
        mine[torch.cat(rows[node * per_node : (node + 1) * per_node])] = True
        seen = case.mask.visible(0, length)[mine].any(dim=0)
        assert crossing[node] == (seen & ~mine).sum()


def test_two_levels_move_a_fraction_over_the_network() -> None:
    """At degree 16 over two nodes of 8, each rank would fetch from 8 ranks of the other node, instead of one copy per node."""
    case = Case(16, (3200,), (Placement(0, 0, 16),))

    def crossing(ranks_per_node: int | None) -> int:
        schedules = [Schedule.build(case.layout(rank), ranks_per_node=ranks_per_node) for rank in range(16)]
        return sum(
            count
            for rank, schedule in enumerate(schedules)
            for stage in schedule.stages
            for hop in stage.hops
            for peer, count in hop.receives
            if peer // 8 != rank // 8
        )

    assert crossing(None) / crossing(8) == pytest.approx(8, rel=0.15)

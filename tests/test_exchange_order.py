"""Messages of all ranks match in order and size, and cross the network once per node; checked without sending any.

Every rank runs forward and backward alone, with an exchange that only records its messages, or the real one on a recorder.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.attention import Schedule, exchange
from longctx.attention.exchange import Exchange, Rows
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

    def hold(self, *tensors: torch.Tensor) -> None: ...

    def beside(self, hops: Callable[[], None], device: torch.device) -> Callable[[], None]:
        hops()
        return lambda: None


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


def varied(data: st.DataObject, case: Case) -> Case:
    """Draws what changes the messages of a case: mask, kept keys, nodes, and swapped heads."""
    case = replace(
        case,
        mask=data.draw(masks(case.lengths)),
        keep_kv=data.draw(st.booleans()),
        ranks_per_node=data.draw(st.none() | st.integers(1, 4)),
    )
    if data.draw(st.booleans()):
        case = data.draw(swapped(case))
    return case


@given(data=st.data(), case=cases(max_ranks=9))
@settings(max_examples=60, deadline=None)
def test_messages_meet_in_order(data: st.DataObject, case: Case) -> None:
    """Each rank receives exactly the messages sent to it, in order; otherwise gloo aborts and NCCL hangs."""
    case = varied(data, case)
    sent: dict[tuple[int, int], list[int]] = defaultdict(list)
    awaited: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, log in enumerate(logs(case)):
        for peer, rows in log.sent:
            sent[rank, peer].append(rows)
        for peer, rows in log.received:
            awaited[peer, rank].append(rows)
    assert sent == awaited


Message = tuple[int, int, int]
"""(sender, receiver, number): the first message between two ranks has number 0."""


class Batches:
    """Stands for torch's messages of one rank: records the batches that the real exchange posts, and sends nothing."""

    def __init__(self, patch: pytest.MonkeyPatch, rank: int, ranks: int) -> None:
        self.rank = rank
        self.posted: list[set[Message]] = []
        self.counts: dict[tuple[int, int], int] = defaultdict(int)
        for name, value in {"is_initialized": True, "get_rank": rank, "get_world_size": ranks}.items():
            patch.setattr(dist, name, lambda *group, value=value: value)
        patch.setattr(dist, "P2POp", lambda *arguments: arguments)
        patch.setattr(dist, "batch_isend_irecv", self.post)

    def post(self, operations: list[Any]) -> list[Any]:
        batch = set()
        for operation, tensor, peer, _ in operations:
            ends = (self.rank, peer) if operation is dist.isend else (peer, self.rank)
            if operation is dist.irecv:
                tensor.zero_()
            batch.add((*ends, self.counts[ends]))
            self.counts[ends] += 1
        self.posted.append(batch)
        return [SimpleNamespace(wait=lambda: None)]


def batches(case: Case) -> list[list[set[Message]]]:
    """Returns the batches that every rank posts in forward and backward."""
    found = []
    for rank in range(case.ranks):
        with pytest.MonkeyPatch.context() as patch:
            recorded = Batches(patch, rank, case.ranks)
            q, k, v, dout = (tensor[case.rows(rank)].requires_grad_() for tensor in case.inputs())
            case.attention(rank, Exchange)(q, k, v).backward(dout.detach())
        found.append(recorded.posted)
    return found


def left_over(posted: list[list[set[Any]]]) -> int:
    """Plays the batches; a rank begins one when all messages of the one before have met. Returns how many never end."""
    waiting = [list(batches) for batches in posted]
    while True:
        begun = [batches[0] if batches else set() for batches in waiting]
        met = set().union(*(begun[a] & begun[b] for a in range(len(begun)) for b in range(a)))
        if not met:
            return sum(map(len, waiting))
        for batch in begun:
            batch -= met
        waiting = [batches[1:] if batches and not batches[0] else batches for batches in waiting]


@given(data=st.data(), case=cases(max_ranks=9))
@settings(max_examples=40, deadline=None)
def test_rounds_meet(data: st.DataObject, case: Case) -> None:
    """No rank waits for ever if it must end a batch before the next, as in a stream of NCCL; batches have at most the cap."""
    case = varied(data, case)
    cap = data.draw(st.sampled_from([4, 8, 64]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "OPERATIONS_PER_BATCH", cap)
        posted = batches(case)
    assert all(0 < len(batch) <= cap for batches in posted for batch in batches)
    assert left_over(posted) == 0


def test_a_ring_of_64_ranks_has_two_rounds() -> None:
    """In one level a rank has 126 messages at once: two batches in forward, the same in backward, and for the gradients."""
    case = Case(64, (1280,), (Placement(0, 0, 64),), exchange_stages=1)
    with pytest.MonkeyPatch.context() as patch:
        recorded = Batches(patch, 5, case.ranks)
        q, k, v, dout = (tensor[case.rows(5)].requires_grad_() for tensor in case.inputs())
        case.attention(5, Exchange)(q, k, v).backward(dout.detach())
    assert [len(batch) for batch in recorded.posted] == [64, 62] * 3


@pytest.mark.parametrize("ranks", [2, 3, 17, 64, 100, 513])
def test_both_ends_of_a_message_have_the_same_round(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """And all messages of a rank to and from all others, in one hop, keep to the cap in every round."""
    numbers: dict[tuple[int, int], int] = {}
    some = sorted({0, 1, ranks // 3, ranks // 2, ranks - 1})
    for rank in some:
        monkeypatch.setattr(dist, "get_world_size", lambda group: ranks)
        monkeypatch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
        one = Exchange(None, "a test")
        numbers |= {(rank, peer): one._round(peer) for peer in range(ranks) if peer != rank}
    assert all(numbers[a, b] == numbers[b, a] for a in some for b in some if a != b)
    of_rank_0 = [number for (rank, _), number in numbers.items() if rank == 0]
    assert all(2 * of_rank_0.count(number) <= exchange.OPERATIONS_PER_BATCH for number in range(max(of_rank_0) + 1))
    assert max(of_rank_0) + 1 == -(-2 * (ranks - 1) // exchange.OPERATIONS_PER_BATCH)


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

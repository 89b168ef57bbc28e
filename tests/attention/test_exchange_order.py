"""Messages of all ranks match in order and size, and cross the network once per node; checked
without sending any.

Every rank runs forward and backward alone, with the real exchange on a recorder of its messages.
"""

from collections import defaultdict
from copy import deepcopy
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.attention import RingSchedule, exchange
from longctx.attention.exchange import Exchange
from longctx.planning.layout import Placement
from tests.attention.test_attention import cases, masks, swapped
from tests.attention_cases import Case
from tests.marks import examples


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


Message = tuple[Any, int, int, int, int]
"""(group, sender, receiver, number, size): the first message of a group between two ranks has
number 0."""
ACROSS: Any = "group of messages between nodes"


@dataclass
class Batch:
    """A batch that a rank posts to a group, after it has waited for the batches with some
    numbers."""

    group: Any
    messages: set[Message]
    after: frozenset[int]


class Batches:
    """Stands for torch's messages of one rank: records the batches that the real exchange posts,
    and sends nothing."""

    def __init__(self, patch: pytest.MonkeyPatch, rank: int, ranks: int) -> None:
        self.rank = rank
        self.posted: list[Batch] = []
        self.waited: set[int] = set()
        self.counts: dict[tuple[Any, int, int], int] = defaultdict(int)
        for name, value in {
            "is_initialized": True,
            "get_rank": rank,
            "get_world_size": ranks,
        }.items():
            patch.setattr(dist, name, lambda *group, value=value: value)
        patch.setattr(dist, "P2POp", lambda *arguments: arguments)
        patch.setattr(dist, "batch_isend_irecv", self.post)

    def post(self, operations: list[Any]) -> list[Any]:
        batch, number = Batch(operations[0][3], set(), frozenset(self.waited)), len(self.posted)
        for operation, tensor, peer, group in operations:
            ends = (group, self.rank, peer) if operation is dist.isend else (group, peer, self.rank)
            if operation is dist.irecv:
                tensor.zero_()
            assert group == batch.group
            batch.messages.add((*ends, self.counts[ends], tensor.numel()))
            self.counts[ends] += 1
        self.posted.append(batch)
        return [SimpleNamespace(wait=lambda: self.waited.add(number))]


def batches(case: Case) -> list[list[Batch]]:
    """Returns the batches that every rank posts in forward and backward."""
    found = []
    for rank in range(case.ranks):
        with pytest.MonkeyPatch.context() as patch:
            recorded = Batches(patch, rank, case.ranks)
            q, k, v, dout = (tensor[case.rows(rank)].requires_grad_() for tensor in case.inputs())
            case.attention(rank, Exchange)(q, k, v).backward(dout.detach())
        found.append(recorded.posted)
    return found


def begun(batches: list[Batch], *, in_order: bool) -> set[Message]:
    """Returns the messages of a rank that are under way: of the first batch of each group that is
    not over.

    A batch begins when those are over that were waited for before it was posted; `in_order`, when
    all before it are.
    """
    under_way: dict[Any, set[Message]] = {}
    for number, batch in enumerate(batches):
        before = range(number) if in_order else batch.after
        if batch.messages and not any(batches[other].messages for other in before):
            under_way.setdefault(batch.group, batch.messages)
    return set().union(*under_way.values())


def left_over(posted: list[list[Batch]], *, in_order: bool = False) -> int:
    """Plays the batches. Returns how many never end."""
    while True:
        ranks = [begun(batches, in_order=in_order) for batches in posted]
        met = set().union(*(ranks[a] & ranks[b] for a in range(len(ranks)) for b in range(a)))
        for batch in (batch for batches in posted for batch in batches):
            batch.messages -= met
        if not met:
            return sum(bool(batch.messages) for batches in posted for batch in batches)


@given(data=st.data(), case=cases(max_ranks=9))
@settings(max_examples=examples(60), deadline=None)
def test_rounds_meet(data: st.DataObject, case: Case) -> None:
    """Each rank receives exactly the messages sent to it, in order and size: otherwise gloo aborts
    and NCCL hangs.

    No rank waits for ever if it must end a batch before the next of its group, as in a stream of
    NCCL, or before the next of any group, as in one queue of a GPU. Batches have at most the cap.
    """
    case = replace(varied(data, case), across=data.draw(st.sampled_from([None, ACROSS])))
    cap = data.draw(st.sampled_from([4, 8, 64]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "OPERATIONS_PER_BATCH", cap)
        posted = batches(case)
    assert all(0 < len(batch.messages) <= cap for batches in posted for batch in batches)
    assert left_over(deepcopy(posted), in_order=True) == left_over(posted) == 0


def test_messages_between_nodes_do_not_wait_for_those_inside() -> None:
    """They have a communicator of their own, and the first ones are posted before anything is
    waited for."""
    case = Case(
        24, (3840,), (Placement(0, 0, 24),), ranks_per_node=8, across=ACROSS, exchange_rounds=2
    )
    for rank, posted in enumerate(batches(case)):
        for batch in posted:
            crosses = {sender // 8 != receiver // 8 for _, sender, receiver, _, _ in batch.messages}
            assert crosses == {batch.group == ACROSS}
        first = [batch.group for batch in posted if not batch.after]
        assert first[:2] == [None, ACROSS], f"rank {rank}"
        # A second hop leaves beside the next first hop, also in backward.
        assert len([batch for batch in posted if batch.group == ACROSS]) >= 6
    # With one rank in each node there are none inside.
    schedule = RingSchedule.build(case.layout(0), ranks_per_node=1)
    assert len(schedule.rounds) == 2


def test_a_ring_of_64_ranks_has_two_rounds() -> None:
    """In one level a rank has 126 messages at once: two batches in forward, the same in backward,
    and for the gradients."""
    case = Case(64, (1280,), (Placement(0, 0, 64),), exchange_rounds=1)
    with pytest.MonkeyPatch.context() as patch:
        recorded = Batches(patch, 5, case.ranks)
        q, k, v, dout = (tensor[case.rows(5)].requires_grad_() for tensor in case.inputs())
        case.attention(5, Exchange)(q, k, v).backward(dout.detach())
    assert [len(batch.messages) for batch in recorded.posted] == [64, 62] * 3


@pytest.mark.parametrize("ranks", [2, 3, 17, 64, 100, 513])
def test_both_ends_of_a_message_have_the_same_round(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """And all messages of a rank to and from all others, in one hop, keep to the cap in every
    round."""
    numbers: dict[tuple[int, int], int] = {}
    some = sorted({0, 1, ranks // 3, ranks // 2, ranks - 1})
    for rank in some:
        monkeypatch.setattr(dist, "get_world_size", lambda group: ranks)
        monkeypatch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
        one = Exchange(None, "a test")
        numbers |= {(rank, peer): one.route(peer).order[1] for peer in range(ranks) if peer != rank}
    assert all(numbers[a, b] == numbers[b, a] for a in some for b in some if a != b)
    of_rank_0 = [number for (rank, _), number in numbers.items() if rank == 0]
    assert all(
        2 * of_rank_0.count(number) <= exchange.OPERATIONS_PER_BATCH
        for number in range(max(of_rank_0) + 1)
    )
    assert max(of_rank_0) + 1 == -(-2 * (ranks - 1) // exchange.OPERATIONS_PER_BATCH)


@given(
    data=st.data(),
    length=st.integers(1, 200),
    degree=st.integers(2, 16),
    first=st.integers(0, 5),
    reverse=st.booleans(),
    per_node=st.integers(2, 8),
    rounds=st.integers(1, 4),
)
@settings(max_examples=examples(60), deadline=None)
def test_rows_cross_the_network_once_a_node(
    data: st.DataObject,
    length: int,
    degree: int,
    first: int,
    reverse: bool,
    per_node: int,
    rounds: int,
) -> None:
    """A node receives each remote key that its queries see exactly once."""
    placement = Placement(0, first, degree, reverse)
    case = Case(
        first + degree,
        (length,),
        (placement,),
        exchange_rounds=rounds,
        mask=data.draw(masks((length,))),
    )
    rows = [case.rows(rank) for rank in range(case.ranks)]
    crossing: dict[int, int] = defaultdict(int)
    for rank in range(case.ranks):
        schedule = RingSchedule.build(case.layout(rank), mask=case.mask, ranks_per_node=per_node)
        for hop in (hop for round_ in schedule.rounds for hop in round_.hops):
            crossing[rank // per_node] += sum(
                count for peer, count in hop.receives if peer // per_node != rank // per_node
            )
    for node in range(-(-case.ranks // per_node)):
        mine = torch.zeros(length, dtype=torch.bool)
        mine[torch.cat(rows[node * per_node : (node + 1) * per_node])] = True
        seen = case.mask.visible(0, length)[mine].any(dim=0)
        assert crossing[node] == (seen & ~mine).sum()


def test_ranks_are_looked_up_once_for_a_schedule() -> None:
    """Torch checks the group at every look-up: in a ring of 64 they would take milliseconds per
    layer."""
    case, looked_up, counts = Case(4, (90,), (Placement(0, 0, 4),)), list[object](), []
    with pytest.MonkeyPatch.context() as patch:
        Batches(patch, 0, case.ranks)
        for name in ("get_rank", "get_world_size", "get_global_rank"):
            found = getattr(dist, name)
            patch.setattr(
                dist, name, lambda *given, found=found: looked_up.append(given) or found(*given)
            )
        q, k, v, dout = (tensor[case.rows(0)].requires_grad_() for tensor in case.inputs())
        attention = case.attention(0, Exchange)
        for layer in range(3):
            attention(q, k, v, layer).backward(dout.detach())
            counts.append(len(looked_up))
    assert counts[0] > 0 and counts == counts[:1] * 3

"""Warm-up: every rank of a group takes part in its first batch of messages, in groups of any
size."""

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist

from longctx.attention import ExchangeError, warm_up
from longctx.attention.exchange import Exchange
from longctx.parallel.mesh import make_groups
from tests.workers import Workers


class Batches:
    """Records the groups and sizes of all batches of messages, which are sent as usual."""

    def __init__(self) -> None:
        self.seen: list[tuple[dist.ProcessGroup, int]] = []
        self.send = dist.batch_isend_irecv

    def __call__(self, operations: list[dist.P2POp]) -> list[dist.Work]:
        self.seen.append((operations[0].group, len(operations)))
        return self.send(operations)


def groups_of_rank(groups: list[list[int] | None]) -> list[list[int]]:
    """Warms up each of `groups` that this rank is in (None: the default group); returns the sizes
    of its batches."""
    found = []
    for members in groups:
        group = None if members is None else dist.new_group(members)
        if members is None or dist.get_rank() in members:
            with pytest.MonkeyPatch.context() as patch:
                batches = Batches()
                patch.setattr(dist, "batch_isend_irecv", batches)
                warm_up(group, "cpu")
            found.append([size for _, size in batches.seen])
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_rank_of_a_group_is_in_one_batch(workers: Workers, ranks: int) -> None:
    groups = [
        None,
        [0],
        list(range(1, ranks)) or None,
        sorted({0, ranks - 1}),
        list(range(ranks))[::-1],
    ]
    for rank, batches in enumerate(workers.run(groups_of_rank, ranks, groups)):
        sizes = [
            ranks if members is None else len(members)
            for members in groups
            if members is None or rank in members
        ]
        assert batches == [[2] if size > 1 else [] for size in sizes]


def groups_without_a_batch(tensor: int, pipeline: int, nodes: int) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "WORLD_SIZE": dist.get_world_size(),
            "LOCAL_WORLD_SIZE": dist.get_world_size() // nodes,
        }.items():
            patch.setenv(name, str(value))
        batches = Batches()
        patch.setattr(dist, "batch_isend_irecv", batches)
        mesh = make_groups(torch.device("cpu"), tensor=tensor, pipeline=pipeline, timeout_s=30.0)
    warm = [group for group, _ in batches.seen]
    assert (mesh.across is not None) == (nodes > 1) and mesh.across is not mesh.exchange
    groups = {
        "exchange": mesh.exchange,
        "across": mesh.across,
        "pipeline": mesh.pipeline,
        "ends": mesh.ends,
    }
    return [
        name
        for name, group in groups.items()
        if group is not None and group.size() > 1 and group not in warm
    ]


@pytest.mark.parametrize(
    ("ranks", "tensor", "pipeline", "nodes"),
    [(3, 1, 1, 1), (3, 1, 3, 3), (4, 1, 2, 1), (4, 2, 2, 2)],
)
def test_the_mesh_warms_up_all_groups_for_messages(
    workers: Workers, ranks: int, tensor: int, pipeline: int, nodes: int
) -> None:
    assert workers.run(groups_without_a_batch, ranks, tensor, pipeline, nodes) == [[]] * ranks


def with_a_silent_neighbor() -> str:
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    if dist.get_rank() == 1:
        return ""
    try:
        warm_up(group, "cpu")
    except ExchangeError as error:
        return str(error)
    return "no error"


def test_a_rank_that_does_not_come_is_an_error(workers: Workers) -> None:
    said = workers.run(with_a_silent_neighbor, 2)[0]
    assert "rank 0 of the domain: exchange with rank(s) 1 failed in the warm-up" in said


def test_a_message_of_another_rank_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Arrived:
        def wait(self) -> torch.Tensor:
            return torch.tensor([[2]])

    def start(*arguments: Any) -> Arrived:
        return Arrived()

    monkeypatch.setattr(Exchange, "start", start)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 4)
    with pytest.raises(
        ExchangeError, match="rank 0 of the group received a message of rank 2 from rank 3"
    ):
        warm_up(None, "cpu")

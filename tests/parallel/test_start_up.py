"""The communicators of a run of 64 ranks: how many a rank is in, which every rank makes in the same
order. What they take: bench/start_up.py."""

import os
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from longctx.parallel import mesh
from tests.whole_size import fake_ranks

RANKS = 64
DEFAULT_AND_CONTROL = Counter({64: 2})


def made(rank: int, sizes: dict[str, int], per_node: int) -> tuple[Counter[int], list[Any]]:
    """Makes the groups of one rank. Returns the sizes of those with several ranks that it is in,
    and the ranks of all that it has to make, in order."""
    order: list[Any] = []
    make = distributed_c10d._new_group_with_tag

    def recorded(ranks: Any = None, *others: Any, **named: Any) -> Any:
        order.append(ranks)
        return make(ranks, *others, **named)

    variables = {"LOCAL_WORLD_SIZE": str(per_node), "WORLD_SIZE": str(RANKS), "RANK": str(rank)}
    with (
        mock.patch.dict(os.environ, variables),
        mock.patch.object(mesh, "warm_up"),
        mock.patch.object(distributed_c10d, "_new_group_with_tag", recorded),
        fake_ranks(rank, RANKS),
    ):
        mesh.make_groups(torch.device("cpu"), **sizes)
        members = [dist.get_world_size(group) for group in distributed_c10d._world.pg_map]
    return Counter(size for size in members if size > 1), order


@pytest.mark.filterwarnings("ignore:Set timeout")
@pytest.mark.parametrize(
    ("sizes", "per_node", "expected"),
    [
        # One domain: its group is the default one. Two exchanges.
        ({}, 8, {64: 2}),
        ({}, 64, {64: 1}),
        # Weights have two axes.
        ({"shard_ranks": 8}, 8, {64: 2, 8: 2}),
        # A domain of 8 with two exchanges; tokens; tensor ranks and the ends of a pipeline; stages,
        # and the mesh's own axis of them, which nothing uses, so that NCCL never connects it.
        ({"tensor": 2, "pipeline": 4}, 8, {8: 3, 16: 1, 2: 2, 4: 2}),
        # Two axes of experts, and tokens.
        ({"expert": 8}, 8, {64: 3, 8: 2}),
    ],
)
def test_communicators_of_64_ranks(
    sizes: dict[str, int], per_node: int, expected: dict[int, int]
) -> None:
    """A communicator takes memory of each GPU, and time at the start."""
    first, order = made(0, sizes, per_node)
    assert first == DEFAULT_AND_CONTROL + Counter(expected)
    for rank in (13, 63):
        assert made(rank, sizes, per_node) == (first, order), (
            "ranks that make groups in another order wait for ever"
        )
    assert len(order) <= 5 * RANKS

"""The ranks of a group issue the same collectives in the same order in a whole step of the trainer,
and messages meet: no rank waits for ever. `tests/step_views.py` says how ranks are seen."""

from dataclasses import replace

import pytest

from tests.step_views import ROWS, Issued, World, differences, waiting

LAYERS = "model.overrides.num_hidden_layers=4"
STAGES = ["parallel.pipeline_parallel_size=2", LAYERS]
TENSOR = "parallel.tensor_parallel_size=2"
MIXTURE = ["model.preset=tiny-moe", "model.overrides.moe_intermediate_size=16"]
TINY = "model.preset=tiny"
CASES = {
    "two levels": (64, 8, [TINY]),
    "tensor ranks and stages": (64, 8, [TINY, TENSOR, *STAGES]),
    "copies on nodes": (64, 8, [TINY, "parallel.shard_ranks=8", "parallel.reshard_after=step"]),
    "interleaved stages": (8, 2, [TINY, *STAGES, "parallel.pipeline_chunks=2"]),
    "experts": (8, 4, [*MIXTURE, "parallel.expert_parallel_size=2"]),
    "kept weights": (
        12,
        4,
        [TINY, "parallel.reshard_after=micro_batch", "train.recompute=norms", LAYERS],
    ),
}


@pytest.fixture(scope="module")
def world() -> World:
    """Returns two nodes of three ranks."""
    return World.of(6, 3, [TINY])


@pytest.fixture(scope="module")
def views(world: World) -> dict[int, list[Issued]]:
    return world.views(range(world.ranks))


def assert_meets(world: World, views: dict[int, list[Issued]]) -> None:
    """All ranks meet, in a step of several micro-batches with rings over nodes."""
    degrees = [each.degree for placed in world.plan.micro_batches for each in placed]
    assert world.plan.profile.ranks_per_node <= world.per_node
    assert max(degrees) > world.plan.profile.ranks_per_node and len(world.plan.micro_batches) > 1
    kinds = {one.kind for issued in views.values() for one in issued}
    assert kinds >= {"send", "recv_", "_allgather_base_", "_reduce_scatter_base_"}
    assert differences(views) == []
    assert waiting(views) == {}


def test_all_ranks_issue_the_same(world: World, views: dict[int, list[Issued]]) -> None:
    assert_meets(world, views)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_all_ranks_of_large_runs_issue_the_same(name: str) -> None:
    ranks, per_node, settings = CASES[name]
    world = World.of(ranks, per_node, settings)
    views = world.views(range(ranks))
    travel = any(one.kind == ROWS for issued in views.values() for one in issued)
    assert travel == (name == "experts")
    assert_meets(world, views)


def place_of(views: dict[int, list[Issued]], rank: int, kind: str) -> int:
    """Returns the place of the last thing of a kind that a rank issues."""
    return max(i for i, one in enumerate(views[rank]) if one.kind == kind)


def test_a_rank_that_leaves_out_a_collective_is_found(views: dict[int, list[Issued]]) -> None:
    for kind in ("_allgather_base_", "_reduce_scatter_base_", "allgather_"):
        faulty = {rank: list(issued) for rank, issued in views.items()}
        del faulty[4][place_of(views, 4, kind)]
        assert differences(faulty) and waiting(faulty)


def test_a_rank_with_another_order_is_found(views: dict[int, list[Issued]]) -> None:
    """Between groups, too, in each of which the order is right: two ranks wait for each other."""
    faulty = {rank: list(issued) for rank, issued in views.items()}
    place = place_of(views, 2, "_reduce_scatter_base_")
    message = max(i for i in range(place) if views[2][i].kind in ("send", "recv_"))
    batch = [one for one in views[2] if one.batch == views[2][message].batch]
    others = [one for one in views[2] if one not in batch]
    collective = views[2][place]
    faulty[2] = [*others[: others.index(collective) + 1], *batch]
    faulty[2] += others[others.index(collective) + 1 :]
    assert differences(faulty) == [] and waiting(faulty)


def test_messages_of_another_size_are_found(views: dict[int, list[Issued]]) -> None:
    faulty = {rank: list(issued) for rank, issued in views.items()}
    place = place_of(views, 0, "send")
    faulty[0][place] = replace(faulty[0][place], sizes=("(1, 2) torch.float32",))
    assert len(differences(faulty)) == 1 and waiting(faulty) == {}

"""Ranks that differ in settings, data, versions or copies of weights are found, and named."""

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from longctx.config import load
from longctx.training import agreement
from longctx.training.agreement import (
    RanksDiffer,
    _checksum,
    identity,
    require_same,
    require_same_copies,
)
from tests import launched
from tests.training_cases import SMALL, make_store, start
from tests.workers import Workers


def differing(ranks: int) -> str:
    """Returns what a rank is told if rank 1 has another value, rank 2 an additional one, and the
    rest are the same."""
    rank = dist.get_rank()
    mine = {"a": "1", "b": "2" if rank == 1 else "3"} | ({"c": "4"} if rank == 2 else {})
    require_same({"a": "1"}, dist.group.WORLD or dist.new_group())
    try:
        require_same(mine, dist.group.WORLD or dist.new_group())
    except RanksDiffer as error:
        return str(error)
    return ""


def test_differences_are_named_on_every_rank(workers: Workers) -> None:
    said = workers.run(differing, 4, 4)
    assert len(set(said)) == 1
    assert "b: 3 on ranks 0, 2 to 3; 2 on rank 1\n" in said[0]
    assert "c: nothing on ranks 0 to 1, 3; 4 on rank 2\n" in said[0]
    assert "  a:" not in said[0]


def test_the_run_folder_may_differ() -> None:
    one, other = (
        load(None, ["data.store=s", f"train.run_dir={run}", f"train.seed={seed}"])
        for run, seed in (("a", 1), ("b", 2))
    )
    mine, theirs = (identity(config, ["f"], None) for config in (one, other))
    versions = {name.removeprefix("version of ") for name in mine if name.startswith("version of ")}
    assert versions == {"longctx", "torch", "numpy", "transformers"}
    assert {name for name in mine if mine[name] != theirs[name]} == {"train.seed"}


def test_the_checksum_knows_the_places_of_bits() -> None:
    """Also in which of its parts a number is."""
    weights = [torch.zeros(2 << 20, dtype=torch.int8) for _ in range(3)]
    for weight, place in zip(weights, (0, 2, 1 << 20), strict=True):
        weight[place] = 1
    assert len({int(_checksum(weight)) for weight in weights}) == 3


def copies(store: Path, run: Path, settings: list[str], spoiled: str | None) -> str:
    """Returns the error of a step after one bit of a weight has changed on rank 1; an empty text if
    there is none. Copies are compared after every second step."""
    trainer = start(store, run, settings)
    with trainer.loader, mock.patch.object(agreement, "EVERY", 2):
        trainer.step()
        require_same_copies(trainer.model, 1, trainer.mesh.control)
        if spoiled is not None:
            weight = dict(trainer.model.named_parameters())[spoiled]
            assert isinstance(weight, DTensor)
            if dist.get_rank() == 1:
                # A high bit, which no update rounds away.
                weight.to_local().view(torch.int32).flatten()[0] ^= 1 << 20
        try:
            trainer.step()
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("ranks", "settings", "spoiled"),
    [
        (2, ["parallel.shard_ranks=1", "batch.tokens_per_rank=400"], "layers.0.mlp.up_proj.weight"),
        (
            2,
            ["parallel.tensor_parallel_size=2", "batch.tokens_per_rank=750"],
            "layers.1.input_layernorm.weight",
        ),
        (2, ["batch.tokens_per_rank=400"], None),
    ],
)
def test_a_flipped_bit_of_a_copy_is_found(
    workers: Workers, tmp_path: Path, ranks: int, settings: list[str], spoiled: str | None
) -> None:
    store = make_store(tmp_path)
    said = workers.run(
        copies,
        ranks,
        store,
        tmp_path / "run",
        ["model.overrides.num_key_value_heads=2", *settings],
        spoiled,
    )
    for text in said:
        assert (
            text == ""
            if spoiled is None
            else f"1 weights, such as {spoiled}, differ between ranks 0 to 1" in text
        )


def arguments(tmp_path: Path, store: Path, *given: str) -> list[str]:
    """Those of a small run."""
    settings = [
        *SMALL,
        f"data.store={store}",
        f"train.run_dir={tmp_path / 'run'}",
        "batch.tokens_per_rank=750",
        *given,
    ]
    return ["train", *(f"--{setting}" for setting in settings)]


def test_a_run_whose_ranks_differ_does_not_start(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    different = [
        (f"optimizer.learning_rate={0.01 * size}", f"parallel.tensor_parallel_size={size}")
        for size in (1, 2)
    ]
    group = launched.start(
        [arguments(tmp_path, store, *given) for given in different], tmp_path / "output"
    )
    assert not group.end() and group.codes == [2, 2], group.said
    assert "optimizer.learning_rate: 0.01 on rank 0; 0.02 on rank 1" in group.errors[0]
    assert "parallel.tensor_parallel_size: 1 on rank 0; 2 on rank 1" in group.errors[0]


def test_ranks_that_do_not_join_are_named(tmp_path: Path) -> None:
    alone = launched.start(
        [arguments(tmp_path, make_store(tmp_path), "train.timeout_s=2")],
        tmp_path / "output",
        world=3,
    )
    assert not alone.end() and alone.codes == [2], alone.said
    assert (
        "ranks 1 to 2 of 3 did not join at 127.0.0.1:" in alone.errors[0]
        and "within 2 s" in alone.errors[0]
    )

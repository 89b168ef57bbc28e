"""Checkpoints of transformers in the trainer: read, packed, split over ranks and sharded, against transformers alone."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.workers import Workers

transformers = pytest.importorskip("transformers")

from tests.huggingface_cases import build_model  # noqa: E402
from tests.pretrained_cases import largest_error, make_batch, make_trainer, reference, step, whole  # noqa: E402

KINDS = ("llama", "gemma2", "mixtral", "gpt2", "phi", "cohere", "deepseek_v3", "gpt_oss")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    for kind in KINDS:
        build_model(kind, "eager").save_pretrained(folder / kind)
    return {kind: folder / kind for kind in KINDS}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_that_of_transformers(workers: Workers, checkpoints: dict[str, Path], kind: str, ranks: int) -> None:
    loss, gradients, state = reference(checkpoints[kind])
    for found_loss, found_gradients, found_state in workers.run(step, ranks, checkpoints[kind], []):
        assert found_state.keys() == state.keys()
        for name, value in state.items():
            assert torch.equal(found_state[name], value), name
        assert found_loss == pytest.approx(loss, rel=1e-5)
        assert largest_error(found_gradients, gradients) < 1e-4


def trained_weights(folder: Path) -> tuple[bool, dict[str, float]]:
    """Whether the optimizer has the shards, and by how much a step moves every weight."""
    trainer = make_trainer(folder, [])
    sharded = all(isinstance(weight, DTensor) for group in trainer.optimizer.param_groups for weight in group["params"])
    before = {name: whole(weight).clone() for name, weight in trainer.model.named_parameters()}
    trainer.step(make_batch(dist.get_world_size(), dist.get_rank()))
    return sharded, {
        name: float((whole(weight) - before[name]).abs().max()) for name, weight in trainer.model.named_parameters()
    }


def test_every_weight_is_trained(workers: Workers, checkpoints: dict[str, Path]) -> None:
    """Also those beside the blocks, which the check of the model gathers before the optimizer is made."""
    for sharded, moved in workers.run(trained_weights, 2, checkpoints["llama"]):
        assert sharded and min(moved.values()) > 0, moved

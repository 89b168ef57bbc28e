"""Tiny checkpoints of transformers on disk, and one step of the trainer on them over several
ranks."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from longctx.config import load
from longctx.data.packing import StepBatch, pack_documents
from longctx.hf.model import OURS
from longctx.parallel.mesh import make_groups
from longctx.planning.layout import Placement
from longctx.training.build import sizes_of_groups
from longctx.training.trainer import Trainer
from tests.data_cases import placed_plan
from tests.huggingface_cases import LENGTHS, PLACEMENTS, make_documents, unpacked
from tests.training_cases import whole

PLACEMENTS_OF: dict[int, tuple[tuple[Placement, ...], ...]] = {
    1: (tuple(Placement(document, 0, 1) for document in range(len(LENGTHS))),),
    2: PLACEMENTS,
    3: (
        (Placement(0, 0, 3), Placement(1, 0, 1), Placement(2, 1, 2)),
        (Placement(3, 1, 2, reversed=True), Placement(4, 0, 1)),
        (Placement(5, 2, 1),),
    ),
}
"""By number of ranks: degrees 1 to 3 side by side, and micro-batches in which a rank has no
tokens."""
SETTINGS = [
    f"context.profile={Path(__file__).parent / 'as_given.yaml'}",
    "batch.tokens_per_rank=300",
    "optimizer.warmup_steps=0",
    "train.steps=1",
]


def reference(folder: Path) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns the loss over single documents, gradients and state of a checkpoint in plain
    transformers."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    state = {name: value.clone() for name, value in model.eval().state_dict().items()}
    loss, _ = unpacked(model, make_documents())
    return loss, {name: _gradient(weight) for name, weight in model.named_parameters()}, state


def step(
    folder: Path, settings: list[str], batch_of: Callable[[int, int], StepBatch] | None = None
) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns the same from the trainer, packed, split and sharded. `batch_of` takes the number of
    ranks and the rank."""
    trainer = make_trainer(folder, settings)
    state = {
        name.removeprefix(OURS): whole(value) for name, value in trainer.model.state_dict().items()
    }
    batch = (batch_of or make_batch)(dist.get_world_size(), dist.get_rank())
    losses = trainer.runner.forward_backward(batch)
    total = losses.sum().double()
    dist.all_reduce(total)
    gradients = {
        name.removeprefix(OURS): _gradient(weight)
        for name, weight in trainer.model.named_parameters()
    }
    return total.item(), gradients, state


Step = tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]
"""Loss, gradients and state."""


def assert_step(found: list[Step], expected: Step) -> None:
    """Checks that every rank's step and first weights are the expected ones."""
    loss, gradients, state = expected
    for found_loss, found_gradients, found_state in found:
        assert found_loss == pytest.approx(loss, rel=1e-5)
        assert largest_error(found_gradients, gradients) < 1e-4
        assert found_state.keys() == state.keys()
        for name, value in state.items():
            assert torch.equal(found_state[name], value), name


def make_trainer(folder: Path, settings: list[str]) -> Trainer:
    config = load(
        None,
        [*SETTINGS, f"model.from_pretrained={folder}", *settings],
        world_size=dist.get_world_size(),
    )
    return Trainer.of(
        config,
        make_groups(torch.device("cpu"), timeout_s=60.0, **sizes_of_groups(config)),
        config.model_source(),
    )


def make_batch(ranks: int, rank: int) -> StepBatch:
    plan = placed_plan(LENGTHS, ranks, PLACEMENTS_OF[ranks])
    micro_batches, targets = pack_documents(plan, rank, make_documents())
    return StepBatch(
        1, plan, tuple(map(str, range(len(LENGTHS)))), sum(LENGTHS), targets, tuple(micro_batches)
    )


def _gradient(weight: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(whole(weight)) if weight.grad is None else whole(weight.grad)


def largest_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Returns the largest relative error of a tensor; scales below a thousandth of the largest are
    raised to that."""
    assert found.keys() == expected.keys()
    floor = 1e-3 * max(float(tensor.norm()) for tensor in expected.values())
    return max(
        float((found[name] - tensor).norm()) / max(float(tensor.norm()), floor)
        for name, tensor in expected.items()
    )

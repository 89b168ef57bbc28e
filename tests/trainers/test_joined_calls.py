"""Calls of a step that are planned together: each gets its own values, gradients are those of calls
one by one, and losses that change what the model gets are planned by call."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

from longctx.trainers import dynamic_context_parallel
from longctx.trainers.joined_calls import Group, JoinedCalls, _ends_of_groups
from tests.marks import slow_unless
from tests.trainer_cases import (
    DOCUMENTS_A_STEP,
    PROFILE,
    TOKENS_PER_RANK,
    arguments,
    as_rank,
    documents,
    model,
    pad,
    report,
    select_fsdp_on_cpus,
)
from tests.trainers.test_whole_outputs import STEPS, assert_same, reward
from tests.workers import Workers

FSDP: dict[str, Any] = {
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]},
}


def of_rows(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A loss that is no sum over tokens."""
    logits = model(input_ids=ids, attention_mask=mask).logits
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return (losses.mean(1) ** 2).mean() / 100


class Own(Trainer):
    """A trainer with an own loss, of which `way` says how it calls the model."""

    way: str
    batches = 0

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        ids = inputs["input_ids"]
        mask = inputs["attention_mask"]
        self.batches += 1
        if self.way == "teaches itself":
            with torch.no_grad():
                model(input_ids=ids, attention_mask=mask)
        if self.way == "twice":
            return of_rows(model, ids, mask) + of_rows(model, ids.flip(0), mask) / 2
        changes = self.way == "changes all" or (
            self.way == "changes the third" and self.batches % 6 == 3
        )
        if changes:
            ids = (ids + 1) % 100
        loss = of_rows(model, ids, mask)
        if self.way == "ignores the second" and self.batches % 6 == 2:
            return loss * 0 + 1
        return loss


def train(folder: Path, way: str, budget: int | None, options: dict[str, Any]) -> dict[str, Any]:
    """Trains a row per call: six per rank and step on two ranks."""
    ranks = as_rank()
    if "fsdp" in options:
        select_fsdp_on_cpus()
    given = arguments(folder, ranks, DOCUMENTS_A_STEP // ranks, **{**STEPS, **options})
    trainer = Own(model(), TrainingArguments(**given), pad, documents()[:36])
    trainer.way = way
    if budget is not None:
        dynamic_context_parallel(trainer, profile=PROFILE, tokens_per_rank=budget)
    trainer.train()
    found = report(trainer)
    return found | {"calls": len(found["plans"])}


# Ways, ranks, tokens per rank, options, and plans of three steps.
CASES: dict[str, tuple[str, int, int, dict[str, Any], int]] = {
    "all of a step": ("plain", 2, 1000, {}, 3),
    "some of a step": ("plain", 2, TOKENS_PER_RANK, {}, 0),
    "on three": ("plain", 3, 90, {}, 0),
    "on one": ("plain", 1, 200, {}, 0),
    "sharded": ("plain", 2, 1000, FSDP, 3),
    "sharded, some of a step": ("plain", 2, TOKENS_PER_RANK, FSDP, 0),
    "sharded and recomputed": ("plain", 2, 200, FSDP | {"gradient_checkpointing": True}, 0),
    "sharded, a call that counts nothing": ("ignores the second", 2, 1000, FSDP, 3),
    "sharded, a call without gradients first": ("teaches itself", 2, 1000, FSDP, 21),
    "sharded, a loss that changes the third": ("changes the third", 2, 1000, FSDP, 17),
    "recomputed": ("plain", 2, 200, {"gradient_checkpointing": True}, 0),
    "a loss that changes all": ("changes all", 2, 1000, {}, 18),
    "a loss that changes the third": ("changes the third", 2, 1000, {}, 17),
    "a call without gradients first": ("teaches itself", 2, 1000, {}, 21),
    "two calls of a batch": ("twice", 2, 1000, {}, 21),
    "a call that counts nothing": ("ignores the second", 2, 1000, {}, 3),
}
QUICK = ("some of a step", "a loss that changes the third")


@pytest.mark.parametrize("case", slow_unless(lambda case: case in QUICK, CASES))
def test_losses_and_weights_are_those_of_plain_training(
    workers: Workers, tmp_path: Path, case: str
) -> None:
    way, ranks, budget, options, plans = CASES[case]
    plain = {name: value for name, value in options.items() if not name.startswith("fsdp")}
    expected = workers.run(train, ranks, tmp_path / "plain", way, None, plain)[0]
    runs = workers.run(train, ranks, tmp_path / "ours", way, budget, options)
    for entry in expected["log"]:
        entry.pop("loss", None)  # of the first rank
        entry.pop("train_loss", None)
    assert_same(runs, expected, split=False)
    calls = 3 * DOCUMENTS_A_STEP // ranks
    for found in runs:
        assert found["calls"] == plans if plans else 3 < found["calls"] < calls


def test_an_epoch_of_pairs_ends_with_rows_of_its_own(workers: Workers, tmp_path: Path) -> None:
    """A pair is an example of two rows: none of them repeats others."""
    options = {"max_steps": -1, "num_train_epochs": 1}
    (expected,) = workers.run(reward, 1, tmp_path / "plain", False, options)
    runs = workers.run(reward, 2, tmp_path / "ours", True, options)
    assert_same(runs, expected)


@pytest.mark.parametrize(
    ("tokens", "first", "most", "ends"),
    [
        ([3, 3, 3], 0, 9, [3]),
        ([3, 3, 3], 0, 8, [2, 3]),
        ([3, 3, 3], 1, 6, [3]),
        ([9, 1, 9], 0, 5, [1, 2, 3]),
        ([5], 0, 1, [1]),
    ],
)
def test_groups_hold_at_most_so_many_tokens(
    tokens: list[int], first: int, most: float, ends: list[int]
) -> None:
    assert _ends_of_groups(tokens, first, most) == ends


def test_gradients_that_no_call_follows_go_through_the_model_alone() -> None:
    weight = torch.ones(5, requires_grad=True)
    group = Group(2, (weight * 3).split([2, 2, 1]))
    (group.values_of(2) * 5).sum().backward()
    group.values_of(3)  # of which a loss reads nothing
    assert weight.grad is None
    group.end()
    assert torch.equal(weight.grad, torch.tensor([15.0, 15.0, 0.0, 0.0, 0.0]))
    group.end()
    assert torch.equal(weight.grad, torch.tensor([15.0, 15.0, 0.0, 0.0, 0.0]))


def test_a_group_ends_with_the_batch_of_its_last_call() -> None:
    """Also if that does not call the model."""
    weight = torch.ones(2, requires_grad=True)
    nobody: Any = None
    joined = JoinedCalls(nobody, nobody)
    batches: list[dict[str, Any]] = [{}, {}]
    joined.begin_step(batches)
    joined._group = Group(0, (weight * 3).split([1, 1]))
    with joined.of_batch(batches[0]):
        joined._group.values_of(0).sum().backward()
    assert weight.grad is None
    with joined.of_batch(batches[1]):
        pass
    assert torch.equal(weight.grad, torch.tensor([3.0, 0.0]))


class _TwoRanks:
    """An exchange of which another rank tells something else."""

    ranks = 2
    planning = SimpleNamespace(tokens_per_rank=1000)

    def __init__(self, other: tuple[int, bool, list[int]]) -> None:
        self.other = other

    def told_by_all(self, told: Any) -> list[Any]:
        return [told, self.other]


@pytest.mark.parametrize(
    ("other", "joins"),
    [
        ((0, True, [3]), True),
        ((0, False, [3]), False),
        ((1, True, [3]), False),
        ((0, True, [3, 3]), False),
    ],
)
def test_calls_are_joined_if_all_ranks_expected_them(
    other: tuple[int, bool, list[int]], joins: bool
) -> None:
    batch = {"input_ids": torch.tensor([[5, 6, 7]])}
    planned: Any = SimpleNamespace(exchange=_TwoRanks(other))

    def read(fields: Any) -> Any:
        return [SimpleNamespace(tokens=row) for row in fields["input_ids"]]

    joined = JoinedCalls(planned, read)
    joined.begin_step([batch])
    assert joined._begin(0, batch) is joins

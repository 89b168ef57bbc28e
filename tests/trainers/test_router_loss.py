"""The auxiliary loss of a mixture's routers in trainers: that of plain transformers, over tokens
that are computed together."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from longctx.trainers import TrainerError, dynamic_context_parallel
from longctx.trainers.kinds import Traits
from longctx.trainers.router_loss import RouterLoss
from tests.trainer_cases import PROFILE, finetune, model, train
from tests.trainers.test_trainers import assert_equal, plain, trainer
from tests.workers import Workers

WHOLE = {"tokens_per_rank": 500, "mode": "static", "degree": 1}
SPLIT = {"tokens_per_rank": 250, "mode": "static", "degree": 2}
"""Budgets with which a step is one micro-batch, as in the plain run."""


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"budget": SPLIT}),
        pytest.param(1, {"budget": WHOLE}, marks=pytest.mark.slow),
        pytest.param(
            2, {"budget": SPLIT, "average_tokens_across_devices": False}, marks=pytest.mark.slow
        ),
    ],
    ids=["two ranks", "one rank", "not averaged"],
)
def test_trainer(workers: Workers, tmp_path: Path, ranks: int, options: dict[str, Any]) -> None:
    runs = workers.run(train, ranks, tmp_path, "qwen3_moe", 1, True, options)
    assert_equal(runs, plain(workers, tmp_path, train, "qwen3_moe", {}))
    assert runs[0]["micro_batches"] == 1


@pytest.mark.parametrize(
    ("ranks", "accumulation"),
    [(2, 3), pytest.param(1, 1, marks=pytest.mark.slow)],
    ids=["two ranks", "one rank"],
)
def test_sft(workers: Workers, tmp_path: Path, ranks: int, accumulation: int) -> None:
    """The coefficient of TRL's config, and the metric that it logs."""
    options = {"kind": "qwen3_moe", "router_aux_loss_coef": 0.25, "num_train_epochs": 1}
    runs = workers.run(
        finetune,
        ranks,
        tmp_path,
        accumulation,
        True,
        options | {"budget": SPLIT if ranks > 1 else WHOLE},
    )
    expected = plain(workers, tmp_path, finetune, options)
    assert_equal(runs, expected)
    assert runs[0]["micro_batches"] == 1
    logs = [
        [entry["aux_loss"] for entry in run["log"] if "aux_loss" in entry]
        for run in (runs[0], expected)
    ]
    assert len(logs[0]) == 4 and logs[0] == pytest.approx(logs[1], rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "accumulation", "options"),
    [
        (2, 2, {"num_train_epochs": 1}),
        pytest.param(3, 1, {}, marks=pytest.mark.slow),
        pytest.param(1, 1, {"bf16": False, "gradient_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param(2, 1, {"average_tokens_across_devices": False}, marks=pytest.mark.slow),
    ],
    ids=["two ranks", "three ranks", "recomputed", "not averaged"],
)
def test_steps_of_several_micro_batches(
    workers: Workers, tmp_path: Path, ranks: int, accumulation: int, options: dict[str, Any]
) -> None:
    """Experts are counted over the step, as in the plain run, whose batch it is; in evaluations,
    too."""
    expected = plain(
        workers,
        tmp_path,
        train,
        "qwen3_moe",
        {"num_train_epochs": options.get("num_train_epochs", 2)},
    )
    runs = workers.run(train, ranks, tmp_path, "qwen3_moe", accumulation, True, options)
    assert_equal(runs, expected)
    assert runs[0]["micro_batches"] > 1


@pytest.mark.slow
def test_metrics_of_several_micro_batches(workers: Workers, tmp_path: Path) -> None:
    options = {"kind": "qwen3_moe", "router_aux_loss_coef": 0.25, "num_train_epochs": 1}
    runs = workers.run(finetune, 2, tmp_path, 3, True, options)
    expected = plain(workers, tmp_path, finetune, options)
    assert_equal(runs, expected)
    assert runs[0]["micro_batches"] > 1
    logs = [
        [entry["aux_loss"] for entry in run["log"] if "aux_loss" in entry]
        for run in (runs[0], expected)
    ]
    assert len(logs[0]) == 4 and logs[0] == pytest.approx(logs[1], rel=1e-5)


def test_tokens_of_experts_are_counted_over_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first micro-batch of a step of several."""
    router_loss: Any = RouterLoss.__new__(RouterLoss)
    router_loss.found = router_loss.counts = None
    router_loss.group = "group"
    monkeypatch.setattr(dist, "all_reduce", lambda counts, group: counts.mul_(10))
    batches: Any = [1.0, 2.0]
    with router_loss.during_step(
        batches, tokens=7, run=lambda batch: router_loss.found.append(torch.tensor([batch, 1.0]))
    ):
        assert router_loss.counts.tolist() == [30.0, 20.0] and router_loss.found is None
    assert router_loss.counts is None and router_loss.step_tokens == 7


@pytest.mark.parametrize(
    ("trl_class", "averages", "divisor"), [("", True, 1), ("", False, 4), ("SFTTrainer", True, 12)]
)
def test_the_divisor_is_that_of_the_trainer(trl_class: str, averages: bool, divisor: int) -> None:
    """TRL's trainers take the mean over ranks and batches."""
    router_loss: Any = RouterLoss.__new__(RouterLoss)
    router_loss.traits = SimpleNamespace(
        args=SimpleNamespace(world_size=4, average_tokens_across_devices=averages),
        trl_class=trl_class,
        trainer=SimpleNamespace(current_gradient_accumulation_steps=3),
    )
    assert router_loss._divisor == divisor


def test_a_rank_without_tokens_adds_nothing_to_the_loss(tmp_path: Path) -> None:
    """It runs a token of padding, which experts get, but no document has."""
    ours = trainer(tmp_path, of=model("qwen3_moe"))
    router_loss = RouterLoss(Traits(ours, False), None)
    router_loss.counts = torch.tensor([2.0, 4.0, 1.0, 1.0, 4.0])
    router_loss.step_tokens = 4
    gates = (torch.tensor([[3.0, 1.0, 2.0, 0.0]]),)
    for tokens, adds in ((0, False), (1, True)):
        router_loss.begin(SimpleNamespace(layout=SimpleNamespace(tokens=tokens)), 0)
        assert (router_loss._loss(gates, 4, 2).item() != 0) == adds


def test_another_loss_of_routers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as module

    ours, function = trainer(tmp_path, of=model("qwen3_moe")), module.load_balancing_loss_func
    monkeypatch.setattr(module, "load_balancing_loss_func", lambda *given: 2 * function(*given))
    with pytest.raises(
        TrainerError,
        match=r"Qwen3MoeForCausalLM does not compute the auxiliary loss .* as most models do",
    ):
        dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)
    assert ours.model.config.output_router_logits and not hasattr(ours, "dynamic")


def test_losses_of_whole_rows_refuse_it(tmp_path: Path) -> None:
    from trl import RewardTrainer

    ours = trainer(tmp_path, of=model("qwen3_moe"))
    ours.__class__ = type(
        "RewardTrainer", (RewardTrainer,), {"__module__": "trl.trainer.reward_trainer"}
    )
    with pytest.raises(
        TrainerError, match=r"or losses of whole rows: set router_aux_loss_coef=0.0 in TrainingArg"
    ):
        dynamic_context_parallel(ours, tokens_per_rank=200, profile=PROFILE)

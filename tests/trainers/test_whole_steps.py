"""Parts of planned steps alone: divisors, rows of a last batch, and what ranks gather."""

import functools
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from longctx.planning.hardware_profile import HardwareProfile
from longctx.planning.planners.planner import make_plan
from longctx.trainers import whole_steps
from longctx.trainers.dynamic import train_planned
from longctx.trainers.planned_call import PlannedCall
from longctx.trainers.step import StepExchange
from longctx.trainers.whole_steps import WholeSteps

RANKS = 4


def averaging(averages: bool, smoothing: float = 0.0) -> Any:
    """Returns a trainer on RANKS ranks, which averages tokens over them or not."""
    args = SimpleNamespace(
        average_tokens_across_devices=averages, device="cpu", label_smoothing_factor=smoothing
    )
    return SimpleNamespace(args=args, dynamic=SimpleNamespace(ranks=RANKS))


@pytest.mark.parametrize(("averages", "targets", "divisor"), [(True, 12, 12), (False, 12, 3)])
def test_a_trainer_that_does_not_multiply_by_ranks_divides_by_less(
    averages: bool, targets: int, divisor: float
) -> None:
    step: Any = SimpleNamespace(targets=targets)
    assert WholeSteps._divisor(averaging(averages), step) == divisor
    step.targets = 0
    assert WholeSteps._divisor(averaging(averages), step) == divisor / targets


@pytest.mark.parametrize(("averages", "factor"), [(True, RANKS), (False, 1)])
def test_a_smoothed_loss_is_multiplied_as_others_are(averages: bool, factor: int) -> None:
    logits, labels = torch.randn(1, 5, 7), torch.tensor([[1, 2, -100]])
    inputs = {"labels": labels, "shift_labels": labels}
    loss, outputs = WholeSteps._summed_loss(
        averaging(averages, 0.1), lambda: {"logits": logits}, inputs, torch.tensor(8.0)
    )
    wanted = F.cross_entropy(logits[0, :3], labels[0], reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(loss, wanted * factor / 8)
    assert outputs["logits"] is logits


@pytest.mark.parametrize(("ends", "own"), [(False, "abc"), (True, "a")])
def test_rows_that_fill_the_last_batch_are_left_out(
    monkeypatch: pytest.MonkeyPatch, ends: bool, own: str
) -> None:
    monkeypatch.setattr(whole_steps, "own_rows_of_last_batch", lambda loader, rank, rows: rows - 2)
    state = SimpleNamespace(active_dataloader="loader", end_of_dataloader=ends)
    family = SimpleNamespace(rows_of=lambda batch, training: list(batch["rows"]))
    trainer: Any = SimpleNamespace(
        dynamic=SimpleNamespace(family=family, rank=1),
        accelerator=SimpleNamespace(gradient_state=state),
    )
    assert WholeSteps._rows(trainer, {"rows": "abc"}) == list(own)


def test_training_waits_for_the_exchange_after_its_last_step() -> None:
    """Other ranks take part in it; its error is nobody's any more."""
    waited: list[float | None] = []

    class Waited(Future[Any]):
        def exception(self, timeout: float | None = None) -> BaseException | None:
            waited.append(timeout)
            return super().exception(timeout)

    class Own:
        def train(self) -> str:
            step = Waited()
            step.set_exception(ValueError("no document is left"))
            self._next: Any = SimpleNamespace(step=step)
            return "trained"

    class Ours(WholeSteps, Own):
        is_fsdp_enabled = True

    assert train_planned(Own.train, Ours()) == "trained"
    assert waited == [None]


def test_the_calls_of_a_model_are_numbered() -> None:
    """So that two calls in a step drop different numbers at random."""
    plan = make_plan([8, 8], ranks=1, tokens_per_rank=8, profile=HardwareProfile.load("cpu-2core"))
    step = SimpleNamespace(exchange="exchange", micro_batches=["one", "two"], plan=plan)
    exchange: Any = SimpleNamespace(
        planning=SimpleNamespace(tokens_per_rank=8),
        plan_and_exchange=lambda *given, **named: step,
        to_owners=lambda step, values: torch.cat(values),
        riders=(),
    )
    seen: list[tuple[str, int]] = []

    def compute(batch: Any, call: int) -> torch.Tensor:
        seen.append((batch, call))
        return torch.zeros(1)

    planned = PlannedCall(exchange)
    for _ in range(2):
        planned.values_of_tokens(list, compute)
    assert seen == [("one", 0), ("two", 0), ("one", 1), ("two", 1)]


def test_ranks_may_have_different_numbers_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents come batch by batch, those of rank 0 first."""

    def all_gather_object(everyone: list[Any], mine: Any, group: Any) -> None:
        everyone[:] = [mine, ([["e"], ["f"], ["g"]], None)]

    def document(name: str) -> Any:
        return SimpleNamespace(info=lambda rank, index: f"{name}{rank}{index}")

    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    exchange: Any = SimpleNamespace(rank=0, ranks=2, ids_group="group")
    exchange.told_by_all = functools.partial(StepExchange.told_by_all, exchange)
    batches = [[document("a"), document("b")], [document("c")]]
    found = StepExchange._gathered(exchange, batches, None)
    assert found == [["a00", "b01", "e"], ["c02", "f"], ["g"]]

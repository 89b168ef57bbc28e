"""Overrides of other tools that are known to pass on what they are given."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainingArguments

from longctx.trainers import dynamic_context_parallel, pass_through, restore
from longctx.trainers.kinds import Traits, is_own
from longctx.trainers.pass_through import KNOWN, PassThrough, checksum, passes_on
from tests.trainer_cases import LONGEST, PROFILE, arguments, as_rank, documents, model, pad
from tests.workers import Workers


class Tool(Trainer):
    """As another tool's."""

    asks_for_more = False

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        return super().compute_loss(model, inputs, *arguments, **named)


class Mine(Tool):
    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        return 2 * super().compute_loss(model, inputs, *arguments, **named)


class Extended(Tool):
    """Without a method of its own."""


NAME = f"{Tool.__module__}.Tool"


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the tool's override a known one."""
    entry = PassThrough(
        checksums=("of another version", checksum(Tool.compute_loss)),
        if_=lambda trainer: not trainer.asks_for_more,
    )
    monkeypatch.setitem(pass_through.KNOWN, (NAME, "compute_loss"), entry)


@pytest.mark.usefixtures("known")
def test_a_known_override_is_not_the_trainers_own() -> None:
    for kind in (Tool, Extended):
        trainer = kind.__new__(kind)
        assert passes_on(trainer, "compute_loss")
        assert not is_own(trainer, "compute_loss")


@pytest.mark.usefixtures("known")
def test_one_of_another_class_or_on_the_trainer_is_its_own() -> None:
    assert is_own(Mine.__new__(Mine), "compute_loss")
    trainer = Tool.__new__(Tool)
    trainer.compute_loss = Tool.compute_loss.__get__(trainer)
    assert is_own(trainer, "compute_loss")


@pytest.mark.usefixtures("known")
def test_one_whose_settings_ask_for_more_is_its_own() -> None:
    trainer = Tool.__new__(Tool)
    trainer.asks_for_more = True
    assert is_own(trainer, "compute_loss")


def test_one_of_another_source_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = PassThrough(checksums=("0123456789abcdef",), if_=lambda trainer: True)
    monkeypatch.setitem(pass_through.KNOWN, (NAME, "compute_loss"), entry)
    assert is_own(Tool.__new__(Tool), "compute_loss")
    monkeypatch.delitem(pass_through.KNOWN, (NAME, "compute_loss"))
    assert is_own(Tool.__new__(Tool), "compute_loss")


def test_a_function_without_source_is_of_no_version() -> None:
    namespace: dict[str, Any] = {}
    exec("def compute_loss(self): pass", namespace)
    assert checksum(namespace["compute_loss"]) == ""
    assert all("" not in entry.checksums for entry in KNOWN.values())


def trained(kind: type[Trainer], folder: Path, *, dynamic: bool) -> tuple[Any, list[float]]:
    """Returns a trainer that has trained on one process, and its losses."""
    trainer = kind(
        model("qwen2"),
        TrainingArguments(**arguments(folder, as_rank(), 2, max_steps=3)),
        data_collator=pad,
        train_dataset=documents(),
        eval_dataset=documents(5, seed=1),
    )
    if dynamic:
        dynamic_context_parallel(trainer, profile=PROFILE, tokens_per_rank=LONGEST)
    trainer.train()
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def whole_steps(folder: Path) -> dict[str, Any]:
    """Returns what a trainer of a tool is, and its losses beside those of plain training."""
    entry = PassThrough(checksums=(checksum(Tool.compute_loss),), if_=lambda trainer: True)
    KNOWN[NAME, "compute_loss"] = entry
    try:
        _, expected = trained(Trainer, folder, dynamic=False)
        trainer, losses = trained(Tool, folder, dynamic=True)
        restore(trainer)
        kind = Traits(trainer, token_sum=False).kind
    finally:
        del KNOWN[NAME, "compute_loss"]
    return {"kind": kind, "losses": losses, "expected": expected}


def test_whole_steps_of_a_tool_are_planned(workers: Workers, tmp_path: Path) -> None:
    (found,) = workers.run(whole_steps, 1, tmp_path)
    assert found["kind"] == "step"
    assert found["losses"] == pytest.approx(found["expected"], rel=1e-6)
    assert len(found["losses"]) == 3

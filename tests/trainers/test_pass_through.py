"""Overrides of other tools that are known to pass on what they are given."""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from longctx.trainers import TrainerError, dynamic_context_parallel, pass_through, restore
from longctx.trainers.kinds import Traits, is_own
from longctx.trainers.pass_through import (
    KNOWN,
    PassThrough,
    checksum,
    methods_of_libraries,
    passes_on,
)
from longctx.trainers.refusals import notes_on_data
from tests.trainer_cases import (
    LONGEST,
    PROFILE,
    arguments,
    as_rank,
    as_rank_alone,
    documents,
    model,
    pad,
    tokenizer,
)
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


@pytest.mark.usefixtures("known")
def test_methods_of_transformers_run_in_the_place_of_known_ones() -> None:
    assert methods_of_libraries(Extended.__new__(Extended)) == {
        "compute_loss": Trainer.compute_loss
    }
    assert methods_of_libraries(Mine.__new__(Mine)) == {}
    assert methods_of_libraries(Trainer.__new__(Trainer)) == {}


class Scaled(Tool):
    """As Axolotl's, which takes means of batches."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.model_accepts_loss_kwargs = False
        self.calls = 0

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        return super().compute_loss(model, inputs, *arguments, **named)


SCALED = f"{Scaled.__module__}.Scaled"


def trained(
    kind: type[Trainer], folder: Path, *, dynamic: bool, **options: Any
) -> tuple[Any, list[float]]:
    """Returns a trainer that has trained on this process, and its losses."""
    trainer = kind(
        model("qwen2"),
        TrainingArguments(**arguments(folder, as_rank(), 2, max_steps=3)),
        data_collator=pad,
        train_dataset=documents(36),
        eval_dataset=documents(6, seed=1),
    )
    if dynamic:
        dynamic_context_parallel(trainer, profile=PROFILE, tokens_per_rank=LONGEST, **options)
    trainer.train()
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def of_tools(folder: Path, kind: type[Trainer], beside: type[Trainer], keep: bool) -> Any:
    """Returns what a trainer of a tool is, and its losses beside those of plain training."""
    for owner in (Tool, Scaled):
        entry = PassThrough((checksum(vars(owner)["compute_loss"]),), if_=lambda trainer: True)
        KNOWN[f"{owner.__module__}.{owner.__name__}", "compute_loss"] = entry
    try:
        _, expected = trained(beside, folder, dynamic=False)
        trainer, losses = trained(kind, folder, dynamic=True, keep_their_scale=keep)
        calls = getattr(trainer, "calls", 0)
        restore(trainer)
        what = Traits(trainer, token_sum=False, keeps_scale=keep).kind
    finally:
        del KNOWN[NAME, "compute_loss"]
        del KNOWN[SCALED, "compute_loss"]
    return {
        "kind": what,
        "losses": losses,
        "expected": expected,
        "calls": calls,
        "class": type(trainer) is kind,
    }


@pytest.mark.parametrize("kind", [Tool, Scaled])
def test_whole_steps_of_a_tool_are_planned(
    workers: Workers, tmp_path: Path, kind: type[Trainer]
) -> None:
    """Means of batches become the mean over tokens, and methods of the tool are not called."""
    (found,) = workers.run(of_tools, 1, tmp_path, kind, Trainer, False)
    assert found["kind"] == "step"
    assert found["losses"] == pytest.approx(found["expected"], rel=1e-6)
    assert len(found["losses"]) == 3
    assert found["calls"] == 0
    assert found["class"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tool_keeps_its_scale_if_it_is_asked_to(
    workers: Workers, tmp_path: Path, ranks: int
) -> None:
    """Means of the batches of each rank, as in plain training on as many."""
    for found in workers.run(of_tools, ranks, tmp_path, Scaled, Scaled, True):
        assert found["kind"] == "hidden_states"
        assert found["losses"] == pytest.approx(found["expected"], rel=2e-6)
        assert found["calls"] >= 6
        assert found["class"]
    (mean_of_tokens,) = workers.run(of_tools, 1, tmp_path, Tool, Trainer, False)
    assert found["losses"] != pytest.approx(mean_of_tokens["losses"], rel=2e-5)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.usefixtures("known")
def test_what_is_said_of_a_scale_is_what_becomes_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    as_rank_alone()
    args = arguments(tmp_path, 1, 1, average_tokens_across_devices=False)
    made = Tool(
        model("qwen2"),
        TrainingArguments(**args),
        data_collator=pad,
        train_dataset=documents(12),
        eval_dataset=documents(6),
    )
    made.model_accepts_loss_kwargs = False
    monkeypatch.setattr(type(made.args), "world_size", 2)
    notes = list(notes_on_data(Traits(made, token_sum=False, keeps_scale=keep), 200))
    said = [
        "average_tokens_across_devices=False changes nothing",
        "that of Tool would be a mean of means of batches: keep_their_scale=True keeps it",
    ]
    for words in said:
        assert any(words in note for note in notes) != keep


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"own_loss_is_a_token_sum": True}, "are both True, but a sum over tokens has the scale"),
        ({"keep_their_scale": 1}, "keep_their_scale is 1: must be True or False"),
    ],
)
def test_scales_that_cannot_be_kept_are_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    as_rank_alone()
    made = Trainer(
        model("qwen2"),
        TrainingArguments(**arguments(tmp_path, 1, 1)),
        data_collator=pad,
        train_dataset=documents(12),
        eval_dataset=documents(6),
    )
    with pytest.raises(TrainerError, match=message):
        dynamic_context_parallel(made, profile=PROFILE, **{"keep_their_scale": True, **options})


def test_the_scale_of_trl_is_not_another_tools(tmp_path: Path) -> None:
    from trl import SFTConfig, SFTTrainer

    as_rank_alone()
    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, max_length=None)
    rows = [{"input_ids": row["input_ids"]} for row in documents(8)]
    made = SFTTrainer(
        model("qwen2"),
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
    )
    with pytest.raises(TrainerError, match="the loss of SFTTrainer is not a mean of batches"):
        dynamic_context_parallel(made, profile=PROFILE, keep_their_scale=True)

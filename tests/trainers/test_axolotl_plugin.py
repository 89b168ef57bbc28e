"""Axolotl's plug-in, beside a base class with the names of Axolotl's."""

import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainingArguments

from longctx.errors import UserError
from longctx.trainers import restore
from tests.trainer_cases import arguments, as_rank_alone, documents, model, pad


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, where Axolotl is not installed, too."""
    base = types.ModuleType("axolotl.integrations.base")
    vars(base)["BasePlugin"] = type("BasePlugin", (), {})
    for name in ("axolotl", "axolotl.integrations"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    name = "longctx.trainers.axolotl"
    yield importlib.import_module(name)
    del sys.modules[name]


def test_its_trainer_plans_steps_by_the_options_of_the_yaml(plugin: Any, tmp_path: Path) -> None:
    as_rank_alone()
    trainer = Trainer(
        model("qwen2"),
        TrainingArguments(**arguments(tmp_path, 1, 1, max_steps=1, eval_strategy="no")),
        data_collator=pad,
        train_dataset=documents(12),
    )
    made = plugin.LongctxPlugin()
    cfg = {"longctx": {"tokens_per_rank": 128, "profile": "cpu-2core"}}
    made.register(cfg)
    made.post_trainer_create(cfg, trainer)
    try:
        assert trainer.dynamic.planning.tokens_per_rank == 128
        trainer.train()
        assert len(trainer.dynamic.plans) == 1
    finally:
        restore(trainer)


def test_the_class_of_its_arguments_is_found_by_name(plugin: Any) -> None:
    module, _, name = plugin.LongctxPlugin().get_input_args().rpartition(".")
    arguments_class = getattr(sys.modules[module], name)
    assert arguments_class().longctx is None
    assert arguments_class(longctx={"mode": "auto"}).longctx == {"mode": "auto"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tokens_per_rnk": 1}, "longctx has 'tokens_per_rnk', which is no option: did you mean"),
        (["auto"], "must be a mapping"),
        ({"tokens_per_rank": "many"}, "tokens_per_rank is 'many': must be a whole number"),
        ({"mode": "fast"}, "mode is 'fast': must be one of"),
    ],
)
def test_wrong_options_are_said_before_data_are_read(
    plugin: Any, values: Any, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        plugin.LongctxPlugin().register({"longctx": values})


def test_without_options_there_are_none(plugin: Any) -> None:
    assert plugin.options_of({}) == {}
    assert plugin.options_of({"longctx": None}) == {}

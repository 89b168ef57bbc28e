"""The table of what does not go with what: every row is refused with its reason, and each of its
ways out is accepted."""

import importlib.util
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from longctx.config import ConfigError, Problem, load
from longctx.config.combinations import A_CHECKPOINT, CHECKPOINT, FACTS, ROWS, Row, _conditions
from longctx.config.names import FIELDS, MAPPINGS
from longctx.config.problems import yaml_text
from longctx.config.run import SECTIONS
from tests.family_cases import build

VALUES = (
    *(
        0.3,
        1,
        2,
        True,
        "x",
        "auto",
        "softmax",
        "full",
        "tensorwise",
        "transformers",
        "rms",
        "gated",
        "silu",
        "rope",
        "none",
    ),
    *(False, "grpo", "token_mask", "adamw", "cosine", "nf4"),
    *(["q_proj"], [0.8, 0.9], {8192: 1}, [{"path": "a", "weight": 1.0}]),
    {"num_experts": 8},
)
"""Values to try where a condition does not say the value."""
NEEDS = {
    "model.from_pretrained is not null": "model.from_pretrained=llama",
    "sizes are taken": "model.preset=tiny-moe",
    "lora.rank is not null": "model.from_pretrained=llama",
    "without LoRA": "model.from_pretrained=llama",
    "cannot be quantized": "model.from_pretrained=llama",
    "are balanced": "model.from_pretrained=llama",
    "linear attention is true": "model.from_pretrained=mamba2",
    "the bias of the router is false": "model.from_pretrained=mixtral",
    "is not null: the router has no bias": "model.implementation=native",
    "of the router is false and the number of experts > 0 and model.from_pretrained is "
    "null": "model.overrides.router_bias=false",
    "the number of experts > 0": "model.preset=tiny-moe",
    "the tokens of every document": "model.preset=tiny-moe",
    "_loss > 0: it goes by": "balance.bias_rate=0.0",
    "one of these": "eval.every=10",
    "and checkpoint.every is null: the best": "data.held_out=0.1",
}
"""What rows with these words need besides their conditions; later ones win."""
COMPANIONS = {"eval.every=100": ["data.held_out=0.1"]}
"""What ways out need."""


def text(row: Row) -> str:
    return f"{row.refused} and {row.where.condition}: {row.why}"


def settings(row: Row) -> list[str]:
    """Returns settings for which the conditions of a row hold, and no other row's where that is
    possible."""
    overrides = [need for words, need in NEEDS.items() if words in text(row)]
    for condition in [row.refused, *row.where.condition.split(" and ")]:
        name, operator, operand = re.split(" (is not|is|>) ", condition)
        if name in FACTS or condition == "model.from_pretrained is not null":
            continue
        overrides.append(
            f"{name}={operand if operator == 'is' else yaml_text(another_value(name, condition))}"
        )
    return overrides


def another_value(name: str, condition: str) -> object:
    """Returns a value that the setting takes and the condition holds for."""
    (parsed,) = _conditions(condition)
    path, _, key = name.rpartition(".")
    kind = MAPPINGS.get(path) or SECTIONS[path]
    for value in VALUES:
        try:
            kind.model_validate({key: value})
        except ValidationError:
            continue
        if parsed.holds(value):
            return value
    raise AssertionError(f"no value for {condition}")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for each in ("llama", "mixtral", "deepseek_v3", "mamba2"):
        build(each, "eager").save_pretrained(folder / each)
    (folder / "tokenizer.json").touch()
    return folder


@pytest.mark.parametrize("row", ROWS, ids=text)
def test_a_row_is_refused_and_its_ways_out_are_accepted(
    row: Row, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "torchao" or find(name))
    monkeypatch.chdir(checkpoints)
    overrides = settings(row)
    (problem,) = problems(row, overrides)
    assert problem.fix == row.fix and set(problem.others) <= set(FIELDS) and problem.key in FIELDS
    for way_out in row.ways_out:
        way_out = way_out.replace(A_CHECKPOINT, "bert" if "masked" in text(row) else "llama")
        overrides += COMPANIONS.get(way_out, [])
        if row.where is CHECKPOINT:
            assert not problems(row, [*overrides, way_out])
        else:
            load(None, [*overrides, way_out])


def problems(row: Row, overrides: list[str]) -> list[Problem]:
    """Returns the problems of the settings that are the row's."""
    try:
        load(None, overrides)
    except ConfigError as error:
        return [
            problem
            for problem in error.problems
            if problem.key == row.key and problem.rule.endswith(f": {row.why}")
        ]
    return []

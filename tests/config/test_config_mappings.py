"""Settings that are mappings with keys of their own: read from a file and the command line, each key
checked by name, type and range."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from longctx import config
from longctx.config import Config, ConfigError
from longctx.config.names import FIELDS, MAPPINGS, setting_of

ROPE = "model.rope_scaling"


def read(folder: Path, text: str, *overrides: str) -> Config:
    path = folder / "run.yaml"
    path.write_text(text, "utf-8")
    return config.load(path, overrides)


def problems(*overrides: str) -> dict[str, str]:
    """Returns the problems of the settings: key → rule and fix."""
    with pytest.raises(ConfigError) as caught:
        config.load(None, overrides)
    return {problem.key: f"{problem.rule}; {problem.fix}" for problem in caught.value.problems}


def test_options_go_into_the_mapping_of_the_file(tmp_path: Path) -> None:
    text = "model:\n  rope_scaling: {rope_type: yarn, factor: 4, beta_fast: 1e1}\n"
    found = read(
        tmp_path, text, f"{ROPE}.factor=8", f"--{ROPE}.original-max-position-embeddings=1e3"
    )
    given = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1000}
    assert found.model.rope_scaling.written() == {**given, "beta_fast": 10.0}
    whole = read(
        tmp_path, text, f"{ROPE}={{rope_type: yarn, original_max_position_embeddings: 1e3}}"
    )
    kept = {"rope_type": "yarn", "original_max_position_embeddings": 1000}
    assert whole.model.rope_scaling.written() == kept, "the option is the whole mapping"
    assert read(tmp_path, whole.to_yaml()) == whole
    assert yaml.safe_load(whole.to_yaml())["model"]["rope_scaling"] == kept


@pytest.mark.parametrize("text", ["model: {rope_scaling: null}", "model:\n  rope_scaling:\n"])
def test_a_mapping_whose_keys_are_commented_out_is_empty(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text) == Config()
    assert read(tmp_path, text, f"{ROPE}.factor=2").model.rope_scaling.factor == 2.0


@pytest.mark.parametrize(
    ("override", "key", "words"),
    [
        (f"{ROPE}.facter=4", f"{ROPE}.facter", f"unknown key; did you mean {ROPE}.factor?"),
        (f"{ROPE}={{type: yarn}}", f"{ROPE}.type", f"did you mean {ROPE}.rope_type?"),
        (f"{ROPE}.zzz=4", f"{ROPE}.zzz", f"keys of {ROPE} are rope_type, factor, original_"),
        (f"{ROPE}.factor=0.5", f"{ROPE}.factor", "must be greater than or equal to 1"),
        (f"{ROPE}.factor=much", f"{ROPE}.factor", "must be a valid number; the default is null"),
        (f"{ROPE}.factor=true", f"{ROPE}.factor", "must be a valid number"),
        (f"{ROPE}.beta_fast=0", f"{ROPE}.beta_fast", "must be greater than 0"),
        (f"{ROPE}.rope_type=yarm", f"{ROPE}.rope_type", "did you mean yarn?"),
        (f"{ROPE}.factor.more=1", f"{ROPE}.factor.more", f"did you mean {ROPE}.factor?"),
        (f"{ROPE}=3", ROPE, "must be a mapping; the default is {} (RoPE for longer"),
        (f"{ROPE}=[yarn]", ROPE, "must be a mapping; the default is {}"),
        ("train.factor=3", "train.factor", f"did you mean {ROPE}.factor?"),
    ],
)
def test_a_wrong_key_is_named(override: str, key: str, words: str) -> None:
    assert words in problems(override)[key]


def test_only_the_wrong_key_is_left_out_of_what_is_checked_next() -> None:
    """The low frequency is above the high one only if the high one is read."""
    given = [f"{ROPE}.low_freq_factor=3", f"{ROPE}.high_freq_factor=2", f"{ROPE}.factor=true"]
    found = problems(*given, "train.a.b=1")
    assert found.keys() == {f"{ROPE}.factor", "model", "train.a.b"}
    assert "low_freq_factor is 3.0: must be below high_freq_factor 2.0" in found["model"]


def test_changed_settings_and_their_keys() -> None:
    changes: dict[str, Any] = {f"{ROPE}.factor": 4.0, "train.steps": 7}
    changed = Config().changed(changes)
    assert {name: changed.value_of(name) for name in changes} == changes
    assert changed.changed({f"{ROPE}.factor": None, "train.steps": 100}) == Config()


def test_every_key_is_listed_behind_its_setting() -> None:
    names = list(FIELDS)
    for mapping, kind in MAPPINGS.items():
        keys = [f"{mapping}.{key}" for key in kind.model_fields]
        first = names.index(mapping) + 1
        assert names[first : first + len(keys)] == keys
        assert setting_of(keys[-1].rpartition(".")[2]) == keys[-1]
        assert all(
            FIELDS[key].description and f"--{key} " in config.describe([key]) for key in keys
        )
        assert f"--{mapping} {{key: value, ..}}\n" in config.describe()

"""Settings that are gone: each is refused by saying what to write now, and read where an older run
wrote it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from longctx import config
from longctx.config import Config, ConfigError
from longctx.config.names import SETTINGS
from longctx.config.problems import yaml_text
from longctx.config.removed import REMOVED

HEADER = "# 2 ranks: longctx 0.1.0, torch 2.9.0, cpu\n"
"""As above the settings in a run folder."""
SIZES = {
    **dict.fromkeys(
        (
            *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
            *("num_key_value_heads", "head_dim", "sliding_window", "full_attention_every"),
            *("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
            *("shared_expert_intermediate_size", "first_dense_layers"),
        ),
        4,
    ),
    **dict.fromkeys(("rms_norm_eps", "routed_scaling_factor"), 0.5),
    **dict.fromkeys(
        ("tie_word_embeddings", "qkv_bias", "qk_norm", "norm_topk_prob", "router_bias"), True
    ),
    "router_scores": "sigmoid",
}
"""A value of each size that was a setting."""
NEEDS: dict[str, dict[str, Any]] = {
    "full_attention_every": {"sliding_window": 8},
    "num_experts_per_tok": {"num_experts": 8},
    "moe_intermediate_size": {"num_experts": 8},
    "shared_expert_intermediate_size": {"num_experts": 8},
    "first_dense_layers": {"num_experts": 8, "num_hidden_layers": 5},
    "router_scores": {"num_experts": 8},
    "norm_topk_prob": {"num_experts": 8},
    "routed_scaling_factor": {"num_experts": 8},
    "router_bias": {"num_experts": 8},
}
"""Sizes without which others have no effect or are refused."""
VALUES: dict[str, Any] = {
    **{f"model.{size}": value for size, value in SIZES.items()},
    "model.rope_factor": 4.5,
    "model.rope_original_length": 4096,
    "model.rope_low_freq_factor": 1.5,
    "model.rope_high_freq_factor": 3.5,
    "model.rope_beta_fast": 16.5,
    "model.rope_beta_slow": 2.5,
    "data.stores": [{"path": "a", "weight": 3.0}],
    "batch.pad_to_multiple_of": 16,
    "parallel.expert_max_load": 1.25,
    "train.peak_flops": 1e12,
    "optimizer.warmup_ratio": 0.1,
    "optimizer.momentum": 0.9,
}
"""A value of each that is not its last default."""


def written(
    folder: Path, name: str, value: Any, first: str = "", others: dict[str, Any] | None = None
) -> Path:
    """Writes settings with one value, and others of its section, below a first line."""
    section, key = name.split(".")
    path = folder / "run.yaml"
    path.write_text(first + yaml.safe_dump({section: {**(others or {}), key: value}}), "utf-8")
    return path


def test_every_removed_setting_has_a_value_here_and_is_no_setting() -> None:
    assert REMOVED.keys() == VALUES.keys()
    assert REMOVED.keys().isdisjoint(SETTINGS)


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_setting_says_what_to_write(tmp_path: Path, name: str) -> None:
    removed = REMOVED[name]
    for value in (VALUES[name], removed.default):
        for path, overrides in (
            (written(tmp_path, name, value), []),
            (None, [f"{name}={yaml.safe_dump(value, default_flow_style=True)}"]),
        ):
            with pytest.raises(ConfigError) as caught:
                config.load(path, overrides)
            (problem,) = caught.value.problems
            assert problem.key == name and problem.rule == "this setting is gone"
            assert problem.fix == removed.fix(value)
            if removed.now is None:
                assert problem.fix.startswith("omit it: ")
            elif value == removed.default:
                assert problem.fix.startswith(f"omit it, or set {removed.now}")
            else:
                assert problem.fix.startswith(f"set {removed.now} to {yaml_text(value)}")


@pytest.mark.parametrize("name", REMOVED)
def test_settings_of_an_older_run_are_read(tmp_path: Path, name: str) -> None:
    removed = REMOVED[name]
    older = written(tmp_path, name, removed.default, HEADER)
    assert config.load(older) == config.load(None), "the last default means what it meant"
    needs = NEEDS.get(name.removeprefix("model."), {})
    older = written(tmp_path, name, VALUES[name], HEADER, needs)
    if removed.now is None:
        with pytest.raises(ConfigError, match="this setting is gone"):
            config.load(older)
    else:
        text = yaml.safe_dump(VALUES[name], default_flow_style=True)
        today = [f"model.overrides.{size}={value}" for size, value in needs.items()]
        assert config.load(older) == config.load(None, [*today, f"{removed.now}={text}"])


def test_the_whole_settings_of_an_older_run_are_read(tmp_path: Path) -> None:
    values = yaml.safe_load(Config().to_yaml())
    del values["model"]["overrides"]
    values["model"]["rope_scaling"] = None
    for name, removed in REMOVED.items():
        section, key = name.split(".")
        values[section][key] = removed.default
    values["data"] |= {"store": None, "stores": [{"path": "a", "weight": 3.0, "epochs": None}]}
    values["model"]["hidden_size"] = 64
    older = tmp_path / "older.yaml"
    older.write_text(HEADER + yaml.safe_dump(values), "utf-8")
    today = ["data.store=[{path: a, weight: 3}]", "model.overrides.hidden_size=64"]
    assert config.load(older) == config.load(None, today)


@pytest.mark.parametrize(("kind", "now"), [("yarn", "yarn"), ("none", "default")])
def test_the_kind_of_rope_was_a_text(tmp_path: Path, kind: str, now: str) -> None:
    with pytest.raises(ConfigError, match=f"set model.rope_scaling to {{rope_type: {now}}}"):
        config.load(written(tmp_path, "model.rope_scaling", kind))
    older = tmp_path / "older.yaml"
    older.write_text(f"{HEADER}model: {{rope_scaling: {kind}, rope_factor: 4.0}}\n", "utf-8")
    found = config.load(older).model.rope_scaling.written()
    assert found == {"rope_type": now, "factor": 4.0}


def test_a_share_of_one_is_not_one_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set optimizer\.warmup_steps, which below 1"):
        config.load(written(tmp_path, "optimizer.warmup_ratio", 1.0, HEADER))

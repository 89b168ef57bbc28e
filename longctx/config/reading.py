"""Reads a configuration: YAML file, dotted overrides, types and bounds, then rules; reports all
problems in one error."""

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from longctx.arguments import a_path, checked, kind, list_of, mapping_of, or_none, whole
from longctx.config.problems import ConfigError, Problem, yaml_text
from longctx.config.removed import REMOVED, RUN_HEADER, of_today
from longctx.config.rules import broken_rules
from longctx.config.run import SECTIONS, Config
from longctx.config.settings import LARGEST, LORA_RATE
from longctx.paths import PathError, local_path
from longctx.safe_yaml import YamlError, parse, read_text

SETTINGS = {
    f"{section}.{key}": setting
    for section, kind in SECTIONS.items()
    for key, setting in kind.model_fields.items()
}
"""All settings by dotted name."""
_BY_ONE_CALL = "by longctx.trainers.dynamic_context_parallel: docs/trainers.md"
ELSEWHERE = {
    "dpo": f"preference tuning runs inside TRL's DPOTrainer, {_BY_ONE_CALL}",
    "policy": f"policy gradients run inside TRL's GRPOTrainer or RLOOTrainer, {_BY_ONE_CALL}",
    "masked": f"masked tokens are learnt inside transformers.Trainer, {_BY_ONE_CALL}",
    "images": f"images and videos are read inside Trainer and SFTTrainer, {_BY_ONE_CALL}",
    "encoder": "encoders run inside transformers.Trainer, encoder-decoders inside Seq2SeqTrainer, "
    f"{_BY_ONE_CALL}",
    "train.freeze": "freeze parameters by requires_grad_(False) inside Trainer or SFTTrainer, "
    f"{_BY_ONE_CALL}",
    "lora.dora": f"DoRA is peft's, inside Trainer or SFTTrainer, {_BY_ONE_CALL}",
    "lora.target_parameters": "adapters of stacked experts are peft's, inside Trainer or "
    f"SFTTrainer, {_BY_ONE_CALL}",
    "lora.dropout": "its random numbers, and so the loss, would depend on how documents are split: "
    "omit it",
    "data.rollouts": "policy gradients run inside TRL's GRPOTrainer or RLOOTrainer, "
    f"{_BY_ONE_CALL}",
}
"""Sections and settings that people look for → where their job runs."""
ALIASES = {
    other: ours
    for ours, others in {
        "optimizer.learning_rate": "lr",
        "train.dtype: bfloat16": "bf16 fp16 mixed_precision",
        "train.recompute": "gradient_checkpointing activation_checkpointing",
        "batch.tokens_per_rank": "micro_batch_size per_device_train_batch_size",
        "batch.global_tokens": "batch_size global_batch_size train_batch_size "
        "gradient_accumulation_steps",
        "data.max_length": "seq_len seq_length sequence_len max_seq_length max_seq_len",
        "train.epochs": "num_epochs num_train_epochs",
        "checkpoint.every": "save_steps save_interval",
        "lora.rank": "r lora_r lora_rank",
        "context.degree": "cp_size context_parallel_size",
    }.items()
    for other in others.split()
}
"""Names in other programs → our settings."""
Values = dict[str, Any]
"""Settings as read, by section, or by key."""


@checked(
    ConfigError,
    path=or_none(a_path),
    overrides=list_of("settings such as 'train.steps=10'", kind("a text", str)),
    world_size=or_none(whole(least=1)),
    defaults=or_none(
        mapping_of("sections", kind("a mapping of settings", Mapping), keys=kind("a text", str))
    ),
)
def load(
    path: Path | str | None,
    overrides: Sequence[str] = (),
    *,
    world_size: int | None = None,
    defaults: Mapping[str, Values] | None = None,
) -> Config:
    """Reads settings from a YAML file (None: only defaults), applies `section.key=value` overrides,
    and checks the result.

    `defaults`, by section and key, replaces the built-in defaults.

    Values of overrides are YAML too (`context.bins={8192: 1}`), dashes in keys count as
    underscores, and the last override wins. With `world_size` (the number of processes) the rules
    that depend on it are checked as well. Raises ConfigError with all problems at once.
    """
    source = (
        " and ".join(
            [str(path)] * (path is not None) + ["the command line"] * bool(overrides or defaults)
        )
        or "the defaults"
    )
    values = {} if path is None else _read(local_path(path))
    for section, settings in (defaults or {}).items():
        own_values = values.setdefault(section, {})
        if isinstance(own_values, dict):
            values[section] = {**settings, **own_values}
    problems = [
        problem for override in overrides if (problem := _apply(override, values)) is not None
    ]
    _adapt_learning_rate(values)
    config, invalid = _validate(values)
    problems += invalid
    wrong = {problem.key for problem in problems}
    # Skip rules on invalid settings: the rule would report the default that replaced the value, not
    # the value given.
    problems += [
        p for p in broken_rules(config, world_size) if wrong.isdisjoint({p.key, *p.others})
    ]
    if problems:
        raise ConfigError.of(problems, source)
    return config


def _read(path: Path) -> Values:
    try:
        text = read_text(path)
        values = parse(text)
    except FileNotFoundError:
        raise ConfigError(
            f"configuration file {path} not found: check the path, or start from a file in "
            "examples/"
        ) from None
    except IsADirectoryError:
        raise ConfigError(
            f"{path} is a folder: give a configuration file, such as those in examples/"
        ) from None
    except YamlError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        sections = ", ".join(SECTIONS)
        raise ConfigError(
            f"{path} contains {type(values).__name__}, not a mapping: write a mapping of sections "
            f"({sections})"
        )
    # A section with all lines commented out reads as null and means the defaults.
    by_section = {
        str(section): {} if content is None else _with_names(content)
        for section, content in values.items()
    }
    if RUN_HEADER.match(text):
        return of_today(by_section)
    return by_section


def _whole(value: Any) -> Any:
    """Returns 1e6 as the whole number that it is."""
    if isinstance(value, float) and value.is_integer() and abs(value) < LARGEST:
        return int(value)
    return value


def _with_names(content: Any) -> Any:
    """Returns a section with text as keys: a number is no setting, which `_explain` says."""
    if isinstance(content, dict):
        return {str(key): _whole(value) for key, value in content.items()}
    return content


def _apply(override: str, values: Values) -> Problem | None:
    """Sets one `section.key=value` in `values`; returns the problem if it cannot be set."""
    name, equals, text = override.removeprefix("--").partition("=")
    name = name.replace("-", "_")
    section, dot, key = name.partition(".")
    if not equals or not dot:
        return Problem(
            override,
            None,
            "an override has the form section.key=value",
            "write --batch.tokens_per_rank=4096",
        )
    try:
        value = parse(text)
    except YamlError as error:
        return Problem(
            name, text, f"the value is not valid YAML: {error}", "quote or correct the value"
        )
    content = values.setdefault(section, {})
    if isinstance(content, dict):
        content[key] = _whole(value)
    return None


def _adapt_learning_rate(values: Values) -> None:
    """Sets the default learning rate of adapters, where no rate is set."""
    lora = values.get("lora")
    if (
        isinstance(lora, dict)
        and lora.get("rank") is not None
        and isinstance(values.setdefault("optimizer", {}), dict)
    ):
        values["optimizer"].setdefault("learning_rate", LORA_RATE)


def _validate(values: Values) -> tuple[Config, list[Problem]]:
    """Returns the settings, invalid ones replaced by their defaults, and a problem for each invalid
    one."""
    try:
        return Config.model_validate(values), []
    except ValidationError as error:
        errors = error.errors()
    problems = [_explain(details) for details in errors]
    sound = {
        section: dict(content) if isinstance(content, dict) else content
        for section, content in values.items()
    }
    for section, *keys in (details["loc"] for details in errors):
        if keys:
            sound[str(section)].pop(keys[0], None)
        else:
            sound.pop(str(section), None)
    return Config.model_validate(sound), problems


def _explain(details: ErrorDetails) -> Problem:
    section, *path = map(str, details["loc"])
    keys = [key for key in path if not key.startswith("<")]  # tags of kinds
    name = ".".join([section, *keys[:1]])
    value = details["input"]
    if details["type"] == "extra_forbidden":
        if len(keys) > 1:
            rule = f"unknown key {keys[-1]} (at {'.'.join(keys[1:-1])})"
            return Problem(
                name, value, rule, f"see `longctx config {section}`: {SETTINGS[name].description}"
            )
        if name in REMOVED:
            return Problem(name, value, "this setting is gone", REMOVED[name].fix(value))
        if (elsewhere := ELSEWHERE.get(name) or ELSEWHERE.get(section)) is not None:
            return Problem(name, value, "not a part of longctx train", elsewhere)
        if (keys or [section])[-1].isdecimal():
            fix = (
                "if it is a row of context.bins, indent it further than `bins:`; otherwise "
                "remove it"
            )
            return Problem(name, value, "a number is not the name of a setting", fix)
        return Problem(name, value, "unknown setting", _suggest(section, keys[0] if keys else None))
    if not keys:
        return Problem(
            name,
            value,
            "a section must be a mapping of settings",
            f"write {section}: {{key: value}}",
        )
    setting = SETTINGS[name]
    error = details.get("ctx", {}).get("error")
    if isinstance(error, PathError):
        return Problem(name, value, error.rule, error.way_out)
    if details["type"] == "path_type":
        rule = "must be a path"
    else:
        rule = details["msg"].replace("Input should", "must")
    where = "" if len(keys) == 1 else f" (at {'.'.join(keys[1:])})"
    fix = f"the default is {yaml_text(setting.default)} ({setting.description})"
    choices = re.findall(r"'([^']*)'", details.get("ctx", {}).get("expected", ""))
    near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
    return Problem(name, value, rule + where, f"did you mean {near[0]}? {fix}" if near else fix)


def setting_of(name: str) -> str | None:
    """Returns the setting with this name in some section, or in another program; None if there is
    none."""
    return next((each for each in SETTINGS if each.split(".")[1] == name), ALIASES.get(name))


def _suggest(section: str, key: str | None) -> str:
    """Suggests the setting or section that was probably meant, otherwise lists the valid ones."""
    if home := setting_of(section if key is None else key):
        return f"did you mean {home}?"
    if section not in SECTIONS:
        near = difflib.get_close_matches(section, SECTIONS, n=1)
        if near:
            return f"did you mean section {near[0]}?"
        return f"sections are {', '.join(SECTIONS)}"
    keys = list(SECTIONS[section].model_fields)
    near = [f"{section}.{name}" for name in difflib.get_close_matches(str(key), keys, n=1)]
    suggestions = near or difflib.get_close_matches(f"{section}.{key}", SETTINGS, n=1)
    if suggestions:
        return f"did you mean {suggestions[0]}?"
    return f"section {section} has {', '.join(keys)}"

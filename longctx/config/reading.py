"""Reads a configuration: YAML file, dotted overrides, types and bounds, then rules; reports all problems in one error."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from longctx.config.problems import ConfigError, Problem, yaml_text
from longctx.config.rules import broken_rules
from longctx.config.run import SECTIONS, Config
from longctx.config.stages import Stage, Values, laid_over, may_be_staged, settings_of
from longctx.safe_yaml import YamlError, parse, read_text
from longctx.units import whole_number

SETTINGS = {f"{section}.{key}": setting for section, kind in SECTIONS.items() for key, setting in kind.model_fields.items()}
"""All settings by dotted name."""
RENAMED = {"context.head_exchange": "context.ulysses_degree"}
"""Settings of earlier versions → their current names."""
REMOVED = {"context.recalibrate": False}
"""Settings of earlier versions that are gone → the value at which run folders may still have them."""


def load(
    path: Path | str | None,
    overrides: Sequence[str] = (),
    *,
    world_size: int | None = None,
    defaults: Mapping[str, Values] | None = None,
    stage: int | None = None,
) -> Config:
    """Reads settings from a YAML file (None: only defaults), applies `section.key=value` overrides, and checks the result.

    `defaults`, by section and key, replaces the built-in defaults. `stage` selects the settings of one stage of the run,
    counted from 0 or backwards from -1, and applies the overrides to that stage; it has no effect without stages.

    Values of overrides are YAML too (`context.bins={8192: 1}`), dashes in keys count as underscores, and the last override
    wins. With `world_size` (the number of processes) the rules that depend on it are checked as well.
    Raises ConfigError with all problems at once.
    """
    source = (
        " and ".join([str(path)] * (path is not None) + ["the command line"] * bool(overrides or defaults)) or "the defaults"
    )
    values = {} if path is None else _read(Path(path))
    for name, unused in REMOVED.items():
        section, _, key = name.partition(".")
        if isinstance(values.get(section), dict) and values[section].get(key) == unused:
            del values[section][key]
    for section, settings in (defaults or {}).items():
        given = values.setdefault(section, {})
        if isinstance(given, dict):
            values[section] = {**settings, **given}
    if stage is not None and values.get("stages"):
        if wrong_stages := _problems_of_stages(values):
            raise ConfigError.of(wrong_stages, source)
        values = laid_over(values, values["stages"][stage])
    problems = [problem for override in overrides if (problem := _apply(override, values)) is not None]
    of_stages = _problems_of_stages(values)
    config, invalid = _validate(values if not of_stages else {**values, "stages": []})
    problems += invalid
    if of_stages:
        raise ConfigError.of([*problems, *of_stages], source)
    wrong = {problem.key for problem in problems}
    # Skip rules on invalid settings: the rule would report the default that replaced the value, not the value given.
    problems += [p for p in broken_rules(config, world_size) if wrong.isdisjoint({_plain_key(p), *p.others})]
    if problems:
        raise ConfigError.of(problems, source)
    return config


def _read(path: Path) -> Values:
    try:
        values = parse(read_text(path))
    except FileNotFoundError:
        raise ConfigError(f"configuration file {path} not found: check the path, or start from a file in examples/") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder: give a configuration file, such as those in examples/") from None
    except YamlError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        sections = ", ".join(SECTIONS)
        raise ConfigError(f"{path} contains {type(values).__name__}, not a mapping: write a mapping of sections ({sections})")
    # A section with all lines commented out reads as null and means the defaults.
    return {str(section): {} if content is None else _with_names(content) for section, content in values.items()}


def _with_names(content: Any) -> Any:
    """Returns a section with text as keys: a number is no setting, which `_explain` says."""
    return {str(key): value for key, value in content.items()} if isinstance(content, dict) else content


def _apply(override: str, values: Values) -> Problem | None:
    """Sets one `section.key=value` in `values`; returns the problem if it cannot be set."""
    name, equals, text = override.removeprefix("--").partition("=")
    name = name.replace("-", "_")
    section, dot, key = name.partition(".")
    if not equals or not dot:
        return Problem(override, None, "an override has the form section.key=value", "write --batch.tokens_per_rank=4096")
    try:
        value = parse(text)
    except YamlError as error:
        return Problem(name, text, f"the value is not valid YAML: {error}", "quote or correct the value")
    if section == "stages":
        return _apply_to_stage(name, key, value, values)
    content = values.setdefault(section, {})
    if isinstance(content, dict):
        content[key] = value
    own = {"store", "stores"} if name in ("data.store", "data.stores") else {key}
    for number, stage in enumerate(_stages(values), start=1):
        given = stage.get(section)
        if isinstance(given, dict) and own & given.keys():
            fix = f"write --stages.{number}.{name}={text}"
            return Problem(name, value, f"stage {number} sets its own value, which takes precedence", fix)
    return None


def _stages(values: Values) -> list[Values]:
    """Returns the given stages that are mappings."""
    given = values.get("stages")
    return [stage for stage in given if isinstance(stage, dict)] if isinstance(given, list) else []


def _apply_to_stage(name: str, key: str, value: object, values: Values) -> Problem | None:
    """Sets `1.steps` or `1.section.key` in the stages; returns the problem if it cannot be set."""
    number, _, inner = key.partition(".")
    section, dot, setting = inner.partition(".")
    stages = _stages(values)
    place = whole_number(number) or 0
    if not (1 <= place <= len(stages) and inner):
        fix = f"use --stages.1.batch.tokens_per_rank=4096, 1 to {len(stages)}" if stages else "add stages to the file"
        return Problem(name, value, f"the run has {len(stages)} stages, counted from 1", fix)
    stage = stages[place - 1]
    if not dot:
        stage[inner] = value
    else:
        given = stage.get(section)
        stage[section] = {**(given if isinstance(given, dict) else {}), setting: value}
    return None


def _plain_key(problem: Problem) -> str:
    """Returns the problem's key without its `stages.N.` prefix."""
    return re.sub(r"^stages\.\d+\.", "", problem.key)


def _problems_of_stages(values: Values) -> list[Problem]:
    """Returns the problems of the stages themselves. Sets `train.steps` to the sum of their steps if it is omitted."""
    given = values.get("stages") or []
    values["stages"] = given
    way_out = "write [{steps: 100}, {steps: 20, data: {max_length: 8192}}]"
    if not isinstance(given, list) or len(given) != len(_stages(values)):
        return [Problem("stages", given, "must be a list of mappings", way_out)]
    problems: list[Problem] = []
    for number, stage in enumerate(given, start=1):
        for section in [section for section, content in stage.items() if content is None]:
            stage[section] = {}
        try:
            Stage.model_validate(stage)
        except ValidationError as error:
            for details in error.errors():
                rule = (
                    details["msg"].replace("Input should", "must").replace("Extra inputs are", "settings of this section are")
                )
                name = ".".join(["stages", str(number), *map(str, details["loc"])])
                problems.append(Problem(name, details["input"], rule, way_out))
            continue
        own = {f"{section}.{key}": value for section, content in settings_of(stage).items() for key, value in content.items()}
        for name, value in own.items():
            if name in SETTINGS and not may_be_staged(*name.split(".")):
                rule = "this setting cannot differ between stages"
                problems.append(Problem(f"stages.{number}.{name}", value, rule, f"set {name} for the whole run"))
        _, invalid = _validate(laid_over(values, stage))
        problems += [replace(p, key=f"stages.{number}.{p.key}") for p in invalid if p.key in own]
    if not problems and given and isinstance(train := values.setdefault("train", {}), dict):
        train.setdefault("steps", sum(stage["steps"] for stage in given))
    return problems


def _validate(values: Values) -> tuple[Config, list[Problem]]:
    """Returns the settings, invalid ones replaced by their defaults, and a problem for each invalid one."""
    try:
        return Config.model_validate(values), []
    except ValidationError as error:
        errors = error.errors()
    problems = [_explain(details) for details in errors]
    sound = {section: dict(content) if isinstance(content, dict) else content for section, content in values.items()}
    for section, *keys in (details["loc"] for details in errors):
        if keys:
            sound[str(section)].pop(keys[0], None)
        else:
            sound.pop(str(section), None)
    return Config.model_validate(sound), problems


def _explain(details: ErrorDetails) -> Problem:
    section, *keys = map(str, details["loc"])
    name = ".".join([section, *keys[:1]])
    value = details["input"]
    if details["type"] == "extra_forbidden":
        if len(keys) > 1:
            rule = f"unknown key {keys[-1]} (at {'.'.join(keys[1:-1])})"
            return Problem(name, value, rule, f"see `longctx train --help`: {SETTINGS[name].description}")
        if name in RENAMED:
            return Problem(name, value, f"renamed to {RENAMED[name]}", f"write {RENAMED[name]}={yaml_text(value)}")
        if name in REMOVED:
            return Problem(name, value, "this setting was removed", "omit it")
        if (keys or [section])[-1].isdecimal():
            fix = "if it is a row of context.bins, indent it further than `bins:`; otherwise remove it"
            return Problem(name, value, "a number is not the name of a setting", fix)
        return Problem(name, value, "unknown setting", _suggest(section, keys[0] if keys else None))
    if not keys:
        return Problem(name, value, "a section must be a mapping of settings", f"write {section}: {{key: value}}")
    setting = SETTINGS[name]
    rule = "must be a path" if details["type"] == "path_type" else details["msg"].replace("Input should", "must")
    where = "" if len(keys) == 1 else f" (at {'.'.join(keys[1:])})"
    return Problem(name, value, rule + where, f"the default is {yaml_text(setting.default)} ({setting.description})")


def _suggest(section: str, key: str | None) -> str:
    """Suggests the setting or section that was probably meant, otherwise lists the valid ones."""
    if section not in SECTIONS:
        if key is None and (home := [name for name in SETTINGS if name.split(".")[1] == section]):
            return f"did you mean {home[0]}?"
        near = difflib.get_close_matches(section, SECTIONS, n=1)
        return f"did you mean section {near[0]}?" if near else f"sections are {', '.join(SECTIONS)}"
    elsewhere = [name for name in SETTINGS if name.split(".")[1] == key]
    keys = list(SECTIONS[section].model_fields)
    near = [f"{section}.{name}" for name in difflib.get_close_matches(str(key), keys, n=1)]
    found = elsewhere or near or difflib.get_close_matches(f"{section}.{key}", SETTINGS, n=1)
    return f"did you mean {found[0]}?" if found else f"section {section} has {', '.join(keys)}"

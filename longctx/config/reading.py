"""Reading a configuration: YAML file, then dotted overrides, then types and bounds, then rules; all problems in one error."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from longctx.config.problems import ConfigError, Problem, yaml_text
from longctx.config.rules import broken_rules
from longctx.config.settings import Config
from longctx.safe_yaml import SafeLoader

Values = dict[str, Any]

SETTINGS = {
    f"{section}.{key}": setting
    for section, field in Config.model_fields.items()
    for key, setting in type(field.default).model_fields.items()
}
"""Every setting by its dotted name."""
RENAMED = {"context.head_exchange": "context.ulysses_degree"}
"""Settings of earlier versions, and what they are called now."""


def load(
    path: Path | str | None,
    overrides: Sequence[str] = (),
    *,
    world_size: int | None = None,
    defaults: Mapping[str, Values] | None = None,
) -> Config:
    """Reads settings from a YAML file (None: defaults alone), replaces those given as `section.key=value`, and checks them.

    `defaults` by section and key are in place of the settings' own.

    Values of overrides are YAML too (`context.bins={8192: 1}`), dashes in keys count as underscores, and the last one wins.
    With `world_size` (processes of the run) the rules that depend on it are checked as well.
    Raises ConfigError with all problems at once.
    """
    source = " and ".join([str(path)] * (path is not None) + ["the command line"] * bool(overrides)) or "the defaults"
    values = {} if path is None else _read(Path(path))
    for section, settings in (defaults or {}).items():
        given = values.setdefault(section, {})
        if isinstance(given, dict):
            values[section] = {**settings, **given}
    problems = [problem for override in overrides if (problem := _apply(override, values)) is not None]
    config, invalid = _validate(values)
    problems += invalid
    wrong = {problem.key for problem in problems}
    # A rule on a setting that is wrong in itself would blame its default, which nobody asked for.
    problems += [p for p in broken_rules(config, world_size) if wrong.isdisjoint({p.key, *p.others})]
    if problems:
        raise ConfigError.of(problems, source)
    return config


def _read(path: Path) -> Values:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), SafeLoader)
    except FileNotFoundError:
        raise ConfigError(f"no configuration file {path}: check the path, or start from one of the examples") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        sections = ", ".join(Config.model_fields)
        raise ConfigError(f"{path} holds {type(values).__name__}, not a mapping: give sections, which are {sections}")
    # A section whose every line is commented out reads as null, and means its defaults.
    return {str(section): {} if content is None else content for section, content in values.items()}


def _apply(override: str, values: Values) -> Problem | None:
    """Sets one `section.key=value` in `values`, or says why it cannot be."""
    name, equals, text = override.removeprefix("--").partition("=")
    name = name.replace("-", "_")
    section, dot, key = name.partition(".")
    if not equals or not dot:
        return Problem(override, None, "an override has the form section.key=value", "write --batch.tokens_per_rank=4096")
    try:
        value = yaml.load(text, SafeLoader)
    except yaml.YAMLError as error:
        return Problem(name, text, f"the value is not valid YAML: {' '.join(str(error).split())}", "quote it, or mend it")
    content = values.setdefault(section, {})
    if isinstance(content, dict):
        content[key] = value
    return None


def _validate(values: Values) -> tuple[Config, list[Problem]]:
    """The settings, wrong ones replaced by their defaults, and what is wrong with those."""
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
            rule = f"there is no key {keys[-1]} (at {'.'.join(keys[1:-1])})"
            return Problem(name, value, rule, f"see `longctx train --help`: {SETTINGS[name].description}")
        if name in RENAMED:
            return Problem(name, value, f"this setting is {RENAMED[name]} now", f"write {RENAMED[name]}={yaml_text(value)}")
        return Problem(name, value, "there is no such setting", _suggest(section, keys[0] if keys else None))
    if not keys:
        return Problem(name, value, "a section is a mapping of settings", f"write {section}: {{key: value}}")
    setting = SETTINGS[name]
    rule = "must be a path" if details["type"] == "path_type" else details["msg"].replace("Input should", "must")
    where = "" if len(keys) == 1 else f" (at {'.'.join(keys[1:])})"
    return Problem(name, value, rule + where, f"the default is {yaml_text(setting.default)} ({setting.description})")


def _suggest(section: str, key: str | None) -> str:
    """The setting or section that was probably meant, else the choice there is."""
    if section not in Config.model_fields:
        if key is None and (home := [name for name in SETTINGS if name.split(".")[1] == section]):
            return f"did you mean {home[0]}?"
        near = difflib.get_close_matches(section, Config.model_fields, n=1)
        return f"did you mean section {near[0]}?" if near else f"sections are {', '.join(Config.model_fields)}"
    elsewhere = [name for name in SETTINGS if name.split(".")[1] == key]
    keys = list(type(Config.model_fields[section].default).model_fields)
    near = [f"{section}.{name}" for name in difflib.get_close_matches(str(key), keys, n=1)]
    found = elsewhere or near or difflib.get_close_matches(f"{section}.{key}", SETTINGS, n=1)
    return f"did you mean {found[0]}?" if found else f"section {section} has {', '.join(keys)}"

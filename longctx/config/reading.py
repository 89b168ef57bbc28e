"""Reads a configuration: YAML file, dotted overrides, types and bounds, then rules; reports all
problems in one error."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from longctx.arguments import a_path, checked, kind, list_of, mapping_of, or_none, whole
from longctx.config.explain import explain
from longctx.config.names import MAPPINGS, split_name
from longctx.config.problems import ConfigError, Problem
from longctx.config.removed import RUN_HEADER, of_today
from longctx.config.rules import broken_rules
from longctx.config.run import SECTIONS, Config
from longctx.config.settings import LARGEST, LORA_RATE
from longctx.paths import expanded, local_path
from longctx.planning.hardware_profile import shipped_profiles
from longctx.safe_yaml import YamlError, parse, read_text

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
    values = {}
    if path is not None:
        file = local_path(path)
        values = _read(file)
        _find_profile_beside(file, values)
    for section, settings in (defaults or {}).items():
        own_values = values.setdefault(section, {})
        if isinstance(own_values, dict):
            values[section] = {**settings, **own_values}
    problems = []
    for override in overrides:
        problem = _apply(override, values)
        if problem is not None:
            problems.append(problem)
    _adapt_learning_rate(values)
    config, invalid = _validate(values)
    problems += invalid
    source = _source(path, on_command_line=bool(overrides or defaults))
    if problems and config.model.from_pretrained is not None:
        # To open a checkpoint takes seconds, which nobody waits for who has mistyped a setting.
        raise ConfigError.of(problems, source)
    wrong = {problem.key for problem in problems}
    # Skip rules on invalid settings: the rule would report the default that replaced the value, not
    # the value given.
    problems += [
        p for p in broken_rules(config, world_size) if wrong.isdisjoint({p.key, *p.others})
    ]
    if problems:
        raise ConfigError.of(problems, source)
    return config


def _source(path: Path | str | None, *, on_command_line: bool) -> str:
    """Returns in words where settings come from."""
    sources = []
    if path is not None:
        sources.append(str(path))
    if on_command_line:
        sources.append("the command line")
    if not sources:
        return "the defaults"
    return " and ".join(sources)


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
        str(section): {} if content is None else _with_names(str(section), content)
        for section, content in values.items()
    }
    if RUN_HEADER.match(text):
        return of_today(by_section)
    return by_section


def _find_profile_beside(file: Path, values: Values) -> None:
    """Replaces a `context.profile` that is not in the working directory by the file of that name
    beside the configuration file, if there is one."""
    context = values.get("context")
    if not isinstance(context, dict) or not isinstance(context.get("profile"), str):
        return
    name = expanded(context["profile"])
    beside = file.parent / name
    if name not in shipped_profiles() and not Path(name).is_file() and beside.is_file():
        context["profile"] = str(beside)


def _whole(value: Any) -> Any:
    """Returns 1e6 as the whole number that it is."""
    if isinstance(value, float) and value.is_integer() and abs(value) < LARGEST:
        return int(value)
    return value


def _with_names(section: str, content: Any) -> Any:
    """Returns a section with text as keys: a number is no setting, which `explain` says."""
    if isinstance(content, dict):
        return {str(key): _numbers(f"{section}.{key}", value) for key, value in content.items()}
    return content


def _numbers(name: str, value: Any) -> Any:
    """Returns the value of a setting with whole numbers as such, also in its keys."""
    if name in MAPPINGS and isinstance(value, dict):
        return {str(key): _whole(each) for key, each in value.items()}
    return _whole(value)


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
    mapping, _, inner = key.partition(".")
    if f"{section}.{mapping}" in MAPPINGS and inner and isinstance(content, dict):
        if content.get(mapping) is None:
            content[mapping] = {}
        content = content[mapping]
        key = inner
    if isinstance(content, dict):
        content[key] = _numbers(name, value)
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
    problems = [explain(details) for details in errors]
    sound = deepcopy(values)
    for details in errors:
        _drop(sound, [str(part) for part in details["loc"]])
    return Config.model_validate(sound), problems


def _drop(values: Values, path: list[str]) -> None:
    """Removes the section, setting or key of a mapping that a path leads to or into."""
    _, inside = split_name(path)
    *outer, key = path[: len(path) - len(inside)]
    place = values
    for part in outer:
        place = place.get(part, {})
    place.pop(key, None)

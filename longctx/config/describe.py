"""The text of settings, which `longctx config` prints, and the list of their sections, for the help
of commands."""

import textwrap
from collections.abc import Iterable
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from longctx.config.names import FIELDS, MAPPINGS
from longctx.config.problems import yaml_text
from longctx.config.run import SECTIONS

_WIDTH = 110
_INDENT = 8


_HEAD = "settings, in the YAML file or as --section.key VALUE (values are YAML)"


def overview() -> str:
    """Returns a line for each section, and how to see its settings."""
    lines = [f"{_HEAD}; `longctx config SECTION` shows a section:"]
    for section, section_type in SECTIONS.items():
        first, *others = _wrapped(str(section_type.__doc__), 13)
        lines += [f"  {section:10} {first.strip()}", *others]
    return "\n".join(lines)


def describe(names: Iterable[str] = SECTIONS) -> str:
    """Returns the help text of the settings of sections, and of settings and keys by name: dotted
    name, type, description, default."""
    lines = [f"{_HEAD}:"]
    for name in names:
        section = name.partition(".")[0]
        lines += ["", f"{section}: {SECTIONS[section].__doc__}"]
        for known, setting in FIELDS.items():
            if known == name or known.startswith(f"{name}."):
                lines.append(f"  --{known} {type_name(setting.annotation)}")
                lines += _wrapped(_with_default(setting.description or "", setting.default))
    return "\n".join(lines)


def _with_default(description: str, default: Any) -> str:
    """Appends the default of a setting. If that is null, whose meaning ends the description, both
    become one remark."""
    text, null, meaning = description.rpartition(" (null: ")
    if default is None and null and meaning.endswith(")"):
        return f"{text} (default: null, {meaning}"
    return f"{description} (default: {yaml_text(default)})"


def _wrapped(text: str, spaces: int = _INDENT) -> list[str]:
    indent = " " * spaces
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )


def type_name(annotation: Any) -> str:
    """Returns a type as the help shows it: `int`, `split|drop|error`, `{int: int}`, `[float,
    float]`, `[text, ..]`."""
    if get_origin(annotation) is Annotated:
        return type_name(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return "|".join(
            "null" if choice is NoneType else type_name(choice) for choice in get_args(annotation)
        )
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    if get_origin(annotation) is list:
        return "[" + ", ".join(map(type_name, get_args(annotation))) + ", ..]"
    if get_origin(annotation) is dict:
        return "{" + ": ".join(map(type_name, get_args(annotation))) + "}"
    if get_origin(annotation) is tuple:
        return "[" + ", ".join(map(type_name, get_args(annotation))) + "]"
    if annotation in MAPPINGS.values():
        return "{key: value, ..}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "{" + ", ".join(annotation.model_fields) + "}"
    return {bool: "true|false", Path: "path", str: "text"}.get(annotation) or str(
        annotation.__name__
    )

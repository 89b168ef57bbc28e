"""Problems of a configuration, each with key, value, rule and fix, and the error that reports all of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from longctx.errors import UserError


@dataclass(frozen=True)
class Problem:
    """One broken rule. `key` is the setting at fault; `others` are the settings that the rule compares it with."""

    key: str
    value: object
    rule: str
    fix: str
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"  {self.key} = {yaml_text(self.value)}\n      rule: {self.rule}\n      fix:  {self.fix}"


def plain(value: object) -> object:
    """Converts a value to YAML's types: a path becomes text, a tuple a list."""
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else value


def yaml_text(value: object) -> str:
    """Returns a value as YAML on one line."""
    text: str = yaml.safe_dump(plain(value), default_flow_style=True, sort_keys=False, width=math.inf, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


class ConfigError(UserError):
    """An invalid configuration. `problems` lists every broken rule; it is empty if the file could not be read."""

    def __init__(self, summary: str, problems: Sequence[Problem] = ()) -> None:
        super().__init__("\n".join([summary, *map(str, problems)]))
        self.problems = tuple(problems)

    @classmethod
    def of(cls, problems: Sequence[Problem], source: str) -> "ConfigError":
        """Makes the error for problems found in `source`, such as `run.yaml and the command line`."""
        count = f"{len(problems)} problems" if len(problems) > 1 else "1 problem"
        return cls(f"{count} in {source}:", problems)

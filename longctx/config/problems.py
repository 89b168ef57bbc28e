"""What is wrong with a configuration: each problem with key, value, rule and fix, and the error that carries all of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from longctx.errors import UserError


@dataclass(frozen=True)
class Problem:
    """One broken rule. `key` is the setting to blame; `others` are settings that the rule compares it with."""

    key: str
    value: object
    rule: str
    fix: str
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"  {self.key} = {yaml_text(self.value)}\n      rule: {self.rule}\n      fix:  {self.fix}"


def plain(value: object) -> object:
    """A value as YAML knows it: a path is text, a tuple a list."""
    if isinstance(value, (tuple, list)):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return str(value) if isinstance(value, Path) else value


def yaml_text(value: object) -> str:
    """A value as it would stand in the YAML file, on one line."""
    text: str = yaml.safe_dump(plain(value), default_flow_style=True, sort_keys=False, width=math.inf, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


class ConfigError(UserError):
    """A configuration that cannot be used. `problems` has every one of them; it is empty if the file could not even be read."""

    def __init__(self, summary: str, problems: Sequence[Problem] = ()) -> None:
        super().__init__("\n".join([summary, *map(str, problems)]))
        self.problems = tuple(problems)

    @classmethod
    def of(cls, problems: Sequence[Problem], source: str) -> "ConfigError":
        """The error for problems found in `source`, such as `run.yaml and the command line`."""
        count = f"{len(problems)} problems" if len(problems) > 1 else "1 problem"
        return cls(f"{count} in {source}:", problems)

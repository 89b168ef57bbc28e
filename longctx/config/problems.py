"""Problems of a configuration, each with key, value, rule and fix, and the error that reports all
of them."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import yaml
from pydantic import BaseModel

from longctx.errors import LONGEST_MESSAGE, UserError, shortened
from longctx.paths import redacted


@dataclass(frozen=True)
class Problem:
    """One broken rule. `key` is the setting at fault; `others` are the settings that the rule
    compares it with."""

    key: str
    value: object
    rule: str
    fix: str
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        key = shortened(self.key, 100)
        value = shortened(redacted(yaml_text(self.value)), 200)
        return (
            f"  {key} = {value}\n      rule: {shortened(self.rule, 800)}\n      fix:  "
            f"{shortened(self.fix, 800)}"
        )


def plain(value: object) -> object:
    """Converts a value to YAML's types: a path becomes text, a tuple a list."""
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, BaseModel):
        return plain(value.model_dump(exclude_none=True))
    if isinstance(value, Path):
        return str(value)
    return value


def yaml_text(value: object) -> str:
    """Returns a value as YAML on one line; Python's text of a value that YAML does not have."""
    try:
        text: str = yaml.safe_dump(
            plain(value),
            default_flow_style=True,
            sort_keys=False,
            width=math.inf,
            allow_unicode=True,
        )
    except (yaml.YAMLError, ValueError):
        if isinstance(value, int):
            return repr(type(value))
        return repr(value)
    return text.removesuffix("\n").removesuffix("\n...")


class ConfigError(UserError):
    """An invalid configuration. `problems` lists every broken rule; it is empty if the file could
    not be read."""

    def __init__(self, summary: str, problems: Sequence[Problem] = ()) -> None:
        lines = [shortened(summary, 800), *map(str, problems)]
        size = list(accumulate(len(line) + 1 for line in lines))
        shown = max(2, bisect_right(size, LONGEST_MESSAGE - 100))
        left_out = [f"  .. and {len(lines) - shown} more: correct these first"] * (
            len(lines) > shown
        )
        super().__init__("\n".join([*lines[:shown], *left_out]))
        self.problems = tuple(problems)

    @classmethod
    def of(cls, problems: Sequence[Problem], source: str) -> "ConfigError":
        """Makes the error for problems found in `source`, such as `run.yaml and the command
        line`."""
        count = f"{len(problems)} problems" if len(problems) > 1 else "1 problem"
        return cls(f"{count} in {source}:", problems)

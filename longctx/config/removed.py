"""Settings that are gone, with what decides instead."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Removed:
    """A setting that is gone.

    Attributes:
        default: its last default. A file with this value, such as the config.yaml of an older run,
            means what it meant before, so that the value is passed over.
        instead: what decides now, or what to write, for the fix of the problem.
    """

    default: Any
    instead: str


REMOVED = {
    "optimizer.momentum": Removed(0.95, "omit it: Muon's momentum is 0.95, and AdamW has betas"),
}
"""By dotted name."""


def without_removed(values: dict[str, Any]) -> dict[str, Any]:
    """Returns settings by section, without removed ones at their last default."""
    kept = dict(values)
    for name, removed in REMOVED.items():
        section, key = name.split(".")
        content = kept.get(section)
        if isinstance(content, dict) and key in content and content[key] == removed.default:
            kept[section] = {other: value for other, value in content.items() if other != key}
    return kept

"""Stages: consecutive parts of a run, each of which may replace settings of the run."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

Values = dict[str, Any]

STAGED = {
    "model": ("rope_",),
    "data": ("store", "stores", "long_documents", "max_length"),
    "batch": ("",),
    "context": ("",),
    "parallel": ("reshard_after", "reduce_after"),
    "train": ("recompute", "mlp_tile_tokens", "offload_activations"),
}
"""Settings that a stage may replace, by section: names or prefixes of names. Weights and processes depend on none of them."""


class Stage(BaseModel):
    """One stage of a run: its number of steps, and the settings that it replaces, by section."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    steps: int = Field(ge=1, le=1 << 40)
    model: Values = {}
    data: Values = {}
    batch: Values = {}
    context: Values = {}
    parallel: Values = {}
    train: Values = {}


def settings_of(stage: Mapping[str, Any]) -> Values:
    """Returns the settings that a stage replaces, by section. `stage` is a dumped `Stage` or the mapping as given."""
    return {section: dict(stage[section]) for section in STAGED if stage.get(section)}


def may_be_staged(section: str, key: str) -> bool:
    allowed = STAGED.get(section, ())
    return any(key.startswith(name) if name in ("", "rope_") else key == name for name in allowed)


def laid_over(values: Mapping[str, Any], stage: Mapping[str, Any]) -> Values:
    """Returns the settings of a run with those of a stage applied, by section. Its `store` also replaces the run's `stores`."""
    merged = {section: content for section, content in values.items() if section != "stages"}
    for section, own in settings_of(stage).items():
        given = merged.get(section) or {}
        if not isinstance(given, Mapping):
            continue  # refused as a section of the run
        if section == "data" and {"store", "stores"} & own.keys():
            given = {**given, "store": None, "stores": None}
        merged[section] = {**given, **own}
    return merged

"""Stages: parts of a run, one after the other, whose settings are laid over those of the run."""

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
"""What a stage may replace: by section, settings or how their names begin. Nothing that weights or processes depend on."""


class Stage(BaseModel):
    """A part of a run: how many steps it has, and settings by section that are its own."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    steps: int = Field(ge=1)
    model: Values = {}
    data: Values = {}
    batch: Values = {}
    context: Values = {}
    parallel: Values = {}
    train: Values = {}


def settings_of(stage: Mapping[str, Any]) -> Values:
    """A stage's own settings, by section, as given or of a `Stage`."""
    return {section: dict(stage[section]) for section in STAGED if stage.get(section)}


def may_be_staged(section: str, key: str) -> bool:
    allowed = STAGED.get(section, ())
    return any(key.startswith(name) if name in ("", "rope_") else key == name for name in allowed)


def laid_over(values: Mapping[str, Any], stage: Mapping[str, Any]) -> Values:
    """Settings of a run by section and key, with those of a stage in their place. One store goes where several come."""
    merged = {section: content for section, content in values.items() if section != "stages"}
    for section, own in settings_of(stage).items():
        given = dict(merged.get(section) or {})
        if section == "data" and {"store", "stores"} & own.keys():
            given |= {"store": None, "stores": None}
        merged[section] = given | own
    return merged

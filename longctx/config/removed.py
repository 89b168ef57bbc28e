"""Settings that are gone, with what to write or what decides instead."""

import re
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from longctx.config.problems import yaml_text
from longctx.config.settings import Overrides

RUN_HEADER = re.compile(r"# \d+ ranks: ")
"""Begins the settings that a run has written into its folder."""


@dataclass(frozen=True)
class Removed:
    """A setting that is gone.

    Attributes:
        default: its last default.
        instead: what decides now; empty where `now` says all.
        now: the setting that takes its values as they are, by dotted name, if there is one.
        below: that setting takes only values below this; None: all.
    """

    default: Any
    instead: str = ""
    now: str | None = None
    below: float | None = None

    def moves(self, value: Any) -> bool:
        """Returns whether another setting takes this value as it is."""
        if self.now is None or self.below is None:
            return self.now is not None
        return isinstance(value, int | float) and value < self.below

    def fix(self, value: Any) -> str:
        """Returns what to write instead of a value."""
        if self.now is None:
            return self.instead
        fix = f"set {self.now}"
        if value == self.default:
            fix = f"omit it, or set {self.now}"
        elif self.moves(value):
            fix = f"set {self.now} to {yaml_text(value)}"
        if self.instead:
            fix += f", {self.instead}"
        return fix


REMOVED = {
    **{
        f"model.{size}": Removed(None, now=f"model.overrides.{size}")
        for size in Overrides.model_fields
    },
    "model.rope_factor": Removed(None, now="model.rope_scaling.factor"),
    "model.rope_original_length": Removed(
        None, now="model.rope_scaling.original_max_position_embeddings"
    ),
    "model.rope_low_freq_factor": Removed(None, now="model.rope_scaling.low_freq_factor"),
    "model.rope_high_freq_factor": Removed(None, now="model.rope_scaling.high_freq_factor"),
    "model.rope_beta_fast": Removed(None, now="model.rope_scaling.beta_fast"),
    "model.rope_beta_slow": Removed(None, now="model.rope_scaling.beta_slow"),
    "data.stores": Removed(None, now="data.store"),
    "batch.pad_to_multiple_of": Removed(
        1,
        "omit it: tokens are padded to what tensor ranks and float8 need",
    ),
    "parallel.expert_max_load": Removed(
        2.0,
        "omit it: experts compute at most twice an even share of rows at once",
    ),
    "train.peak_flops": Removed(None, "omit it: the peak of a GPU is known by its name"),
    "optimizer.warmup_ratio": Removed(
        None, "which below 1 is a share of the steps", now="optimizer.warmup_steps", below=1
    ),
    "optimizer.momentum": Removed(0.95, "omit it: Muon's momentum is 0.95, and AdamW has betas"),
}
"""By dotted name."""


def scaling_of_kind(kind: str) -> dict[str, str]:
    """Returns model.rope_scaling for a kind, which was its whole value."""
    if kind == "none":
        return {"rope_type": "default"}
    return {"rope_type": kind}


def of_today(values: dict[str, Any]) -> dict[str, Any]:
    """Returns settings that a run wrote, by section, as they are written today.

    A removed setting at its last default is left out, and one whose values another setting takes
    is moved there. All others stay, and so are refused.
    """
    new = deepcopy(values)
    model = new.get("model")
    if isinstance(model, dict):
        kind = model.get("rope_scaling")
        if kind is None:
            model["rope_scaling"] = {}
        elif isinstance(kind, str):
            model["rope_scaling"] = scaling_of_kind(kind)
    for name, removed in REMOVED.items():
        section, key = name.split(".")
        content = new.get(section)
        if not isinstance(content, dict) or key not in content:
            continue
        value = content[key]
        if value == removed.default:
            del content[key]
        elif removed.moves(value):
            del content[key]
            _put(new, str(removed.now), value)
    return new


def _put(values: dict[str, Any], name: str, value: Any) -> None:
    """Sets the setting of a dotted name."""
    *path, key = name.split(".")
    place = values
    for part in path:
        place = place.setdefault(part, {})
    place[key] = value

"""Context extension: another RoPE for a checkpoint, in the terms of transformers' configs, so that exports keep it."""

from collections.abc import Mapping
from typing import Any

from longctx.errors import UserError
from longctx.model.presets import ModelShape

ROPE_SETTINGS = (
    "rope_theta",
    "rope_scaling",
    "rope_factor",
    "rope_original_length",
    "rope_low_freq_factor",
    "rope_high_freq_factor",
    "rope_beta_fast",
    "rope_beta_slow",
)
"""The settings of section `model` that a checkpoint takes."""


class RopeError(UserError):
    """Settings of RoPE that a checkpoint's model cannot have."""


ORIGINAL_LENGTH = {"original_max_position_embeddings": "rope_original_length"}
ROPE_FIELDS: dict[str, dict[str, str]] = {
    "llama3": {**ORIGINAL_LENGTH, "low_freq_factor": "rope_low_freq_factor", "high_freq_factor": "rope_high_freq_factor"},
    "yarn": {**ORIGINAL_LENGTH, "beta_fast": "rope_beta_fast", "beta_slow": "rope_beta_slow"},
}
"""What kinds of RoPE have besides base and factor: the names in transformers' configs → ours."""


def ntk_theta(theta: float, factor: float, dim: int) -> float:
    """The base by which the slowest of the frequencies of `dim` numbers is divided by `factor` (bloc97, 2023)."""
    return float(theta * factor ** (dim / (dim - 2)))


def with_rope(config: Any, settings: Mapping[str, Any]) -> None:
    """Changes the RoPE of a config of transformers, in place; `settings` are some of ROPE_SETTINGS.

    Where layers have different ones, those of full attention are changed. The longest length that the config states grows with
    the factor. Raises RopeError if the model has no RoPE, or settings are missing.
    """
    text = config.get_text_config()
    ropes = getattr(text, "rope_parameters", None)
    if not isinstance(ropes, dict) or not ropes:
        raise RopeError(f"{config.model_type} has no rotary position embedding: leave {', '.join(settings)} out")
    old = ropes.get("full_attention", ropes)
    kind = settings.get("rope_scaling", "default")
    theta = float(settings.get("rope_theta", old["rope_theta"]))
    original = (
        settings.get("rope_original_length") or old.get("original_max_position_embeddings") or text.max_position_embeddings
    )
    new = {key: value for key, value in old.items() if key in ("partial_rotary_factor",)} | {"rope_theta": theta}
    factor = float(settings.get("rope_factor", 1.0))
    if kind in ("none", "default"):
        if "rope_factor" in settings:
            raise RopeError(f"rope_factor is {factor}, and there is no rope_scaling: choose linear, ntk, yarn or llama3")
        new["rope_type"] = "default"
    elif factor <= 1:
        raise RopeError(f"rope_scaling is {kind}, and rope_factor {factor}: give a factor greater than 1")
    elif kind == "ntk":  # which is another base, and nothing else
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        turned = int(head_dim * old.get("partial_rotary_factor", 1.0))
        new |= {"rope_type": "default", "rope_theta": ntk_theta(theta, factor, turned)}
    else:
        new |= {"rope_type": kind, "factor": factor}
        given, known = {**settings, "rope_original_length": int(original)}, ModelShape.model_fields
        new |= {theirs: given.get(ours, known[ours].default) for theirs, ours in ROPE_FIELDS.get(kind, {}).items()}
    if old is ropes:
        text.rope_parameters = new
    else:
        text.rope_parameters = {**ropes, "full_attention": new}
    if factor > 1:
        text.max_position_embeddings = max(text.max_position_embeddings, int(original * factor))

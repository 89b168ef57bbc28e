"""Context extension: changes the RoPE of a checkpoint in the terms of transformers' configs, so that exports keep it."""

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
"""Settings of section `model` that can be combined with a checkpoint."""


class RopeError(UserError):
    """RoPE settings that a checkpoint's model does not support."""


ORIGINAL_LENGTH = {"original_max_position_embeddings": "rope_original_length"}
ROPE_FIELDS: dict[str, dict[str, str]] = {
    "llama3": {**ORIGINAL_LENGTH, "low_freq_factor": "rope_low_freq_factor", "high_freq_factor": "rope_high_freq_factor"},
    "yarn": {**ORIGINAL_LENGTH, "beta_fast": "rope_beta_fast", "beta_slow": "rope_beta_slow"},
}
"""Fields of each RoPE type besides base and factor: names in transformers' configs → our settings."""


def ntk_theta(theta: float, factor: float, dim: int) -> float:
    """Returns the base that divides the lowest frequency of `dim` rotated dimensions by `factor` (bloc97, 2023)."""
    return float(theta * factor ** (dim / (dim - 2)))


def with_rope(config: Any, settings: Mapping[str, Any]) -> None:
    """Changes the RoPE of a config of transformers, in place; `settings` are some of ROPE_SETTINGS.

    If layers have different RoPEs, that of full attention is changed. The maximum length in the config grows with the factor.
    Raises RopeError if the model has no RoPE, or settings are missing.
    """
    text = config.get_text_config()
    ropes = getattr(text, "rope_parameters", None)
    if not isinstance(ropes, dict) or not ropes:
        raise RopeError(f"{config.model_type} has no rotary position embedding: remove {', '.join(settings)}")
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
            raise RopeError(f"rope_factor is {factor}, but rope_scaling is not set: choose linear, ntk, yarn or llama3")
        new["rope_type"] = "default"
    elif factor <= 1:
        raise RopeError(f"rope_scaling is {kind}, but rope_factor is {factor}: give a factor greater than 1")
    elif kind == "ntk":  # changes only the base
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

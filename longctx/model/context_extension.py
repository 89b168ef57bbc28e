"""Context extension: changes the RoPE of a checkpoint in the terms of transformers' configs, so
that exports keep it."""

from collections.abc import Mapping
from typing import Any

from longctx.errors import UserError
from longctx.model.presets import ModelShape

ROPE_KEYS = {
    "rope_theta": "rope_theta",
    "rope_type": "rope_scaling",
    "factor": "rope_factor",
    "original_max_position_embeddings": "rope_original_length",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "beta_fast": "rope_beta_fast",
    "beta_slow": "rope_beta_slow",
}
"""Keys of model.rope_scaling, as in transformers' configs, and the base → fields of ModelShape."""


class RopeError(UserError):
    """RoPE settings that a checkpoint's model does not support."""


LENGTH = "original_max_position_embeddings"
ORIGINAL_LENGTH = {LENGTH: "rope_original_length"}
ROPE_FIELDS: dict[str, dict[str, str]] = {
    "llama3": {
        **ORIGINAL_LENGTH,
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
    },
    "yarn": {**ORIGINAL_LENGTH, "beta_fast": "rope_beta_fast", "beta_slow": "rope_beta_slow"},
}
"""Fields of each RoPE type besides base and factor: names in transformers' configs → fields of
ModelShape."""
WITH_FACTOR = ("linear", "dynamic", "proportional", *ROPE_FIELDS)
"""RoPE types of transformers whose frequencies depend on one factor."""
OF_SCALING = {
    *(
        "rope_type",
        "type",
        "factor",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "short_factor",
        "long_factor",
    ),
    *(theirs for fields in ROPE_FIELDS.values() for theirs in fields),
}
"""Fields that belong to a type, which another type replaces; all others stay."""


def shape_of_rope(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields of ModelShape for settings by keys of ROPE_KEYS."""
    fields = {ROPE_KEYS[key]: value for key, value in settings.items()}
    if fields.get("rope_scaling") == "default":
        fields["rope_scaling"] = "none"
    return fields


def ntk_theta(theta: float, factor: float, dim: int) -> float:
    """Returns the base that divides the lowest frequency of `dim` rotated dimensions by `factor`
    (bloc97, 2023)."""
    return float(theta * factor ** (dim / (dim - 2)))


def with_rope(config: Any, settings: Mapping[str, Any]) -> None:
    """Changes the RoPE of a config of transformers, in place; `settings` are by keys of ROPE_KEYS.

    Only what `settings` name changes: a type without its fields keeps the config's, or takes our
    defaults if the type is new. If layers have different RoPEs, that of full attention is changed.
    The maximum length in the config grows with the factor. Raises RopeError if the model has no
    RoPE, settings are missing, or its RoPE lacks what they name.
    """
    text = config.get_text_config()
    ropes = getattr(text, "rope_parameters", None) or {}
    old = ropes.get("full_attention", ropes)
    if not old:
        raise RopeError(
            f"{config.model_type} has no rotary position embedding: remove {', '.join(settings)}"
        )
    if "rope_theta" not in old:
        raise RopeError(
            f"{config.model_type} has one RoPE each for {', '.join(ropes)}: remove "
            f"{', '.join(settings)}"
        )
    before = str(old.get("rope_type") or old.get("type") or "default")
    kind = str(settings.get("rope_type", before))
    factor = settings.get("factor")
    if not factor and kind == before:
        factor = old.get("factor")
    factor = float(factor or 1.0)
    _check(settings, before, kind=kind, factor=factor)
    original = settings.get(LENGTH) or old.get(LENGTH)
    if original is None and kind != before == "linear" and kind in ROPE_FIELDS:
        raise RopeError(
            f"rope_type is {kind}, but the config lacks the length before scaling by {before}: set "
            f"{LENGTH}"
        )
    scaled_before = float(old.get("factor") or 1.0) if before == "linear" else 1.0
    unscaled = original or text.max_position_embeddings / scaled_before
    new = {**old, "rope_theta": float(settings.get("rope_theta", old["rope_theta"]))}
    if kind != before:
        new = {key: value for key, value in new.items() if key not in OF_SCALING}
    if kind == "ntk":  # changes only the base
        theta = ntk_theta(new["rope_theta"], factor, dim=_rotated_dim(text, old))
        new |= {"rope_type": "default", "rope_theta": theta}
    elif kind != before:
        new |= _fields_of_type(kind, original_length=int(unscaled))
    for field in ROPE_FIELDS.get(kind, {}):
        if field in settings:
            new[field] = settings[field]
    if kind in WITH_FACTOR and ("factor" in settings or kind != before):
        new["factor"] = factor
    if old is ropes:
        text.rope_parameters = new
    else:
        text.rope_parameters = {**ropes, "full_attention": new}
    # Frequencies of type dynamic depend on the maximum length.
    if "factor" in settings and kind != "dynamic":
        text.max_position_embeddings = max(text.max_position_embeddings, int(unscaled * factor))


def _rotated_dim(text: Any, rope: Mapping[str, Any]) -> int:
    """Returns the number of dimensions of a head that RoPE rotates."""
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(head_dim * rope.get("partial_rotary_factor", 1.0))


def _fields_of_type(kind: str, *, original_length: int) -> dict[str, Any]:
    """Returns the fields of a new type of RoPE, with our defaults."""
    fields = ROPE_FIELDS.get(kind, {})
    new: dict[str, Any] = {"rope_type": kind}
    for theirs, ours in fields.items():
        new[theirs] = ModelShape.model_fields[ours].default
    if fields:
        new[LENGTH] = original_length
    return new


def _check(settings: Mapping[str, Any], before: str, kind: str, factor: float) -> None:
    """Raises RopeError if settings do not belong to RoPE of type `kind`, or cannot replace that of
    type `before`."""
    scales = kind in (*WITH_FACTOR, "ntk")
    if "factor" in settings and not scales:
        if "rope_type" not in settings:
            unset = "rope_type is not set"
        else:
            unset = f"rope_type is {settings['rope_type']}"
        raise RopeError(
            f"factor is {factor}, but {unset}, and RoPE of type {before} has no factor: choose "
            "linear, ntk, yarn or llama3"
        )
    if scales and factor <= 1 and ("factor" in settings or kind != before):
        raise RopeError(
            f"rope_type is {kind}, but factor is {factor}: give a factor greater than 1"
        )
    if kind != before and (
        before in ("proportional", "axial") or (kind == "ntk" and before != "default")
    ):
        raise RopeError(
            f"rope_type is {kind}, which cannot replace the checkpoint's RoPE of type {before}: "
            "omit rope_type"
        )
    known = {"rope_theta", "rope_type", "factor", *ROPE_FIELDS.get(kind, {})}
    known |= {LENGTH} if scales and kind != "dynamic" else set()
    if unknown := [name for name in settings if name not in known]:
        raise RopeError(
            f"RoPE of type {kind} has no {', '.join(unknown)}: omit it, or set rope_type to the "
            "type that has it"
        )
